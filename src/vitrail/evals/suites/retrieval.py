"""Retrieval over a whole gallery: how early the first thing that belongs to a query comes.

Q queries, G gallery, E width of the embedding
"""

import math
from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.shares import Score, Share

TILE = 2048  # queries, and things of the gallery, that are compared at once
RESAMPLES = 1000


def ranks(queries: Tensor, gallery: Tensor, asked: Tensor, held: Tensor, *, tile: int = TILE) -> Tensor:
    """(Q,) the rank, from 1, of the first of the gallery that belongs to a query: those with `held` (G,) == `asked`.

    What does not belong and lies exactly as near counts half, so that a model that gives everything the same vector is
    no better than chance. queries (Q, E), gallery (G, E).
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
        yield queries @ gallery[columns].T, asked[:, None] == held[columns]


def retrieval(
    name: str, queries: Tensor, gallery: Tensor, asked: Tensor, held: Tensor, *, at: tuple[int, ...] = (1, 5, 10)
) -> list[Score]:
    """Recall at each k below the gallery's size, and the median rank; arguments as of `ranks`."""
    if not len(queries) or not len(gallery):
        raise DataError(f"{name}: {len(queries)} queries and a gallery of {len(gallery)}", "give at least one of each")
    rank, G = ranks(queries, gallery, asked, held), len(gallery)
    known, many = held.unique(return_counts=True)
    belong = many[torch.searchsorted(known, asked)]  # (Q,) how many of the gallery do
    at = tuple(k for k in at if k < G)
    recalls, medians = bootstrap(rank, asked, at)
    scores = []
    for k, interval in zip(at, recalls, strict=True):
        value = float((rank <= k).double().mean())
        scores.append(Score(f"{name}, recall@{k}", value, interval, len(rank), {"chance": by_chance(belong, G, k)}))
    beside = {"chance": float(_usual(belong, G))}
    return [*scores, Score(f"{name}, median rank", float(rank.median()), medians, len(rank), beside, rank=True)]


def both_ways(pictures: Tensor, texts: Tensor, shown: Tensor, told: Tensor) -> list[Score]:
    """pictures (N, E) and texts (M, E) with their numbers; the same number belongs together. A picture that nothing is
    told of is no query. Where pictures have several texts, their first ones also ask for the others."""
    found = retrieval("text→image", texts, pictures, told, shown)
    asking = torch.isin(shown, told)
    found += retrieval("image→text", pictures[asking], texts, shown[asking], told)
    order = told.argsort(stable=True)
    first = torch.ones_like(told, dtype=torch.bool)
    first[order[1:]] = told[order[1:]] != told[order[:-1]]  # the earliest of each number
    several = first & torch.isin(told, told[~first])
    if several.any():
        found += retrieval("text→text", texts[several], texts[~first], told[several], told[~first])
    return found


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
