"""Every feature by itself: a linear layer (LLaVA), or an MLP (LLaVA-1.5: 1024 → 4096 → 4096 with GELU).

B batch, N features, D their width, W width of the soft tokens
"""

from collections.abc import Sequence

from torch import Tensor

from vitrail.connectors.base import Connector, ConnectorConfig, Layers, positive
from vitrail.connectors.grids import Laid, count
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost
from vitrail.nn.mlp import Activation


class ProjectorConfig(ConnectorConfig, tag="projector", tag_field="kind"):
    """`layers` linear layers, one for a plain projection; `hidden` are the widths between them, all `gives` unless
    given (Prismatic: 8704 and 4096 of 4096)."""

    layers: int = 2
    hidden: tuple[int, ...] = ()
    activation: Activation = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "layers")
        if self.hidden and (len(self.hidden) != self.layers - 1 or min(self.hidden) < 1):
            raise ConfigError(
                f"widths {self.hidden} between {self.layers} layers", f"give hidden {self.layers - 1} of them, or none"
            )

    def tokens(self, laid: Laid) -> int:
        return count(laid)


class Projector(Connector[ProjectorConfig]):
    Config = ProjectorConfig

    def __init__(self, config: ProjectorConfig):
        super().__init__(config)
        between = config.hidden or (config.gives,) * (config.layers - 1)
        self.layers = Layers(config.reads, *between, config.gives, activation=config.activation, bias=config.bias)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, N, D) → (B, N, W)"""
        self.rows(features, laid)
        return self.layers(features)


@cost.flops.register
def _(module: Projector, work: Work) -> int:
    return cost.flops(module.layers, work)
