"""Feature reductions: order, selection and merging."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail.connectors.feature_reduction import apply_visionzip, apply_vispruner, compute_attention_scores
from vitrail.errors import ConfigError
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedMLPConfig

sizes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**16))


def draw(B: int, N: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, 4, generator=generator), torch.rand(B, N, generator=generator)


@settings(max_examples=150)
@given(sizes, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_vispruner_keeps_order(size, important):
    B, N, keep, seed = size
    features, scores = draw(B, N, seed)
    tokens, index = apply_vispruner(features, scores, keep, important)
    n = min(keep, N)
    assert index.shape == (B, n) and tokens.shape == (B, n, 4)
    assert (index.diff(dim=1) > 0).all() and index.min() >= 0 and index.max() < N
    assert torch.equal(tokens, features.gather(1, index[..., None].expand(-1, -1, 4)))
    best = scores.argsort(dim=1, descending=True)[:, : int(n * important)] if keep < N else index[:, :0]
    assert all(set(b.tolist()) <= set(i.tolist()) for b, i in zip(best, index, strict=True))
    if keep >= N:
        assert torch.equal(tokens, features)


def prune_reference(features, scores, keep: int, important: float) -> list[int]:
    """Reference VisPruner for one row, written with lists."""
    unit = F.normalize(features, dim=-1)
    order = sorted(range(len(scores)), key=lambda i: -scores[i].item())
    first = int(keep * important)
    best, rest = order[:first], order[first:]
    while keep - first > 0 and len(rest) > keep - first:
        even, odd = rest[::2], rest[1::2]
        alike = {i: max((unit[i] @ unit[j]).item() for j in odd) for i in even}
        out = sorted(even, key=lambda i: -alike[i])[: min(8, len(rest) - (keep - first))]
        # What stays comes most alike first, and before those it was compared with.
        rest = [i for i in sorted(even, key=lambda i: -alike[i]) if i not in out] + odd
    return sorted(best + (rest if keep > first else []))


@pytest.mark.parametrize("N, keep", [(60, 20), (33, 7), (41, 1), (20, 19), (5, 2)])
def test_vispruner_matches_reference(N, keep):
    features, scores = draw(1, N, seed=N)
    _, index = apply_vispruner(features, scores, keep)
    assert index[0].tolist() == prune_reference(features[0], scores[0], keep, 0.5)


def test_vispruner_removes_duplicates():
    """Whatever the scores, one of three duplicates is removed."""
    features = torch.eye(8)[[0, 0, 0, 1, 2, 3]][None]
    for scores in torch.rand(20, 1, 6):
        _, index = apply_vispruner(features, scores, 5, important_fraction=0.0)
        order = scores[0].argsort(descending=True).tolist()
        sides = {order.index(i) % 2 for i in range(3)}
        if len(sides) == 2:  # alike ones are among those compared and among those compared with
            assert {3, 4, 5} < set(index[0].tolist())


@settings(max_examples=150)
@given(sizes, st.integers(0, 12))
def test_visionzip_selects_and_merges(size, contextual):
    B, N, keep, seed = size
    features, scores = draw(B, N, seed)
    if contextual > keep and keep < N:
        with pytest.raises(ConfigError, match="contextual"):
            apply_visionzip(features, scores, keep, contextual)
        return
    tokens, index = apply_visionzip(features, scores, keep, contextual)
    n = min(keep, N)
    assert index.shape == (B, n) and tokens.shape == (B, n, 4)
    assert all(len(set(row.tolist())) == n for row in index) and index.max() < N
    if keep >= N:
        assert torch.equal(tokens, features)
        return
    dominant, centres = index[:, : keep - contextual], index[:, keep - contextual :]
    assert (dominant.diff(dim=1) > 0).all() and (centres.diff(dim=1) > 0).all()
    for b in range(B):
        best = scores[b].topk(keep - contextual).indices
        assert set(best.tolist()) == set(dominant[b].tolist())
        assert torch.equal(tokens[b, : keep - contextual], features[b, dominant[b]])
        if contextual:
            check_merged(features[b], tokens[b, keep - contextual :], dominant[b].tolist(), centres[b].tolist())


def check_merged(features, merged, dominant: list[int], centres: list[int]) -> None:
    """Assert that each contextual token is its center plus the mean of the most similar features."""
    rest = [i for i in range(len(features)) if i not in dominant]
    assert centres == rest[:: len(rest) // len(centres)][: len(centres)]
    unit = F.normalize(features, dim=-1)
    near = {c: [] for c in centres}
    for i in rest:
        if i not in near:
            near[max(centres, key=lambda c: (unit[i] @ unit[c]).item())].append(i)
    for token, (c, others) in zip(merged, near.items(), strict=True):
        added = features[others].mean(0) if others else torch.zeros(features.shape[1])
        assert torch.allclose(token, features[c] + added, atol=1e-5)


def test_visionzip_counts_in_half_precision():
    """More neighbours than bfloat16 can count: the mean of 300 equal features is the feature."""
    features = torch.ones(1, 301, 4, dtype=torch.bfloat16)
    tokens, _ = apply_visionzip(features, torch.rand(1, 301), 1, contextual_tokens=1)
    assert torch.equal(tokens, 2 * features[:, :1])


def test_visionzip_compares_by_keys():
    features, scores = draw(1, 30, seed=3)
    keys = torch.randn(1, 30, 2)
    assert not torch.equal(
        apply_visionzip(features, scores, 12).tokens, apply_visionzip(features, scores, 12, keys=keys).tokens
    )
    assert torch.equal(
        apply_visionzip(features, scores, 12, keys=features).tokens, apply_visionzip(features, scores, 12).tokens
    )


@pytest.mark.parametrize("reduce", [apply_vispruner, apply_visionzip])
def test_invalid_arguments_raise(reduce):
    features, scores = draw(2, 9, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        reduce(features, scores, 0)
    with pytest.raises(ConfigError, match="scores"):
        reduce(features, scores[:, 1:], 4)
    with pytest.raises(ConfigError, match="important"):
        apply_vispruner(features, scores, 4, important_fraction=1.5)


def test_attention_scores_are_probabilities():
    config = BlockConfig(
        width=12, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=8)
    )
    block = randomize(Block(config))
    found = compute_attention_scores(block, torch.randn(2, 3 + 5, 12), num_prefix_tokens=3)
    assert found.scores.shape == (2, 5) and found.keys.shape == (2, 5, 3)
    assert (found.scores.sum(1) < 1).all() and (found.scores > 0).all()
    whole = compute_attention_scores(block, torch.randn(2, 8, 12), num_prefix_tokens=0)
    assert torch.allclose(whole.scores.sum(1), torch.ones(2))
    for wrong in ({"bias": "all_but_k"}, {"qk_norm": "rms", "qk_norm_over": "heads"}):
        with pytest.raises(ConfigError, match="CLIP"):
            compute_attention_scores(
                Block(config.replace(attention=config.attention.replace(**wrong))), torch.randn(2, 8, 12)
            )


@pytest.mark.parametrize("normed", [None, "rms"])
def test_scores_without_cls(normed):
    """Compare with the mean over attention rows, computed head by head."""
    attention = AttentionConfig(heads=4, kv_heads=2, qk_norm=normed)
    block = randomize(Block(BlockConfig(width=12, attention=attention, mlp=GatedMLPConfig(intermediate_size=8))))
    x = torch.randn(2, 3 + 5, 12)
    found = compute_attention_scores(block, x, num_prefix_tokens=3, cls=False)
    branch = block.branches["self"]
    q, k, _ = branch.op.qkv(branch.norm(x)).unflatten(-1, (-1, 3)).split([4, 2, 2], dim=-2)
    q, k = branch.op.q_norm(q), branch.op.k_norm(k)
    rows = [((q[:, :, h] @ k[:, :, h // 2].mT) / 3**0.5).softmax(-1) for h in range(4)]  # (B, 8, 8) each
    assert torch.allclose(found.scores, torch.stack(rows).mean((0, 2))[:, 3:], atol=1e-6)
    assert torch.allclose(found.keys, k[:, 3:].mean(2), atol=1e-6)
    alone = compute_attention_scores(block, x, num_prefix_tokens=3)
    assert torch.allclose(alone.scores, torch.stack(rows)[:, :, 0].mean(0)[:, 3:], atol=1e-6)
