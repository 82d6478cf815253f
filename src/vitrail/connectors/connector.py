"""Base class of connectors between a vision tower and a language model: features in, visual tokens out.

Shapes: B batch, N features, D their width, M visual tokens, W their width.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from vitrail.config import Config, PositiveInt
from vitrail.connectors.feature_layout import FeatureLayout, count_features
from vitrail.connectors.view_stitching import stitch_views
from vitrail.errors import ConfigError
from vitrail.nn import AttentionPlan, Workload, attention_plan, cost
from vitrail.nn.mlp import Activation, apply_activation
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.processing.image_layout import ImageLayout


class ConnectorConfig(Config):
    """Base class of connector configs. `in_features` is the width D of the features, `out_features` the width W of the
    tokens.
    """

    in_features: PositiveInt
    out_features: PositiveInt

    def count_tokens(self, layout: FeatureLayout) -> int:
        """Count the visual tokens of a number of features or a grid. No module is built."""
        raise NotImplementedError

    def supports_packed_blocks(self, merge_size: int) -> bool:
        """Whether the connector merges whole blocks of packed images, which follow one another in one row."""
        return False

    @property
    def has_separators(self) -> bool:
        """Whether the connector gives the tokens after rows and between views, which are then features of the image."""
        return False


C = TypeVar("C", bound=ConnectorConfig)


class Connector(nn.Module, Generic[C]):
    """Base class: `connector(features)` maps features (B, N, D) to visual tokens (B, M, W).

    `layout` is the number of features or their grid: one for all rows, or a sequence with one for each padded row. In
    the second case the output is padded too: row b has `config.count_tokens(layout[b])` valid tokens.
    """

    Config: ClassVar[Any]  # type of the config

    def __init__(self, config: C):
        super().__init__()
        self.config: C = config

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        raise NotImplementedError

    def arrange_views(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        """Stitch the visual tokens (views, M, W) of an image whose views keep their grids: (M', W), no newlines."""
        return torch.cat([stitch_views(tokens, layout, span) for span in layout.spans])

    def resolve_layouts(
        self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None
    ) -> list[FeatureLayout]:
        """Return the layouts of the features: one for all rows, or one for each row. Raise if they do not fit the
        features.
        """
        name, D = type(self).__name__, self.config.in_features
        if features.ndim != 3 or features.shape[-1] != D:
            raise ConfigError(
                f"{name} needs features (B, N, {D}), but the input has shape {tuple(features.shape)}",
                "set `in_features` to the tower's width",
            )
        B, N = features.shape[:2]
        if layout is None or isinstance(layout, FeatureLayout):
            layouts: list[FeatureLayout] = [N if layout is None else layout]
        else:
            layouts = list(layout)
            if len(layouts) != B:
                raise ConfigError(f"{name} has {len(layouts)} layouts for {B} rows", "give one layout for each row")
        for one in layouts:
            if not 0 < count_features(one) <= N or (count_features(one) < N and not isinstance(layout, Sequence)):
                raise ConfigError(
                    f"{name}: layout {one} does not match rows of {N} features",
                    "give the grid of the tower's features",
                )
        return layouts

    def make_query_plan(
        self, features: Tensor, layouts: Sequence[FeatureLayout], num_queries: int, num_extra_keys: int = 0
    ) -> AttentionPlan | None:
        """Make the attention plan of queries over valid features, and `num_extra_keys` keys after them; None without
        padding.
        """
        N = features.shape[1]
        if all(count_features(one) == N for one in layouts):
            return None
        real = torch.tensor([count_features(one) for one in layouts], device=features.device)[:, None]
        keys = torch.arange(N + num_extra_keys, device=features.device)
        segments = -((keys >= real) & (keys < N)).long()  # (B, N + own): −1 at padding
        return attention_plan(segments.new_zeros(len(features), num_queries), key_segments=segments)

    def workload(self, layout: FeatureLayout, batch_size: int = 1) -> Workload:
        """Return the workload of a batch of images: tokens are the output tokens, context tokens the input features."""
        M = self.config.count_tokens(layout)
        return Workload.full_attention(M, batch_size).with_context(count_features(layout), batch_size)

    def list_unused_modules(self) -> Sequence[nn.Module]:
        """Modules that `connector(features)` does not use."""
        return ()


class ProjectionMLP(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, *widths: int, activation: Activation = "gelu", bias: bool = True):
        super().__init__()
        self.activation: Activation = activation
        self.linears = nn.ModuleList([nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.linears):
            x = linear(x if i == 0 else apply_activation(x, self.activation))
        return x


def make_width_projection(in_features: int, out_features: int) -> nn.Module:
    """Make a linear layer if the two widths differ, else an identity."""
    return nn.Identity() if in_features == out_features else nn.Linear(in_features, out_features)


cost.count_flops.register(ProjectionMLP, cost.sum_child_flops)


@cost.count_bytes.register
def _(module: Connector, work: Workload) -> cost.MemoryBytes:
    weights = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=weights, read=weights - count_parameter_bytes(*module.list_unused_modules()))
