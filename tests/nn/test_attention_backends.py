"""Attention backends agree with the reference, and packed samples with unpacked ones: values and gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    KVCache,
    MoEConfig,
    PlainMLPConfig,
    RotaryConfig,
    RotaryEmbedding,
    attention_plan,
    build_grid_positions,
    build_text_positions,
    compute_attention,
)


def tensors(B, Q, K, H, G, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Q, H, D), (B, K, G, D), (B, K, G, D))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def with_gradients(route, plan, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = compute_attention(*inputs, plan, route)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return out, *torch.autograd.grad((out * weight).sum(), inputs)


@st.composite
def cases(draw):
    B, L = draw(st.integers(1, 2)), draw(st.integers(1, 40))
    G, D = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 8, 24]))
    H = G * draw(st.integers(1, 3))
    rows = [sorted(draw(st.lists(st.integers(0, 3), min_size=L, max_size=L))) for _ in range(B)]
    segments = torch.tensor(rows)
    if draw(st.booleans()):
        segments = segments[:, torch.randperm(L, generator=torch.Generator().manual_seed(L))]
    spans = (torch.arange(L)[None].expand(B, L) // draw(st.integers(1, 5))) * draw(st.sampled_from([0, 1]))
    window = draw(st.none() | st.tuples(st.integers(0, 6), st.integers(-1, 6)))
    use = draw(st.sampled_from(["bare", "segments", "spans", "both"]))
    plan = attention_plan(
        segments if use in ("segments", "both") else None,
        spans if use in ("spans", "both") else None,
        causal=draw(st.booleans()),
        window=window,
    )
    return plan, (B, L, L, H, G, D)


@given(cases())
@settings(max_examples=120)
def test_backends_agree(case):
    plan, shape = case
    inputs = tensors(*shape)
    reference = with_gradients("plain", plan, inputs)
    for route in ["sdpa", None] + (["packed"] if plan.segment_lengths else []):
        for ours, theirs in zip(with_gradients(route, plan, inputs), reference, strict=True):
            # Relative to the largest gradient: with one visible key, the gradients of q and k are zero.
            assert (ours - theirs).abs().max() <= 1e-5 * max(x.abs().max() for x in reference), route


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=60)
def test_prefix_tokens_agree(n, more, turns, seed):
    """A bidirectional image, followed by turns that do not attend to each other."""
    generator = torch.Generator().manual_seed(seed)
    turn_ids = torch.randint(1, turns + 1, (2, more), generator=generator).sort(1)[0]
    segments = torch.cat([torch.zeros(2, n, dtype=torch.long), turn_ids], 1)
    spans = torch.cat([torch.ones(2, n, dtype=torch.long), torch.zeros_like(turn_ids)], 1)
    fields = {
        "segments": segments,
        "key_segments": segments,
        "spans": spans,
        "key_spans": spans,
        "shares_segment_zero": True,
    }
    plan = AttentionPlan(causal=True, prefix_length=n, **fields)
    inputs = tensors(2, n + more, n + more, 4, 2, 8, seed)
    reference = with_gradients("plain", plan, inputs)
    for ours, theirs in zip(with_gradients("sdpa", plan, inputs), reference, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(x.abs().max() for x in reference)


@pytest.mark.parametrize("segments", [[0, 0, 0, 1, 1], [0, 1, 0, 1, 1]], ids=["packed", "broken"])
@pytest.mark.parametrize("spans", [None, [0, 1, 1, 0, 0]], ids=["plain", "spans"])
def test_one_row_plan_expands_to_a_batch(segments, spans):
    ids = torch.tensor([segments])
    plan = attention_plan(ids, None if spans is None else torch.tensor([spans]), causal=True)
    inputs = tensors(3, 5, 5, 4, 2, 8)
    together = compute_attention(*inputs, plan)
    for row in range(3):
        alone = compute_attention(*(x[row : row + 1] for x in inputs), plan, "plain")
        assert relative(together[row : row + 1], alone) <= 1e-5


def test_mismatched_plan_raises():
    for ids in (torch.zeros(2, 5, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)):
        with pytest.raises(ConfigError, match="does not fit 3 × 5"):
            compute_attention(*tensors(3, 5, 5, 4, 2, 8), attention_plan(ids))
    with pytest.raises(ConfigError, match="key_segments"):
        plan = attention_plan(torch.zeros(1, 5, dtype=torch.long), key_segments=torch.zeros(1, 4, dtype=torch.long))
        compute_attention(*tensors(3, 5, 5, 4, 2, 8), plan)


def test_plan_limits_its_mask_cache():
    plan = attention_plan(causal=True, window=(3, -1))
    for length in range(1, 60):
        compute_attention(*tensors(1, length, length, 1, 1, 4), plan)
    assert len(plan._cached) <= 8
    assert not replace(plan, causal=False)._cached


def test_cross_attention_agrees_and_queries_without_keys_get_zeros():
    segments = torch.tensor([[0, 0, 0, 1, 1, 7], [2, 2, 2, 2, 2, 2]])
    keys = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, -1]])
    plan = attention_plan(segments, key_segments=keys)
    inputs = tensors(2, 6, 5, 4, 2, 8)
    reference = with_gradients("plain", plan, inputs)
    for ours, theirs in zip(with_gradients("sdpa", plan, inputs), reference, strict=True):
        assert relative(ours, theirs) <= 1e-5
    out = reference[0]
    assert torch.equal(out[0, 5], torch.zeros_like(out[0, 5]))  # segment 7 has no key
    assert all(torch.isfinite(x).all() for x in reference)
    assert torch.equal(reference[2][1, 4], torch.zeros(2, 8))  # no gradient to the padding


def test_no_kernel_gets_a_query_without_keys(monkeypatch):
    # CUDA kernels give NaN gradients for such a query and for all keys; a CPU does not show it.
    fused, masks = torch.nn.functional.scaled_dot_product_attention, []

    def checked(q, k, v, attn_mask=None, **more):
        masks.append(attn_mask)
        return fused(q, k, v, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", checked)
    segments = torch.tensor([[0, 0, 1, 5, 5]])
    plan = attention_plan(segments, key_segments=torch.tensor([[0, 1, 1, 9]]))
    out = compute_attention(*tensors(3, 5, 4, 2, 2, 8), plan, "sdpa")
    assert masks[0].any(-1).all()
    assert not out[:, 3:].any() and out[:, :3].all()
    compute_attention(
        *tensors(3, 5, 5, 2, 2, 8), attention_plan(segments), "sdpa"
    )  # every query sees itself: the mask is not changed
    assert torch.equal(masks[1].expand(3, 1, 5, 5)[0, 0], segments[0, :, None] == segments[0])


# ---- blocks: packed samples equal unpacked ones -----------------------------------------------------------------

ROTARY = RotaryConfig(head_dim=16, layout="mrope", sections=(2, 3, 3))

BLOCKS = {
    "decoder": BlockConfig(
        width=48,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16, qk_norm="rms"),
        mlp=GatedMLPConfig(intermediate_size=64),
        norm="rms",
    ),
    "tower": BlockConfig(
        width=64,
        attention=AttentionConfig(heads=4, bias="all"),
        mlp=PlainMLPConfig(intermediate_size=80),
        layer_scale=0.3,
    ),
    "experts": BlockConfig(
        width=48,
        attention=AttentionConfig(heads=3, kv_heads=1, head_dim=16, bias="qkv"),
        mlp=MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=24, shared_intermediate_size=16),
        norm="rms",
    ),
}


def sample(kind: str, seed: int, width: int):
    """Return embeddings, positions and spans of text, a bidirectional image, and text."""
    h, w = 2 + seed % 2, 3
    before, after = 3 + seed, 2
    positions = torch.cat(
        [build_text_positions(before), build_grid_positions(1, h, w, before), build_text_positions(after, before + w)]
    )
    spans = torch.tensor([0] * before + [1] * (h * w) + [0] * after)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(positions), width, generator=generator)
    return x, positions, spans if kind == "decoder" else torch.zeros_like(spans)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_samples_equal_unpacked_ones(kind, causal):
    config = BLOCKS[kind]
    blocks = torch.nn.ModuleList([randomize(Block(config), seed=i) for i in range(2)])
    rotary = RotaryEmbedding(ROTARY)
    samples = [sample(kind, seed, config.width) for seed in range(4)]

    def run(x, positions, plan):
        for block in blocks:
            x = block(x, plan, rotation=rotary(positions))
        return x

    def gradients(outputs):
        loss = sum((y * torch.sin(torch.arange(y.numel()).view_as(y) * 0.1)).sum() for y in outputs)
        return torch.autograd.grad(loss, list(blocks.parameters()), allow_unused=True)

    alone = [run(x[None], p[None], attention_plan(spans=s[None], causal=causal))[0] for x, p, s in samples]
    lengths = [len(x) for x, _, _ in samples]
    segments = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    plan = attention_plan(segments, torch.cat([s for _, _, s in samples])[None], causal=causal)
    x, positions = (torch.cat([s[i] for s in samples])[None] for i in (0, 1))
    packed = run(x, positions, plan)[0].split(lengths)

    for ours, theirs in zip(packed, alone, strict=True):
        assert relative(ours, theirs) <= 1e-5
    for ours, theirs in zip(gradients(packed), gradients(alone), strict=True):
        if theirs is not None:
            assert relative(ours, theirs) <= 1e-5


@pytest.mark.parametrize("route_of", ["spans", "no spans"])
def test_no_gradient_crosses_a_segment(route_of):
    block = randomize(Block(BLOCKS["decoder"]))
    segments = torch.tensor([[0] * 7 + [1] * 6 + [-1] * 3])
    spans = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]]) if route_of == "spans" else None
    plan = attention_plan(segments, spans, causal=True)
    x = torch.randn(1, 16, 48, requires_grad=True)
    out = block(x, plan, rotation=RotaryEmbedding(ROTARY)(torch.arange(16)[None]))
    (gradient,) = torch.autograd.grad(out[0, 7:13].square().sum(), x)
    assert (gradient[0, 7:13] != 0).any(-1).all()
    assert torch.equal(gradient[0, :7], torch.zeros(7, 48))
    assert torch.equal(gradient[0, 13:], torch.zeros(3, 48))


def test_spans_are_bidirectional_and_text_is_causal():
    block = randomize(Block(BLOCKS["decoder"]))
    spans = torch.tensor([[0, 0, 1, 1, 1, 0, 0]])
    x = torch.randn(1, 7, 48, requires_grad=True)
    out = block(x, attention_plan(spans=spans, causal=True), rotation=RotaryEmbedding(ROTARY)(torch.arange(7)[None]))

    def sources(i):
        (gradient,) = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)
        return (gradient[0] != 0).any(-1).nonzero().flatten().tolist()

    assert sources(1) == [0, 1]
    assert sources(2) == [0, 1, 2, 3, 4]  # the first patch attends to the last
    assert sources(5) == [0, 1, 2, 3, 4, 5]


# ---- cache ------------------------------------------------------------------------------------------------------


def decode(blocks, rotary, x, cache, steps, spans=None):
    """Run x (B, L, W) through the cache in chunks of the given sizes."""
    outs, start = [], 0
    for n in steps:
        piece = x[:, start : start + n]
        positions = cache.lengths[:, None] + torch.arange(n)
        plan = cache.extend(n, spans=None if spans is None else spans[:, start : start + n])
        for i, block in enumerate(blocks):
            piece = block(piece, plan, rotation=rotary(positions), cache=cache.layer(i))
        outs.append(piece)
        start += n
    return torch.cat(outs, 1)


def make_cache(layers, batch, config, capacity):
    attention = config.attention
    shape = (attention.num_kv_heads, attention.resolve_head_dim(config.width))
    return KVCache([shape] * layers, batch, capacity=capacity)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())
@settings(max_examples=25)
def test_cache_equals_no_cache(steps, fixed):
    config = BLOCKS["decoder"]
    blocks = [randomize(Block(config), seed=i) for i in range(2)]
    rotary = RotaryEmbedding(RotaryConfig(head_dim=16))
    L = sum(steps)
    x = torch.randn(2, L, 48, generator=torch.Generator().manual_seed(L))
    with torch.no_grad():
        whole = x
        for block in blocks:
            whole = block(whole, AttentionPlan(causal=True), rotation=rotary(torch.arange(L)[None]))
        ours = decode(blocks, rotary, x, make_cache(2, 2, config, L if fixed else None), steps)
    assert relative(ours, whole) <= 1e-5


def test_cache_supports_bidirectional_spans():
    config = BLOCKS["decoder"]
    blocks = [randomize(Block(config))]
    rotary = RotaryEmbedding(RotaryConfig(head_dim=16))
    spans = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]])
    x = torch.randn(1, 9, 48)
    with torch.no_grad():
        whole = blocks[0](x, attention_plan(spans=spans, causal=True), rotation=rotary(torch.arange(9)[None]))
        ours = decode(blocks, rotary, x, make_cache(1, 1, config, None), [3, 4, 1, 1], spans)
    assert relative(ours, whole) <= 1e-5


def test_prompts_of_different_lengths():
    config = BLOCKS["decoder"]
    block = randomize(Block(config))
    rotary = RotaryEmbedding(RotaryConfig(head_dim=16))
    lengths = torch.tensor([5, 2, 4])
    rows = [torch.randn(n + 3, 48) for n in lengths.tolist()]  # a prompt and three more tokens
    cache = make_cache(1, 3, config, 16)
    with torch.no_grad():
        alone = [
            block(x[None], AttentionPlan(causal=True), rotation=rotary(torch.arange(len(x))[None]))[0] for x in rows
        ]
        prompts = torch.stack(
            [torch.cat([x[:n], torch.full((5 - n, 48), 99.0)]) for x, n in zip(rows, lengths, strict=True)]
        )
        plan = cache.extend(5, counts=lengths)
        out = block(prompts, plan, rotation=rotary(torch.arange(5)[None].expand(3, -1)), cache=cache.layer(0))
        for row, n, reference in zip(out, lengths.tolist(), alone, strict=True):
            assert relative(row[:n], reference[:n]) <= 1e-5
        for step in range(3):
            at = cache.lengths[:, None]
            x = torch.stack([row[n + step] for row, n in zip(rows, lengths.tolist(), strict=True)])[:, None]
            out = block(x, cache.extend(1), rotation=rotary(at), cache=cache.layer(0))
            for row, n, reference in zip(out, lengths.tolist(), alone, strict=True):
                assert relative(row[0], reference[n + step]) <= 1e-5


def test_padding_does_not_fill_the_cache():
    cache = KVCache([(1, 8)], 2, capacity=10)
    cache.extend(10, counts=torch.tensor([8, 7]))
    assert cache.max_row_length == 8
    cache.extend(1)
    assert cache.lengths.tolist() == [9, 8]


@pytest.mark.parametrize("counts", [[3, 4], [-1, 2]])
def test_invalid_counts_raise(counts):
    with pytest.raises(ConfigError, match="counts"):
        KVCache([(1, 8)], 2).extend(3, counts=torch.tensor(counts))


def test_zero_capacity_raises():
    with pytest.raises(ConfigError, match="capacity is 0"):
        KVCache([(1, 8)], 1, capacity=0)


def test_full_cache_raises():
    cache = KVCache([(1, 8)], 1, capacity=4)
    cache.extend(3)
    with pytest.raises(ConfigError, match="capacity of 4 tokens, and 5"):
        cache.extend(2)


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=70), min_size=1, max_size=3), st.booleans())
def test_cache_selects_tokens(rows, fixed):
    """Rows of different lengths: selected tokens move up in order; the next tokens attend only to them."""
    longest, B = max(map(len, rows)), len(rows)
    cache = KVCache([(1, 3)] * 2, B, capacity=longest + 2 if fixed else None)
    counts = torch.tensor([len(row) for row in rows])
    cache.extend(longest, counts)
    k = torch.randn(2, B, longest, 1, 3)
    for layer in range(2):
        cache.layer(layer).append(k[layer], -k[layer])
    kept = torch.zeros(B, longest, dtype=torch.bool)
    for row, flags in zip(kept, rows, strict=True):
        row[: len(flags)] = torch.tensor(flags)
    kept[:, 0] = True
    cache.select_tokens(kept | (torch.arange(longest) >= counts[:, None]))  # padding is never selected
    assert cache.lengths.tolist() == kept.sum(1).tolist() and cache.max_row_length == int(kept.sum(1).max())
    plan = cache.extend(1)
    new = torch.randn(B, 1, 1, 3)
    found = cache.layer(1).append(new, new)
    seen = plan.mask(1, found[0].shape[1], torch.device("cpu")).expand(B, -1, -1, -1)
    for b in range(B):
        wanted = torch.cat([k[1, b][kept[b]], new[b]])
        assert torch.equal(found[0][b][seen[b, 0, 0]], wanted) and torch.equal(found[1][b, 0], -k[1, b, 0])


def test_softcap_equals_the_formula():
    inputs, plan = tensors(2, 9, 9, 4, 2, 8), attention_plan(causal=True, window=(3, -1))
    q, k, v = inputs
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
    scores = (0.7 * torch.tanh(scores / 0.7)).masked_fill(~plan.mask(9, 9, q.device), -torch.inf)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    out = compute_attention(*inputs, plan, logit_softcap=0.7)
    assert relative(out, expected) <= 1e-5
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    for mine, theirs in zip(*grads, strict=True):
        assert relative(mine, theirs) <= 1e-4
    with pytest.raises(ConfigError, match="no logit_softcap"):
        compute_attention(*inputs, plan, "sdpa", logit_softcap=0.7)
