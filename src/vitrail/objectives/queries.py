"""Losses of the queries that look at a picture: beside its text, and among themselves.

B pictures, M texts, N rows, Q queries of a picture, E width of the embedding, V width of a query
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTHING = 0.1  # BLIP-2's, of what is compared and of what is written


def closest(u: Tensor, v: Tensor) -> Tensor:
    """Queries (B, Q, E) and texts (M, E) → (B, M): how near to a text the nearest of a picture's queries comes"""
    return (u.flatten(0, 1) @ v.T).unflatten(0, u.shape[:2]).amax(1)


def smoothed_cross_entropy(logits: Tensor, own: Tensor, smoothing: float = SMOOTHING) -> Tensor:
    """logits (N, M) and which columns are a row's `own` (N, M) → (N,): these share its target, and all columns a
    `smoothing` part of it. Every row has some of its own."""
    target = own / own.sum(1, keepdim=True) * (1 - smoothing) + smoothing / own.shape[1]
    return -(target * logits.log_softmax(1)).sum(1)


@torch.no_grad()
def hard_negatives(logits: Tensor, own: Tensor) -> Tensor:
    """(N,) for each row a column that is not its `own` (N, M), drawn with the probability that softmax gives it among
    those, so that what is easily taken for true comes up more often; −1 where there is none"""
    noise = -torch.empty_like(logits).exponential_().log()  # Gumbel's: the largest sum is such a draw
    found = (logits + noise).masked_fill(own, -torch.inf).argmax(1)
    return found.masked_fill(own.all(1), -1)


def orthogonality(queries: Tensor) -> Tensor:
    """(B, Q, V) → (B,): ‖YYᵀ − I‖² / Q with Y the queries at length 1, so that each of a picture's queries says
    something else. The token-scaling paper writes YᵀY, which is V × V and differs by V − Q alone."""
    y = F.normalize(queries, dim=-1)
    gram = y @ y.mT - torch.eye(y.shape[1], dtype=y.dtype, device=y.device)  # (B, Q, Q)
    return gram.square().sum((1, 2)) / y.shape[1]


def joint_loss(logits: Tensor, own: Tensor) -> Tensor:
    """logits (N, M) → −log of the share that pairs which belong together, `own` (N, M), have of all pairs at once, in
    the mean over them: the token-scaling paper's (35), which is 2 ln N where all N² are alike. CLIP's loss asks of each
    row and of each column by itself."""
    return logits.flatten().logsumexp(0) - logits[own].mean()
