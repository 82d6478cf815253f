"""GAN losses of the discriminator and the generator, and their regularizers.

Discriminator logits have shape (B, 1, h, w), one per patch, high for real images. All losses are means over logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError


class GANLoss(NamedTuple):
    """Discriminator and generator loss of one kind."""

    discriminator: Callable[[Tensor, Tensor], Tensor]  # (logits of real images, logits of generated images)
    generator: Callable[[Tensor], Tensor]  # (logits of generated images)


def _hinge(real: Tensor, fake: Tensor) -> Tensor:
    return (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2


def _hinge_generator(fake: Tensor) -> Tensor:
    return -fake.mean()


def _non_saturating(real: Tensor, fake: Tensor) -> Tensor:
    return (F.softplus(-real).mean() + F.softplus(fake).mean()) / 2


def _non_saturating_generator(fake: Tensor) -> Tensor:
    return F.softplus(-fake).mean()


GAN_LOSSES: dict[str, GANLoss] = {
    "hinge": GANLoss(_hinge, _hinge_generator),
    "non-saturating": GANLoss(_non_saturating, _non_saturating_generator),
}


def delay_weight(weight: float, step: int, start: int) -> float:
    """Return `weight` from step `start` on, and 0 before. Early reconstructions are too poor for a discriminator."""
    return weight if step >= start else 0.0


def r1_penalty(logits: Tensor, images: Tensor) -> Tensor:
    """R1 gradient penalty: ½ · mean over images of |∂ Σ logits / ∂ pixels|².

    `images` are the real images; they must require gradients before the discriminator's forward pass.
    """
    if not images.requires_grad:
        raise ConfigError("R1 needs gradients of the images", "call images.requires_grad_() before the forward pass")
    (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return gradient.square().flatten(1).sum(1).mean() / 2


def lecam_penalty(real: Tensor, fake: Tensor, real_average: Tensor, fake_average: Tensor) -> Tensor:
    """LeCam regularization for small datasets: mean (real − fake_average)² + mean (fake − real_average)².

    The averages are running means of the logits, which the caller maintains.
    """
    return (real - fake_average.detach()).square().mean() + (fake - real_average.detach()).square().mean()
