"""Retrieval with reranking, as in BLIP-2: the top candidates by embedding are reordered with matching scores.

Q queries, G gallery, K reranked candidates, N images, M texts
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.evals.image_feature_extractor import LazyImage
from vitrail.evals.qformer_embedder import QFormerEmbedder
from vitrail.evals.scores import Score
from vitrail.evals.suites.image_collections import CaptionGallery
from vitrail.evals.suites.retrieval_metrics import RetrievalRanks
from vitrail.objectives.query_losses import max_query_similarity

MATCH_BATCH_SIZE = 4096  # pairs per matching batch

MatchFn = Callable[[Tensor, Tensor], Tensor]
"""Indices of queries (P,) and gallery items (P,) → matching scores (P,)."""


def rerank_ranks(similarity: Tensor, query_ids: Tensor, gallery_ids: Tensor, match: MatchFn, top_k: int) -> Tensor:
    """Rank (Q,), from 1, of the first match of each query after reranking.

    The `top_k` candidates by `similarity` (Q, G) are ordered by similarity plus matching score; the others follow in
    their original order. A non-match with an equal score counts half.
    """
    top = similarity.topk(min(top_k, similarity.shape[1]), dim=1)
    is_match = gallery_ids[top.indices] == query_ids[:, None]  # (Q, K)
    rows = torch.arange(len(similarity))[:, None].expand_as(top.indices).flatten()
    pairs = zip(rows.split(MATCH_BATCH_SIZE), top.indices.flatten().split(MATCH_BATCH_SIZE), strict=True)
    match_scores = torch.cat([match(row, column) for row, column in pairs]).view_as(top.values)
    reranked_rank = _first_match_rank(top.values + match_scores, is_match)
    return torch.where(is_match.any(1), reranked_rank, _first_match_rank(similarity, gallery_ids == query_ids[:, None]))


def _first_match_rank(score: Tensor, belongs: Tensor) -> Tensor:
    """Rank (Q,) of the best match, from scores and labels (Q, G)."""
    best = score.masked_fill(~belongs, -torch.inf).amax(1, keepdim=True)
    return 1 + ((score > best) & ~belongs).sum(1) + ((score == best) & ~belongs).sum(1) / 2


def evaluate_reranked_retrieval(
    embedder: QFormerEmbedder, images: Sequence[LazyImage], gallery: CaptionGallery, top_k: int
) -> list[Score]:
    """Evaluate reranked retrieval between images and captions, in both directions."""
    if top_k < 1:
        raise ConfigError(f"{top_k} candidates to rerank", "set at least 1")
    image_ids, text_ids = gallery.image_ids, gallery.caption_ids
    text_inputs = embedder.encode_texts(gallery.captions)
    features = embedder.encode_images(images)
    similarity = max_query_similarity(embedder.embed_features(features), text_inputs.embeddings)  # (N, M)
    queried = torch.isin(image_ids, text_ids).nonzero()[:, 0]  # images without text are not queries
    directions: list[tuple[str, Tensor, Tensor, Tensor, MatchFn]] = [
        (
            "text→image",
            similarity.T,
            text_ids,
            image_ids,
            lambda q, g: embedder.compute_match_logits(features[g], text_inputs.ids[q]),
        ),
        (
            "image→text",
            similarity[queried],
            image_ids[queried],
            text_ids,
            lambda q, g: embedder.compute_match_logits(features[queried[q]], text_inputs.ids[g]),
        ),
    ]
    scores = []
    for name, direction_similarity, query_ids, gallery_ids, match in directions:
        rank = rerank_ranks(direction_similarity, query_ids, gallery_ids, match, top_k)
        num_matches = (gallery_ids == query_ids[:, None]).sum(1)
        scores += RetrievalRanks(
            f"{name}, matched", rank.double(), query_ids, num_matches, len(gallery_ids)
        ).compute_scores()
    return scores
