"""Load-balancing losses of the mixtures of experts in a model, one for each layer, as losses of a task."""

from torch import Tensor, nn

from vitrail.nn.mlp import MoE, pop_load_balancing_losses


class ExpertBalance:
    """The load-balancing losses of a model: `experts/0`, `experts/1`, … in the order of the layers.

    weight  of their mean in the total loss; None for the `router_aux_loss_coef` of each layer's config

    A layer's loss is the number of experts per token under an even load, and larger otherwise. Validation has none.
    `exclude_padding` names the tokens that count; without it, all do.
    """

    def __init__(self, model: nn.Module, weight: float | None = None):
        self.model = model
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        self.layers = layers
        for layer in layers:
            layer.token_mask = None  # of an earlier task
        weights = [layer.config.router_aux_loss_coef if weight is None else weight for layer in layers]
        self.loss_weights = {f"experts/{n}": value / len(layers) for n, value in enumerate(weights)}

    def count_loss_terms(self) -> dict[str, int]:
        """Return one term for each layer and micro-batch."""
        return dict.fromkeys(self.loss_weights, 1) if self.model.training else {}

    def exclude_padding(self, token_mask: Tensor) -> None:
        """Let only the tokens of a mask count in the next forward pass."""
        for layer in self.layers:
            layer.token_mask = token_mask

    def pop_losses(self) -> dict[str, Tensor]:
        """Return the losses of the forward pass."""
        if not self.model.training:
            return {}
        return dict(zip(self.loss_weights, pop_load_balancing_losses(self.model), strict=True))
