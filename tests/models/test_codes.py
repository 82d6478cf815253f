"""Codes by rows: the way back is the product with every row, and codes that share digits share what is learned."""

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs.quantizers import BSQConfig, FSQConfig, IBQConfig, LFQConfig, SimVQConfig, VQConfig, make_quantizer
from vitrail.models.codes import CodeRows

LATTICES = [FSQConfig(levels=(8, 5, 3)), FSQConfig(levels=(7,)), LFQConfig(bits=5), BSQConfig(bits=4)]
TABLES = [VQConfig(codes=64, dim=6), SimVQConfig(codes=32, dim=4), IBQConfig(codes=16, dim=4)]


@pytest.mark.parametrize("config", LATTICES + TABLES)
def test_logits_are_products_with_every_row(config):
    quantizer = make_quantizer(config)
    rows = CodeRows(quantizer, 12)
    randomize(rows)
    (K,), x = quantizer.sizes, torch.randn(2, 3, 12, requires_grad=True)
    found, truth = rows.logits(x), x @ rows(torch.arange(K)).T
    assert found.shape == (2, 3, K) and relative(found, truth) < 1e-5
    far, weights = torch.randn_like(found), [x, *rows.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * far).sum(), weights) for y in (found, truth)), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("config", LATTICES)
def test_codes_share_the_rows_of_equal_numbers(config):
    """Of any two codes the rows differ as their vectors do: where these are equal in a number, its row is the same."""
    quantizer = make_quantizer(config)
    rows = CodeRows(quantizer, 12)
    torch.nn.init.zeros_(rows.own.weight)
    (K,) = quantizer.sizes
    codes, found = quantizer.lookup(torch.arange(K)), rows(torch.arange(K))
    for number, first in enumerate(rows.first):
        with torch.no_grad():
            rows.digits.weight[first] += 1
            moved = ((rows(torch.arange(K)) - found).abs() > 0.5).all(-1)
            rows.digits.weight[first] -= 1
        assert torch.equal(moved, codes[:, number] == codes[:, number].min())


@pytest.mark.parametrize("config", TABLES)
def test_rows_of_a_table_have_no_digits(config):
    """Though its ids have bits, by which they can be split."""
    quantizer = make_quantizer(config)
    assert quantizer.radices and [name for name, _ in CodeRows(quantizer, 12).named_parameters()] == ["own.weight"]


@pytest.mark.parametrize("config", LATTICES + TABLES)
def test_a_row_has_length_one_at_first(config):
    torch.manual_seed(0)
    quantizer = make_quantizer(config)
    (K,) = quantizer.sizes
    lengths = CodeRows(quantizer, 256)(torch.arange(K)).norm(dim=-1)
    assert lengths.mean().item() == pytest.approx(1, abs=0.1)
