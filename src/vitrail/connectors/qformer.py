"""Q-Former (BLIP-2): learned queries attend to an image and, in the first training stage, to its text.

Blocks are BERT's, with a norm after each branch; in every second block the queries attend to the image. Text shares the
self-attention and has its own MLPs. The three tasks of the first stage are three attention plans:

    itc  contrastive  queries attend to queries, text to text
    itm  matching     all attend to all
    itg  generation   queries attend to queries; a text token to queries and earlier text tokens

Shapes: B batch, N features, D their width, Q queries, T text tokens, V hidden width, W width of the visual tokens.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.config import LayerCount, PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    PlainMLPConfig,
    Workload,
    attention_plan,
    cost,
)
from vitrail.nn.block import ResidualBranch
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import CONNECTORS

QFormerPass = Literal["itc", "itm", "itg"]


class QFormerConfig(ConnectorConfig, tag="qformer", tag_field="kind"):
    """Config of a `QFormer`.

    cross_attention_frequency  every how many blocks there is cross-attention to the image, from the first block
    use_text                   add MLPs for text, which the first training stage needs
    """

    num_queries: PositiveInt = 32
    layers: LayerCount = 12
    cross_attention_frequency: PositiveInt = 2
    width: PositiveInt = 768
    heads: int = 12
    intermediate_size: PositiveInt = 3072
    use_text: bool = False
    eps: float = 1e-12

    def __post_init__(self) -> None:
        self.block_config(0)  # raises if the heads do not divide the width

    def block_config(self, layer: int) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            attention=AttentionConfig(heads=self.heads, bias="all"),
            mlp=PlainMLPConfig(intermediate_size=self.intermediate_size),
            branches=("self", "mlp") if layer % self.cross_attention_frequency else ("self", "cross", "mlp"),
            norm_position="after",
            eps=self.eps,
            context_width=self.in_features,
        )

    def count_tokens(self, layout: FeatureLayout) -> int:
        return self.num_queries


class QFormerLayer(nn.Module):
    """One block, and the MLP for text in place of the block's MLP."""

    def __init__(self, config: QFormerConfig, index: int):
        super().__init__()
        self.block = Block(config.block_config(index))
        self.text_mlp = ResidualBranch(config.block_config(index), "mlp") if config.use_text else None

    def forward(
        self, x: Tensor, queries: int, plan: AttentionPlan, context: Tensor | None, context_plan: AttentionPlan | None
    ) -> Tensor:
        """Run the layer on x (B, Q + T, V), whose first `queries` tokens are queries."""
        branches = self.block.branches
        x = branches["self"](x, plan=plan)
        query_states, text_states = x[:, :queries], x[:, queries:]
        if queries:
            if "cross" in branches:
                query_states = branches["cross"](query_states, plan=context_plan or AttentionPlan(), context=context)
            query_states = branches["mlp"](query_states)
        if self.text_mlp is not None and text_states.shape[1]:
            text_states = self.text_mlp(text_states)
        return torch.cat([query_states, text_states], dim=1)


@CONNECTORS.register("qformer")
class QFormer(Connector[QFormerConfig]):
    Config = QFormerConfig

    def __init__(self, config: QFormerConfig):
        super().__init__(config)
        self.queries = make_small_parameter(config.num_queries, config.width)
        self.norm = make_norm("layer", config.width, config.eps)
        self.layers = nn.ModuleList([QFormerLayer(config, i) for i in range(config.layers)])
        self.project = nn.Linear(config.width, config.out_features)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, Q, W)."""
        return self.project(self.encode_queries(features, layout))

    def encode_queries(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Return the query states (B, Q, V) of image features (B, N, D)."""
        return self._forward_layers(features, layout, None, AttentionPlan())

    def encode_text(self, text: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """Encode text embeddings (B, T, V) without an image to (B, T, V); `text_mask` (B, T) marks valid tokens."""
        self._check_text(text)
        plan = AttentionPlan() if text_mask is None else attention_plan(text_mask.bool().long() - 1)
        x = self.norm(text)
        for layer in self.layers:
            x = layer(x, 0, plan, None, None)
        return x

    def encode_jointly(
        self,
        features: Tensor,
        text: Tensor,
        task: QFormerPass,
        *,
        text_mask: Tensor | None = None,
        layout: FeatureLayout | Sequence[FeatureLayout] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encode image features and text embeddings (B, T, V) in one pass to query states (B, Q, V) and text states (B,
        T, V).

        `text_mask` (B, T) marks valid tokens. For `itc` the result equals two separate passes.
        """
        self._check_text(text)
        if text_mask is None:
            text_mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        Q = self.config.num_queries
        x = self._forward_layers(features, layout, text, make_pass_plan(task, Q, text_mask))
        return x[:, :Q], x[:, Q:]

    def _forward_layers(
        self,
        features: Tensor,
        layouts: FeatureLayout | Sequence[FeatureLayout] | None,
        text: Tensor | None,
        plan: AttentionPlan,
    ) -> Tensor:
        Q = self.config.num_queries
        context_plan = self.make_query_plan(features, self.resolve_layouts(features, layouts), Q)
        x = self.queries.expand(len(features), -1, -1)
        x = self.norm(x if text is None else torch.cat([x, text.to(x.dtype)], dim=1))
        for layer in self.layers:
            x = layer(x, Q, plan, features, context_plan)
        return x

    def _check_text(self, text: Tensor) -> None:
        if not self.config.use_text:
            raise ConfigError("this Q-Former has no MLPs for text", "set `use_text` in its config")
        if text.ndim != 3 or text.shape[-1] != self.config.width:
            raise ConfigError(f"text embeddings have shape {tuple(text.shape)}", f"give (B, T, {self.config.width})")

    def count_pass_flops(self, task: QFormerPass, batch_size: int, num_features: int, num_text_tokens: int) -> int:
        """Count the FLOPs of `encode_jointly` for a batch of images with texts."""
        Q, T, total = self.config.num_queries, num_text_tokens, 0
        pairs = {"itc": Q * Q + T * T, "itm": (Q + T) ** 2, "itg": Q * Q + T * Q + T * (T + 1) // 2}[task]
        query_work = Workload(tokens=batch_size * Q, attention_pairs=0).with_context(num_features, batch_size)
        for layer in self.layers:
            assert isinstance(layer, QFormerLayer)
            for kind, branch in layer.block.branches.items():
                together = Workload(tokens=batch_size * (Q + T), attention_pairs=batch_size * pairs)
                total += cost.count_flops(branch, together if kind == "self" else query_work)
            total += (
                0
                if layer.text_mlp is None
                else cost.count_flops(layer.text_mlp, Workload(tokens=batch_size * T, attention_pairs=0))
            )
        return total

    def list_unused_modules(self) -> Sequence[nn.Module]:
        return [
            layer.text_mlp for layer in self.layers if isinstance(layer, QFormerLayer) and layer.text_mlp is not None
        ]


def make_pass_plan(task: QFormerPass, num_queries: int, text_mask: Tensor) -> AttentionPlan:
    """Make the attention plan of queries and text; `text_mask` (B, T) marks valid text tokens."""
    text_mask = text_mask.bool()
    query_segments = torch.zeros(len(text_mask), num_queries, dtype=torch.long, device=text_mask.device)
    text_segments = torch.full_like(text_mask, int(task == "itc"), dtype=torch.long).masked_fill(~text_mask, -1)
    segments = torch.cat([query_segments, text_segments], dim=1)  # (B, Q + T)
    if task != "itg":
        return attention_plan(segments)
    # Causal order puts queries before the text; the span makes attention among queries bidirectional.
    spans = torch.cat([torch.ones_like(query_segments), torch.zeros_like(text_segments)], dim=1)
    return attention_plan(segments, spans, causal=True)


@cost.count_flops.register
def _(module: QFormer, work: Workload) -> int:
    """Count `qformer(features)`, without text."""
    blocks = sum(cost.count_flops(layer.block, work) for layer in module.layers if isinstance(layer, QFormerLayer))
    return blocks + cost.count_flops(module.project, work)
