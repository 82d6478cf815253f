"""The Q-Former (BLIP-2): learned queries read a picture, and in the first stage of training a text beside it.

Blocks are BERT's, norms after each branch; in every second one the queries look at the picture. Text goes through the
same self-attention and has MLPs of its own. The three tasks of the first stage are three plans of who sees whom:

    itc  contrast   queries see queries, words see words
    itm  matching   all see all
    itg  writing    queries see queries; a word sees the queries and the words before it

B batch, N features, D their width, Q queries, T words, V width inside, W width of the soft tokens
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.connectors.base import Connector, ConnectorConfig, positive
from vitrail.connectors.grids import Laid
from vitrail.errors import ConfigError
from vitrail.nn import AttentionConfig, Block, BlockConfig, PlainConfig, Plan, Work, attention_plan, cost
from vitrail.nn.block import Residual
from vitrail.nn.learned import small
from vitrail.nn.norms import make_norm

Pass = Literal["itc", "itm", "itg"]


class QFormerConfig(ConnectorConfig, tag="qformer", tag_field="kind"):
    """`every` how many blocks there is one that looks at the picture, from the first on. `text`: with MLPs for words,
    which the first stage of training needs and the second does not."""

    queries: int = 32
    layers: int = 12
    every: int = 2
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    text: bool = False
    eps: float = 1e-12

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "queries", "layers", "every", "width", "hidden")
        self.block(0)  # refuses a width that the heads do not divide

    def block(self, layer: int) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            attention=AttentionConfig(heads=self.heads, bias="all"),
            mlp=PlainConfig(hidden=self.hidden),
            chain=("self", "mlp") if layer % self.every else ("self", "cross", "mlp"),
            norm_at="after",
            eps=self.eps,
            context_width=self.reads,
        )

    def tokens(self, laid: Laid) -> int:
        return self.queries


class Layer(nn.Module):
    """One block, and the MLP that words go through instead of the block's."""

    def __init__(self, config: QFormerConfig, index: int):
        super().__init__()
        self.block = Block(config.block(index))
        self.words = Residual(config.block(index), "mlp") if config.text else None

    def forward(self, x: Tensor, queries: int, plan: Plan, context: Tensor | None, context_plan: Plan | None) -> Tensor:
        """x (B, Q + T, V), of which the first `queries` are queries"""
        branches = self.block.branches
        x = branches["self"](x, plan=plan)
        asked, words = x[:, :queries], x[:, queries:]
        if queries:
            if "cross" in branches:
                asked = branches["cross"](asked, plan=context_plan or Plan(), context=context)
            asked = branches["mlp"](asked)
        if self.words is not None and words.shape[1]:
            words = self.words(words)
        return torch.cat([asked, words], dim=1)


class QFormer(Connector[QFormerConfig]):
    Config = QFormerConfig

    def __init__(self, config: QFormerConfig):
        super().__init__(config)
        self.queries = small(config.queries, config.width)
        self.norm = make_norm("layer", config.width, config.eps)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.layers)])
        self.project = nn.Linear(config.width, config.gives)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, N, D) → (B, Q, W)"""
        return self.project(self.look(features, laid))

    def look(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """What the queries find in the picture: (B, N, D) → (B, Q, V)"""
        return self._run(features, laid, None, Plan())

    def read(self, text: Tensor, real: Tensor | None = None) -> Tensor:
        """Words alone, which see each other: embeddings (B, T, V), of which `real` (B, T) are → (B, T, V)"""
        self._check(text)
        plan = Plan() if real is None else attention_plan(real.bool().long() - 1)
        x = self.norm(text)
        for layer in self.layers:
            x = layer(x, 0, plan, None, None)
        return x

    def both(
        self,
        features: Tensor,
        text: Tensor,
        task: Pass,
        *,
        real: Tensor | None = None,
        laid: Laid | Sequence[Laid] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries (B, Q, V) and words (B, T, V) of one pass over the picture and the embeddings of a text (B, T, V).

        `real` (B, T) says which words are no padding. For `itc` it is as if there had been two passes.
        """
        self._check(text)
        if real is None:
            real = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        Q = self.config.queries
        x = self._run(features, laid, text, pass_plan(task, Q, real))
        return x[:, :Q], x[:, Q:]

    def _run(self, features: Tensor, laid: Laid | Sequence[Laid] | None, text: Tensor | None, plan: Plan) -> Tensor:
        Q = self.config.queries
        context_plan = self.looking(features, self.rows(features, laid), Q)
        x = self.queries.expand(len(features), -1, -1)
        x = self.norm(x if text is None else torch.cat([x, text.to(x.dtype)], dim=1))
        for layer in self.layers:
            x = layer(x, Q, plan, features, context_plan)
        return x

    def _check(self, text: Tensor) -> None:
        if not self.config.text:
            raise ConfigError("this Q-Former reads no text", "set `text` in its config")
        if text.ndim != 3 or text.shape[-1] != self.config.width:
            raise ConfigError(f"a text is embeddings (B, T, {self.config.width}), not {tuple(text.shape)}")

    def pass_flops(self, task: Pass, batch: int, features: int, words: int) -> int:
        """Operations of `both`: so many pictures of so many features, beside texts of so many words."""
        Q, T, total = self.config.queries, words, 0
        pairs = {"itc": Q * Q + T * T, "itm": (Q + T) ** 2, "itg": Q * Q + T * Q + T * (T + 1) // 2}[task]
        asked = Work(tokens=batch * Q, pairs=0).across(features, batch)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for kind, branch in layer.block.branches.items():
                together = Work(tokens=batch * (Q + T), pairs=batch * pairs)
                total += cost.flops(branch, together if kind == "self" else asked)
            total += 0 if layer.words is None else cost.flops(layer.words, Work(tokens=batch * T, pairs=0))
        return total

    def spared(self) -> Sequence[nn.Module]:
        return [layer.words for layer in self.layers if isinstance(layer, Layer) and layer.words is not None]


def pass_plan(task: Pass, queries: int, real: Tensor) -> Plan:
    """Who sees whom among queries and words, of which `real` (B, T) are no padding."""
    real = real.bool()
    asked = torch.zeros(len(real), queries, dtype=torch.long, device=real.device)
    words = torch.full_like(real, int(task == "itc"), dtype=torch.long).masked_fill(~real, -1)
    segments = torch.cat([asked, words], dim=1)  # (B, Q + T)
    if task != "itg":
        return attention_plan(segments)
    # The past, which for a word holds all queries and for a query no word; queries see each other both ways.
    spans = torch.cat([torch.ones_like(asked), torch.zeros_like(words)], dim=1)
    return attention_plan(segments, spans, causal=True)


@cost.flops.register
def _(module: QFormer, work: Work) -> int:
    """Of `qformer(features)`: no text."""
    blocks = sum(cost.flops(layer.block, work) for layer in module.layers if isinstance(layer, Layer))
    return blocks + cost.flops(module.project, work)
