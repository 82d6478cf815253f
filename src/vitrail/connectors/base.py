"""One interface for everything between a tower and a language model: features in, soft tokens out.

B batch, N features, D their width, M soft tokens, W their width
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.connectors.grids import Laid, count
from vitrail.errors import ConfigError
from vitrail.nn import Plan, Work, attention_plan, cost
from vitrail.nn.mlp import Activation, activate


class ConnectorConfig(Config):
    """What all connectors have: `reads` is the width D of the features, `gives` the width W of the soft tokens."""

    reads: int
    gives: int

    def tokens(self, laid: Laid) -> int:
        """How many soft tokens come of so many features, or of a grid of them. Nothing needs to be built for this."""
        raise NotImplementedError


C = TypeVar("C", bound=ConnectorConfig)


class Connector(nn.Module, Generic[C]):
    """`connector(features)` for features (B, N, D) → (B, M, W).

    `laid` says how the features lie: one count or grid for all rows or, where rows are unequal and filled up behind,
    one a row. What comes out is then filled up too: row b has `config.tokens(laid[b])` soft tokens, and what stands
    behind them means nothing.
    """

    Config: ClassVar[Any]  # the type of its config

    def __init__(self, config: C):
        super().__init__()
        self.config: C = config

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        raise NotImplementedError

    def rows(self, features: Tensor, laid: Laid | Sequence[Laid] | None) -> list[Laid]:
        """How the features lie: one answer for all rows, or one a row. Refused where they cannot lie so."""
        name, D = type(self).__name__, self.config.reads
        if features.ndim != 3 or features.shape[-1] != D:
            raise ConfigError(
                f"{name} reads features (B, N, {D}); it was given a tensor of shape {tuple(features.shape)}",
                "set `reads` to the tower's width",
            )
        B, N = features.shape[:2]
        if laid is None or isinstance(laid, Laid):
            found: list[Laid] = [N if laid is None else laid]
        else:
            found = list(laid)
            if len(found) != B:
                raise ConfigError(f"{name} was told of {len(found)} rows and given {B}", "say how each row lies")
        for one in found:
            if not 0 < count(one) <= N or (count(one) < N and not isinstance(laid, Sequence)):
                raise ConfigError(
                    f"{name}: {one} does not fit rows of {N} features",
                    "give the grid that the tower made of the picture",
                )
        return found

    def looking(self, features: Tensor, laid: Sequence[Laid], queries: int, own: int = 0) -> Plan | None:
        """The plan by which so many queries see what is real of the features, and `own` keys behind them."""
        N = features.shape[1]
        if all(count(one) == N for one in laid):
            return None
        real = torch.tensor([count(one) for one in laid], device=features.device)[:, None]
        keys = torch.arange(N + own, device=features.device)
        segments = -((keys >= real) & (keys < N)).long()  # (B, N + own): −1 where padding
        return attention_plan(segments.new_zeros(len(features), queries), key_segments=segments)

    def work(self, laid: Laid, batch: int = 1) -> Work:
        """What `cost` needs to know of so many pictures: tokens are those that come out, the context what goes in."""
        M = self.config.tokens(laid)
        return Work.full(M, batch).across(count(laid), batch)

    def spared(self) -> Sequence[nn.Module]:
        """Parts that `connector(features)` does not read."""
        return ()


class Layers(nn.Module):
    """Linear layers with an activation between each two."""

    def __init__(self, *widths: int, activation: Activation = "gelu", bias: bool = True):
        super().__init__()
        self.activation: Activation = activation
        self.linears = nn.ModuleList([nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.linears):
            x = linear(x if i == 0 else activate(x, self.activation))
        return x


def fit(reads: int, gives: int) -> nn.Module:
    """A linear layer where two widths differ."""
    return nn.Identity() if reads == gives else nn.Linear(reads, gives)


def positive(config: Config, *names: str) -> None:
    """Refuse a width or a count that is none."""
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{type(config).__name__}.{name} is {value}", "give at least 1")


@cost.flops.register
def _(module: Layers, work: Work) -> int:
    return cost.flops(module.linears, work)


@cost.bytes.register
def _(module: Connector, work: Work) -> cost.Bytes:
    weights, spared = _weigh(module), sum(_weigh(part) for part in module.spared())
    return cost.Bytes(weights=weights, read=weights - spared)


def _weigh(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
