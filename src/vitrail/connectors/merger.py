"""Merger: concatenate m × m neighbouring features, or take their mean, then apply an MLP or a linear layer.

    Idefics 3, SmolVLM       concatenation, linear layer without bias
    Qwen2-VL, Qwen3-VL       norm of each feature, concatenation, MLP of the same width
    Qwen2.5-VL               the same with an RMS norm
    Qwen3-VL's DeepStack     concatenation, norm, MLP of the same width
    InternVL (pixel shuffle) concatenation, norm, MLP of the language model's width
    Mistral 3                norm of each feature, concatenation, linear layer, MLP of the language model's width
    Phi-3.5-vision           concatenation and learned separators, MLP of the language model's width
    Phi-4-multimodal         mean and learned separators, MLP of the language model's width

Shapes: B batch, N features, D their width, m side of a block, M = N / m² visual tokens, W their width.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig, ProjectionMLP
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, group_blocks, require_grid
from vitrail.connectors.view_stitching import stitch_spans
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.nn.mlp import Activation
from vitrail.nn.norms import NormKind, make_norm
from vitrail.nn.parameters import make_small_parameter
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import ImageLayout
from vitrail.registry import CONNECTORS


class MergerConfig(ConnectorConfig, tag="merger", tag_field="kind"):
    """Config of a `Merger`. `intermediate_size` is the hidden width of the MLP, by default that of a block, m²·D.

    layers         number of linear layers, 1 or 2
    norm_position  norm of each feature ("before" concatenation), of each block ("after" it), or none
    block_size     width to which a linear layer without bias maps a block before the MLP (Mistral 3); None for none
    bias           biases of the MLP
    order          order of the features: row by row, or block by block as from Qwen's towers
    reduction      what becomes of the features of a block before the MLP: concatenation, or their mean
    separators     learned vectors that the MLP projects too: a newline and a separator of views (see `stitch_spans`)
    """

    merge: PositiveInt = 2
    layers: int = 2
    intermediate_size: PositiveInt | None = None
    norm: NormKind = "layer"
    norm_position: Literal["none", "before", "after"] = "before"
    eps: float = 1e-6
    activation: Activation = "gelu"
    block_size: PositiveInt | None = None
    bias: bool = True
    order: Literal["raster", "blocks"] = "raster"
    reduction: Literal["concatenate", "mean"] = "concatenate"
    separators: bool = False

    @property
    def block_width(self) -> int:
        """Width of a block before the MLP."""
        return self.in_features * (self.merge**2 if self.reduction == "concatenate" else 1)

    def __post_init__(self) -> None:
        if self.layers not in (1, 2) or (self.layers == 1 and self.intermediate_size is not None):
            raise ConfigError(
                f"MergerConfig.layers is {self.layers}, and intermediate_size is {self.intermediate_size}",
                "give 2 layers, or 1 without intermediate_size",
            )
        if self.separators and self.norm_position == "after":
            raise ConfigError(
                "MergerConfig.separators is set with a norm after the concatenation", "use another norm_position"
            )

    def count_tokens(self, layout: FeatureLayout) -> int:
        return require_grid(layout).replace(merge_size=self.merge).num_tokens

    def supports_packed_blocks(self, merge_size: int) -> bool:
        return self.order == "blocks" and self.merge == merge_size

    @property
    def has_separators(self) -> bool:
        return self.separators


@CONNECTORS.register("merger")
class Merger(Connector[MergerConfig]):
    Config = MergerConfig

    def __init__(self, config: MergerConfig):
        super().__init__(config)
        normed = config.in_features if config.norm_position == "before" else config.block_width
        self.norm = nn.Identity() if config.norm_position == "none" else make_norm(config.norm, normed, config.eps)
        width = config.block_size or config.block_width
        hidden = [config.intermediate_size or config.block_width] * (config.layers - 1)
        self.block_layer = nn.Linear(config.block_width, width, bias=False) if config.block_size else None
        widths = (width, *hidden, config.out_features)
        self.layers = ProjectionMLP(*widths, activation=config.activation, bias=config.bias)
        self.newline = make_small_parameter(config.block_width) if config.separators else None
        self.separator = make_small_parameter(config.block_width) if config.separators else None

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        x = self.norm(features) if self.config.norm_position == "before" else features
        x = apply_per_grid(x, grids, self._reduce_blocks)  # (B, M, m²·D) or (B, M, D)
        return self._project(self.norm(x) if self.config.norm_position == "after" else x)

    def arrange_views(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        if not self.config.separators:
            return super().arrange_views(tokens, layout)
        return stitch_spans(tokens, layout, *self.project_separators())

    def project_separators(self) -> tuple[Tensor, Tensor]:
        """Return the visual tokens (W,) of a newline and of a separator of views."""
        assert self.newline is not None and self.separator is not None
        newline, separator = self._project(torch.stack([self.newline, self.separator]))
        return newline, separator

    def _project(self, blocks: Tensor) -> Tensor:
        return self.layers(blocks if self.block_layer is None else self.block_layer(blocks))

    def _reduce_blocks(self, x: Tensor, grid: Grid) -> Tensor:
        m, D = self.config.merge, self.config.in_features
        if self.config.order == "raster":
            blocks = group_blocks(x, grid, m)  # (B, M, m², D)
        else:
            blocks = x.reshape(len(x), self.config.count_tokens(grid), m * m, D)
        return blocks.flatten(2) if self.config.reduction == "concatenate" else blocks.mean(2)


@cost.count_flops.register
def _(module: Merger, work: Workload) -> int:
    if module.config.separators:
        work = work.replace(tokens=work.tokens + 2)
    block_layer = 0 if module.block_layer is None else cost.count_flops(module.block_layer, work)
    return block_layer + cost.count_flops(module.layers, work)
