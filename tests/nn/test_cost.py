"""Cost rules against torch's FLOP counter and the bytes of the tensors."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    KVCache,
    MoEConfig,
    PatchEmbed,
    PlainMLPConfig,
    Workload,
    attention_plan,
    cost,
)


def counted(call) -> int:
    # torch's counter does not count the fused CPU attention kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def block(chain=("self", "mlp"), mlp=None, **more) -> Block:
    attention = AttentionConfig(heads=6, kv_heads=6 if "cross" in chain or "joint" in chain else 2, head_dim=8)
    return Block(
        BlockConfig(
            width=40, attention=attention, mlp=mlp or GatedMLPConfig(intermediate_size=56), branches=chain, **more
        )
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "mlp", [PlainMLPConfig(intermediate_size=30), GatedMLPConfig(intermediate_size=56)], ids=["plain", "gated"]
)
@pytest.mark.parametrize("size", [(1, 1), (2, 17), (3, 64)])
def test_self_attention_blocks(device, mlp, size):
    B, L = size
    with torch.device(device):
        ours = block(mlp=mlp)
        x = torch.zeros(B, L, 40)
    assert cost.count_flops(ours, Workload.full_attention(L, batch_size=B)) == counted(lambda: ours(x))


@pytest.mark.parametrize("chain", [("cross", "mlp"), ("self", "cross", "mlp"), ("joint", "mlp")])
def test_blocks_with_a_context(chain):
    B, L, C = 2, 5, 11
    with torch.device("meta"):
        ours = block(chain)
        x, context = torch.zeros(B, L, 40), torch.zeros(B, C, 40)
    work = Workload.full_attention(L, batch_size=B).with_context(C, batch_size=B)
    if chain[0] == "joint":
        work = work.replace(context_pairs=B * L * (C + L))
    assert cost.count_flops(ours, work) == counted(lambda: ours(x, context=context))


def test_moe_counts_selected_experts():
    ours = block(
        mlp=MoEConfig(
            num_experts=8, experts_per_token=3, intermediate_size=16, shared_intermediate_size=20, shared_gate=True
        )
    )
    x = torch.randn(2, 9, 40)
    assert cost.count_flops(ours, Workload.full_attention(9, batch_size=2)) == counted(lambda: ours(x))


def test_patch_embedding():
    embed = PatchEmbed((1, 4, 4), 24)
    assert cost.count_flops(embed, Workload.full_attention(30)) == counted(lambda: embed(torch.zeros(1, 3, 20, 24)))


def test_workload_from_plan_counts_pairs():
    assert (
        Workload.from_plan(AttentionPlan(causal=True), 9).attention_pairs == Workload.prefill(9).attention_pairs == 45
    )
    segments = torch.tensor([[0] * 4 + [1] * 5])
    assert Workload.from_plan(attention_plan(segments), 9).attention_pairs == 16 + 25
    assert Workload.from_plan(attention_plan(segments, causal=True), 9).attention_pairs == 10 + 15
    assert Workload.from_plan(AttentionPlan(), 9, batch_size=2).attention_pairs == 162
    two = Workload.from_plan(attention_plan(torch.tensor([[0] * 9, [0] * 4 + [1] * 5])), 9)
    assert (two.tokens, two.attention_pairs, two.sequences) == (18, 81 + 41, 2)
    with pytest.raises(ConfigError, match="2 rows"):
        Workload.from_plan(attention_plan(torch.zeros(2, 9, dtype=torch.long)), 9, batch_size=3)


def test_decode_costs_sum_to_prefill():
    ours = block()
    steps = sum(cost.count_flops(ours, Workload.decode(n)) for n in range(1, 21))
    assert steps == cost.count_flops(ours, Workload.prefill(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_equal_those_of_the_tensors(dtype):
    ours = block(layer_scale=0.1).to(dtype)
    total = sum(p.numel() * p.element_size() for p in ours.parameters())
    held = cost.count_bytes(ours, Workload.prefill(20, batch_size=3))
    cache = KVCache([(2, 8)], 3, capacity=20, dtype=dtype)
    assert held.weights == held.read == total
    assert held.cache == cache.k[0].nbytes + cache.v[0].nbytes
    assert cost.count_bytes(ours, Workload.decode(20, batch_size=3)).cache == held.cache


def test_token_reads_only_its_experts():
    mlp = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=16)
    ours = block(mlp=mlp)
    total = sum(p.numel() * 4 for p in ours.parameters())
    stacked = 4 * 8 * 3 * 16 * 40
    one = cost.count_bytes(ours, Workload.decode(1))
    assert one.weights == total
    assert one.read == total - stacked * 6 // 8
    assert total * 0.99 < cost.count_bytes(ours, Workload.prefill(1000)).read <= total


def test_large_model_on_the_meta_device():
    with torch.device("meta"):
        ours = Block(
            BlockConfig(
                width=4096,
                attention=AttentionConfig(heads=64, kv_heads=4, head_dim=128, qk_norm="rms"),
                mlp=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=1536),
                norm="rms",
            )
        ).bfloat16()
    # One layer of Qwen3-235B-A22B by hand: q, k, v, out; router; 128 experts of three matrices; norms.
    width, heads = 4096, 64 * 128
    weights = width * (heads + 2 * 4 * 128) + heads * width + 128 * width + 128 * 3 * 1536 * width + 2 * width + 2 * 128
    assert cost.count_bytes(ours, Workload.decode(8192)).weights == 2 * weights
    active = 2 * (width * (heads + 1024) + heads * width + 128 * width + 8 * 3 * 1536 * width)
    assert cost.count_flops(ours, Workload.decode(8192)) == active + 4 * 8192 * heads


def test_unknown_module_raises():
    with pytest.raises(ConfigError, match="LSTM"):
        cost.count_flops(torch.nn.Sequential(torch.nn.LSTM(1, 1)), Workload.full_attention(3))
    with pytest.raises(ConfigError, match="LSTM"):
        cost.count_bytes(torch.nn.LSTM(1, 1), Workload.full_attention(3))


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (9, 0), (3, 0), (1, 4), (1, 30), (5, 2), (7, 30)])
@pytest.mark.parametrize("window", [1, 4, 7, 100])
def test_pairs_of_a_sliding_window(tokens, cached, window):
    """The count equals that of the mask, for passes with and without a cache."""
    total = cached + tokens
    mask = attention_plan(causal=True, window=(window - 1, -1)).mask(total, total, torch.device("cpu"))
    pairs = cached * tokens + tokens * (tokens + 1) // 2
    work = Workload(tokens=3 * tokens, attention_pairs=3 * pairs, sequences=3).limit_to_window(window)
    assert work.attention_pairs == 3 * int(mask[..., cached:, :].sum())
