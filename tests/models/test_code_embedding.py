"""Code embeddings: logits are products with every row, and similar codes share digit rows."""

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs.quantizers import BSQConfig, FSQConfig, IBQConfig, LFQConfig, SimVQConfig, VQConfig, make_quantizer
from vitrail.models.code_embedding import CodeEmbedding

LATTICES = [FSQConfig(levels=(8, 5, 3)), FSQConfig(levels=(7,)), LFQConfig(bits=5), BSQConfig(bits=4)]
TABLES = [VQConfig(codebook_size=64, dim=6), SimVQConfig(codebook_size=32, dim=4), IBQConfig(codebook_size=16, dim=4)]


@pytest.mark.parametrize("config", LATTICES + TABLES)
def test_logits_match_row_products(config):
    quantizer = make_quantizer(config)
    rows = CodeEmbedding(quantizer, 12)
    randomize(rows)
    (K,), x = quantizer.vocab_sizes, torch.randn(2, 3, 12, requires_grad=True)
    found, truth = rows.compute_logits(x), x @ rows(torch.arange(K)).T
    assert found.shape == (2, 3, K) and relative(found, truth) < 1e-5
    far, weights = torch.randn_like(found), [x, *rows.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * far).sum(), weights) for y in (found, truth)), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("config", LATTICES)
def test_codes_share_digit_rows(config):
    """Rows of two codes differ only in the digits that differ."""
    quantizer = make_quantizer(config)
    rows = CodeEmbedding(quantizer, 12)
    torch.nn.init.zeros_(rows.table.weight)
    (K,) = quantizer.vocab_sizes
    codes, found = quantizer.lookup(torch.arange(K)), rows(torch.arange(K))
    for number, first in enumerate(rows.digit_offsets):
        with torch.no_grad():
            rows.digits.weight[first] += 1
            moved = ((rows(torch.arange(K)) - found).abs() > 0.5).all(-1)
            rows.digits.weight[first] -= 1
        assert torch.equal(moved, codes[:, number] == codes[:, number].min())


@pytest.mark.parametrize("config", TABLES)
def test_codebooks_have_no_digit_rows(config):
    """A codebook has no digit rows, although its ids can be split into bits."""
    quantizer = make_quantizer(config)
    names = [name for name, _ in CodeEmbedding(quantizer, 12).named_parameters()]
    assert quantizer.radices and names == ["table.weight"]


@pytest.mark.parametrize("config", LATTICES + TABLES)
def test_initial_rows_have_unit_length(config):
    torch.manual_seed(0)
    quantizer = make_quantizer(config)
    (K,) = quantizer.vocab_sizes
    lengths = CodeEmbedding(quantizer, 256)(torch.arange(K)).norm(dim=-1)
    assert lengths.mean().item() == pytest.approx(1, abs=0.1)
