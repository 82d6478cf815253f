"""Reconstruction losses of codecs: pixel losses, and published weights of all losses."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError


def l1_loss(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean absolute pixel error."""
    return F.l1_loss(*_check_shapes(reconstruction, image))


def l2_loss(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean squared pixel error."""
    return F.mse_loss(*_check_shapes(reconstruction, image))


class ReconstructionWeights(Config):
    """Weight of each loss; 0 disables it."""

    l1: float = 0.0
    l2: float = 0.0
    perceptual: float = 0.0
    gram: float = 0.0
    gan: float = 0.0
    quantizer: float = 0.0
    distillation: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in self.to_dict().items():
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"the weight of {name} is {weight}", "use a finite number of at least 0")


PUBLISHED_WEIGHTS: dict[str, ReconstructionWeights] = {
    "gaia-1": ReconstructionWeights(l1=0.2, l2=2.0, perceptual=0.1, gan=1.0, quantizer=1.0, distillation=0.1),
    "qlip-stage-2": ReconstructionWeights(l2=1.0, perceptual=0.1, gan=0.1, quantizer=1.0),
}


def sum_weighted_losses(losses: Mapping[str, Tensor], weights: ReconstructionWeights) -> Tensor:
    """Return the weighted sum of the losses. Raise if a loss has no weight, or a weight has no loss."""
    active = {name: weight for name, weight in weights.to_dict().items() if weight}
    if not active:
        raise ConfigError("all loss weights are 0", "give at least one loss a weight")
    for name in losses:
        if name not in active:
            raise ConfigError(f"the loss {name!r} has no weight", f"weights: {', '.join(active)}")
    for name in active:
        if name not in losses:
            raise ConfigError(f"the weight of {name!r} has no loss", f"losses: {', '.join(losses)}")
    parts = [weight * losses[name] for name, weight in active.items()]
    return sum(parts[1:], parts[0])


def _check_shapes(reconstruction: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    if reconstruction.shape != image.shape:  # torch would broadcast
        raise ConfigError(
            f"the reconstruction has shape {tuple(reconstruction.shape)} and the image {tuple(image.shape)}"
        )
    return reconstruction, image
