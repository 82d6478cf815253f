"""Contrastive losses on CUDA against float64 references with the same bf16 inputs."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.objectives import clip_loss, reference_clip_loss, reference_siglip_loss, siglip_loss
from vitrail.objectives.tiled_contrastive import choose_tile_backend

pytestmark = pytest.mark.gpu

LOSSES = {"clip": (clip_loss, reference_clip_loss, 1), "siglip": (siglip_loss, reference_siglip_loss, 2)}


def make_inputs(N, M, D, scale, bias=-10.0, aligned=0.0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    u, v = (F.normalize(torch.randn(n, D, device="cuda", generator=generator), dim=1) for n in (N, M))
    if aligned:
        v = F.normalize(v + aligned * u, dim=1)
    return [u.to(dtype), v.to(dtype), torch.tensor(scale, device="cuda"), torch.tensor(bias, device="cuda")]


def compare(name, inputs, labels=None, tolerance=5e-3, **options):
    ours, reference, count = LOSSES[name]
    inputs = [x.requires_grad_() for x in inputs[: 2 + count]]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    a, b = ours(*inputs, labels=labels, **options), reference(*exact, labels=labels)
    assert a.item() == pytest.approx(b.item(), rel=1e-4, abs=1e-9)
    for x, y in zip(torch.autograd.grad(a, inputs), torch.autograd.grad(b, exact), strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("N", "D", "scale", "bias", "aligned"),
    [
        (1500, 768, 10.0, -10.0, 0.0),
        (1500, 768, 100.0, 0.0, 0.0),  # unrelated
        (1500, 768, 100.0, -10.0, 0.4),  # aligned: p of the positives is almost 1
        (1, 100, 10.0, -3.0, 0.0),
        (131, 100, 30.0, -3.0, 1.0),  # a width that is not a multiple of 16 bytes
    ],
)
def test_bf16(name, N, D, scale, bias, aligned):
    inputs = make_inputs(N, N, D, scale, bias, aligned)
    if torch.cuda.get_device_capability()[0] == 9:
        assert choose_tile_backend(inputs[0]).__name__.endswith("nn.kernels.contrastive_tiles_triton")
    compare(name, inputs, tile_size=1024)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["ids", "signs"])
def test_labels(name, kind):
    N, M = 700, 390
    generator = torch.Generator("cuda").manual_seed(1)
    labels = tuple(torch.randint(-1, 60, (n,), device="cuda", generator=generator) for n in (N, M))
    if kind == "signs":
        labels = torch.randint(-1, 2, (N, M), device="cuda", generator=generator).to(torch.int8)
    compare(name, make_inputs(N, M, 100, 20.0), labels, tile_size=512)


def test_large_logit_range():
    """Rows of ±300 in one tile, for which no common shift of exponents exists."""
    u, v, _, _ = make_inputs(300, 300, 100, 1.0)
    u = torch.cat([u[:150] + 1, u[150:] - 1]) * 3
    compare("clip", [u.bfloat16(), (v + 1).bfloat16(), torch.tensor(1.0, device="cuda")], tolerance=1e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_uses_torch_tiles(name):
    compare(name, make_inputs(700, 700, 96, 100.0, dtype=torch.float32), tolerance=1e-4, tile_size=512)


@pytest.mark.parametrize(("name", "tile"), [("clip", 8192), ("siglip", 8192)])
def test_memory_grows_with_the_inputs(name, tile):
    loss, _, count = LOSSES[name]
    inputs = [x.requires_grad_() for x in make_inputs(49152, 49152, 100, 10.0)[: 2 + count]]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(*inputs, tile_size=tile).backward()
    above = torch.cuda.max_memory_allocated() - before
    assert above < 2 * tile**2 + 12 * inputs[0].numel() * 2 + 2**26  # one bf16 tile and a few copies of the inputs
    assert above < 49152**2 / 8
    assert all(x.grad.isfinite().all() for x in inputs)
