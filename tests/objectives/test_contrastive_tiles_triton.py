"""Triton kernels against the references, in Triton's interpreter in a separate process (float32 only)."""

import pytest

from helpers import interpreted

pytest.importorskip("triton")

SCRIPT = """
import sys
import numpy as np
import torch
import torch.nn.functional as F
from vitrail.nn.kernels import contrastive_tiles_triton as kernels
from vitrail.objectives import clip_loss, reference_clip_loss, reference_siglip_loss, siglip_loss, tiled_contrastive

np.seterr(all="ignore")  # the kernels take logarithms of 0
torch.manual_seed(0)
LOSSES = ((clip_loss, reference_clip_loss, 3), (siglip_loss, reference_siglip_loss, 4))

def inputs(N, M, D, scale, bias):
    u, v = (F.normalize(torch.randn(n, D), dim=1) for n in (N, M))
    return [u, v, torch.tensor(scale), torch.tensor(bias)]

def compare(given, labels=None, tolerance=1e-4, **more):
    for loss, reference, count in LOSSES:
        ours = [x.detach().clone().requires_grad_() for x in given[:count]]
        exact = [x.detach().double().requires_grad_() for x in given[:count]]
        assert tiled_contrastive.choose_tile_backend(ours[0]) is kernels
        a, b = loss(*ours, labels=labels, **more), reference(*exact, labels=labels)
        assert abs(a - b) <= 1e-5 * (1 + b), (loss.__name__, a, b)
        for x, y in zip(torch.autograd.grad(a, ours), torch.autograd.grad(b, exact), strict=True):
            assert (x - y).norm() <= tolerance * (y.norm() + 1e-4), (loss.__name__, labels, x, y)

def few():
    compare(inputs(1, 1, 1, 5.0, -3.0))
    compare(inputs(35, 35, 21, 100.0, -10.0), tile_size=32)  # odd, two tiles each way, a width that needs padding
    ids = torch.randint(-1, 9, (35,)), torch.randint(-1, 9, (20,))
    compare(inputs(35, 20, 16, 9.0, -3.0), ids)
    # Rows of logits around 300 and around −300: no common shift of exponents exists.
    given = inputs(20, 20, 4, 1.0, 0.0)
    given[0] = torch.cat([torch.full((10, 4), 30.0), torch.full((10, 4), -30.0)]) + torch.randn(20, 4) / 50
    given[1] = torch.full((20, 4), 2.5) + torch.randn(20, 4) / 50
    measured = []
    plain = kernels.prepare_clip_terms
    kernels.prepare_clip_terms = lambda *a: measured.append(plain(*a)) or measured[-1]
    compare(given, tolerance=1e-3)
    assert measured[0][0][1] == 0  # two exponentials were used
    kernels.prepare_clip_terms = plain

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
def test_kernels_agree_with_the_references(cases):
    interpreted(SCRIPT, cases)
