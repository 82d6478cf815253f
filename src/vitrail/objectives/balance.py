"""Weights found while training: how hard each loss pulls at one tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.errors import ConfigError

EPS = 1e-4  # of VQGAN
LIMIT = 1e4


def gradient_norms(losses: Mapping[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """The length of each loss's gradient at one tensor, such as the weight of a decoder's last layer. The graph is
    kept, so that the losses can still be trained by."""
    norms = {}
    for name, loss in losses.items():
        slope = torch.autograd.grad(loss, at, retain_graph=True, allow_unused=True)[0] if loss.requires_grad else None
        if slope is None:
            raise ConfigError(f"the loss {name!r} does not depend on the given tensor", "give one that it is made from")
        norms[name] = slope.norm()
    return norms


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, last: Tensor) -> Tensor:
    """VQGAN's weight of the adversarial loss, at which both pull equally at the last layer of the decoder:
    |∇ reconstruction| / (|∇ adversarial| + 10⁻⁴), at most 10⁴, as a constant."""
    norms = gradient_norms({"reconstruction": reconstruction, "adversarial": adversarial}, last)
    return (norms["reconstruction"] / (norms["adversarial"] + EPS)).clamp(0.0, LIMIT).detach()
