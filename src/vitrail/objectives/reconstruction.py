"""What a reconstruction is trained by: differences of pixels, and the published weights of all its losses."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError


def l1(drawn: Tensor, picture: Tensor) -> Tensor:
    """Mean |difference| of pixels."""
    return F.l1_loss(*_alike(drawn, picture))


def l2(drawn: Tensor, picture: Tensor) -> Tensor:
    """Mean squared difference of pixels."""
    return F.mse_loss(*_alike(drawn, picture))


class Weights(Config):
    """What each loss counts; 0 leaves it out."""

    l1: float = 0.0
    l2: float = 0.0
    perceptual: float = 0.0
    gram: float = 0.0
    gan: float = 0.0
    quantizer: float = 0.0
    distillation: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in self.plain().items():
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"the weight of {name} is {weight}", "give a number from 0 up")


WEIGHTS: dict[str, Weights] = {
    "gaia-1": Weights(l1=0.2, l2=2.0, perceptual=0.1, gan=1.0, quantizer=1.0, distillation=0.1),
    "qlip-stage-2": Weights(l2=1.0, perceptual=0.1, gan=0.1, quantizer=1.0),
}


def weighed(losses: Mapping[str, Tensor], weights: Weights) -> Tensor:
    """The sum of the losses, each times its weight. A loss without a weight, or a weight without its loss, is an
    error: neither is left out silently."""
    counted = {name: weight for name, weight in weights.plain().items() if weight}
    if not counted:
        raise ConfigError("every weight is 0, so nothing would be learned", "give at least one loss a weight")
    for name in losses:
        if name not in counted:
            raise ConfigError(f"the loss {name!r} has no weight", f"weights: {', '.join(counted)}")
    for name in counted:
        if name not in losses:
            raise ConfigError(f"the weight of {name!r} has no loss", f"losses: {', '.join(losses)}")
    parts = [weight * losses[name] for name, weight in counted.items()]
    return sum(parts[1:], parts[0])


def _alike(drawn: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
    if drawn.shape != picture.shape:  # torch would stretch the smaller one over the larger
        raise ConfigError(f"pictures of {tuple(drawn.shape)} and {tuple(picture.shape)} cannot be compared")
    return drawn, picture
