"""What a pass over words and pictures costs, part by part: one rule for every vision-language model.

The decoder's work is the pass's own; the tower and the connectors have theirs beside it, and none where nothing new is
looked at. A total that left the tower out would call a model with a large one faster than it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from vitrail.encoders.towers import spared
from vitrail.encoders.vit import ViT
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh


class Leg(NamedTuple):
    """One part of a model in a pass: modules that all do the same work.

    spared  what of these the pass leaves alone
    loose   learned vectors that are no module
    beside  operations of the pass that are no module's
    """

    modules: Sequence[nn.Module]
    work: Work | None
    spared: Sequence[nn.Module] = ()
    loose: Sequence[nn.Parameter] = ()
    beside: int = 0

    @property
    def parameters(self) -> int:
        own = sum(p.numel() for module in self.modules for p in module.parameters())
        return own + sum(p.numel() for p in self.loose)

    @property
    def flops(self) -> int:
        work = self.work
        if work is None:
            return 0
        spared = sum(cost.flops(one, work) for one in self.spared)
        return sum(cost.flops(one, work) for one in self.modules) - spared + self.beside

    @property
    def bytes(self) -> cost.Bytes:
        if self.work is None:
            return cost.Bytes(weights=weigh(*self.modules, *self.loose))
        loose = weigh(*self.loose)
        found = sum((cost.bytes(one, self.work) for one in self.modules), cost.Bytes(loose, loose))
        return found + cost.Bytes(read=-weigh(*self.spared))


class SeeingWork(Work):
    """A pass of the decoder whose `context` are the picture tokens that enter it or are looked at beside it.

    `looks` is the work of the tower, of the connectors, if there are any, and of queries that are fused with the
    question; nothing where nothing is looked at.
    """

    looks: tuple[Any, ...] = ()

    @classmethod
    def of(cls, prompt: Work, *looks: Work | None) -> "SeeingWork":
        return cls(**{field: getattr(prompt, field) for field in Work.__struct_fields__}, looks=looks)


def summed(one: tuple[Work, ...], other: tuple[Work, ...]) -> tuple[Work, ...]:
    """Of the same parts that look twice, the work of both."""
    if not one or not other:
        return one or other
    fields = ("tokens", "pairs", "context", "context_pairs", "rows")
    pairs = zip(one, other, strict=True)
    return tuple(a.with_(**{field: getattr(a, field) + getattr(b, field) for field in fields}) for a, b in pairs)


def make_legs(
    work: Work,
    tower: nn.Module,
    connectors: Sequence[nn.Module],
    decoder: nn.Module,
    *,
    layer: int | None = None,
    loose: Sequence[nn.Parameter] = (),
    queries: nn.Module | None = None,
    choosing: int = 0,
) -> dict[str, Leg]:
    """The parts of a model that reads its tower at `layer`. Work without looks runs the decoder alone. `choosing` are
    operations by which it is found out what of a view's features goes on."""
    seen, soft, fused = (*(work.looks if isinstance(work, SeeingWork) else ()), None, None, None)[:3]
    chosen = 0 if seen is None else seen.rows * choosing
    unread = spared(tower, layer) if isinstance(tower, ViT) else []
    legs = {"tower": Leg([tower], seen, unread, beside=chosen)}
    if connectors:
        legs["connector"] = Leg(connectors, soft, loose=loose)
    if queries is not None:
        legs["queries"] = Leg([queries], fused)
    return legs | {"decoder": Leg([decoder], work)}


def flops(model: Any, work: Work) -> int:
    """Of all parts; a rule for models with `legs`."""
    return sum(leg.flops for leg in model.legs(work).values())


def bytes(model: Any, work: Work) -> cost.Bytes:
    return sum((leg.bytes for leg in model.legs(work).values()), cost.Bytes())
