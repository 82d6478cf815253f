"""Retrieval over an image collection: by names or keywords, per language, category and embedding width."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder, truncate_embeddings
from vitrail.evals.qformer_embedder import QFormerEmbedder
from vitrail.evals.scores import Score
from vitrail.evals.suites.image_collections import NO_TEXT, ImageCollection
from vitrail.evals.suites.retrieval_metrics import (
    RECALL_CUTOFFS,
    RetrievalDirection,
    build_directions,
    score_directions,
    text_categories,
)

COUNT_NAMES = ("images", "captions", "names", "phrases")


class RetrievalOptions(NamedTuple):
    """Options of the queries. Images of `exclude_category` are not queried, but stay in the gallery."""

    texts: Literal["names", "keywords"] = "names"
    language: str | None = None
    all_languages: bool = False
    exclude_category: tuple[str, ...] = ()
    by_category: bool = False
    matryoshka_width: tuple[int, ...] = ()


class RetrievalResult(NamedTuple):
    """Retrieval scores and the sizes of gallery and queries."""

    scores: list[Score]
    counts: dict[str, Any]  # sizes of the gallery, queries and excluded images; per language if there are several

    def __str__(self) -> str:
        """Such as `gallery: 20 images and 18 captions; queried images: 15, excluded: 5 of flags`."""
        if "languages" in self.counts:
            each = {language: sum(count["excluded"].values()) for language, count in self.counts["languages"].items()}
            left = ", ".join(f"{language} {n:,}" for language, n in each.items() if n)
            return f"{len(each)} languages" + (f"; images excluded from the queries: {left}" if left else "")
        size = " and ".join(f"{self.counts[name]:,} {name}" for name in COUNT_NAMES if name in self.counts)
        line = f"gallery: {size}; queried images: {self.counts['queries']:,}"
        left = self.counts["excluded"].items()
        why = [f"{n:,} {'without a text' if reason == NO_TEXT else f'of {reason}'}" for reason, n in left]
        return f"{line}, excluded: {', '.join(why)}" if why else line


def evaluate_collection(
    embedder: ContrastiveEmbedder | QFormerEmbedder, collection: ImageCollection, options: RetrievalOptions
) -> RetrievalResult:
    """Evaluate retrieval over a collection. Images are embedded once for all languages, and not at all for keywords."""
    languages = _query_languages(collection, options)
    excluded = collection.category_indices(options.exclude_category)
    if options.by_category and not collection.categories:
        raise DataError(f"the images of {collection.name} have no categories", "remove --by-category")
    several_languages = options.all_languages
    scores: list[Score] = []
    counts, pictures = {}, None
    for language in languages:
        if options.texts == "keywords":
            words = collection.keywords(language)
            image_ids, text_ids = words.image_ids, torch.arange(len(words.phrases))
            text_embeddings = _check_widths(embedder.embed_texts(words.phrases), options.matryoshka_width)
            name_embeddings = embedder.embed_texts(words.names)
            directions = [
                RetrievalDirection(
                    "keywords→name",
                    text_embeddings,
                    name_embeddings,
                    text_ids,
                    words.name_ids,
                    text_categories(collection.category_table, image_ids, text_ids),
                )
            ]
            sizes = {"names": len(name_embeddings), "phrases": len(text_embeddings)}
        else:
            captions = collection.gallery(language)
            image_ids, text_ids = captions.image_ids, captions.caption_ids
            text_embeddings = _check_widths(embedder.embed_texts(captions.captions), options.matryoshka_width)
            pictures = embedder.embed_images(collection.images) if pictures is None else pictures
            directions = build_directions(pictures, text_embeddings, image_ids, text_ids, collection.category_table)
            sizes = {"images": len(pictures), "captions": len(text_embeddings)}
        scores += score_directions(
            directions,
            cutoffs=(1,) if several_languages else RECALL_CUTOFFS,
            with_median=not several_languages,
            widths=options.matryoshka_width,
            excluded=excluded,
            categories=collection.categories if options.by_category else None,
            subset={"language": str(language)} if several_languages else {},
        )
        num_excluded = collection.count_excluded(image_ids, text_ids, options.exclude_category)
        counts[language] = {**sizes, "queries": len(image_ids) - sum(num_excluded.values()), "excluded": num_excluded}
    return RetrievalResult(scores, {"languages": counts} if several_languages else counts[options.language])


def _query_languages(collection: ImageCollection, options: RetrievalOptions) -> list[str | None]:
    if not options.all_languages:
        return [options.language]
    if options.language is not None:
        raise ConfigError(f"--all-languages and language {options.language!r} are both set", "remove one of the two")
    if not collection.languages:
        raise DataError(f"the images of {collection.name} have names in one language only", "remove --all-languages")
    return list(collection.languages)


def _check_widths(embeddings: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Raise an error for invalid widths before images are embedded."""
    for width in widths:
        truncate_embeddings(embeddings[:1], width)
    return embeddings
