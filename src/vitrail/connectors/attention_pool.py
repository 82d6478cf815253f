"""Attention pooling (Molmo): the mean of m × m features attends to them, then a gated MLP projects the result.

Shapes: B batch, N features, D their width, m side of a block, M = N / m² visual tokens, H heads, P width of all heads,
W width of the visual tokens.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, group_blocks, require_grid
from vitrail.errors import ConfigError
from vitrail.nn import AttentionPlan, Workload, compute_attention, cost
from vitrail.nn.mlp import Activation, apply_activation
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class AttentionPoolConnectorConfig(ConnectorConfig, tag="attention-pool", tag_field="kind"):
    """Config of a `AttentionPoolConnector`.

    pooled_width       width of all heads together, and of the pooled features
    intermediate_size  hidden width of the MLP, whose layers have no biases
    """

    pooled_width: PositiveInt
    intermediate_size: PositiveInt
    heads: PositiveInt = 16
    merge: PositiveInt = 2
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if self.pooled_width % self.heads:
            raise ConfigError(
                f"pooled_width {self.pooled_width} does not divide into {self.heads} heads", "change one of the two"
            )

    def count_tokens(self, layout: FeatureLayout) -> int:
        return require_grid(layout).replace(merge_size=self.merge).num_tokens


@CONNECTORS.register("attention-pool")
class AttentionPoolConnector(Connector[AttentionPoolConnectorConfig]):
    Config = AttentionPoolConnectorConfig

    def __init__(self, config: AttentionPoolConnectorConfig):
        super().__init__(config)
        D, P = config.in_features, config.pooled_width
        self.q, self.kv, self.out = nn.Linear(D, P), nn.Linear(D, 2 * P), nn.Linear(P, P)
        self.gate_up = nn.Linear(P, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.out_features, bias=False)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        gate, up = self.gate_up(apply_per_grid(features, grids, self._pool)).chunk(2, dim=-1)
        return self.down(apply_activation(gate, self.config.activation) * up)

    def _pool(self, x: Tensor, grid: Grid) -> Tensor:
        """Pool the blocks of features (B, N, D) to (B, M, P)."""
        blocks = group_blocks(x, grid, self.config.merge)  # (B, M, m·m, D)
        H, flat = self.config.heads, blocks.flatten(0, 1)
        query = self.q(flat.mean(1, keepdim=True)).unflatten(-1, (H, -1))  # (B·M, 1, H, P / H)
        k, v = self.kv(flat).unflatten(-1, (2, H, -1)).unbind(2)
        return self.out(compute_attention(query, k, v, AttentionPlan()).flatten(2)).view(*blocks.shape[:2], -1)


@cost.count_flops.register
def _(module: AttentionPoolConnector, work: Workload) -> int:
    features, layers = work.replace(tokens=work.context_tokens), (module.q, module.out, module.gate_up, module.down)
    scores = 4 * work.context_tokens * module.config.pooled_width  # two products of each query with its block
    return scores + cost.count_flops(module.kv, features) + sum(cost.count_flops(layer, work) for layer in layers)
