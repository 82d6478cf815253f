"""The ledger's root against torch's own counter and against the bytes that are really there."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    Block,
    BlockConfig,
    ExpertsConfig,
    GatedConfig,
    KVCache,
    PatchEmbed,
    PlainConfig,
    Plan,
    Work,
    attention_plan,
    cost,
)


def counted(call) -> int:
    # torch's counter has no entry for the fused CPU kernel, so it would count attention as free.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def block(chain=("self", "mlp"), mlp=None, **more) -> Block:
    attention = AttentionConfig(heads=6, kv_heads=6 if "cross" in chain or "joint" in chain else 2, head_dim=8)
    return Block(BlockConfig(width=40, attention=attention, mlp=mlp or GatedConfig(hidden=56), chain=chain, **more))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mlp", [PlainConfig(hidden=30), GatedConfig(hidden=56)], ids=["plain", "gated"])
@pytest.mark.parametrize("size", [(1, 1), (2, 17), (3, 64)])
def test_self_attention_blocks(device, mlp, size):
    B, L = size
    with torch.device(device):
        ours = block(mlp=mlp)
        x = torch.zeros(B, L, 40)
    assert cost.flops(ours, Work.full(L, batch=B)) == counted(lambda: ours(x))


@pytest.mark.parametrize("chain", [("cross", "mlp"), ("self", "cross", "mlp"), ("joint", "mlp")])
def test_blocks_with_a_context(chain):
    B, L, C = 2, 5, 11
    with torch.device("meta"):
        ours = block(chain)
        x, context = torch.zeros(B, L, 40), torch.zeros(B, C, 40)
    work = Work.full(L, batch=B).across(C, batch=B)
    if chain[0] == "joint":
        work = work.with_(context_pairs=B * L * (C + L))
    assert cost.flops(ours, work) == counted(lambda: ours(x, context=context))


def test_experts_count_the_active_ones():
    ours = block(mlp=ExpertsConfig(count=8, active=3, hidden=16, shared=20, shared_gate=True))
    x = torch.randn(2, 9, 40)
    assert cost.flops(ours, Work.full(9, batch=2)) == counted(lambda: ours(x))


def test_patch_embedding():
    embed = PatchEmbed((1, 4, 4), 24)
    assert cost.flops(embed, Work.full(30)) == counted(lambda: embed(torch.zeros(1, 3, 20, 24)))


def test_plans_count_the_pairs_they_allow():
    assert Work.planned(Plan(causal=True), 9).pairs == Work.prefill(9).pairs == 45
    segments = torch.tensor([[0] * 4 + [1] * 5])
    assert Work.planned(attention_plan(segments), 9).pairs == 16 + 25
    assert Work.planned(attention_plan(segments, causal=True), 9).pairs == 10 + 15
    assert Work.planned(Plan(), 9, batch=2).pairs == 162
    two = Work.planned(attention_plan(torch.tensor([[0] * 9, [0] * 4 + [1] * 5])), 9)
    assert (two.tokens, two.pairs, two.rows) == (18, 81 + 41, 2)
    with pytest.raises(ConfigError, match="2 rows"):
        Work.planned(attention_plan(torch.zeros(2, 9, dtype=torch.long)), 9, batch=3)


def test_decoding_adds_up_to_prefill():
    ours = block()
    steps = sum(cost.flops(ours, Work.decode(n)) for n in range(1, 21))
    assert steps == cost.flops(ours, Work.prefill(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_are_there(dtype):
    ours = block(layer_scale=0.1).to(dtype)
    total = sum(p.numel() * p.element_size() for p in ours.parameters())
    held = cost.bytes(ours, Work.prefill(20, batch=3))
    cache = KVCache(1, 3, 2, 8, capacity=20, dtype=dtype)
    assert held.weights == held.read == total
    assert held.cache == cache.k.numel() * cache.k.element_size() * 2
    assert cost.bytes(ours, Work.decode(20, batch=3)).cache == held.cache


def test_a_token_reads_only_its_experts():
    mlp = ExpertsConfig(count=8, active=2, hidden=16)
    ours = block(mlp=mlp)
    total = sum(p.numel() * 4 for p in ours.parameters())
    stacked = 4 * 8 * 3 * 16 * 40
    one = cost.bytes(ours, Work.decode(1))
    assert one.weights == total
    assert one.read == total - stacked * 6 // 8
    assert total * 0.99 < cost.bytes(ours, Work.prefill(1000)).read <= total


def test_published_size_costs_no_memory():
    with torch.device("meta"):
        ours = Block(
            BlockConfig(
                width=4096,
                attention=AttentionConfig(heads=64, kv_heads=4, head_dim=128, qk_norm="rms"),
                mlp=ExpertsConfig(count=128, active=8, hidden=1536),
                norm="rms",
            )
        ).bfloat16()
    # One layer of Qwen3-235B-A22B by hand: q, k, v, out; router; 128 experts of three matrices; norms.
    width, heads = 4096, 64 * 128
    weights = width * (heads + 2 * 4 * 128) + heads * width + 128 * width + 128 * 3 * 1536 * width + 2 * width + 2 * 128
    assert cost.bytes(ours, Work.decode(8192)).weights == 2 * weights
    active = 2 * (width * (heads + 1024) + heads * width + 128 * width + 8 * 3 * 1536 * width)
    assert cost.flops(ours, Work.decode(8192)) == active + 4 * 8192 * heads


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="LSTM"):
        cost.flops(torch.nn.Sequential(torch.nn.LSTM(1, 1)), Work.full(3))
    with pytest.raises(ConfigError, match="LSTM"):
        cost.bytes(torch.nn.LSTM(1, 1), Work.full(3))
