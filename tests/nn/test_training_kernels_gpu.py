"""Kernels of QLoRA and of rotary embeddings on a GPU against plain torch."""

import pytest
import torch

from helpers import relative
from vitrail.nn import RotaryConfig, RotaryEmbedding, apply_rotation
from vitrail.nn.blockwise_quantization import NF4Weight, dequantize_blockwise, quantize_blockwise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(4096, 4096), (300, 129)])
def test_nf4_on_a_gpu_equals_the_cpu(shape):
    torch.manual_seed(0)
    values = torch.randn(shape).bfloat16()
    here, there = NF4Weight.quantize(values), NF4Weight.quantize(values.cuda())
    assert torch.equal(here.codes, there.codes.cpu())
    # Sums of the scales are rounded differently, so a scale may get the next code.
    assert (here.scale_codes.int() - there.scale_codes.cpu().int()).abs().max() <= 1
    moved = NF4Weight.quantize(values).cuda()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        assert relative(moved.dequantize(dtype).cpu().float(), here.dequantize(dtype).float()) < tolerance


def test_8_bit_codes_on_a_gpu_equal_the_cpu():
    values = torch.randn(100_000)
    codes, scales = quantize_blockwise(values)
    on_gpu = quantize_blockwise(values.cuda())
    assert torch.equal(scales, on_gpu[1].cpu())
    assert (codes.int() - on_gpu[0].cpu().int()).abs().max() <= 1
    assert relative(dequantize_blockwise(codes.cuda(), scales.cuda()).cpu(), dequantize_blockwise(codes, scales)) < 1e-6


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rotary_kernel_equals_plain_torch(dtype, tolerance, pairing):
    rotary = RotaryEmbedding(RotaryConfig(head_dim=128, rotary_dim=96, pairing=pairing)).cuda()
    turn = rotary(torch.randint(0, 4000, (2, 50), device="cuda"))
    fused = torch.randn(2, 50, 24, 128, device="cuda", dtype=dtype)
    x, y = (fused[:, :, :16].detach().requires_grad_() for _ in range(2))
    upstream = torch.randn(2, 50, 16, 128, device="cuda", dtype=dtype)
    ours = apply_rotation(x, turn)
    ours.backward(upstream)
    with torch.no_grad():
        assert relative(ours.float(), apply_rotation(y.detach(), turn).float()) < tolerance  # without gradient: plain
    wide = y.detach().double().requires_grad_()
    apply_rotation(wide.cpu(), turn._replace(cos=turn.cos.cpu(), sin=turn.sin.cpu())).backward(upstream.double().cpu())
    assert relative(x.grad.double(), wide.grad) < tolerance
