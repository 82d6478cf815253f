"""Query losses against their definitions, and the distribution of sampled negatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitrail.objectives.query_losses import (
    joint_contrastive_loss,
    max_query_similarity,
    query_orthogonality_loss,
    sample_hard_negatives,
    smoothed_cross_entropy,
)


def test_similarity_is_the_largest_of_all_queries():
    u, v = torch.randn(3, 5, 4, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    wanted = [[max(float(q @ text) for q in picture) for text in v] for picture in u]
    torch.testing.assert_close(max_query_similarity(u, v), torch.tensor(wanted, dtype=torch.double))
    u.requires_grad_()
    max_query_similarity(u, v[:1]).sum().backward()
    assert (u.grad.abs().sum(-1) > 0).sum(1).tolist() == [1, 1, 1]  # only that query has a gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_positive_equals_torch_cross_entropy(smoothing):
    logits = torch.randn(5, 7, dtype=torch.double, requires_grad=True)
    own = F.one_hot(torch.tensor([3, 0, 6, 6, 1]), 7).bool()
    found = smoothed_cross_entropy(logits, own, smoothing)
    wanted = F.cross_entropy(logits, own.long().argmax(1), label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (found, wanted)))


def test_several_positives_share_the_target():
    own = torch.tensor([[True, True, False, False], [False, False, False, True]])
    logits = torch.randn(2, 4, dtype=torch.double)
    logp = logits.log_softmax(1)
    wanted = [
        -(0.475 * (logp[0, 0] + logp[0, 1]) + 0.025 * (logp[0, 2] + logp[0, 3])),
        -(0.925 * logp[1, 3] + 0.025 * logp[1, :3].sum()),
    ]
    torch.testing.assert_close(smoothed_cross_entropy(logits, own, 0.1), torch.stack(wanted))
    torch.testing.assert_close(smoothed_cross_entropy(torch.zeros(2, 4), own), torch.full((2,), 4.0).log())


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**20), st.floats(0, 1))
def test_positives_are_never_sampled(rows, columns, seed, share):
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=chance) * 30
    own = torch.rand(rows, columns, generator=chance) < share
    found = sample_hard_negatives(logits, own)
    for row, column in enumerate(found.tolist()):
        assert (column == -1) == bool(own[row].all())
        assert column == -1 or not own[row, column]


def test_negatives_follow_the_softmax():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(40_000, -1)
    own = torch.tensor([False, False, False, True]).expand(40_000, -1)
    share = sample_hard_negatives(logits, own).bincount(minlength=4) / 40_000
    torch.testing.assert_close(share[:3], logits[0, :3].softmax(0), atol=0.01, rtol=0)


def test_orthogonality_of_queries():
    image_embedder = (
        torch.eye(6, dtype=torch.double)[None, :4] * torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.double)[:, None]
    )
    assert query_orthogonality_loss(image_embedder).item() == pytest.approx(0, abs=1e-12)  # for any norm
    assert query_orthogonality_loss(torch.ones(1, 4, 6)).item() == pytest.approx(3)  # (Q² − Q) / Q
    torch.manual_seed(0)
    y = F.normalize(torch.randn(2, 4, 6, dtype=torch.double), dim=-1)
    paper = (y.mT @ y - torch.eye(6)).square().sum((1, 2)) / 4  # as in the paper: 6 × 6
    torch.testing.assert_close(query_orthogonality_loss(y), paper - (6 - 4) / 4)


def test_joint_loss_equals_the_paper():
    torch.manual_seed(0)
    v, s = torch.randn(5, 3, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
    whole = sum(float((v[i] @ s[j]).exp()) for i in range(5) for j in range(5))
    wanted = -sum(math.log(float((v[k] @ s[k]).exp()) / whole) for k in range(5)) / 5
    image_embedder = torch.eye(5, dtype=torch.bool)
    assert joint_contrastive_loss(v @ s.T, image_embedder).item() == pytest.approx(wanted)
    assert joint_contrastive_loss(torch.full((5, 5), 3.0), image_embedder).item() == pytest.approx(2 * math.log(5))
    assert torch.isfinite(joint_contrastive_loss(torch.eye(5) * 1e4, image_embedder))
