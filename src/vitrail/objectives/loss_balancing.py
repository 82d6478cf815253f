"""Adaptive loss weights from gradient norms."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.errors import ConfigError

EPS = 1e-4  # as in VQGAN
MAX_WEIGHT = 1e4


def compute_gradient_norms(losses: Mapping[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """Return the gradient norm of each loss at one tensor, such as the weight of the decoder's last layer.

    The graph is retained, so that the losses can still be backpropagated.
    """
    norms = {}
    for name, loss in losses.items():
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, at, retain_graph=True, allow_unused=True)
        if gradient is None:
            raise ConfigError(f"loss {name!r} does not depend on the tensor", "pass one that it uses")
        norms[name] = gradient.norm()
    return norms


def compute_adaptive_weight(reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor) -> Tensor:
    """Return VQGAN's weight of the adversarial loss, which balances both gradients at the decoder's last layer.

    It is |∇ reconstruction| / (|∇ adversarial| + 10⁻⁴), at most 10⁴, detached.
    """
    norms = compute_gradient_norms({"reconstruction": reconstruction, "adversarial": adversarial}, last_layer)
    return (norms["reconstruction"] / (norms["adversarial"] + EPS)).clamp(0.0, MAX_WEIGHT).detach()
