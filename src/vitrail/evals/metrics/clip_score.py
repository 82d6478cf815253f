"""CLIPScore, and RefCLIPScore with reference captions, from embeddings of a contrastive model.

Embeddings are normalised here in float64. The original program normalises in the model's precision, and differently
with numpy before 1.21; in float32 both agree up to rounding.

N captions, M references of one caption, E embedding width
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.image_feature_extractor import LazyImage
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable

CLIP_SCORE_PREFIX = "A photo depicts "  # prefix of all captions
CLIP_SCORE_WEIGHT = 2.5  # scales the range of CLIP ViT-B/32 to about 0 … 1


def clip_score(images: Tensor, captions: Tensor, *, weight: float = CLIP_SCORE_WEIGHT) -> Tensor:
    """CLIPScore (N,) of embeddings (N, E) and (N, E): cosine clamped at 0, times `weight`."""
    if images.shape != captions.shape or images.ndim != 2 or not len(images):
        raise DataError(
            f"captions {tuple(captions.shape)} and images {tuple(images.shape)} do not match",
            "pass one embedding of each",
        )
    return weight * (_normalize(images) * _normalize(captions)).sum(1).clamp(min=0)


def reference_similarity(captions: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Cosine (N,) of each caption (N, E) and its nearest reference (M, E), clamped at 0 as in the paper.

    The original program does not clamp here.
    """
    if len(references) != len(captions) or not len(captions):
        raise DataError(f"references of {len(references):,} images for {len(captions):,} captions", "pass one set each")
    missing = next((n for n, several in enumerate(references) if not len(several)), None)
    if missing is not None:
        raise DataError(f"image {missing} has no reference", "remove it")
    pairs = zip(_normalize(captions), references, strict=True)
    return torch.stack([(_normalize(several) @ caption).max() for caption, several in pairs]).clamp(min=0)


def ref_clip_score(clip: Tensor, reference: Tensor) -> Tensor:
    """RefCLIPScore (N,): harmonic mean of `clip_score` and `reference_similarity`; 0 if either is 0."""
    total = clip + reference
    return torch.where(total > 0, 2 * clip * reference / total.clamp(min=1e-300), 0.0)


def _normalize(x: Tensor) -> Tensor:
    return F.normalize(x.double(), dim=1)


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


MAX_SCORES = {"CLIPScore": CLIP_SCORE_WEIGHT, "RefCLIPScore": 2 * CLIP_SCORE_WEIGHT / (CLIP_SCORE_WEIGHT + 1)}
"""Largest possible scores."""


class ClipCaptionScorer:
    """Embeds the images and reference captions of samples once, to score any number of captions of these images."""

    def __init__(self, embedder: ContrastiveEmbedder, samples: Sequence[Sample]):
        images: list[LazyImage] = []
        captions: list[str] = []
        self.row_of_sample: dict[str, int] = {}
        for n, sample in enumerate(samples):
            if len(sample.images) != 1 or not sample.captions:
                raise DataError(
                    f"sample {sample.id!r} has {len(sample.images)} images and {len(sample.captions)} captions",
                    "CLIPScore needs one image and at least one caption",
                )
            images.append(sample.images[0])
            captions += [CLIP_SCORE_PREFIX + caption for caption in sample.captions]
            self.row_of_sample[sample.id] = n
        self.embedder = embedder
        self.image_embeddings = embedder.embed_images(images)  # (N, E)
        self.reference_embeddings = embedder.embed_texts(captions).split([len(sample.captions) for sample in samples])

    def score_captions(self, table: ScoringTable, answers: AnswerTexts) -> dict[str, ItemScores]:
        """Compute CLIPScore and RefCLIPScore of each caption."""
        unknown = next((sample.id for sample in table.samples if sample.id not in self.row_of_sample), None)
        if unknown is not None:
            raise DataError(f"image {unknown!r} was not embedded", "construct the scorer with the samples to be scored")
        rows = [self.row_of_sample[sample.id] for sample in table.samples]
        captions = self.embedder.embed_texts([CLIP_SCORE_PREFIX + text for text in answers])
        clip = clip_score(self.image_embeddings[rows], captions)
        reference = reference_similarity(captions, [self.reference_embeddings[row] for row in rows])
        return {"CLIPScore": clip.tolist(), "RefCLIPScore": ref_clip_score(clip, reference).tolist()}
