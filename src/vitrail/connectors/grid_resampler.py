"""Resampler of MiniCPM-V: learned queries attend once to the features, whose keys know their place in the grid.

Shapes: B batch, N features, D their width, M queries, W width of the visual tokens.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout, require_grid
from vitrail.errors import ConfigError
from vitrail.nn import Attention, AttentionConfig, AttentionPlan, Workload, build_sincos_embedding, cost
from vitrail.nn.attention import KeyValues
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import CONNECTORS


class GridResamplerConfig(ConnectorConfig, tag="grid-resampler", tag_field="kind"):
    """Config of a `GridResampler`. A linear layer without bias precedes it if the widths differ."""

    num_queries: PositiveInt = 64
    heads: PositiveInt = 16
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.attention_config.resolve_head_dim(self.out_features)  # raises if the heads do not divide the width
        if self.out_features % 4:
            raise ConfigError(f"out_features is {self.out_features}", "give a multiple of 4, for sines and cosines")

    @property
    def attention_config(self) -> AttentionConfig:
        return AttentionConfig(heads=self.heads, bias="all")

    def count_tokens(self, layout: FeatureLayout) -> int:
        require_grid(layout)
        return self.num_queries


@CONNECTORS.register("grid-resampler")
class GridResampler(Connector[GridResamplerConfig]):
    Config = GridResamplerConfig

    def __init__(self, config: GridResamplerConfig):
        super().__init__(config)
        width = config.out_features
        self.queries = make_small_parameter(config.num_queries, width)
        self.width_proj = (
            nn.Identity() if config.in_features == width else nn.Linear(config.in_features, width, bias=False)
        )
        self.query_norm, self.context_norm, self.norm = (nn.LayerNorm(width, eps=config.eps) for _ in range(3))
        self.attention = Attention(width, config.attention_config, "cross")
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, M, W)."""
        layouts = self.resolve_layouts(features, layout)
        plan = self.make_query_plan(features, layouts, self.config.num_queries) or AttentionPlan()
        context = self.context_norm(self.width_proj(features))  # (B, N, W)
        grids = [require_grid(one) for one in layouts]
        W, attention = self.config.out_features, self.attention
        tables = {
            grid: build_sincos_embedding(grid.h, grid.w, W, features.device).to(context.dtype).repeat(grid.t, 1)
            for grid in set(grids)
        }
        places = pad_sequence([tables[grid] for grid in grids], batch_first=True)  # (1 or B, ≤ N, W)
        places = F.pad(places, (0, 0, 0, context.shape[1] - places.shape[1]))
        keys, values = attention.kv(context).chunk(2, dim=-1)
        keys = keys + F.linear(places, attention.kv.weight[:W])  # the place is part of keys, and not of values
        heads = (x.unflatten(-1, (self.config.heads, -1)) for x in (keys, values))
        queries = self.query_norm(self.queries).expand(len(features), -1, -1)
        return self.proj(self.norm(attention(queries, plan, context=KeyValues(*heads))))


@cost.count_flops.register
def _(module: GridResampler, work: Workload) -> int:
    features = work.replace(tokens=work.context_tokens)
    places = 2 * work.context_tokens // work.sequences * module.config.out_features**2  # shared by rows of one grid
    return (
        cost.count_flops(module.width_proj, features)
        + places
        + cost.count_flops(module.attention, work)
        + cost.count_flops(module.proj, work)
    )
