"""Entropies over groups of bits, compared with a dense table of all 2^D codes."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.codecs.quantizers import BSQ, LFQ
from vitrail.codecs.quantizers.binary_codes import batch_entropy


def dense(q, x):
    """Mean entropy of each vector's assignment, and entropy of the mean: softmax over all codes in float64."""
    z = x.double() if isinstance(q, LFQ) else F.normalize(x.double(), dim=-1)
    codes = q.lookup(torch.arange(q.vocab_sizes[0])).double()
    logs = (-q.config.inv_temperature * (z[:, None] - codes).square().sum(-1)).log_softmax(1)
    p = logs.exp()
    mean = p.mean(0)
    return -(p * logs).sum(1).mean(), -torch.xlogy(mean, mean).sum()


def kinds(bits, sharpness, **fields):
    return LFQ(bits=bits, inv_temperature=sharpness, **fields), BSQ(bits=bits, inv_temperature=4 * sharpness, **fields)


@pytest.mark.parametrize("bits", [1, 4, 10])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 100.0])
def test_vector_entropy_matches_dense_table(bits, sharpness):
    x = torch.randn(40, bits)
    for q in kinds(bits, sharpness, diversity_weight=0.0):
        torch.testing.assert_close(q(x).losses["entropy"].double(), dense(q, x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 5, 10])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 100.0])
def test_one_group_matches_dense_table(bits, sharpness):
    x = torch.randn(40, bits)
    for q in kinds(bits, sharpness, entropy_group_size=bits):
        own, batch = dense(q, x)
        torch.testing.assert_close(q(x).losses["entropy"].double(), own - batch, rtol=1e-4, atol=1e-5)


def test_gradient_matches_dense_table():
    x = torch.randn(30, 6)
    for q in kinds(6, 1.0, entropy_group_size=6, diversity_weight=0.7):
        ours = x.clone().requires_grad_()
        plain = x.clone().double().requires_grad_()
        own, batch = dense(q, plain)
        (wanted,) = torch.autograd.grad(own - 0.7 * batch, plain)
        (found,) = torch.autograd.grad(q(ours).losses["entropy"], ours)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-6)


def test_smaller_groups_are_an_upper_bound():
    x = torch.randn(50, 3) @ torch.randn(3, 8)  # bits that depend on each other
    for q in kinds(8, 2.0):
        batch = dense(q, x)[1]
        values = []
        for group in (1, 2, 4, 8):
            made = type(q)(q.config.replace(entropy_group_size=group))
            values.append(
                type(q)(q.config.replace(diversity_weight=0.0))(x).losses["entropy"] - made(x).losses["entropy"]
            )
        assert values[0] > values[1] > values[2] > values[3] + 0.01  # the coarser the looser
        torch.testing.assert_close(values[3].double(), batch, rtol=1e-4, atol=1e-5)


def test_groups_are_exact_for_independent_bits():
    x = torch.cartesian_prod(*[torch.tensor([-0.4, 0.1, 0.9])] * 5)  # every combination once
    q = LFQ(bits=5, inv_temperature=1.0)
    torch.testing.assert_close(batch_entropy(4 * x, 1, False).double(), dense(q, x)[1], rtol=1e-5, atol=1e-6)


def test_wide_codes_need_no_table():
    """63 bits without a table; 18 bits exactly, with two halves of 512."""
    assert BSQ(bits=63)(torch.randn(500, 63)).losses["entropy"].isfinite()
    x = (torch.randn(300, 18) * 3).requires_grad_()
    q = LFQ(bits=18, entropy_group_size=18)
    loss = q(x).losses["entropy"]
    loss.backward()
    distinct = torch.unique(q(x).ids).numel()
    assert loss.item() == pytest.approx(
        -torch.tensor(float(distinct)).log().item(), abs=0.1
    )  # all are sure, and differ
    assert x.grad.isfinite().all()
