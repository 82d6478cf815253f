"""The Triton kernels against plain torch, by Triton's interpreter in a process of its own (float32 only)."""

import pytest

from helpers import interpreted

triton = pytest.importorskip("triton")

SCRIPT = """
import torch
import torch.nn.functional as F
from vitrail.nn import Plan, Rotary, RotaryConfig, attend, rotate
from vitrail.nn.kernels.decode import DecodeAttention, matvec

torch.manual_seed(0)
for N, K in ((1, 1), (5, 7), (33, 300), (64, 2048)):
    x, w, norm, bias, residual = (torch.randn(s) for s in ((K,), (N, K), (K,), (N,), (N,)))
    out = torch.full((N,), float("nan"))
    normed = F.rms_norm(x, (K,), norm, 1e-5)
    torch.testing.assert_close(matvec(x, w, out), w @ x, rtol=1e-4, atol=1e-3)
    ours = matvec(x, w, out, bias=bias, norm=norm, eps=1e-5, residual=residual)
    torch.testing.assert_close(ours, w @ normed + bias + residual, rtol=1e-4, atol=1e-3)
    pair, biases = torch.randn(2 * N, K), torch.randn(2 * N)
    gate, up = (pair @ normed + biases).chunk(2)
    ours = matvec(x, pair, out, bias=biases, norm=norm, eps=1e-5, gated=True)
    torch.testing.assert_close(ours, F.silu(gate) * up, rtol=1e-4, atol=1e-2)

for H, G, D, capacity, length, pairing, normed in (
    (4, 2, 32, 200, 130, "half", False), (6, 2, 64, 128, 0, "adjacent", True),
    (8, 8, 32, 300, 64, "half", True), (32, 8, 64, 100, 63, "adjacent", False),
):
    qkv = torch.randn((H + 2 * G) * D)
    k, v = torch.randn(capacity, G, D), torch.randn(capacity, G, D)
    norms = (torch.randn(D), torch.randn(D)) if normed else None
    rotary = Rotary(RotaryConfig(head_dim=D, pairing=pairing))
    table = rotary(torch.arange(capacity)[None])
    at, out = torch.tensor([length]), torch.full((H * D,), float("nan"))
    ours_k, ours_v = k.clone(), v.clone()
    kernel = DecodeAttention(H, G, D, capacity, "cpu")
    for _ in range(2):  # twice: the counters must be back at zero
        kernel(qkv, ours_k, ours_v, out, cos=table.cos[0], sin=table.sin[0], length=at, position=at,
               adjacent=pairing == "adjacent", norms=norms, eps=1e-6)
    q, new_k, new_v = (x.view(1, 1, -1, D) for x in qkv.split([H * D, G * D, G * D]))
    if norms:
        q, new_k = F.rms_norm(q, (D,), norms[0], 1e-6), F.rms_norm(new_k, (D,), norms[1], 1e-6)
    turn = rotary(at[None])
    q, new_k = rotate(q, turn), rotate(new_k, turn)
    keys, values = torch.cat([k[None, :length], new_k], 1), torch.cat([v[None, :length], new_v], 1)
    torch.testing.assert_close(out, attend(q, keys, values, Plan(), "plain").flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours_k[length], new_k[0, 0])
    assert torch.equal(ours_v[length], new_v[0, 0])
    assert torch.equal(ours_k[length + 1 :], k[length + 1 :])
    assert torch.equal(ours_k[:length], k[:length])

from vitrail.data.scenes import chance
from vitrail.nn.kernels import mix

for B, C in ((1, 1), (7, 3), (300, 10), (0, 4)):
    for index in (torch.randint(-(2**62), 2**62, (B,)), torch.arange(2 * B)[::2] - 5, torch.arange(B).int()):
        for seed in (0, 2**40):
            ours = mix.bits(chance._number(seed, "a draw"), index, C)
            assert torch.equal(ours, chance.bits(seed, index, "a draw", C))
print("agreed")
"""


def test_kernels_agree_with_plain_torch():
    interpreted(SCRIPT)


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("shaded", [False, True])
def test_the_painter_becomes_machine_code_without_a_gpu(generation, shaded):
    """The interpreter takes what a compiler would not: a variable of two types, say."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels.paint import BLOCK, _paint

    names = _paint.arg_names
    kinds = {name: "*i64" if name.endswith("_ptr") else "i32" for name in names}
    kinds |= {"out_ptr": "*u8", "SHADED": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(_paint, signature=kinds, constexprs={"SHADED": shaded, "BLOCK": BLOCK})
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
    assert len(made.asm["cubin"]) > 1000
