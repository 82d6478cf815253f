"""The gated delta net: chunks against the recurrence, packed segments, the cache, refused plans, and its cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    BlockConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GatedMLPConfig,
    RotaryConfig,
    Workload,
    attention_plan,
    cost,
)
from vitrail.nn.gated_delta_net import apply_delta_rule

CONFIG = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=5, value_dim=7, kernel_size=3)


def run_recurrence(q, k, v, rate, log_decay, state=None):
    """Apply the rule token by token."""
    (B, L, H, K), V = q.shape, v.shape[-1]
    state, outputs = q.new_zeros(B, H, K, V) if state is None else state, []
    for i in range(L):
        state = state * log_decay[:, i].exp()[..., None, None]
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, i])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], rate[:, i, :, None] * (v[:, i] - old))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("has_state", [False, True])
def test_chunks_equal_recurrence(length, has_state):
    B, H, K, V = 2, 3, 5, 7
    q, k, v = (torch.randn(B, length, H, n, dtype=torch.double) for n in (K, K, V))
    k = k / k.norm(dim=-1, keepdim=True)
    rate, log_decay = torch.rand(B, length, H, dtype=torch.double), -3 * torch.rand(B, length, H, dtype=torch.double)
    state = torch.randn(B, H, K, V, dtype=torch.double) if has_state else None
    given = [x.requires_grad_() for x in (q, k, v, rate, log_decay)]
    results = [function(*given, state) for function in (apply_delta_rule, run_recurrence)]
    for ours, expected in zip(*results, strict=True):
        assert relative(ours, expected) <= 1e-10
    weight = torch.randn_like(results[0][0])
    grads = [torch.autograd.grad((out * weight).sum() + last.sum(), given) for out, last in results]
    for ours, expected in zip(*grads, strict=True):
        assert relative(ours, expected) <= 1e-8


def test_strong_decay_is_finite():
    q, k, v = (torch.randn(1, 130, 2, 4) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    rate, log_decay = torch.ones(1, 130, 2), torch.full((1, 130, 2), -80.0, requires_grad=True)
    ours, _ = apply_delta_rule(q, k, v, rate, log_decay)
    assert relative(ours, run_recurrence(q, k, v, rate, log_decay)[0]) <= 1e-5
    ours.sum().backward()
    assert log_decay.grad is not None and log_decay.grad.isfinite().all()


@torch.no_grad()
def test_segments_are_independent():
    net, x = GatedDeltaNet(6, CONFIG), torch.randn(2, 11, 6)
    segments = torch.tensor([[0] * 3 + [1] * 7 + [-1], [2] * 11])
    packed = net(x, attention_plan(segments, causal=True))
    for row, ids in zip(range(2), segments, strict=True):
        for segment in ids.unique():
            alone = net(x[row, ids == segment][None], AttentionPlan(causal=True))
            assert relative(packed[row, ids == segment], alone[0]) <= 1e-5


def test_unsupported_plans_raise():
    net, x = GatedDeltaNet(6, CONFIG), torch.randn(1, 4, 6)
    segments, spans = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 1, 1, 0]])
    for plan in (
        AttentionPlan(),
        attention_plan(segments, causal=True),
        attention_plan(segments.sort().values, spans, causal=True),
        AttentionPlan(causal=True).with_window(2),
    ):
        with pytest.raises(ConfigError, match="linear attention"):
            net(x, plan)


ATTENTION = AttentionConfig(heads=2, output_gate=True)
BLOCK = BlockConfig(width=12, attention=ATTENTION, mlp=GatedMLPConfig(intermediate_size=9), norm="rms")
DECODER = DecoderConfig(
    vocab_size=20,
    layers=3,
    block=BLOCK,
    rotary=RotaryConfig(head_dim=6),
    layer_types=("linear_attention", "full_attention"),
    linear_attention=CONFIG,
)


@torch.no_grad()
def test_cached_tokens_cannot_be_removed():
    model = Decoder(DECODER).eval()
    cache, ids = model.make_cache(1), torch.randint(0, 20, (1, 7))
    whole = model(ids, cache=cache)
    assert len(cache.k) == 1 and len(cache.recurrent_states) == 2
    for remove in (lambda: cache.crop(torch.tensor([3])), lambda: cache.select_tokens(torch.ones(1, 7) > 0)):
        with pytest.raises(ConfigError, match="cannot be removed"):
            remove()
    cache.clear()
    assert torch.equal(model(ids, cache=cache), whole)


@pytest.mark.parametrize("changes", [{"linear_attention": None}, {"layer_types": ("full_attention",)}])
def test_config_and_layer_types_must_agree(changes):
    with pytest.raises(ConfigError, match="linear_attention"):
        DECODER.replace(**changes)
    with pytest.raises(ConfigError, match="divisor"):
        CONFIG.replace(key_heads=3)
    with pytest.raises(ConfigError, match="no output_gate"):
        Decoder(DECODER.replace(block=BLOCK.replace(branches=("self", "cross", "mlp"))))


@pytest.mark.parametrize("tokens", [1, 9, 64, 100])
def test_cost_is_that_of_torch(tokens):
    """torch counts the convolution too. Of the state, it counts nothing but its size."""
    net, counter = GatedDeltaNet(6, CONFIG), FlopCounterMode(display=False)
    with counter, torch.no_grad():
        net(torch.randn(2, tokens, 6), AttentionPlan(causal=True))
    counts = counter.get_flop_counts()["Global"]
    convolution = counts.pop(torch.ops.aten.convolution)
    assert convolution > 0
    assert cost.count_flops(net, Workload.causal_attention(tokens, 2)) == sum(counts.values())


@torch.no_grad()
def test_state_bytes():
    model = Decoder(DECODER)
    cache = model.make_cache(2, 64)
    model(torch.randint(0, 20, (2, 9)), cache=cache)
    states = sum(x.nbytes for state in cache.recurrent_states.values() for x in state)
    per_token = sum(x[:, :1].nbytes for x in (*cache.k, *cache.v))
    assert cost.count_bytes(model, Workload.prefill(9, 2)).cache == states + 9 * per_token
    assert cost.count_bytes(model, Workload.causal_attention(9, 2)).cache == 0
