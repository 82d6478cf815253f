"""Reduction keeps what it says, in order, and loses nothing when nothing has to go."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail.connectors.reduce import looks, visionzip, vispruner
from vitrail.errors import ConfigError
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedConfig

sizes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**16))


def draw(B: int, N: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, 4, generator=generator), torch.rand(B, N, generator=generator)


@settings(max_examples=150)
@given(sizes, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_vispruner_keeps_places_in_order(size, important):
    B, N, keep, seed = size
    features, scores = draw(B, N, seed)
    tokens, index = vispruner(features, scores, keep, important)
    n = min(keep, N)
    assert index.shape == (B, n) and tokens.shape == (B, n, 4)
    assert (index.diff(dim=1) > 0).all() and index.min() >= 0 and index.max() < N
    assert torch.equal(tokens, features.gather(1, index[..., None].expand(-1, -1, 4)))
    best = scores.argsort(dim=1, descending=True)[:, : int(n * important)] if keep < N else index[:, :0]
    assert all(set(b.tolist()) <= set(i.tolist()) for b, i in zip(best, index, strict=True))
    if keep >= N:
        assert torch.equal(tokens, features)


def pruned_plainly(features, scores, keep: int, important: float) -> list[int]:
    """One row, in lists: the released procedure."""
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
def test_vispruner_is_the_plain_one(N, keep):
    features, scores = draw(1, N, seed=N)
    _, index = vispruner(features, scores, keep)
    assert index[0].tolist() == pruned_plainly(features[0], scores[0], keep, 0.5)


def test_vispruner_leaves_out_what_repeats():
    """Whatever the scores: the one that goes is one of the three that are alike."""
    features = torch.eye(8)[[0, 0, 0, 1, 2, 3]][None]
    for scores in torch.rand(20, 1, 6):
        _, index = vispruner(features, scores, 5, important=0.0)
        order = scores[0].argsort(descending=True).tolist()
        sides = {order.index(i) % 2 for i in range(3)}
        if len(sides) == 2:  # alike ones are among those compared and among those compared with
            assert {3, 4, 5} < set(index[0].tolist())


@settings(max_examples=150)
@given(sizes, st.integers(0, 12))
def test_visionzip_keeps_the_best_and_merges_the_rest(size, contextual):
    B, N, keep, seed = size
    features, scores = draw(B, N, seed)
    if contextual > keep and keep < N:
        with pytest.raises(ConfigError, match="contextual"):
            visionzip(features, scores, keep, contextual)
        return
    tokens, index = visionzip(features, scores, keep, contextual)
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
    """Each centre, and the mean of those that are nearest to it by their angle."""
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


def test_visionzip_counts_in_halves():
    """More neighbours than bfloat16 can count: 300 equal ones, whose mean is what they are."""
    features = torch.ones(1, 301, 4, dtype=torch.bfloat16)
    tokens, _ = visionzip(features, torch.rand(1, 301), 1, contextual=1)
    assert torch.equal(tokens, 2 * features[:, :1])


def test_visionzip_compares_by_keys():
    features, scores = draw(1, 30, seed=3)
    keys = torch.randn(1, 30, 2)
    assert not torch.equal(visionzip(features, scores, 12).tokens, visionzip(features, scores, 12, keys=keys).tokens)
    assert torch.equal(visionzip(features, scores, 12, keys=features).tokens, visionzip(features, scores, 12).tokens)


@pytest.mark.parametrize("reduce", [vispruner, visionzip])
def test_what_cannot_be_kept(reduce):
    features, scores = draw(2, 9, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        reduce(features, scores, 0)
    with pytest.raises(ConfigError, match="scores"):
        reduce(features, scores[:, 1:], 4)
    with pytest.raises(ConfigError, match="important"):
        vispruner(features, scores, 4, important=1.5)


def test_looks_are_shares():
    config = BlockConfig(width=12, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedConfig(hidden=8))
    block = randomize(Block(config))
    found = looks(block, torch.randn(2, 3 + 5, 12), prefix=3)
    assert found.scores.shape == (2, 5) and found.keys.shape == (2, 5, 3)
    assert (found.scores.sum(1) < 1).all() and (found.scores > 0).all()
    whole = looks(block, torch.randn(2, 8, 12), prefix=0)
    assert torch.allclose(whole.scores.sum(1), torch.ones(2))
    for wrong in ({"bias": "all_but_k"}, {"qk_norm": "rms", "qk_norm_over": "heads"}):
        with pytest.raises(ConfigError, match="CLIP"):
            looks(Block(config.with_(attention=config.attention.with_(**wrong))), torch.randn(2, 8, 12))


@pytest.mark.parametrize("normed", [None, "rms"])
def test_without_cls_all_tokens_look(normed):
    """The mean over the rows of the attention, against torch's own softmax of q·k, written out head by head."""
    attention = AttentionConfig(heads=4, kv_heads=2, qk_norm=normed)
    block = randomize(Block(BlockConfig(width=12, attention=attention, mlp=GatedConfig(hidden=8))))
    x = torch.randn(2, 3 + 5, 12)
    found = looks(block, x, prefix=3, cls=False)
    branch = block.branches["self"]
    q, k, _ = branch.op.qkv(branch.norm(x)).unflatten(-1, (-1, 3)).split([4, 2, 2], dim=-2)
    q, k = branch.op.q_norm(q), branch.op.k_norm(k)
    rows = [((q[:, :, h] @ k[:, :, h // 2].mT) / 3**0.5).softmax(-1) for h in range(4)]  # (B, 8, 8) each
    assert torch.allclose(found.scores, torch.stack(rows).mean((0, 2))[:, 3:], atol=1e-6)
    assert torch.allclose(found.keys, k[:, 3:].mean(2), atol=1e-6)
    alone = looks(block, x, prefix=3)
    assert torch.allclose(alone.scores, torch.stack(rows)[:, :, 0].mean(0)[:, 3:], atol=1e-6)
