"""LoRA adapters of requests: PEFT folders, applied to the linear layers of a decoder while their requests run.

    y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ

Layers of the folders are q, k, v, gate and up; those of the decoder are fused, so an adapter covers slices of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.peft_adapters import read_adapter
from vitrail.models.vlm import VLM
from vitrail.nn import Attention
from vitrail.nn.mlp import GatedMLP


class ScaledUpdate(NamedTuple):
    """Low-rank update of the rows `start` … `stop` of a layer. b includes the scale."""

    start: int
    stop: int
    a: Tensor  # (rank, in)
    b: Tensor  # (stop − start, rank)


@dataclass
class AdapterSwitch:
    """Which adapter the layers apply. `updates`: layer → adapter → updates of its slices."""

    active: str | None = None
    updates: dict[nn.Module, dict[str, list[ScaledUpdate]]] = field(default_factory=dict)


class SwitchedLinear(nn.Linear):
    """Linear layer that adds the update of the active adapter."""

    switch: AdapterSwitch

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if self.switch.active is None:
            return y
        for start, stop, a, b in self.switch.updates[self].get(self.switch.active, ()):
            y[..., start:stop] += F.linear(F.linear(input, a), b)
        return y


class LoRAAdapters:
    """Adapters of a decoder by name. The decoder without an active adapter computes what it did before."""

    def __init__(self, model: Decoder | VLM):
        self.model, self.switch, self.names = model, AdapterSwitch(), list[str]()

    @torch.no_grad()
    def load(self, name: str, folder: str | Path) -> None:
        """Load the adapter of a PEFT folder."""
        if name in self.names:
            raise ConfigError(f"there are two adapters {name!r}", "rename one")
        decoder = self.model.decoder if isinstance(self.model, VLM) else self.model
        layers = set(_list_layers(decoder))
        by_name = {path: layer for path, layer in self.model.named_modules() if layer in layers}
        updates = read_adapter(self.model, folder)
        for update in updates:
            if update.layer not in by_name:
                raise CheckpointError(
                    f"{update.key} is no attention or gated MLP layer of the language model",
                    "merge this adapter into the weights instead",
                )
        weight = decoder.embed.weight
        for update in updates:
            a, b = update.a.to(weight), (update.b.float() * update.scale).to(weight)
            self._add(by_name[update.layer], name, ScaledUpdate(update.start, update.stop, a, b))
        self.names.append(name)

    @contextmanager
    def activate(self, name: str | None) -> Iterator[None]:
        """Apply an adapter to the passes inside of the context."""
        before, self.switch.active = self.switch.active, name
        try:
            yield
        finally:
            self.switch.active = before

    def _add(self, linear: nn.Linear, name: str, update: ScaledUpdate) -> None:
        if not isinstance(linear, SwitchedLinear):
            linear.__class__ = SwitchedLinear  # in place: references to the layer stay valid
            linear.switch = self.switch  # type: ignore[bad-argument-type]
        self.switch.updates.setdefault(linear, {}).setdefault(name, []).append(update)


def _list_layers(decoder: Decoder) -> Iterator[nn.Linear]:
    """Yield the layers that are called as modules in every pass, so that an update takes effect."""
    for module in decoder.blocks.modules():
        if isinstance(module, Attention) and not module.config.output_gate and not module.config.share_kv:
            yield from (layer for layer in (module.qkv, module.out) if isinstance(layer, nn.Linear))
        elif isinstance(module, GatedMLP):
            yield from (module.gate_up, module.down)
