"""Retrieval over a whole gallery: how early the first thing that belongs to a query comes.

Q queries, G gallery, N pictures, M texts, K categories, E width of the embedding
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.contrastive import narrowed
from vitrail.evals.shares import EVERYTHING, Score, Share
from vitrail.objectives.queries import closest

TILE = 2048  # queries, and things of the gallery, that are compared at once
RESAMPLES = 1000
AT = (1, 5, 10)


def ranks(queries: Tensor, gallery: Tensor, asked: Tensor, held: Tensor, *, tile: int = TILE) -> Tensor:
    """(Q,) the rank, from 1, of the first of the gallery that belongs to a query: those with `held` (G,) == `asked`.

    What does not belong and lies exactly as near counts half, so that a model that gives everything the same vector is
    no better than chance. queries (Q, E), gallery (G, E); of either several vectors each, of which the nearest counts.
    """
    found = torch.empty(len(queries), dtype=torch.float64)
    for start in range(0, len(queries), tile):
        rows = slice(start, start + tile)
        # Two passes over the same tiles: their numbers are the same, and no row of scores is kept.
        best = torch.full((len(queries[rows]),), -math.inf)
        for score, ours in _tiles(queries[rows], gallery, asked[rows], held, tile):
            best = torch.maximum(best, score.masked_fill(~ours, -math.inf).amax(1))
        if best.isinf().any():
            lost = start + int(best.isinf().nonzero()[0])
            raise DataError(f"nothing in the gallery belongs to query {lost}", "leave the query out")
        ahead = torch.zeros(len(best), dtype=torch.float64)
        for score, ours in _tiles(queries[rows], gallery, asked[rows], held, tile):
            nearer, level = (score > best[:, None]) & ~ours, (score == best[:, None]) & ~ours
            ahead += nearer.sum(1) + level.sum(1) / 2
        found[rows] = 1 + ahead
    return found


def _tiles(queries: Tensor, gallery: Tensor, asked: Tensor, held: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """scores and belonging (q, g), one piece of the gallery after another"""
    for start in range(0, len(gallery), tile):
        columns = slice(start, start + tile)
        yield _near(queries, gallery[columns]), asked[:, None] == held[columns]


def _near(queries: Tensor, gallery: Tensor) -> Tensor:
    """(q, g)"""
    if queries.ndim == 3:
        return closest(queries, gallery)
    return closest(gallery, queries).T if gallery.ndim == 3 else queries @ gallery.T


class Ranks(NamedTuple):
    """How early queries found what belongs to them."""

    name: str
    rank: Tensor  # (Q,)
    asked: Tensor  # (Q,) what each asked for
    belong: Tensor  # (Q,) how many of the gallery belong to each
    gallery: int

    def of(self, rows: Tensor) -> "Ranks":
        """Of some queries, (Q,) bool: the gallery stays whole."""
        return self._replace(rank=self.rank[rows], asked=self.asked[rows], belong=self.belong[rows])

    def scores(
        self, at: tuple[int, ...] = AT, *, median: bool = True, part: Mapping[str, str | int] = EVERYTHING
    ) -> list[Score]:
        """Recall at each k below the gallery's size, and the median rank."""
        at, G = tuple(k for k in at if k < self.gallery), self.gallery
        recalls, medians = bootstrap(self.rank, self.asked, at)
        scores = []
        for k, interval in zip(at, recalls, strict=True):
            value, beside = float((self.rank <= k).double().mean()), {"chance": by_chance(self.belong, G, k)}
            scores.append(Score(f"{self.name}, recall@{k}", value, interval, len(self.rank), beside, part=part))
        if median:
            value, beside = float(self.rank.median()), {"chance": float(_usual(self.belong, G))}
            name = f"{self.name}, median rank"
            scores.append(Score(name, value, medians, len(self.rank), beside, rank=True, part=part))
        return scores


class Way(NamedTuple):
    """Queries, and the gallery in which they look for what belongs to them: what has the same number."""

    name: str
    queries: Tensor  # (Q, E)
    gallery: Tensor  # (G, E)
    asked: Tensor  # (Q,)
    held: Tensor  # (G,)
    kinds: Tensor | None = None  # (Q, K) bool: categories that a query is of

    def only(self, rows: Tensor) -> "Way":
        """With some queries, (Q,) bool: the gallery stays whole."""
        kinds = None if self.kinds is None else self.kinds[rows]
        return self._replace(queries=self.queries[rows], asked=self.asked[rows], kinds=kinds)

    def narrowed(self, width: int) -> "Way":
        return self._replace(queries=narrowed(self.queries, width), gallery=narrowed(self.gallery, width))

    def ranks(self) -> Ranks:
        Q, G = len(self.queries), len(self.gallery)
        if not Q or not G:
            raise DataError(f"{self.name}: {Q} queries and a gallery of {G}", "leave less out")
        rank = ranks(self.queries, self.gallery, self.asked, self.held)
        known, many = self.held.unique(return_counts=True)
        return Ranks(self.name, rank, self.asked, many[torch.searchsorted(known, self.asked)], G)


def retrieval(
    name: str, queries: Tensor, gallery: Tensor, asked: Tensor, held: Tensor, *, at: tuple[int, ...] = AT
) -> list[Score]:
    """Recall at each k below the gallery's size, and the median rank; arguments as of `ranks`."""
    return Way(name, queries, gallery, asked, held).ranks().scores(at)


def ways(pictures: Tensor, texts: Tensor, shown: Tensor, told: Tensor, kinds: Tensor | None = None) -> list[Way]:
    """Both ways between pictures (N, E) and texts (M, E) with their numbers; the same number belongs together. A
    picture that nothing is told of is no query. Where pictures have several texts, their first ones also ask for the
    others. `kinds` (N, K) are the pictures' categories; a text is of all that one of its pictures is of."""
    said = None if kinds is None else spread(kinds, shown, told)
    found = [Way("text→image", texts, pictures, told, shown, said)]
    found.append(Way("image→text", pictures, texts, shown, told, kinds).only(torch.isin(shown, told)))
    order = told.argsort(stable=True)
    first = torch.ones_like(told, dtype=torch.bool)
    first[order[1:]] = told[order[1:]] != told[order[:-1]]  # the earliest of each number
    several = first & torch.isin(told, told[~first])
    if several.any():
        found.append(Way("text→text", texts, texts[~first], told, told[~first], said).only(several))
    return found


def both_ways(pictures: Tensor, texts: Tensor, shown: Tensor, told: Tensor) -> list[Score]:
    """The scores of `ways`."""
    return [score for way in ways(pictures, texts, shown, told) for score in way.ranks().scores()]


def spread(kinds: Tensor, shown: Tensor, told: Tensor) -> Tensor:
    """(M, K) the categories of texts: those of all the pictures (N, K) that have a text's number"""
    columns = [torch.isin(told, shown[column]) for column in kinds.unbind(1)]
    return torch.stack(columns, 1) if columns else kinds.new_zeros(len(told), 0)


def scored(
    found: Sequence[Way],
    *,
    at: tuple[int, ...] = AT,
    median: bool = True,
    widths: Sequence[int] = (),
    leave: Sequence[int] = (),
    categories: Sequence[str] | None = None,
    part: Mapping[str, str | int] = EVERYTHING,
) -> list[Score]:
    """The scores of several ways, at each width; without the queries that are only of categories to `leave`; and
    recall@1 of each category left where `categories` names them, each among the whole gallery."""
    scores = []
    for way in found:
        if leave:
            assert way.kinds is not None
            gone = torch.zeros(way.kinds.shape[1], dtype=torch.bool)
            gone[list(leave)] = True
            # A query of no category is of none of those.
            way = way.only(way.kinds[:, ~gone].any(1) | ~way.kinds.any(1))
        for width in widths or (None,):
            at_width = part if width is None else {**part, "width": width}
            ranked = (way if width is None else way.narrowed(width)).ranks()
            scores += ranked.scores(at, median=median, part=at_width)
            for k, category in enumerate(categories or ()):
                assert way.kinds is not None
                if k not in leave and (rows := way.kinds[:, k]).any():
                    scores += ranked.of(rows).scores((1,), median=False, part={**at_width, "category": category})
    return scores


def bootstrap(
    rank: Tensor, asked: Tensor, at: tuple[int, ...]
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Intervals of 95 % for recall at each k, and for the median rank; the same draws every time.

    Ids are drawn anew and not queries, because captions of one picture stand or fall together. Where every query
    succeeds, or none, a bootstrap sees no doubt at all: Wilson's interval over the ids stands there instead.
    """
    rank, order = rank.sort()
    group = asked.unique(return_inverse=True)[1][order]
    n, chance = int(group.max()) + 1, torch.Generator().manual_seed(0)
    hits = torch.stack([rank <= k for k in at]).double() if at else rank.new_zeros(0, len(rank))
    recalls, medians = [], []
    for _ in range(RESAMPLES):
        weight = torch.randint(n, (n,), generator=chance).bincount(minlength=n)[group].double()
        recalls.append(hits @ weight / weight.sum())
        total = weight.cumsum(0)
        medians.append(rank[torch.searchsorted(total, total[-1] / 2)])
    found = [_middle(column) for column in torch.stack(recalls).unbind(1)]
    for i, row in enumerate(hits):
        if row.all() or not row.any():
            found[i] = Share(n if row.all() else 0, n).interval
    return found, _middle(torch.stack(medians))


def _middle(drawn: Tensor) -> tuple[float, float]:
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return low, high


def by_chance(belong: Tensor, gallery: int, k: int) -> float:
    """Recall at k of a random order, where `belong` (Q,) of the gallery belong to each query: 1 − C(G−r, k)/C(G, k)."""
    r, many = belong.unique(return_counts=True)
    rest, G = gallery - r.double(), torch.tensor(gallery, dtype=torch.float64)
    miss = (rest + 1).lgamma() - (rest - k + 1).clamp(min=1).lgamma() - (G + 1).lgamma() + (G - k + 1).lgamma()
    return float(((1 - miss.exp() * (rest >= k)) * many).sum() / len(belong))


def _usual(belong: Tensor, gallery: int) -> int:
    """The median rank of a random order: the first k whose recall is a half."""
    return 1 + bisect_left(range(1, gallery + 1), 0.5, key=lambda k: by_chance(belong, gallery, k))
