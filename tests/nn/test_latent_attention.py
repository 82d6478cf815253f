"""Latent attention: the absorbed form against the plain one, packed segments, the cache, refused configs, its cost."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import VisualExpertConfig
from vitrail.errors import ConfigError
from vitrail.nn import (
    Attention,
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    KVCache,
    LatentAttention,
    LatentConfig,
    RotaryConfig,
    RotaryEmbedding,
    Workload,
    attention_plan,
    cost,
)
from vitrail.nn.latent_attention import is_absorbed_cheaper
from vitrail.training.lora import LoRAConfig, add_lora, merge_lora

LATENT = LatentConfig(kv_lora_rank=7, q_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=6)
CONFIG = AttentionConfig(heads=3, latent=LATENT, query_pre_attn_scalar=4.5, bias="all")


def make_decoder(attention: AttentionConfig = CONFIG, layers: int = 2) -> Decoder:
    block = BlockConfig(width=12, attention=attention, mlp=GatedMLPConfig(intermediate_size=16), norm="rms")
    rotary = RotaryConfig(head_dim=4, pairing="adjacent")
    return randomize(Decoder(DecoderConfig(vocab_size=31, layers=layers, block=block, rotary=rotary))).eval()


def causal_slots(queries: int, keys: int) -> AttentionPlan:
    """The last queries of a causal row."""
    return AttentionPlan(causal=True, query_slots=torch.arange(keys - queries, keys)[None])


PLANS = {
    "one token": (1, 1, AttentionPlan()),
    "one of many": (1, 19, AttentionPlan()),
    "causal": (9, 9, AttentionPlan(causal=True)),
    "last of a row": (3, 11, causal_slots(3, 11)),
    "segments": (8, 8, attention_plan(torch.tensor([[0] * 3 + [1] * 4 + [-1], [2] * 8]), causal=True)),
    "spans": (6, 6, attention_plan(spans=torch.tensor([[0, 1, 1, 1, 0, 0]]), causal=True)),
    "no visible key": (2, 3, attention_plan(torch.tensor([[0, 1]]), key_segments=torch.tensor([[0, 0, 0]]))),
}


@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize("heads", [1, 5])
def test_absorbed_form_equals_plain_form(case, heads):
    queries, keys, plan = PLANS[case]
    module = randomize(LatentAttention(12, CONFIG.replace(heads=heads)).double())
    inputs = [
        torch.randn(2, *shape, dtype=torch.double, requires_grad=True)
        for shape in ((queries, heads, 7), (keys, 1, 7), (keys, 1, 4))
    ]
    weight, found = torch.randn(2, queries, heads, 6, dtype=torch.double), []
    for attend in (module.attend_expanded, module.attend_absorbed):
        out = attend(*inputs, plan)
        found.append((out, *torch.autograd.grad((out * weight).sum(), [*inputs, module.kv_up.weight])))
    scale = max(x.abs().max() for x in found[0])  # with one visible key, the gradients of its score are zero
    for plain, absorbed in zip(*found, strict=True):
        assert (absorbed - plain).abs().max() <= 1e-6 * scale  # some of both is computed in float32


@pytest.mark.parametrize("q_rank", [None, 5])
@torch.no_grad()
def test_cache_equals_no_cache(q_rank):
    """Steps of one and several tokens in rows of unequal lengths. The steps of one token are absorbed."""
    assert is_absorbed_cheaper(LATENT, 1, 10) and not is_absorbed_cheaper(LATENT, 10, 10)
    ours = make_decoder(CONFIG.replace(latent=LATENT.replace(q_lora_rank=q_rank)))
    ids, lengths = torch.randint(0, 31, (2, 20)), [10, 7]
    whole, cache = ours(ids), ours.make_cache(2, 20)
    first = ours(ids[:, :10], cache=cache, counts=torch.tensor(lengths))
    parts = [[row[:n]] for row, n in zip(first, lengths, strict=True)]
    for step in (1, 4, 1, 1, 3):
        given = torch.stack([row[n : n + step] for row, n in zip(ids, lengths, strict=True)])
        for part, new in zip(parts, ours(given, cache=cache), strict=True):
            part.append(new)
        lengths = [n + step for n in lengths]
    for part, row, n in zip(parts, whole, lengths, strict=True):
        assert relative(torch.cat(part), row[:n]) <= 1e-5
    assert cache.k[0].shape == (2, 20, 1, 7) and cache.v[0].shape == (2, 20, 1, 4)  # latents and rotated channels


@torch.no_grad()
def test_adapters_apply_to_both_forms():
    """LoRA layers of the projection that the absorbed form moves."""
    ours = randomize(add_lora(make_decoder(), LoRAConfig(rank=2, alpha=4, target_modules=("*.kv_up", "*.q")))).eval()
    ids, cache = torch.randint(0, 31, (1, 12)), ours.make_cache(1)
    steps = [ours(piece, cache=cache) for piece in ids.split([10, 1, 1], dim=1)]
    whole = ours(ids)
    assert relative(torch.cat(steps, dim=1), whole) <= 1e-5
    assert relative(merge_lora(ours)(ids), whole) <= 1e-5


@torch.no_grad()
def test_packed_segments_are_independent():
    module, x = randomize(LatentAttention(12, CONFIG)), torch.randn(1, 9, 12)
    segments = torch.tensor([[0] * 4 + [1] * 5])
    packed = module(x, attention_plan(segments, causal=True))
    for n in range(2):
        assert relative(packed[:, segments[0] == n], module(x[:, segments[0] == n], AttentionPlan(causal=True))) <= 1e-5


def count_real_flops(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("latent", [LATENT, LATENT.replace(q_lora_rank=None)])
def test_cost_of_prefill_and_decoding(latent):
    """FLOPs of both forms by torch's counter; the cache holds one latent and one rotated key for each token."""
    block = Block(
        BlockConfig(
            width=12, attention=CONFIG.replace(latent=latent), mlp=GatedMLPConfig(intermediate_size=16), norm="rms"
        )
    )
    x = torch.randn(2, 30, 12)
    full = Workload.full_attention(30, batch_size=2)
    assert cost.count_flops(block, full) == count_real_flops(lambda: block(x))
    cache = KVCache([CONFIG.replace(latent=latent).cache_shape(12)], 2, capacity=31)
    block(x, cache.extend(30), cache=cache.layer(0))
    step = count_real_flops(lambda: block(x[:, :1], cache.extend(1), cache=cache.layer(0)))
    assert cost.count_flops(block, Workload.decode(31, batch_size=2)) == step
    held = cost.count_bytes(block, Workload.decode(31, batch_size=2))
    assert held.cache == cache.k[0].nbytes + cache.v[0].nbytes == 2 * 31 * (7 + 4) * 4
    assert held.weights == held.read == sum(p.nbytes for p in block.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatentConfig(kv_lora_rank=0), "latent attention has the sizes"),
        (lambda: AttentionConfig(heads=2, latent=LATENT, qk_norm="rms"), "qk_norm = 'rms'"),
        (lambda: AttentionConfig(heads=2, latent=LATENT, bias="qkv"), "bias = 'qkv'"),
        (lambda: AttentionConfig(heads=2, kv_heads=1, latent=LATENT), "kv_heads 1"),
        (lambda: AttentionConfig(heads=2, head_dim=8, latent=LATENT), "head_dim 8"),
        (lambda: Attention(12, CONFIG, "cross"), "cross attention cannot be latent"),
        (lambda: LatentAttention(12, AttentionConfig(heads=2)), "attention.latent is missing"),
        (
            lambda: make_decoder().config.replace(fusion=VisualExpertConfig()),
            "visual experts do not support latent attention",
        ),
        (lambda: make_decoder().config.replace(rotary=RotaryConfig(head_dim=8)), "have 4 channels with rotary"),
        (
            lambda: LatentAttention(12, CONFIG)(
                torch.zeros(1, 2, 12), AttentionPlan(), rotation=RotaryEmbedding(RotaryConfig(8))(torch.arange(2)[None])
            ),
            "rotate 8 channels",
        ),
    ],
)
def test_unsupported_settings_raise(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_cuda_backends_match_the_reference(dtype, packed):
    """The sizes of DeepSeek-V3 with fewer heads: prefill, packed rows and decoding."""
    latent = LatentConfig(kv_lora_rank=512, q_lora_rank=96)
    module = LatentAttention(256, AttentionConfig(heads=8, latent=latent)).to("cuda", dtype)
    x = torch.randn(2, 300, 256, device="cuda", dtype=dtype)
    rotation = RotaryEmbedding(RotaryConfig(head_dim=64)).to("cuda")(torch.arange(300, device="cuda")[None])
    segments = (torch.arange(300) // 130)[None].expand(2, -1).contiguous()
    plan = attention_plan(segments, causal=True) if packed else AttentionPlan(causal=True)
    exact = module.double()(x.double(), plan.to("cuda"), rotation=rotation)
    module.to(dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    out = module(x, plan.to("cuda"), rotation=rotation)
    assert relative(out.double(), exact) <= tolerance
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    if not packed:
        with torch.no_grad():
            cache, outs = KVCache([module.config.cache_shape(256)], 2, dtype=dtype, device="cuda"), []
            for a, b in ((0, 290), (290, 291), (291, 300)):
                part = rotation._replace(cos=rotation.cos[:, a:b], sin=rotation.sin[:, a:b])
                outs.append(module(x[:, a:b], cache.extend(b - a), rotation=part, cache=cache.layer(0)))
        assert relative(torch.cat(outs, 1).double(), exact) <= tolerance
