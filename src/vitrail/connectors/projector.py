"""Projector: a linear layer (LLaVA) or an MLP (LLaVA-1.5: 1024 → 4096 → 4096 with GELU) for each feature.

Shapes: B batch, N features, D their width, W width of the visual tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.config import LayerCount
from vitrail.connectors.connector import Connector, ConnectorConfig, ProjectionMLP
from vitrail.connectors.feature_layout import FeatureLayout, count_features
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.nn.mlp import Activation
from vitrail.registry import CONNECTORS


class ProjectorConfig(ConnectorConfig, tag="projector", tag_field="kind"):
    """Config of a `Projector`.

    layers        number of linear layers
    hidden_sizes  widths between the layers, by default all `out_features` (Prismatic: 8704 and 4096 of 4096)
    split_widths  widths of concatenated features with a first layer each (DeepSeek-VL); empty: one layer for all
    """

    layers: LayerCount = 2
    hidden_sizes: tuple[int, ...] = ()
    activation: Activation = "gelu"
    bias: bool = True
    split_widths: tuple[int, ...] = ()

    @property
    def resolved_hidden_sizes(self) -> tuple[int, ...]:
        """Widths between the layers."""
        return self.hidden_sizes or (self.out_features,) * (self.layers - 1)

    def __post_init__(self) -> None:
        if self.hidden_sizes and (len(self.hidden_sizes) != self.layers - 1 or min(self.hidden_sizes) < 1):
            raise ConfigError(
                f"hidden_sizes {self.hidden_sizes} do not match {self.layers} layers",
                f"give {self.layers - 1}, or none",
            )

        first = (*self.resolved_hidden_sizes, self.out_features)[0]
        if self.split_widths and (
            sum(self.split_widths) != self.in_features or min(self.split_widths) < 1 or first % len(self.split_widths)
        ):
            raise ConfigError(
                f"split_widths {self.split_widths} does not match in_features {self.in_features} and a first layer "
                f"of width {first}",
                "give widths that sum to in_features, and whose number divides the width of the first layer",
            )

    def count_tokens(self, layout: FeatureLayout) -> int:
        return count_features(layout)

    def supports_packed_blocks(self, merge_size: int) -> bool:
        return merge_size == 1


@CONNECTORS.register("projector")
class Projector(Connector[ProjectorConfig]):
    Config = ProjectorConfig

    def __init__(self, config: ProjectorConfig):
        super().__init__(config)
        widths = (config.in_features, *config.resolved_hidden_sizes, config.out_features)
        self.layers = ProjectionMLP(*widths, activation=config.activation, bias=config.bias)
        if config.split_widths:
            self.layers.linears[0] = SplitLinear(config.split_widths, widths[1], config.bias)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, N, W)."""
        self.resolve_layouts(features, layout)
        return self.layers(features)


class SplitLinear(nn.Module):
    """Separate linear layers for concatenated features: (…, D) to concatenated outputs (…, W) of equal widths."""

    def __init__(self, widths: Sequence[int], out_features: int, bias: bool):
        super().__init__()
        self.widths = list(widths)
        self.parts = nn.ModuleList([nn.Linear(width, out_features // len(widths), bias=bias) for width in widths])

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(self.parts, x.split(self.widths, dim=-1), strict=True)
        return torch.cat([part(piece) for part, piece in pieces], dim=-1)


for _kind in (SplitLinear, Projector):
    cost.count_flops.register(_kind, cost.sum_child_flops)
