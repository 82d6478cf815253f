"""Losses of query embeddings (Q-Former): contrastive, matching and orthogonality.

B images, M texts, N rows, Q queries of an image, E embedding width, V query width
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LABEL_SMOOTHING = 0.1  # as in BLIP-2, for the contrastive and the captioning loss


def max_query_similarity(u: Tensor, v: Tensor) -> Tensor:
    """Return the largest similarity of an image's queries (B, Q, E) to each text (M, E), as (B, M)."""
    return (u.flatten(0, 1) @ v.T).unflatten(0, u.shape[:2]).amax(1)


def smoothed_cross_entropy(logits: Tensor, positives: Tensor, label_smoothing: float = LABEL_SMOOTHING) -> Tensor:
    """Return the cross-entropy of logits (N, M) with smoothed labels, (N,).

    `positives` (N, M) marks the positive columns of each row, at least one; they share the target.
    """
    target = positives / positives.sum(1, keepdim=True) * (1 - label_smoothing) + label_smoothing / positives.shape[1]
    return -(target * logits.log_softmax(1)).sum(1)


@torch.no_grad()
def sample_hard_negatives(logits: Tensor, positives: Tensor) -> Tensor:
    """Sample a negative column for each row, (N,), with the softmax probability of its logit; −1 if there is none.

    `positives` (N, M) marks the columns to exclude. Negatives with large logits are sampled more often.
    """
    noise = -torch.empty_like(logits).exponential_().log()  # Gumbel noise: the argmax is a sample of the softmax
    sampled = (logits + noise).masked_fill(positives, -torch.inf).argmax(1)
    return sampled.masked_fill(positives.all(1), -1)


def query_orthogonality_loss(queries: Tensor) -> Tensor:
    """Return ‖YYᵀ − I‖² / Q per image, (B,), with Y the normalized queries (B, Q, V). It makes queries differ.

    The token-scaling paper writes YᵀY, which is V × V and differs only by the constant V − Q.
    """
    y = F.normalize(queries, dim=-1)
    gram = y @ y.mT - torch.eye(y.shape[1], dtype=y.dtype, device=y.device)  # (B, Q, Q)
    return gram.square().sum((1, 2)) / y.shape[1]


def joint_contrastive_loss(logits: Tensor, positives: Tensor) -> Tensor:
    """Return −log softmax over all pairs (N, M) at once, averaged over the positive pairs.

    This is equation (35) of the token-scaling paper. If all N² logits are equal, the loss is 2 ln N. CLIP's loss
    normalizes each row and column separately.
    """
    return logits.flatten().logsumexp(0) - logits[positives].mean()
