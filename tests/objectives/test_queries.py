"""Losses of queries: each against its definition, and what is drawn against what it should be drawn with."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitrail.objectives.queries import closest, hard_negatives, joint_loss, orthogonality, smoothed_cross_entropy


def test_the_nearest_query_speaks_for_its_picture():
    u, v = torch.randn(3, 5, 4, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    wanted = [[max(float(q @ text) for q in picture) for text in v] for picture in u]
    torch.testing.assert_close(closest(u, v), torch.tensor(wanted, dtype=torch.double))
    u.requires_grad_()
    closest(u, v[:1]).sum().backward()
    assert (u.grad.abs().sum(-1) > 0).sum(1).tolist() == [1, 1, 1]  # and it alone learns


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_target_is_torchs_cross_entropy(smoothing):
    logits = torch.randn(5, 7, dtype=torch.double, requires_grad=True)
    own = F.one_hot(torch.tensor([3, 0, 6, 6, 1]), 7).bool()
    found = smoothed_cross_entropy(logits, own, smoothing)
    wanted = F.cross_entropy(logits, own.long().argmax(1), label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (found, wanted)))


def test_several_targets_share_theirs_and_everything_alike_costs_the_logarithm():
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
def test_what_belongs_together_is_never_a_negative(rows, columns, seed, share):
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=chance) * 30
    own = torch.rand(rows, columns, generator=chance) < share
    found = hard_negatives(logits, own)
    for row, column in enumerate(found.tolist()):
        assert (column == -1) == bool(own[row].all())
        assert column == -1 or not own[row, column]


def test_negatives_are_drawn_as_often_as_they_look_true():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(40_000, -1)
    own = torch.tensor([False, False, False, True]).expand(40_000, -1)
    share = hard_negatives(logits, own).bincount(minlength=4) / 40_000
    torch.testing.assert_close(share[:3], logits[0, :3].softmax(0), atol=0.01, rtol=0)


def test_queries_that_differ_in_everything_cost_nothing_and_equal_ones_the_most():
    eye = torch.eye(6, dtype=torch.double)[None, :4] * torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.double)[:, None]
    assert orthogonality(eye).item() == pytest.approx(0, abs=1e-12)  # of whichever length
    assert orthogonality(torch.ones(1, 4, 6)).item() == pytest.approx(3)  # (Q² − Q) / Q
    torch.manual_seed(0)
    y = F.normalize(torch.randn(2, 4, 6, dtype=torch.double), dim=-1)
    paper = (y.mT @ y - torch.eye(6)).square().sum((1, 2)) / 4  # as it is written: 6 × 6
    torch.testing.assert_close(orthogonality(y), paper - (6 - 4) / 4)


def test_all_pairs_at_once_is_what_the_paper_writes():
    torch.manual_seed(0)
    v, s = torch.randn(5, 3, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
    whole = sum(float((v[i] @ s[j]).exp()) for i in range(5) for j in range(5))
    wanted = -sum(math.log(float((v[k] @ s[k]).exp()) / whole) for k in range(5)) / 5
    eye = torch.eye(5, dtype=torch.bool)
    assert joint_loss(v @ s.T, eye).item() == pytest.approx(wanted)
    assert joint_loss(torch.full((5, 5), 3.0), eye).item() == pytest.approx(2 * math.log(5))
    assert torch.isfinite(joint_loss(torch.eye(5) * 1e4, eye))
