"""A discriminator's game: what it loses by, what its opponent loses by, and what keeps it in bounds.

Logits are a map (B, 1, h, w): one judgement a patch, high for what looks real. Both sides take the mean of all.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError


class Game(NamedTuple):
    """Both sides of one kind of loss."""

    discriminator: Callable[[Tensor, Tensor], Tensor]  # (logits of real pictures, of drawn ones)
    generator: Callable[[Tensor], Tensor]  # (logits of drawn ones)


def _hinge(real: Tensor, drawn: Tensor) -> Tensor:
    return (F.relu(1 - real).mean() + F.relu(1 + drawn).mean()) / 2


def _hinge_generator(drawn: Tensor) -> Tensor:
    return -drawn.mean()


def _non_saturating(real: Tensor, drawn: Tensor) -> Tensor:
    return (F.softplus(-real).mean() + F.softplus(drawn).mean()) / 2


def _non_saturating_generator(drawn: Tensor) -> Tensor:
    return F.softplus(-drawn).mean()


GAMES: dict[str, Game] = {
    "hinge": Game(_hinge, _hinge_generator),
    "non-saturating": Game(_non_saturating, _non_saturating_generator),
}


def from_step(weight: float, step: int, start: int) -> float:
    """`weight` from step `start` on, 0 before: a discriminator has nothing to say of pictures that are still grey."""
    return weight if step >= start else 0.0


def r1(logits: Tensor, pictures: Tensor) -> Tensor:
    """½ · mean over pictures of |∂ Σ logits / ∂ pixels|²: keeps a discriminator flat around real pictures, which must
    have required gradients before it saw them."""
    if not pictures.requires_grad:
        raise ConfigError("R1 needs the gradient of the pictures", "call pictures.requires_grad_() before judging them")
    (slope,) = torch.autograd.grad(logits.sum(), pictures, create_graph=True)
    return slope.square().flatten(1).sum(1).mean() / 2


def lecam(real: Tensor, drawn: Tensor, real_before: Tensor, drawn_before: Tensor) -> Tensor:
    """Keeps the logits of each side near what those of the other were on average (running means of the caller):
    mean (real − drawn_before)² + mean (drawn − real_before)². For little data."""
    return (real - drawn_before.detach()).square().mean() + (drawn - real_before.detach()).square().mean()
