"""Every feature by itself: a linear layer (LLaVA), or an MLP (LLaVA-1.5: 1024 → 4096 → 4096 with GELU).

B batch, N features, D their width, W width of the soft tokens
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.connectors.base import Connector, ConnectorConfig, Layers, positive
from vitrail.connectors.grids import Laid, count
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost
from vitrail.nn.mlp import Activation


class ProjectorConfig(ConnectorConfig, tag="projector", tag_field="kind"):
    """`layers` linear layers, one for a plain projection; `hidden` are the widths between them, all `gives` unless
    given (Prismatic: 8704 and 4096 of 4096). `apart` are widths of features that stand side by side, each of which has
    a first layer of its own, of an equal share of what that gives (DeepSeek-VL); none, and one layer reads all."""

    layers: int = 2
    hidden: tuple[int, ...] = ()
    activation: Activation = "gelu"
    bias: bool = True
    apart: tuple[int, ...] = ()

    @property
    def between(self) -> tuple[int, ...]:
        """Widths between the layers."""
        return self.hidden or (self.gives,) * (self.layers - 1)

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "layers")
        if self.hidden and (len(self.hidden) != self.layers - 1 or min(self.hidden) < 1):
            raise ConfigError(
                f"widths {self.hidden} between {self.layers} layers", f"give hidden {self.layers - 1} of them, or none"
            )

        first = (*self.between, self.gives)[0]
        if self.apart and (sum(self.apart) != self.reads or min(self.apart) < 1 or first % len(self.apart)):
            raise ConfigError(
                f"features of {self.apart} apart, of the {self.reads} that are read, for a first layer of {first}",
                "apart must sum to `reads`, and their number divide what the first layer gives",
            )

    def tokens(self, laid: Laid) -> int:
        return count(laid)


class Projector(Connector[ProjectorConfig]):
    Config = ProjectorConfig

    def __init__(self, config: ProjectorConfig):
        super().__init__(config)
        widths = (config.reads, *config.between, config.gives)
        self.layers = Layers(*widths, activation=config.activation, bias=config.bias)
        if config.apart:
            self.layers.linears[0] = Apart(config.apart, widths[1], config.bias)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, N, D) → (B, N, W)"""
        self.rows(features, laid)
        return self.layers(features)


class Apart(nn.Module):
    """Features that stand side by side, each through a layer of its own: (…, D) → (…, W), in the same order."""

    def __init__(self, widths: Sequence[int], gives: int, bias: bool):
        super().__init__()
        self.widths = list(widths)
        self.parts = nn.ModuleList([nn.Linear(width, gives // len(widths), bias=bias) for width in widths])

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(self.parts, x.split(self.widths, dim=-1), strict=True)
        return torch.cat([part(piece) for part, piece in pieces], dim=-1)


@cost.flops.register
def _(module: Apart, work: Work) -> int:
    return cost.flops(module.parts, work)


@cost.flops.register
def _(module: Projector, work: Work) -> int:
    return cost.flops(module.layers, work)
