"""Triton kernels against torch, in Triton's interpreter in a separate process (float32 only)."""

import pytest

from helpers import compile_kernel, interpreted

triton = pytest.importorskip("triton")

SCRIPT = """
import torch
import torch.nn.functional as F
from vitrail.nn import AttentionPlan, RotaryConfig, RotaryEmbedding, apply_rotation, compute_attention
from vitrail.nn.kernels.decode_kernels import DecodeAttention, compute_matvec

torch.manual_seed(0)
for N, K in ((1, 1), (5, 7), (33, 300), (64, 2048)):
    x, w, norm, bias, residual = (torch.randn(s) for s in ((K,), (N, K), (K,), (N,), (N,)))
    out = torch.full((N,), float("nan"))
    normed = F.rms_norm(x, (K,), norm, 1e-5)
    torch.testing.assert_close(compute_matvec(x, w, out), w @ x, rtol=1e-4, atol=1e-3)
    ours = compute_matvec(x, w, out, bias=bias, norm=norm, eps=1e-5, residual=residual)
    torch.testing.assert_close(ours, w @ normed + bias + residual, rtol=1e-4, atol=1e-3)
    pair, biases = torch.randn(2 * N, K), torch.randn(2 * N)
    gate, up = (pair @ normed + biases).chunk(2)
    ours = compute_matvec(x, pair, out, bias=biases, norm=norm, eps=1e-5, gated=True)
    torch.testing.assert_close(ours, F.silu(gate) * up, rtol=1e-4, atol=1e-2)

for H, G, D, capacity, length, pairing, normed in (
    (4, 2, 32, 200, 130, "half", False), (6, 2, 64, 128, 0, "adjacent", True),
    (8, 8, 32, 300, 64, "half", True), (32, 8, 64, 100, 63, "adjacent", False),
):
    qkv = torch.randn((H + 2 * G) * D)
    k, v = torch.randn(capacity, G, D), torch.randn(capacity, G, D)
    norms = (torch.randn(D), torch.randn(D)) if normed else None
    rotary = RotaryEmbedding(RotaryConfig(head_dim=D, pairing=pairing))
    table = rotary(torch.arange(capacity)[None])
    at, out = torch.tensor([length]), torch.full((H * D,), float("nan"))
    ours_k, ours_v = k.clone(), v.clone()
    kernel = DecodeAttention(H, G, D, capacity, "cpu")
    for _ in range(2):  # twice, to check that the counters are reset
        kernel(qkv, ours_k, ours_v, out, cos=table.cos[0], sin=table.sin[0], length=at, position=at,
               adjacent=pairing == "adjacent", norms=norms, eps=1e-6)
    q, new_k, new_v = (x.view(1, 1, -1, D) for x in qkv.split([H * D, G * D, G * D]))
    if norms:
        q, new_k = F.rms_norm(q, (D,), norms[0], 1e-6), F.rms_norm(new_k, (D,), norms[1], 1e-6)
    turn = rotary(at[None])
    q, new_k = apply_rotation(q, turn), apply_rotation(new_k, turn)
    keys, values = torch.cat([k[None, :length], new_k], 1), torch.cat([v[None, :length], new_v], 1)
    expected = compute_attention(q, keys, values, AttentionPlan(), "plain").flatten()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours_k[length], new_k[0, 0])
    assert torch.equal(ours_v[length], new_v[0, 0])
    assert torch.equal(ours_k[length + 1 :], k[length + 1 :])
    assert torch.equal(ours_k[:length], k[:length])

from vitrail.data.scenes import counter_rng
from vitrail.nn.kernels import random_bits

for B, C in ((1, 1), (7, 3), (300, 10), (0, 4)):
    for index in (torch.randint(-(2**62), 2**62, (B,)), torch.arange(2 * B)[::2] - 5, torch.arange(B).int()):
        for seed in (0, 2**40):
            ours = random_bits.random_bits(counter_rng._hash_label(seed, "a draw"), index, C)
            assert torch.equal(ours, counter_rng.random_bits(seed, index, "a draw", C))
from vitrail.nn.blockwise_quantization import NF4Weight
from vitrail.nn.kernels.nf4_triton import dequantize_nf4
from vitrail.nn.kernels.rotary_triton import rotate

for shape in ((128, 192), (65, 257), (3, 5)):
    weight = NF4Weight.quantize(torch.randn(shape))
    assert torch.equal(dequantize_nf4(weight, torch.float32), weight.dequantize(torch.float32))

for H, D, rotated, pairing, rows in ((3, 16, 16, "half", 2), (4, 24, 16, "adjacent", 1), (2, 20, 12, "half", 1)):
    rotary = RotaryEmbedding(RotaryConfig(head_dim=D, rotary_dim=rotated, pairing=pairing))
    turn = rotary(torch.randint(0, 50, (rows, 7)))
    wide = torch.randn(2, 7, H + 2, D)
    x, y = (wide[:, :, 1:-1].detach().requires_grad_() for _ in range(2))
    ours, plain = rotate(x, turn.cos, turn.sin, pairing == "adjacent"), apply_rotation(y, turn)
    torch.testing.assert_close(ours, plain)
    gradient = torch.randn(2, 7, D, H).mT
    ours.backward(gradient)
    plain.backward(gradient)
    torch.testing.assert_close(x.grad, y.grad)
print("agreed")
"""


def test_kernels_agree_with_plain_torch():
    interpreted(SCRIPT)


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("shaded", [False, True])
def test_compositing_kernel_compiles_without_a_gpu(generation, shaded):
    """The interpreter accepts code that the compiler rejects, such as a variable with two types."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels.scene_compositing import BLOCK, _paint

    names = _paint.arg_names
    kinds = {name: "*i64" if name.endswith("_ptr") else "i32" for name in names}
    kinds |= {"out_ptr": "*u8", "SHADED": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(_paint, signature=kinds, constexprs={"SHADED": shaded, "BLOCK": BLOCK})
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
    assert len(made.asm["cubin"]) > 1000


@pytest.mark.parametrize("tail", [0, 64])
def test_training_kernels_compile_without_a_gpu(tail):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels.nf4_triton import BYTES, _dequantize
    from vitrail.nn.kernels.rotary_triton import _rotate

    target = GPUTarget("cuda", 90, 32)
    pointers = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16"}
    numbers = dict.fromkeys(("L", "STRIDE_B", "STRIDE_L", "STRIDE_H", "TABLE_B"), "i32") | {"SIGN": "fp32"}
    sizes = {"H": 24, "D": 128 + tail, "S": 64, "HP": 32, "SP": 64, "TP": tail, "ADJACENT": bool(tail)}
    compile_kernel(_rotate, pointers, numbers, sizes, target, ASTSource)
    pointers = {"codes": "*u8", "scale_codes": "*u8", "out": "*bf16"}
    pointers |= dict.fromkeys(("scale_scales", "mean", "table", "map"), "*fp32")
    compile_kernel(_dequantize, pointers, {"N": "i64"}, {"BLOCK": 64, "BYTES": BYTES}, target, ASTSource)
