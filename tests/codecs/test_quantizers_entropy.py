"""Entropies over bits and groups of bits against the dense table of all 2^D codes, which is built here."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.codecs.quantizers import BSQ, LFQ
from vitrail.codecs.quantizers.bits import mean_entropy


def dense(q, x):
    """Entropy of each vector's choice, mean, and of the mean choice: softmax over all codes, in float64."""
    z = x.double() if isinstance(q, LFQ) else F.normalize(x.double(), dim=-1)
    codes = q.lookup(torch.arange(q.sizes[0])).double()
    logs = (-q.config.sharpness * (z[:, None] - codes).square().sum(-1)).log_softmax(1)
    p = logs.exp()
    mean = p.mean(0)
    return -(p * logs).sum(1).mean(), -torch.xlogy(mean, mean).sum()


def kinds(bits, sharpness, **fields):
    return LFQ(bits=bits, sharpness=sharpness, **fields), BSQ(bits=bits, sharpness=4 * sharpness, **fields)


@pytest.mark.parametrize("bits", [1, 4, 10])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 100.0])
def test_a_vectors_entropy_is_the_dense_one(bits, sharpness):
    x = torch.randn(40, bits)
    for q in kinds(bits, sharpness, diversity=0.0):
        torch.testing.assert_close(q(x).losses["entropy"].double(), dense(q, x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 5, 10])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 100.0])
def test_one_group_of_all_bits_is_the_dense_value(bits, sharpness):
    x = torch.randn(40, bits)
    for q in kinds(bits, sharpness, group=bits):
        own, batch = dense(q, x)
        torch.testing.assert_close(q(x).losses["entropy"].double(), own - batch, rtol=1e-4, atol=1e-5)


def test_its_gradient_too():
    x = torch.randn(30, 6)
    for q in kinds(6, 1.0, group=6, diversity=0.7):
        ours = x.clone().requires_grad_()
        plain = x.clone().double().requires_grad_()
        own, batch = dense(q, plain)
        (wanted,) = torch.autograd.grad(own - 0.7 * batch, plain)
        (found,) = torch.autograd.grad(q(ours).losses["entropy"], ours)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-6)


def test_smaller_groups_bound_it_from_above():
    x = torch.randn(50, 3) @ torch.randn(3, 8)  # bits that depend on each other
    for q in kinds(8, 2.0):
        batch = dense(q, x)[1]
        values = []
        for group in (1, 2, 4, 8):
            made = type(q)(q.config.with_(group=group))
            values.append(type(q)(q.config.with_(diversity=0.0))(x).losses["entropy"] - made(x).losses["entropy"])
        assert values[0] > values[1] > values[2] > values[3] + 0.01  # the coarser the looser
        torch.testing.assert_close(values[3].double(), batch, rtol=1e-4, atol=1e-5)


def test_groups_are_exact_where_bits_are_independent():
    x = torch.cartesian_prod(*[torch.tensor([-0.4, 0.1, 0.9])] * 5)  # every combination once
    q = LFQ(bits=5, sharpness=1.0)
    torch.testing.assert_close(mean_entropy(4 * x, 1, False).double(), dense(q, x)[1], rtol=1e-5, atol=1e-6)


def test_wide_codes_need_no_table():
    """2⁶³ codes; and 18 bits exactly, by two halves of 512."""
    assert BSQ(bits=63)(torch.randn(500, 63)).losses["entropy"].isfinite()
    x = (torch.randn(300, 18) * 3).requires_grad_()
    q = LFQ(bits=18, group=18)
    loss = q(x).losses["entropy"]
    loss.backward()
    distinct = torch.unique(q(x).ids).numel()
    assert loss.item() == pytest.approx(
        -torch.tensor(float(distinct)).log().item(), abs=0.1
    )  # all are sure, and differ
    assert x.grad.isfinite().all()
