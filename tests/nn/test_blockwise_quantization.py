"""NF4 weights and 8-bit codes against bitsandbytes, and gradients over NF4 weights against autograd.

`bitsandbytes_values.json` holds what bitsandbytes gives for the values of `make_values`.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import relative
from vitrail.nn import blockwise_quantization
from vitrail.nn.blockwise_quantization import (
    NF4_TABLE,
    NF4Linear,
    NF4Weight,
    count_parameters,
    dequantize_blockwise,
    make_dynamic_map,
    nf4_linear,
    quantize_blockwise,
    quantize_linear,
)

CPU = torch.device("cpu")


def make_values(rows: int, columns: int) -> torch.Tensor:
    """Values of many magnitudes, from integers alone, so that every version of torch gives the same."""
    n = torch.arange(rows * columns, dtype=torch.int64)
    digits = (n * 7_919 + 104_729) * 15_485_863 % 1_000_003
    values = (digits.double() / 500_001.5 - 1) * (1 + n % 37).double() / 16
    return values.to(torch.bfloat16).float().view(rows, columns)


@pytest.fixture(scope="module")
def published():
    return json.loads(Path(__file__).with_name("bitsandbytes_values.json").read_text())


def read_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def check_8_bit_codes(ours: torch.Tensor, published: str) -> None:
    """bitsandbytes compares with approximate limits on a CPU: values about as near to two codes may differ by one."""
    differences = (ours.int() - read_bytes(published).int()).abs()
    assert differences.max() <= 1 and (differences > 0).float().mean() < 0.03


@pytest.mark.parametrize("shape", [(40, 192), (9, 100), (300, 129)])
def test_nf4_equals_bitsandbytes(published, shape):
    expected = published["nf4"]["{}x{}".format(*shape)]
    weight = NF4Weight.quantize(make_values(*shape))
    assert torch.equal(weight.codes, read_bytes(expected["codes"]))
    check_8_bit_codes(weight.scale_codes, expected["scale_codes"])
    torch.testing.assert_close(weight.scale_scales, torch.tensor(expected["scale_scales"]))
    assert weight.scale_mean.item() == pytest.approx(expected["scale_mean"], rel=1e-6)
    assert weight.dequantize(torch.float32).double().abs().sum().item() == pytest.approx(expected["sum"], rel=1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_equal_bitsandbytes(published, signed):
    expected = published["8bit"][str(signed).lower()]
    assert torch.equal(make_dynamic_map(signed, CPU), torch.tensor(expected["map"]))
    values = make_values(3, 1000).flatten()
    codes, scales = quantize_blockwise(values if signed else values.abs(), signed)
    assert torch.equal(scales, torch.tensor(expected["scales"]))
    check_8_bit_codes(codes, expected["codes"])


def test_nf4_error_is_that_of_the_table():
    """Each value becomes the nearest of 16 levels times the scale of its block, which has an 8-bit error."""
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    packed = NF4Weight.quantize(weight)
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1)
    assert relative(packed.scales(), scales) < 0.01
    levels = torch.tensor(NF4_TABLE)[None] * scales[:, None]
    nearest = levels.gather(1, (blocks[:, :, None] - levels[:, None]).abs().argmin(-1))
    assert relative(packed.dequantize(torch.float32), nearest.view_as(weight)) < 0.01
    assert sum(b.nbytes for b in packed.buffers()) == 256 * 256 // 2 + 1024 + 4 * 4 + 4


def test_chunks_and_zeros(monkeypatch):
    weight = make_values(40, 192)
    weight[:2] = 0
    whole = NF4Weight.quantize(weight)
    assert not whole.dequantize(torch.float32)[:2].any()
    monkeypatch.setattr(blockwise_quantization, "CHUNK", 512)
    parts = NF4Weight.quantize(weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), parts.buffers(), strict=True))
    assert torch.equal(whole.dequantize(torch.bfloat16), parts.dequantize(torch.bfloat16))
    codes, scales = quantize_blockwise(weight.flatten())
    assert relative(dequantize_blockwise(codes, scales), weight.flatten()) < 0.02


def test_casts_keep_the_scales():
    weight = NF4Weight.quantize(make_values(40, 192))
    before = {name: buffer.clone() for name, buffer in weight.named_buffers()}
    weight.to(torch.bfloat16).double()
    assert all(torch.equal(before[name], buffer) for name, buffer in weight.named_buffers())
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_autograd_over_the_dequantized_weight(bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=bias)
    quantize_linear(layer)
    assert type(layer) is NF4Linear and "weight" not in dict(layer.named_parameters())
    assert count_parameters(layer) == 96 * 40 + 40 * bias
    x, y = (torch.randn(3, 5, 96).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    ours, plain = layer(x), F.linear(y, layer.weight, layer.bias)
    assert torch.equal(ours, plain)
    gradient = torch.randn(3, 5, 40)
    ours.backward(gradient)
    plain.backward(gradient)
    assert torch.equal(x.grad, y.grad)


def test_the_backward_pass_keeps_no_dequantized_weight():
    layer = nn.Linear(256, 256, bias=False)
    quantize_linear(layer)
    kept = []
    x = torch.randn(1, 256).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        nf4_linear(x, layer.nf4).sum()
    assert max(kept, default=0) < 256 * 256


def test_meta_weights_have_the_sizes():
    with torch.device("meta"):
        layer = nn.Linear(96, 40)
    quantize_linear(layer)
    real = NF4Weight.quantize(make_values(40, 96))
    assert [b.nbytes for b in layer.nf4.buffers()] == [b.nbytes for b in real.buffers()]
    assert layer.weight.shape == (40, 96)
