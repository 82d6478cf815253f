"""Queries fused with the question: a small Llama reads [picture; question; queries], and what it makes of the queries
precedes the question in the language model.

A talk of K questions is read in one pass. The first is followed by n_l queries, every later one by n_s, the first n_s
of the same; a learned end closes each group:

    picture · question 1 · n_l queries · end · question 2 · n_s queries · end · …

B batch, N features, D their width, T words of a question, K questions, V width inside, W width of the soft tokens
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.connectors.base import Connector, ConnectorConfig, fit, positive
from vitrail.connectors.grids import Laid, count
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    Block,
    BlockConfig,
    GatedConfig,
    Plan,
    Rotary,
    RotaryConfig,
    Work,
    attention_plan,
    cost,
)
from vitrail.nn.learned import small
from vitrail.nn.norms import make_norm


class FusedConfig(ConnectorConfig, tag="fused", tag_field="kind"):
    """`first` is n_l, `later` n_s: 8, or n_l where that is less, unless given. `vocab` is that of the questions.

    `question` says whether the questions are read: always, never (a model tuned without them), or in training alone
    (a model that is tuned with them, and then not told).
    """

    vocab: int
    first: int = 256
    later: int | None = None
    question: Literal["always", "never", "training"] = "always"
    layers: int = 20
    width: int = 1024
    heads: int = 16
    hidden: int = 2816
    theta: float = 10_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "vocab", "first", "layers", "width", "hidden")
        if self.later is not None and not 1 <= self.later <= self.first:
            raise ConfigError(f"{self.later} later queries of {self.first}", "later questions use the first's queries")
        self.rotary()  # refuses a width that the heads do not divide

    def block(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            attention=AttentionConfig(heads=self.heads),
            mlp=GatedConfig(hidden=self.hidden),
            norm="rms",
            eps=self.eps,
        )

    def rotary(self) -> RotaryConfig:
        return RotaryConfig(head_dim=self.block().attention.channels(self.width), theta=self.theta)

    def groups(self, questions: int) -> list[int]:
        """How many queries, and soft tokens, each question has."""
        if questions < 1:
            raise ConfigError(f"a talk of {questions} questions", "ask at least one")
        later = min(8, self.first) if self.later is None else self.later
        return [self.first] + [later] * (questions - 1)

    def tokens(self, laid: Laid, questions: int = 1) -> int:
        """n_l + (K − 1)·n_s"""
        return sum(self.groups(questions))


class Groups(NamedTuple):
    queries: list[Tensor]
    """of each question (B, n, V)"""
    ends: Tensor
    """(B, K, V), what a contrastive loss compares with the answers"""


class Fused(Connector[FusedConfig]):
    """`questions` are the ids of each question (B, T), −1 where padded, or how many there are, where none is read."""

    Config = FusedConfig

    def __init__(self, config: FusedConfig):
        super().__init__(config)
        self.fit = fit(config.reads, config.width)
        self.embed = nn.Embedding(config.vocab, config.width)
        self.queries = small(config.first, config.width)
        self.end = small(config.width)
        self.rotary = Rotary(config.rotary())
        self.blocks = nn.ModuleList([Block(config.block()) for _ in range(config.layers)])
        self.norm = make_norm("rms", config.width, config.eps)
        self.project = nn.Linear(config.width, config.gives)

    @property
    def reads_questions(self) -> bool:
        return self.config.question == "always" or (self.config.question == "training" and self.training)

    def forward(
        self,
        features: Tensor,
        laid: Laid | Sequence[Laid] | None = None,
        questions: Sequence[Tensor] | int = 1,
    ) -> Tensor:
        """(B, N, D) → (B, n_l + (K − 1)·n_s, W), question after question"""
        return self.project(torch.cat(self.fuse(features, laid, questions).queries, dim=1))

    def fuse(
        self,
        features: Tensor,
        laid: Laid | Sequence[Laid] | None = None,
        questions: Sequence[Tensor] | int = 1,
    ) -> Groups:
        """What comes out at the queries and at the ends."""
        B, N = features.shape[:2]
        rows = self.rows(features, laid)
        asked = self._questions(questions, B)
        counts = self.config.groups(len(asked))
        shown = torch.tensor([count(one) for one in rows], device=features.device)[:, None]
        parts = [self.fit(features)]
        real = [(torch.arange(N, device=features.device) < shown).expand(B, -1)]
        for ids, n in zip(asked, counts, strict=True):
            group = torch.cat([self.queries[:n], self.end[None]]).expand(B, -1, -1)
            parts += [self.embed(ids.clamp_min(0)), group]
            real += [ids >= 0, ids.new_ones(B, n + 1).bool()]
        x = self._run(torch.cat(parts, dim=1), torch.cat(real, dim=1))
        groups = x.split([part.shape[1] for part in parts], dim=1)[2::2]  # (B, n + 1, V) each
        return Groups([group[:, :-1] for group in groups], torch.stack([group[:, -1] for group in groups], dim=1))

    def talks(self, pictures: Sequence[Tensor], questions: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Pictures of unequal size (N, D), each with questions of its own, ids (T,) → (n, W) for every question of each
        picture. Of a picture nobody asks about, what is made of a question that says nothing."""
        if len(pictures) != len(questions):
            raise ConfigError(f"{len(pictures)} pictures and the questions of {len(questions)}", "give those of each")
        nothing = torch.zeros(0, dtype=torch.long, device=self.queries.device)
        asked = [[ids.to(nothing) for ids in own] or [nothing] for own in questions]
        columns = zip_longest(*asked, fillvalue=nothing)  # the k-th question of every picture
        ids = [pad_sequence(list(column), batch_first=True, padding_value=-1) for column in columns]
        laid = [len(picture) for picture in pictures]
        groups = self.fuse(pad_sequence(list(pictures), batch_first=True), laid, ids).queries
        return [[self.project(groups[k][p]) for k in range(len(own))] for p, own in enumerate(asked)]

    def _run(self, x: Tensor, real: Tensor) -> Tensor:
        """x (B, L, V), of which `real` (B, L) are no padding: that is not seen, and takes no position."""
        segments = real.long() - 1
        if torch.compiler.is_compiling():  # which may not ask what the tensor holds
            plan = Plan(causal=True, segments=segments, key_segments=segments)
        else:
            plan = Plan(causal=True) if bool(real.all()) else attention_plan(segments, causal=True)
        rotation = self.rotary((real.long().cumsum(1) - 1).clamp_min(0))
        for block in self.blocks:
            x = block(x, plan, rotation=rotation)
        return self.norm(x)

    def _questions(self, questions: Sequence[Tensor] | int, batch: int) -> list[Tensor]:
        """The ids of every question that are read: (B, T), or (B, 0) where they are not."""
        reads, device = self.reads_questions, self.queries.device
        if isinstance(questions, int):
            if reads:
                raise ConfigError("these queries are fused with the questions", "give the ids of every question")
            questions = [torch.empty(batch, 0)] * questions
        for ids in questions:
            if ids.ndim != 2 or len(ids) != batch:
                raise ConfigError(f"a question is ids ({batch}, T), not {tuple(ids.shape)}", "one row a picture")
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return [ids.to(device) if reads else empty for ids in questions]

    def work(self, laid: Laid, batch: int = 1, questions: Sequence[int] = (0,)) -> Work:
        """`questions` are the words of each that are read; `asked` is what comes out."""
        M = self.config.tokens(laid, len(questions))
        length = count(laid) + sum(questions) + M + len(questions)
        return Work.causal(length, batch).with_(asked=batch * M, context=batch * count(laid))


@cost.flops.register
def _(module: Fused, work: Work) -> int:
    asked = work.tokens if work.asked is None else work.asked
    entered = cost.flops(module.fit, work.with_(tokens=work.context))
    return entered + cost.flops(module.blocks, work) + cost.flops(module.project, work.with_(tokens=asked))


@cost.bytes.register
def _(module: Fused, work: Work) -> cost.Bytes:
    """Of the table of words, a row a token at most is read."""
    return cost.sum_bytes(module, work)
