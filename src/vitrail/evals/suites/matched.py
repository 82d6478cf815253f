"""Retrieval in two looks, as BLIP-2's: what is nearest is found first, and the best of that is put in order by reading
picture and text together.

Q queries, G gallery, K of it that are looked at again, N pictures, M texts
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.evals.queried import QueryEmbedder
from vitrail.evals.shares import Score
from vitrail.evals.suites.retrieval import Ranks
from vitrail.evals.suites.sets import Gallery
from vitrail.evals.viewer import Picture
from vitrail.objectives.queries import closest

PAIRS = 4096  # looked at before the next are gathered

Match = Callable[[Tensor, Tensor], Tensor]
"""Numbers of queries (P,) and of things of the gallery (P,) → (P,) how well they match"""


def reranked(first: Tensor, asked: Tensor, held: Tensor, match: Match, most: int) -> Tensor:
    """(Q,) the rank, from 1, of the first of the gallery that belongs to a query: the `most` that are nearest by
    `first` (Q, G) go in the order of its sum with what `match` says, and the others behind them as they were. What does
    not belong and is exactly as good counts half."""
    top = first.topk(min(most, first.shape[1]), dim=1)
    ours = held[top.indices] == asked[:, None]  # (Q, K)
    rows = torch.arange(len(first))[:, None].expand_as(top.indices).flatten()
    pairs = zip(rows.split(PAIRS), top.indices.flatten().split(PAIRS), strict=True)
    again = torch.cat([match(row, column) for row, column in pairs]).view_as(top.values)
    near = _rank(top.values + again, ours)
    return torch.where(ours.any(1), near, _rank(first, held == asked[:, None]))


def _rank(score: Tensor, ours: Tensor) -> Tensor:
    """(Q, G) both → (Q,)"""
    best = score.masked_fill(~ours, -torch.inf).amax(1, keepdim=True)
    return 1 + ((score > best) & ~ours).sum(1) + ((score == best) & ~ours).sum(1) / 2


def matched(embedder: QueryEmbedder, pictures: Sequence[Picture], gallery: Gallery, most: int) -> list[Score]:
    """Both ways between pictures and their captions."""
    if most < 1:
        raise ConfigError(f"{most} of a gallery to look at again", "give 1 or more")
    shown, told = gallery.shown, gallery.told
    read = embedder.read(gallery.captions)
    features = embedder.seen(pictures)
    first = closest(embedder.embedded(features), read.embeddings)  # (N, M)
    asking = torch.isin(shown, told).nonzero()[:, 0]  # a picture that nothing is told of is no query
    ways: list[tuple[str, Tensor, Tensor, Tensor, Match]] = [
        ("text→image", first.T, told, shown, lambda q, g: embedder.match(features[g], read.ids[q])),
        (
            "image→text",
            first[asking],
            shown[asking],
            told,
            lambda q, g: embedder.match(features[asking[q]], read.ids[g]),
        ),
    ]
    scores = []
    for name, near, asked, held, match in ways:
        rank = reranked(near, asked, held, match, most)
        belong = (held == asked[:, None]).sum(1)
        scores += Ranks(f"{name}, matched", rank.double(), asked, belong, len(held)).scores()
    return scores
