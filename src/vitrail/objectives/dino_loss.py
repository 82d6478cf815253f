"""Self-distillation losses of DINO and iBOT. The teacher is an EMA of the student.

B images, T teacher views, S student views (the teacher's first), K prototypes
"""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def sinkhorn_knopp(logits: Tensor, temperature: float, num_iterations: int = 3) -> Tensor:
    """Sinkhorn–Knopp normalization of teacher logits (N, K) into targets (SwAV, DINOv2).

    Each row becomes a distribution, and all prototypes get equal mass over the batch of all ranks. This prevents
    collapse to one prototype. Unlike DINO's centering it has no state and works from the first step.
    """
    q = torch.softmax(logits.float() / temperature, dim=1)
    for _ in range(num_iterations):
        columns = q.sum(0)
        if dist.is_initialized():
            dist.all_reduce(columns)
        q = q / columns.clamp(min=1e-30)
        q = q / q.sum(1, keepdim=True)
    return q


def dino_view_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy between different views, summed over images.

    Shapes: targets (T, B, K), logits (S, B, K).
    """
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    pairs = -torch.einsum("tbk,sbk->bts", targets, log_probs)
    T, S = len(targets), len(logits)
    different = 1 - torch.eye(T, S, device=pairs.device)
    return (pairs * different).sum() / (T * S - min(T, S))


def ibot_patch_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of masked patches, summed over rows: targets and logits (N, K)."""
    return -(targets * torch.log_softmax(logits.float() / temperature, dim=-1)).sum()


def target_entropy(targets: Tensor) -> Tensor:
    """Return the entropy of the targets (…, K) in nats, summed over rows. Near log K the teacher has collapsed."""
    return torch.special.entr(targets).sum()
