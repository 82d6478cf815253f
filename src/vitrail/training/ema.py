"""Exponential moving average of a model's weights, in float32."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.training.parameter_names import check_state_matches


class EMA:
    """Average of the trainable parameters: average ← decay · average + (1 − decay) · weight.

    With `warmup`, the decay after t updates is at most (1 + t) / (10 + t), so the initial weights lose their influence
    soon. Frozen parameters and buffers are not averaged: the model uses the live ones.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True):
        if not 0 <= decay < 1:
            raise ConfigError(f"EMA decay is {decay}", "use 0 ≤ decay < 1, such as 0.9999")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.averages = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the current weights. Call it once a step."""
        t = self.updates
        new_weight = 1 - (min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay)
        self.updates += 1
        averages, weights = list(self.averages.values()), list(self._weights(model).values())
        # lerp keeps an average that equals the weight bit for bit; decay · a + (1 − decay) · w would not.
        if all(a.dtype == w.dtype for a, w in zip(averages, weights, strict=True)):
            torch._foreach_lerp_(averages, weights, new_weight)
        else:  # one at a time, to avoid a float32 copy of the whole model
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.to(average.dtype), new_weight)

    @contextmanager
    def swap_weights(self, model: nn.Module) -> Iterator[None]:
        """Use the averaged weights inside the context, then restore the live weights bit for bit."""
        weights = self._weights(model)
        live = {name: weight.clone() for name, weight in weights.items()}
        try:
            _copy_values(weights, self.averages)
            yield
        finally:
            _copy_values(weights, live)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a flat state: `average.<parameter>` and `updates`. The tensors are not copies."""
        averages = {f"average.{name}": average for name, average in self.averages.items()}
        return {**averages, "updates": torch.tensor(self.updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of exactly the same parameters."""
        check_state_matches("average", state, self.state_dict())
        self.updates = int(state["updates"])
        for name, average in self.averages.items():
            average.copy_(state[f"average.{name}"])

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        return {name: parameters[name].detach() for name in self.averages}


def _copy_values(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
