"""Triton kernels over a paged cache against plain torch, in Triton's interpreter (float32 only)."""

import pytest

from helpers import compile_kernel, interpreted

triton = pytest.importorskip("triton")

SCRIPT = """
import numpy as np
import torch
import torch.nn.functional as F
from vitrail.nn import AttentionPlan, PagedKVCache, PagedPass
from vitrail.nn.kernels.paged_attention_triton import attend_paged
from vitrail.nn.paged_attention import count_tile_tokens
from vitrail.nn.kernels.token_kernels import add_rms_norm, multiply_silu

torch.manual_seed(0)
for W in (1, 7, 64, 300):
    x, r, w = torch.randn(5, W), torch.randn(5, W), torch.randn(W)
    torch.testing.assert_close(add_rms_norm(x, w, 1e-5), F.rms_norm(x, (W,), w, 1e-5), rtol=1e-4, atol=1e-5)
    total = x + r
    ours = add_rms_norm(x, w, 1e-5, r)
    torch.testing.assert_close(ours, F.rms_norm(total, (W,), w, 1e-5), rtol=1e-4, atol=1e-5)
    assert torch.equal(r, total)
    pair = torch.randn(3, 2 * W)
    torch.testing.assert_close(multiply_silu(pair), F.silu(pair[:, :W]) * pair[:, W:], rtol=1e-4, atol=1e-5)

def run(H, G, D, S, lengths, counts, window, cap, splits):
    pages = 1 + sum(-(-n // S) for n in lengths)
    cache = PagedKVCache([(G, D)], pages, S)
    cache.k[0].normal_(); cache.v[0].normal_()
    order = torch.randperm(pages - 1) + 1
    tables = torch.zeros(len(lengths) + 2, -(-max(lengths) // S), dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 1)[: len(lengths)]
    at = 0
    for row, n in zip(rows, lengths):
        used = -(-n // S)
        tables[row, :used] = order[at : at + used].int()
        at += used
    slots = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts)])
    token_rows = rows.repeat_interleave(torch.tensor(counts))
    decode = all(c == 1 for c in counts)
    tiles, step, first = [], count_tile_tokens(H // G), 0
    for row, c in zip(rows.tolist(), counts):
        tiles += [(row, first + a, min(step, c - a)) for a in range(0, c, step)]
        first += c
    chunks = None if decode else tuple(zip(rows.tolist(), counts))
    batch = PagedPass(cache, slots, token_rows, tables, max(lengths), chunks)
    q = torch.randn(1, len(slots), H, D)
    plan = AttentionPlan(causal=True)
    plan = plan if window is None else plan.with_window(window - 1)
    expected = batch.layer(0).attend_plain(q, plan, cap)[0]
    ours = attend_paged(q[0], cache.k[0], cache.v[0], tables, slots, token_rows=token_rows, window=window,
                        logit_softcap=cap, splits=splits, tile_tokens=step,
                        tiles=None if decode else torch.tensor(tiles, dtype=torch.int32).T.contiguous())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)

run(4, 2, 16, 4, [1, 9, 70], [1, 1, 1], None, None, 1)
run(8, 1, 32, 16, [5, 130, 64], [1, 1, 1], None, None, 4)
run(3, 3, 16, 5, [90, 2], [1, 1], 11, None, 2)
run(6, 2, 16, 4, [30, 7], [1, 1], 8, 5.0, 1)
run(4, 2, 16, 4, [40, 9, 70], [40, 3, 1], None, None, 1)
run(2, 2, 16, 16, [100, 33], [70, 20], 9, 7.0, 1)
run(5, 1, 32, 8, [80], [33], None, 3.0, 1)
print("agreed")
"""

DECODER_SCRIPT = """
import torch
from helpers import randomize
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.generate import GREEDY, generate_texts
from vitrail.generate.fused_paged_decoder import FusedPagedDecoder
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig

for attention, rotary in (
    ({"qk_norm": "rms"}, {"layout": "mrope", "sections": (2, 3, 3)}),
    ({"bias": "qkv"}, {"pairing": "adjacent"}),
):
    block = BlockConfig(width=48, attention=AttentionConfig(heads=6, kv_heads=2, head_dim=16, **attention),
                        mlp=GatedMLPConfig(intermediate_size=40), norm="rms", eps=1e-5)
    config = DecoderConfig(vocab_size=61, layers=2, block=block, rotary=RotaryConfig(head_dim=16, **rotary),
                           context_length=96)
    model = randomize(Decoder(config), spread=0.3).eval()
    assert FusedPagedDecoder.supports(model)
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_batched_tokens=7, page_size=4))
    engine.runner.use_fused_kernels()
    for prompts in ([[1, 2, 3], [7] * 6], [[4]]):  # one token alone has kernels of its own
        outputs = engine.generate([EnginePrompt(ids) for ids in prompts], SamplingParams(max_new_tokens=2))
        for ids, output in zip(prompts, outputs):
            assert output.ids == generate_texts(model, [ids], max_new_tokens=2, sampling=GREEDY)[0].ids
print("agreed")
"""


def test_paged_attention_agrees_with_its_plain_version():
    interpreted(SCRIPT)


@pytest.mark.slow
def test_engine_with_fused_kernels_agrees_with_the_model():
    interpreted(DECODER_SCRIPT)


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("tiled", [False, True])
def test_paged_attention_compiles_without_a_gpu(generation, tiled):
    """The interpreter accepts code that the compiler rejects."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels.paged_attention_triton import _attend

    pointers = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "tables": "*i32", "slots": "*i64", "rows": "*i64"}
    pointers |= {"tiles": "*i32", "out": "*bf16", "part": "*fp32", "stat": "*fp32"}
    sizes = {"H": 16, "G": 8, "R": 2, "RP": 2, "D": 128, "S": 16, "BLOCK_M": 64 if tiled else 16, "BLOCK_N": 64}
    choices = {"WINDOW": 0, "SOFTCAP": False, "TILED": tiled, "SPLITS": 1 if tiled else 4}
    numbers = {"M": "i32", "T": "i32", "scale": "fp32", "softcap": "fp32"}
    compile_kernel(_attend, pointers, numbers, sizes | choices, GPUTarget("cuda", generation, 32), ASTSource)


@pytest.mark.parametrize("norm", [False, True])
def test_token_kernels_compile_without_a_gpu(norm):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels import paged_attention_triton, token_kernels

    target = GPUTarget("cuda", 90, 32)
    pointers = dict.fromkeys(("qkv", "q", "k", "v"), "*bf16") | {"tables": "*i32", "slots": "*i64", "rows": "*i64"}
    pointers |= {"cos": "*fp32", "sin": "*fp32", "qw": "*bf16", "kw": "*bf16"}
    sizes = {"H": 32, "G": 8, "D": 64, "S": 16, "HP": 32, "GP": 8, "ADJACENT": False, "QK_NORM": norm}
    compile_kernel(token_kernels._rotate_and_write, pointers, {"M": "i32", "eps": "fp32"}, sizes, target, ASTSource)
    pointers = dict.fromkeys(("x", "r", "w", "out"), "*bf16")
    sizes = {"ADD": norm, "BLOCK": 2048}
    compile_kernel(token_kernels._add_rms_norm, pointers, {"W": "i32", "eps": "fp32"}, sizes, target, ASTSource)
    pointers = dict.fromkeys(("x", "out"), "*bf16")
    compile_kernel(token_kernels._multiply_silu, pointers, {"F": "i32"}, {"BLOCK": 1024}, target, ASTSource)
    pointers = {"part": "*fp32", "stat": "*fp32", "out": "*bf16"}
    compile_kernel(paged_attention_triton._merge, pointers, {}, {"D": 64, "SPLITS": 8}, target, ASTSource)
