"""The Triton kernels against the formulas, by Triton's interpreter in a process of its own (float32 only)."""

import pytest

from helpers import interpreted

pytest.importorskip("triton")

SCRIPT = """
import sys
import numpy as np
import torch
import torch.nn.functional as F
from vitrail.nn.kernels import contrastive as kernels
from vitrail.objectives import clip_loss, plain_clip_loss, plain_siglip_loss, siglip_loss, sweep

np.seterr(all="ignore")  # logarithms of 0 and the like, which the kernels mean
torch.manual_seed(0)
LOSSES = ((clip_loss, plain_clip_loss, 3), (siglip_loss, plain_siglip_loss, 4))

def inputs(N, M, D, scale, bias):
    u, v = (F.normalize(torch.randn(n, D), dim=1) for n in (N, M))
    return [u, v, torch.tensor(scale), torch.tensor(bias)]

def compare(given, labels=None, tolerance=1e-4, **more):
    for loss, plain, count in LOSSES:
        ours = [x.detach().clone().requires_grad_() for x in given[:count]]
        exact = [x.detach().double().requires_grad_() for x in given[:count]]
        assert sweep.maker(ours[0]) is kernels
        a, b = loss(*ours, labels=labels, **more), plain(*exact, labels=labels)
        assert abs(a - b) <= 1e-5 * (1 + b), (loss.__name__, a, b)
        for x, y in zip(torch.autograd.grad(a, ours), torch.autograd.grad(b, exact), strict=True):
            assert (x - y).norm() <= tolerance * (y.norm() + 1e-4), (loss.__name__, labels, x, y)

def few():
    compare(inputs(1, 1, 1, 5.0, -3.0))
    compare(inputs(35, 35, 21, 100.0, -10.0), tile=32)  # odd, two tiles each way, a width to be filled up
    ids = torch.randint(-1, 9, (35,)), torch.randint(-1, 9, (20,))
    compare(inputs(35, 20, 16, 9.0, -3.0), ids)
    # Exponents too far apart for a common shift: rows of logits around 300 beside rows around −300, both ways.
    given = inputs(20, 20, 4, 1.0, 0.0)
    given[0] = torch.cat([torch.full((10, 4), 30.0), torch.full((10, 4), -30.0)]) + torch.randn(20, 4) / 50
    given[1] = torch.full((20, 4), 2.5) + torch.randn(20, 4) / 50
    measured = []
    kept, kernels.prepared = kernels.prepared, lambda *a: measured.append(kept(*a)) or measured[-1]
    compare(given, tolerance=1e-3)
    assert measured[0][0][1] == 0  # the route of two exponentials was taken
    kernels.prepared = kept

def many():
    for N, M, D in ((3, 3, 5), (17, 17, 8), (70, 70, 33), (70, 40, 16)):
        for scale, bias in ((9.0, -3.0), (100.0, 0.0)):
            labels = [tuple(torch.randint(-1, 9, (n,)) for n in (N, M)), torch.randint(-1, 2, (N, M)).to(torch.int8)]
            for each in ([None] if N == M else []) + labels + [torch.rand(N, M) < 0.3]:
                compare(inputs(N, M, D, scale, bias), each)

few() if sys.argv[1] == "few" else many()
print("agreed")
"""


@pytest.mark.parametrize("cases", ["few", pytest.param("many", marks=pytest.mark.slow)])
def test_kernels_agree_with_the_formulas(cases):
    interpreted(SCRIPT, cases)
