"""Question-fused queries: a small Llama reads [image; question; queries], and its outputs at the queries become the
visual tokens before the question.

A conversation with K questions is processed in one pass. The first question is followed by n_l queries, each later one
by the first n_s of them; a learned end token closes each group:

    image · question 1 · n_l queries · end · question 2 · n_s queries · end · …

Shapes: B batch, N features, D their width, T tokens of a question, K questions, V hidden width, W width of the visual
tokens.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.config import LayerCount, PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig, make_width_projection
from vitrail.connectors.feature_layout import FeatureLayout, count_features
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    RotaryConfig,
    RotaryEmbedding,
    Workload,
    attention_plan,
    cost,
)
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import CONNECTORS


class FusedQueryConfig(ConnectorConfig, tag="fused", tag_field="kind"):
    """Config of a `FusedQueryConnector`.

    `first_queries` is n_l; `later_queries` is n_s, by default 8 or n_l if that is less. `vocab_size` is that of the
    questions.

    `question_mode` selects when questions are read: "always", "never", or "training" (in training only).
    """

    vocab_size: PositiveInt
    first_queries: PositiveInt = 256
    later_queries: int | None = None
    question_mode: Literal["always", "never", "training"] = "always"
    layers: LayerCount = 20
    width: PositiveInt = 1024
    heads: int = 16
    intermediate_size: PositiveInt = 2816
    theta: float = 10_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.later_queries is not None and not 1 <= self.later_queries <= self.first_queries:
            raise ConfigError(
                f"later_queries is {self.later_queries}, but first_queries is {self.first_queries}",
                f"give 1 … {self.first_queries}",
            )
        self.rotary_config()  # raises if the heads do not divide the width

    def block_config(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            attention=AttentionConfig(heads=self.heads),
            mlp=GatedMLPConfig(intermediate_size=self.intermediate_size),
            norm="rms",
            eps=self.eps,
        )

    def rotary_config(self) -> RotaryConfig:
        return RotaryConfig(head_dim=self.block_config().attention.resolve_head_dim(self.width), theta=self.theta)

    def queries_per_question(self, num_questions: int) -> list[int]:
        """Return the number of queries of each question."""
        if num_questions < 1:
            raise ConfigError(f"num_questions is {num_questions}", "give at least 1")
        later = min(8, self.first_queries) if self.later_queries is None else self.later_queries
        return [self.first_queries] + [later] * (num_questions - 1)

    def count_tokens(self, layout: FeatureLayout, num_questions: int = 1) -> int:
        """Count the visual tokens: n_l + (K − 1)·n_s."""
        return sum(self.queries_per_question(num_questions))


class FusedQueryOutput(NamedTuple):
    """Hidden states of a `FusedQueryConnector`."""

    queries: list[Tensor]
    """query states of each question (B, n, V)"""
    end_states: Tensor
    """states of the end tokens (B, K, V), which a contrastive loss compares with the answers"""


@CONNECTORS.register("fused")
class FusedQueryConnector(Connector[FusedQueryConfig]):
    """Connector whose queries are fused with questions.

    `questions` are the ids of each question (B, T), padded with −1, or the number of questions if they are not read.
    """

    Config = FusedQueryConfig

    def __init__(self, config: FusedQueryConfig):
        super().__init__(config)
        self.width_proj = make_width_projection(config.in_features, config.width)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.queries = make_small_parameter(config.first_queries, config.width)
        self.end = make_small_parameter(config.width)
        self.rotary = RotaryEmbedding(config.rotary_config())
        self.blocks = nn.ModuleList([Block(config.block_config()) for _ in range(config.layers)])
        self.norm = make_norm("rms", config.width, config.eps)
        self.project = nn.Linear(config.width, config.out_features)

    @property
    def uses_questions(self) -> bool:
        return self.config.question_mode == "always" or (self.config.question_mode == "training" and self.training)

    def forward(
        self,
        features: Tensor,
        layout: FeatureLayout | Sequence[FeatureLayout] | None = None,
        questions: Sequence[Tensor] | int = 1,
    ) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, n_l + (K − 1)·n_s, W), question after question."""
        return self.project(torch.cat(self.encode_queries(features, layout, questions).queries, dim=1))

    def encode_queries(
        self,
        features: Tensor,
        layout: FeatureLayout | Sequence[FeatureLayout] | None = None,
        questions: Sequence[Tensor] | int = 1,
    ) -> FusedQueryOutput:
        """Return the hidden states at the queries and end tokens."""
        B, N = features.shape[:2]
        layouts = self.resolve_layouts(features, layout)
        question_ids = self._resolve_questions(questions, B)
        counts = self.config.queries_per_question(len(question_ids))
        num_features = torch.tensor([count_features(one) for one in layouts], device=features.device)[:, None]
        parts = [self.width_proj(features)]
        real = [(torch.arange(N, device=features.device) < num_features).expand(B, -1)]
        for ids, n in zip(question_ids, counts, strict=True):
            group = torch.cat([self.queries[:n], self.end[None]]).expand(B, -1, -1)
            parts += [self.embed(ids.clamp_min(0)), group]
            real += [ids >= 0, ids.new_ones(B, n + 1).bool()]
        x = self._forward_blocks(torch.cat(parts, dim=1), torch.cat(real, dim=1))
        groups = x.split([part.shape[1] for part in parts], dim=1)[2::2]  # (B, n + 1, V) each
        return FusedQueryOutput(
            [group[:, :-1] for group in groups], torch.stack([group[:, -1] for group in groups], dim=1)
        )

    def forward_per_image(
        self, features: Sequence[Tensor], questions: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Process images of different sizes (N, D), each with its own questions (T,); return (n, W) for each question.

        An image without questions is processed with one empty question.
        """
        if len(features) != len(questions):
            raise ConfigError(
                f"there are {len(features)} images, but questions of {len(questions)}", "give questions for each image"
            )
        nothing = torch.zeros(0, dtype=torch.long, device=self.queries.device)
        question_ids = [[ids.to(nothing) for ids in own] or [nothing] for own in questions]
        columns = zip_longest(*question_ids, fillvalue=nothing)  # the k-th question of every image
        ids = [pad_sequence(list(column), batch_first=True, padding_value=-1) for column in columns]
        layouts = [len(image_features) for image_features in features]
        groups = self.encode_queries(pad_sequence(list(features), batch_first=True), layouts, ids).queries
        return [[self.project(groups[k][p]) for k in range(len(own))] for p, own in enumerate(question_ids)]

    def _forward_blocks(self, x: Tensor, real: Tensor) -> Tensor:
        """Run the blocks on x (B, L, V); tokens outside the mask `real` (B, L) are masked and take no position."""
        segments = real.long() - 1
        if torch.compiler.is_compiling():  # tensor values cannot be read here
            plan = AttentionPlan(causal=True, segments=segments, key_segments=segments)
        else:
            plan = AttentionPlan(causal=True) if bool(real.all()) else attention_plan(segments, causal=True)
        rotation = self.rotary((real.long().cumsum(1) - 1).clamp_min(0))
        for block in self.blocks:
            x = block(x, plan, rotation=rotation)
        return self.norm(x)

    def _resolve_questions(self, questions: Sequence[Tensor] | int, batch: int) -> list[Tensor]:
        """Return the ids of every question that is read, (B, T); (B, 0) if questions are not read."""
        with_question, device = self.uses_questions, self.queries.device
        if isinstance(questions, int):
            if with_question:
                raise ConfigError("question ids are missing, but the queries are fused with them", "give the ids")
            questions = [torch.empty(batch, 0)] * questions
        for ids in questions:
            if ids.ndim != 2 or len(ids) != batch:
                raise ConfigError(
                    f"a question has shape {tuple(ids.shape)}, not ({batch}, T)", "give one row for each image"
                )
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return [ids.to(device) if with_question else empty for ids in questions]

    def workload(self, layout: FeatureLayout, batch_size: int = 1, question_lengths: Sequence[int] = (0,)) -> Workload:
        """Return the workload; `question_lengths` are the tokens of each question, `logit_tokens` the output tokens."""
        M = self.config.count_tokens(layout, len(question_lengths))
        length = count_features(layout) + sum(question_lengths) + M + len(question_lengths)
        return Workload.causal_attention(length, batch_size).replace(
            logit_tokens=batch_size * M, context_tokens=batch_size * count_features(layout)
        )


@cost.count_flops.register
def _(module: FusedQueryConnector, work: Workload) -> int:
    output_tokens = work.tokens if work.logit_tokens is None else work.logit_tokens
    input_flops = cost.count_flops(module.width_proj, work.replace(tokens=work.context_tokens))
    return (
        input_flops
        + cost.count_flops(module.blocks, work)
        + cost.count_flops(module.project, work.replace(tokens=output_tokens))
    )


cost.count_bytes.register(FusedQueryConnector, cost.sum_child_bytes)  # one row of the embedding table for each token
