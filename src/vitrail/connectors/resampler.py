"""Perceiver resampler (Flamingo, Idefics): a few learned latents attend to the image and to each other.

Shapes: B batch, N features, D their width, M latents, W width of the visual tokens.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.config import LayerCount, PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig, make_width_projection
from vitrail.connectors.feature_layout import FeatureLayout
from vitrail.nn import AttentionConfig, Block, BlockConfig, PlainMLPConfig, Workload, cost
from vitrail.nn.mlp import Activation
from vitrail.nn.norms import NormKind, make_norm
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import CONNECTORS


class ResamplerConfig(ConnectorConfig, tag="resampler", tag_field="kind"):
    """Config of a `Resampler`: blocks of the features' width without biases, whose latents attend to features and
    latents.

    `intermediate_size` is that of the MLPs, by default 4·D. A linear layer follows if the widths differ.
    """

    num_latents: PositiveInt = 64
    layers: LayerCount = 6
    heads: int = 16
    head_dim: int | None = None
    intermediate_size: PositiveInt | None = None
    activation: Activation = "gelu"
    qk_norm: NormKind | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self.block_config()  # raises if the heads do not divide the width

    def block_config(self) -> BlockConfig:
        return BlockConfig(
            width=self.in_features,
            attention=AttentionConfig(heads=self.heads, head_dim=self.head_dim, qk_norm=self.qk_norm, eps=self.eps),
            mlp=PlainMLPConfig(
                intermediate_size=self.intermediate_size or 4 * self.in_features, activation=self.activation, bias=False
            ),
            branches=("joint", "mlp"),
            eps=self.eps,
        )

    def count_tokens(self, layout: FeatureLayout) -> int:
        return self.num_latents


@CONNECTORS.register("resampler")
class Resampler(Connector[ResamplerConfig]):
    Config = ResamplerConfig

    def __init__(self, config: ResamplerConfig):
        super().__init__(config)
        self.latents = make_small_parameter(config.num_latents, config.in_features)
        self.blocks = nn.ModuleList([Block(config.block_config()) for _ in range(config.layers)])
        self.norm = make_norm("layer", config.in_features, config.eps)
        self.width_proj = make_width_projection(config.in_features, config.out_features)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, M, W)."""
        M = self.config.num_latents
        plan = self.make_query_plan(features, self.resolve_layouts(features, layout), M, num_extra_keys=M)
        x = self.latents.expand(len(features), -1, -1)
        for block in self.blocks:
            x = block(x, context=features, context_plan=plan)
        return self.width_proj(self.norm(x))

    def workload(self, layout: FeatureLayout, batch_size: int = 1) -> Workload:
        """Return the workload; latents attend to latents too."""
        work = super().workload(layout, batch_size)
        return work.replace(context_pairs=work.context_pairs + work.attention_pairs)


@cost.count_flops.register
def _(module: Resampler, work: Workload) -> int:
    return cost.count_flops(module.blocks, work) + cost.count_flops(module.width_proj, work)
