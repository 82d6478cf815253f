"""DINO and iBOT losses against explicit formulas, and Sinkhorn targets on several ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from training import ranks
from vitrail.objectives.dino_loss import dino_view_loss, ibot_patch_loss, sinkhorn_knopp, target_entropy


def test_view_loss_excludes_equal_views():
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
    loss = dino_view_loss(targets, logits, warm)
    assert pairs == T * S - T and loss.item() == pytest.approx(plain / pairs, rel=1e-4)
    loss.backward()
    assert logits.grad is not None and (logits.grad != 0).all()


def test_loss_is_smallest_if_student_equals_targets():
    targets = torch.softmax(torch.randn(1, 4, 9), -1).expand(2, 4, 9)
    right = (0.1 * targets.log()).expand(2, 4, 9)
    least = float(dino_view_loss(targets, right, 0.1))
    assert least == pytest.approx(float(target_entropy(targets[0])), rel=1e-5)
    assert all(float(dino_view_loss(targets, right + 0.05 * torch.randn(2, 4, 9), 0.1)) > least for _ in range(20))


def test_patch_loss_is_cross_entropy():
    targets, logits = torch.softmax(torch.randn(6, 9), -1), torch.randn(6, 9)
    wanted = torch.nn.functional.cross_entropy(logits / 0.2, targets, reduction="sum")
    torch.testing.assert_close(ibot_patch_loss(targets, logits, 0.2), wanted)


def test_sinkhorn_equals_explicit_iterations():
    """Reference: DINOv2's matrix of prototypes × samples with alternating row and column scaling."""
    N, K = 12, 5
    logits = torch.rand(N, K) * 2 - 1

    def rounds(q, count):
        for _ in range(count):
            q = q / (q.sum(1, keepdim=True) * K)
            q = q / (q.sum(0, keepdim=True) * N)
        return (q * N).T.float()

    powers = (logits / 0.1).double().exp().T
    torch.testing.assert_close(sinkhorn_knopp(logits, 0.1), rounds(powers / powers.sum(0), 3), rtol=1e-4, atol=1e-6)
    # The result does not depend on the initial scale of the samples.
    torch.testing.assert_close(
        sinkhorn_knopp(logits, 0.1, 400), rounds(powers / powers.sum(), 400), rtol=1e-3, atol=1e-5
    )


def test_targets_use_prototypes_equally():
    logits = torch.randn(40, 6) + torch.tensor([9.0, 0, 0, 0, 0, 0])  # all prefer the first prototype
    found = sinkhorn_knopp(logits, 0.5, num_iterations=300)
    torch.testing.assert_close(found.sum(1), torch.ones(40))
    torch.testing.assert_close(found.sum(0), torch.full((6,), 40 / 6), rtol=1e-2, atol=0)
    assert float((logits / 0.5).softmax(1).sum(0)[0]) > 39


@pytest.mark.parametrize("temperature", [1e-4, 0.05, 10])
def test_small_temperatures_do_not_overflow(temperature):
    found = sinkhorn_knopp(torch.rand(8, 50) * 2 - 1, temperature)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.ones(8))


def test_entropy_shows_collapse():
    same = torch.randn(1, 16).expand(32, 16)  # all images are equal
    assert float(target_entropy(sinkhorn_knopp(same, 0.05))) == pytest.approx(32 * math.log(16), rel=1e-4)
    assert float(target_entropy(sinkhorn_knopp(torch.eye(16).repeat(2, 1), 0.05))) < 0.1
    assert float(target_entropy(torch.eye(4))) == 0


def test_targets_have_no_gradient():
    assert not sinkhorn_knopp(torch.randn(4, 5, requires_grad=True), 0.1).requires_grad


def share() -> None:
    torch.manual_seed(0)
    logits, sizes = torch.randn(11, 7), [4, 7]
    rank = dist.get_rank()
    whole = (logits / 0.2).softmax(1)
    for _ in range(3):
        whole = whole / whole.sum(0)
        whole = whole / whole.sum(1, keepdim=True)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    torch.testing.assert_close(sinkhorn_knopp(logits[own], 0.2), whole[own])
    alone = (logits[own] / 0.2).softmax(1)
    for _ in range(3):
        alone = alone / alone.sum(0)
        alone = alone / alone.sum(1, keepdim=True)
    assert not torch.allclose(whole[own], alone, atol=0.05)  # the rows of the other rank count


@pytest.mark.slow
def test_sinkhorn_covers_all_ranks():
    ranks.run(2, share)
