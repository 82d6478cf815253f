"""Learning from one's own average: what it makes of one view is to be told from another (DINO, iBOT).

B pictures, T views the teacher sees, S those the student sees, the teacher's first; K prototypes
"""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, rounds: int = 3) -> Tensor:
    """Rows (N, K) → targets: each a distribution, and all prototypes equally often meant in the batch (SwAV, DINOv2).

    The batch is that of all ranks together. Without the second condition one prototype for everything would be a
    perfect answer; unlike DINO's running centre it holds from the first step, and has neither state nor momentum.
    """
    q = torch.softmax(logits.float() / temperature, dim=1)
    for _ in range(rounds):
        columns = q.sum(0)
        if dist.is_initialized():
            dist.all_reduce(columns)
        q = q / columns.clamp(min=1e-30)
        q = q / q.sum(1, keepdim=True)
    return q


def views_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Sum over pictures of the mean cross-entropy between views that differ: targets (T, B, K), logits (S, B, K)."""
    said = torch.log_softmax(logits.float() / temperature, dim=-1)
    pairs = -torch.einsum("tbk,sbk->bts", targets, said)
    T, S = len(targets), len(logits)
    other = 1 - torch.eye(T, S, device=pairs.device)
    return (pairs * other).sum() / (T * S - min(T, S))


def patches_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Sum over rows of the cross-entropy: targets, logits (N, K)."""
    return -(targets * torch.log_softmax(logits.float() / temperature, dim=-1)).sum()


def entropy(targets: Tensor) -> Tensor:
    """Sum over rows (…, K), in nats. Near log K the teacher tells no picture from another: it has collapsed."""
    return torch.special.entr(targets).sum()
