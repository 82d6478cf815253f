"""An exponential moving average of a model's weights, in float32 whatever the weights are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.train.names import refuse_other


class EMA:
    """average ← decay · average + (1 − decay) · weight, of the parameters that are trainable when it is made.

    With `warmup` the decay after t updates is at most (1 + t) / (10 + t): the first weights, which are far off, are
    soon forgotten. What is frozen is its own average. Buffers are not averaged: while the average is swapped in, the
    model keeps the live ones.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True):
        if not 0 <= decay < 1:
            raise ConfigError(f"an average cannot decay by {decay}", "use 0 ≤ decay < 1, such as 0.9999")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.averages = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the model's present weights into the average; once a step."""
        t = self.updates
        share = 1 - (min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay)
        self.updates += 1
        averages, weights = list(self.averages.values()), list(self._weights(model).values())
        # lerp leaves an average that equals the weight as it is, bit for bit; decay · a + (1 − decay) · w would not.
        if all(a.dtype == w.dtype for a, w in zip(averages, weights, strict=True)):
            torch._foreach_lerp_(averages, weights, share)
        else:  # one at a time: no float32 copy of the whole model
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights; the live ones come back bit for bit, whatever happens inside."""
        weights = self._weights(model)
        live = {name: weight.clone() for name, weight in weights.items()}
        try:
            _put(weights, self.averages)
            yield
        finally:
            _put(weights, live)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat: `average.<parameter>` and `updates`. These are the live tensors; save them before the next update."""
        averages = {f"average.{name}": average for name, average in self.averages.items()}
        return {**averages, "updates": torch.tensor(self.updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Only a state of the very same parameters is taken."""
        refuse_other("average", state, self.state_dict())
        self.updates = int(state["updates"])
        for name, average in self.averages.items():
            average.copy_(state[f"average.{name}"])

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        return {name: parameters[name].detach() for name in self.averages}


def _put(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
