"""Retrieval metrics: rank of the first match of each query in a gallery, recall@k and median rank.

Q queries, G gallery, N images, M texts, K categories, E embedding width
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.contrastive_embedder import truncate_embeddings
from vitrail.evals.scores import NO_SUBSET, Proportion, Score
from vitrail.objectives.query_losses import max_query_similarity

TILE_SIZE = 2048  # queries and gallery items per score tile
RESAMPLES = 1000
RECALL_CUTOFFS = (1, 5, 10)


def first_match_ranks(
    queries: Tensor, gallery: Tensor, query_ids: Tensor, gallery_ids: Tensor, *, tile: int = TILE_SIZE
) -> Tensor:
    """Rank (Q,), from 1, of the first gallery item that matches each query.

    queries (Q, E) and gallery (G, E); items match if their ids are equal. One of the two may have several vectors per
    item, of which the nearest counts. A non-match with an equal score counts half, so that a model with constant
    embeddings is at chance level.
    """
    first_ranks = torch.empty(len(queries), dtype=torch.float64)
    for start in range(0, len(queries), tile):
        rows = slice(start, start + tile)
        # Two passes over the same tiles, to avoid storing all scores.
        best = torch.full((len(queries[rows]),), -math.inf)
        for score, is_match in _iter_score_tiles(queries[rows], gallery, query_ids[rows], gallery_ids, tile):
            best = torch.maximum(best, score.masked_fill(~is_match, -math.inf).amax(1))
        if best.isinf().any():
            unmatched = start + int(best.isinf().nonzero()[0])
            raise DataError(f"query {unmatched} has no match in the gallery", "remove the query")
        num_ahead = torch.zeros(len(best), dtype=torch.float64)
        for score, is_match in _iter_score_tiles(queries[rows], gallery, query_ids[rows], gallery_ids, tile):
            is_nearer, is_equal = (score > best[:, None]) & ~is_match, (score == best[:, None]) & ~is_match
            num_ahead += is_nearer.sum(1) + is_equal.sum(1) / 2
        first_ranks[rows] = 1 + num_ahead
    return first_ranks


def _iter_score_tiles(
    queries: Tensor, gallery: Tensor, query_ids: Tensor, gallery_ids: Tensor, tile: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores and matches (q, g), one tile of the gallery at a time."""
    for start in range(0, len(gallery), tile):
        columns = slice(start, start + tile)
        yield _similarity(queries, gallery[columns]), query_ids[:, None] == gallery_ids[columns]


def _similarity(queries: Tensor, gallery: Tensor) -> Tensor:
    """Similarity (q, g) of queries and gallery items."""
    if queries.ndim == 3:
        return max_query_similarity(queries, gallery)
    return max_query_similarity(gallery, queries).T if gallery.ndim == 3 else queries @ gallery.T


class RetrievalRanks(NamedTuple):
    """Ranks of the first match of each query."""

    name: str
    ranks: Tensor  # (Q,)
    query_ids: Tensor  # (Q,) id of each query
    num_matches: Tensor  # (Q,) number of matches in the gallery
    gallery_size: int

    def select(self, rows: Tensor) -> "RetrievalRanks":
        """Select queries (Q,) bool; the gallery stays complete."""
        return RetrievalRanks(
            self.name, self.ranks[rows], self.query_ids[rows], self.num_matches[rows], self.gallery_size
        )

    def compute_scores(
        self,
        cutoffs: tuple[int, ...] = RECALL_CUTOFFS,
        *,
        with_median: bool = True,
        subset: Mapping[str, str | int] = NO_SUBSET,
    ) -> list[Score]:
        """Recall@k for every k below the gallery size, and the median rank."""
        cutoffs, G = tuple(k for k in cutoffs if k < self.gallery_size), self.gallery_size
        recalls, medians = bootstrap_intervals(self.ranks, self.query_ids, cutoffs)
        scores = []
        for k, interval in zip(cutoffs, recalls, strict=True):
            value = float((self.ranks <= k).double().mean())
            baselines = {"chance": chance_recall(self.num_matches, G, k)}
            scores.append(Score(f"{self.name}, recall@{k}", value, interval, len(self.ranks), baselines, subset=subset))
        if with_median:
            value, baselines = float(self.ranks.median()), {"chance": float(_chance_median_rank(self.num_matches, G))}
            name = f"{self.name}, median rank"
            scores.append(
                Score(name, value, medians, len(self.ranks), baselines, subset, unit="rank", higher_is_better=False)
            )
        return scores


class RetrievalDirection(NamedTuple):
    """Queries and their gallery, such as texts that search images; equal ids match."""

    name: str
    queries: Tensor  # (Q, E)
    gallery: Tensor  # (G, E)
    query_ids: Tensor  # (Q,)
    gallery_ids: Tensor  # (G,)
    query_categories: Tensor | None = None  # (Q, K) bool: categories of the queries

    def select_queries(self, rows: Tensor) -> "RetrievalDirection":
        """Select queries (Q,) bool; the gallery stays complete."""
        kinds = None if self.query_categories is None else self.query_categories[rows]
        return RetrievalDirection(
            self.name, self.queries[rows], self.gallery, self.query_ids[rows], self.gallery_ids, kinds
        )

    def truncate(self, width: int) -> "RetrievalDirection":
        queries, gallery = truncate_embeddings(self.queries, width), truncate_embeddings(self.gallery, width)
        return RetrievalDirection(self.name, queries, gallery, self.query_ids, self.gallery_ids, self.query_categories)

    def compute_ranks(self) -> RetrievalRanks:
        Q, G = len(self.queries), len(self.gallery)
        if not Q or not G:
            raise DataError(f"{self.name}: {Q} queries and a gallery of {G}", "exclude fewer categories")
        first_ranks = first_match_ranks(self.queries, self.gallery, self.query_ids, self.gallery_ids)
        ids, id_counts = self.gallery_ids.unique(return_counts=True)
        return RetrievalRanks(
            self.name, first_ranks, self.query_ids, id_counts[torch.searchsorted(ids, self.query_ids)], G
        )


def score_retrieval(
    name: str,
    queries: Tensor,
    gallery: Tensor,
    query_ids: Tensor,
    gallery_ids: Tensor,
    *,
    cutoffs: tuple[int, ...] = RECALL_CUTOFFS,
) -> list[Score]:
    """Score retrieval: recall@k for every k below the gallery size, and the median rank."""
    return RetrievalDirection(name, queries, gallery, query_ids, gallery_ids).compute_ranks().compute_scores(cutoffs)


def build_directions(
    images: Tensor, texts: Tensor, image_ids: Tensor, text_ids: Tensor, image_categories: Tensor | None = None
) -> list[RetrievalDirection]:
    """Build the retrieval directions between images (N, E) and texts (M, E) with ids; equal ids match.

    Images without text are not queries. If images have several texts, the first text also queries for the others.
    `image_categories` (N, K) are bool; a text has the categories of all its images.
    """
    query_categories = None if image_categories is None else text_categories(image_categories, image_ids, text_ids)
    directions = [RetrievalDirection("text→image", texts, images, text_ids, image_ids, query_categories)]
    directions.append(
        RetrievalDirection("image→text", images, texts, image_ids, text_ids, image_categories).select_queries(
            torch.isin(image_ids, text_ids)
        )
    )
    order = text_ids.argsort(stable=True)
    first = torch.ones_like(text_ids, dtype=torch.bool)
    first[order[1:]] = text_ids[order[1:]] != text_ids[order[:-1]]  # the first text of each id
    has_other_texts = first & torch.isin(text_ids, text_ids[~first])
    if has_other_texts.any():
        directions.append(
            RetrievalDirection(
                "text→text", texts, texts[~first], text_ids, text_ids[~first], query_categories
            ).select_queries(has_other_texts)
        )
    return directions


def text_categories(image_categories: Tensor, image_ids: Tensor, text_ids: Tensor) -> Tensor:
    """Categories (M, K) of texts: the union over all images (N, K) with the id of the text."""
    columns = [torch.isin(text_ids, image_ids[column]) for column in image_categories.unbind(1)]
    return torch.stack(columns, 1) if columns else image_categories.new_zeros(len(text_ids), 0)


def score_directions(
    directions: Sequence[RetrievalDirection],
    *,
    cutoffs: tuple[int, ...] = RECALL_CUTOFFS,
    with_median: bool = True,
    widths: Sequence[int] = (),
    excluded: Sequence[int] = (),
    categories: Sequence[str] | None = None,
    subset: Mapping[str, str | int] = NO_SUBSET,
) -> list[Score]:
    """Score several directions.

    widths      embedding widths to score; default: the full width
    excluded    indices of categories; queries that have only these categories are removed
    categories  names of categories; adds recall@1 of each category, in the complete gallery
    """
    scores = []
    for direction in directions:
        if excluded:
            assert direction.query_categories is not None
            is_excluded = torch.zeros(direction.query_categories.shape[1], dtype=torch.bool)
            is_excluded[list(excluded)] = True
            # Queries without a category stay.
            direction = direction.select_queries(
                direction.query_categories[:, ~is_excluded].any(1) | ~direction.query_categories.any(1)
            )
        for width in widths or (None,):
            at_width = subset if width is None else {**subset, "width": width}
            direction_ranks = (direction if width is None else direction.truncate(width)).compute_ranks()
            scores += direction_ranks.compute_scores(cutoffs, with_median=with_median, subset=at_width)
            for k, category in enumerate(categories or ()):
                assert direction.query_categories is not None
                if k not in excluded and (rows := direction.query_categories[:, k]).any():
                    scores += direction_ranks.select(rows).compute_scores(
                        (1,), with_median=False, subset={**at_width, "category": category}
                    )
    return scores


def bootstrap_intervals(
    ranks: Tensor, query_ids: Tensor, cutoffs: tuple[int, ...]
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """95 % bootstrap intervals of recall@k and of the median rank, with fixed draws.

    The bootstrap draws ids instead of queries, because captions of one image are dependent. If all queries succeed or
    all fail, it is replaced by Wilson's interval over the ids.
    """
    ranks, order = ranks.sort()
    group = query_ids.unique(return_inverse=True)[1][order]
    n, generator = int(group.max()) + 1, torch.Generator().manual_seed(0)
    hits = torch.stack([ranks <= k for k in cutoffs]).double() if cutoffs else ranks.new_zeros(0, len(ranks))
    recalls, medians = [], []
    for _ in range(RESAMPLES):
        weight = torch.randint(n, (n,), generator=generator).bincount(minlength=n)[group].double()
        recalls.append(hits @ weight / weight.sum())
        total = weight.cumsum(0)
        medians.append(ranks[torch.searchsorted(total, total[-1] / 2)])
    recall_intervals = [_central_interval(column) for column in torch.stack(recalls).unbind(1)]
    for i, row in enumerate(hits):
        if row.all() or not row.any():
            recall_intervals[i] = Proportion(n if row.all() else 0, n).interval
    return recall_intervals, _central_interval(torch.stack(medians))


def _central_interval(samples: Tensor) -> tuple[float, float]:
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high


def chance_recall(num_matches: Tensor, gallery_size: int, k: int) -> float:
    """Recall@k of a random order with `num_matches` (Q,) matches per query: 1 − C(G−r, k)/C(G, k)."""
    matches, num_queries = num_matches.unique(return_counts=True)
    non_matches, G = gallery_size - matches.double(), torch.tensor(gallery_size, dtype=torch.float64)
    log_miss = (
        (non_matches + 1).lgamma()
        - (non_matches - k + 1).clamp(min=1).lgamma()
        - (G + 1).lgamma()
        + (G - k + 1).lgamma()
    )
    return float(((1 - log_miss.exp() * (non_matches >= k)) * num_queries).sum() / len(num_matches))


def _chance_median_rank(num_matches: Tensor, gallery_size: int) -> int:
    """Median rank of a random order: the first k with a recall of at least 0.5."""
    return 1 + bisect_left(range(1, gallery_size + 1), 0.5, key=lambda k: chance_recall(num_matches, gallery_size, k))
