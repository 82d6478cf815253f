"""DINO's losses against formulas written out, and targets that many processes spread together."""

import math

import pytest
import torch
import torch.distributed as dist

from train import ranks
from vitrail.objectives.dino import entropy, patches_loss, sinkhorn, views_loss


def test_the_loss_between_views_leaves_out_a_view_with_itself():
    T, S, B, K, warm = 2, 5, 3, 7, 0.1
    targets, logits = torch.rand(T, B, K), torch.randn(S, B, K, requires_grad=True)
    targets = targets / targets.sum(-1, keepdim=True)
    plain, pairs = 0.0, 0
    for t in range(T):
        for s in range(S):
            if s == t:
                continue
            pairs += 1
            for b in range(B):
                powers = [math.exp(x / warm) for x in logits[s, b].tolist()]
                plain -= sum(p * math.log(q / sum(powers)) for p, q in zip(targets[t, b].tolist(), powers, strict=True))
    loss = views_loss(targets, logits, warm)
    assert pairs == T * S - T and loss.item() == pytest.approx(plain / pairs, rel=1e-4)
    loss.backward()
    assert logits.grad is not None and (logits.grad != 0).all()


def test_the_loss_is_least_where_student_and_targets_agree():
    targets = torch.softmax(torch.randn(1, 4, 9), -1).expand(2, 4, 9)
    right = (0.1 * targets.log()).expand(2, 4, 9)
    least = float(views_loss(targets, right, 0.1))
    assert least == pytest.approx(float(entropy(targets[0])), rel=1e-5)
    assert all(float(views_loss(targets, right + 0.05 * torch.randn(2, 4, 9), 0.1)) > least for _ in range(20))


def test_the_patches_loss_is_cross_entropy():
    targets, logits = torch.softmax(torch.randn(6, 9), -1), torch.randn(6, 9)
    wanted = torch.nn.functional.cross_entropy(logits / 0.2, targets, reduction="sum")
    torch.testing.assert_close(patches_loss(targets, logits, 0.2), wanted)


def test_sinkhorn_is_the_rounds_written_out():
    """A table of prototypes by samples as DINOv2 has it, whose rows and columns are scaled in turn."""
    N, K = 12, 5
    logits = torch.rand(N, K) * 2 - 1

    def rounds(q, count):
        for _ in range(count):
            q = q / (q.sum(1, keepdim=True) * K)
            q = q / (q.sum(0, keepdim=True) * N)
        return (q * N).T.float()

    powers = (logits / 0.1).double().exp().T
    torch.testing.assert_close(sinkhorn(logits, 0.1), rounds(powers / powers.sum(0), 3), rtol=1e-4, atol=1e-6)
    # Where it ends does not depend on how heavy the samples are at first, all alike or by their largest power.
    torch.testing.assert_close(sinkhorn(logits, 0.1, 400), rounds(powers / powers.sum(), 400), rtol=1e-3, atol=1e-5)


def test_targets_are_distributions_that_mean_every_prototype_alike():
    logits = torch.randn(40, 6) + torch.tensor([9.0, 0, 0, 0, 0, 0])  # all would say the first
    found = sinkhorn(logits, 0.5, rounds=300)
    torch.testing.assert_close(found.sum(1), torch.ones(40))
    torch.testing.assert_close(found.sum(0), torch.full((6,), 40 / 6), rtol=1e-2, atol=0)
    assert float((logits / 0.5).softmax(1).sum(0)[0]) > 39


@pytest.mark.parametrize("temperature", [1e-4, 0.05, 10])
def test_no_temperature_overflows(temperature):
    found = sinkhorn(torch.rand(8, 50) * 2 - 1, temperature)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.ones(8))


def test_a_collapse_is_seen():
    same = torch.randn(1, 16).expand(32, 16)  # every picture the same
    assert float(entropy(sinkhorn(same, 0.05))) == pytest.approx(32 * math.log(16), rel=1e-4)
    assert float(entropy(sinkhorn(torch.eye(16).repeat(2, 1), 0.05))) < 0.1
    assert float(entropy(torch.eye(4))) == 0


def test_targets_have_no_gradient():
    assert not sinkhorn(torch.randn(4, 5, requires_grad=True), 0.1).requires_grad


def share() -> None:
    torch.manual_seed(0)
    logits, sizes = torch.randn(11, 7), [4, 7]
    rank = dist.get_rank()
    whole = (logits / 0.2).softmax(1)
    for _ in range(3):
        whole = whole / whole.sum(0)
        whole = whole / whole.sum(1, keepdim=True)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    torch.testing.assert_close(sinkhorn(logits[own], 0.2), whole[own])
    alone = (logits[own] / 0.2).softmax(1)
    for _ in range(3):
        alone = alone / alone.sum(0)
        alone = alone / alone.sum(1, keepdim=True)
    assert not torch.allclose(whole[own], alone, atol=0.05)  # the other rank's rows did count


@pytest.mark.slow
def test_ranks_spread_the_targets_of_the_whole_batch():
    ranks.run(2, share)
