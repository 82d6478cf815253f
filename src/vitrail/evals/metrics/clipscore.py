"""Captions beside their pictures, by a contrastive model: CLIPScore, and RefCLIPScore with people's captions too.

Both take embeddings, of any length: they are brought to length 1 in float64 here. The original does so in the precision
that the model gives, half on a GPU, and differently with numpy before 1.21; in float32 they agree to rounding.

N captions, M references of one, E width of the embedding
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError

PREFIX = "A photo depicts "  # what captions are read behind
WEIGHT = 2.5  # stretches what CLIP ViT-B/32 gives to about 0 … 1


def clip_score(pictures: Tensor, captions: Tensor, *, weight: float = WEIGHT) -> Tensor:
    """(N, E), (N, E) → (N,): the cosine of each caption and its picture, 0 where it is below, times `weight`."""
    if pictures.shape != captions.shape or pictures.ndim != 2 or not len(pictures):
        raise DataError(
            f"captions {tuple(captions.shape)} beside pictures {tuple(pictures.shape)}", "give one embedding for each"
        )
    return weight * (_unit(pictures) * _unit(captions)).sum(1).clamp(min=0)


def reference_score(captions: Tensor, references: Sequence[Tensor]) -> Tensor:
    """(N, E), N times (M, E) → (N,): the cosine of each caption and the nearest of its references, 0 where it is
    below, as the paper has it; the original program leaves that out here."""
    if len(references) != len(captions) or not len(captions):
        raise DataError(f"references of {len(references):,} pictures beside {len(captions):,} captions", "give both")
    bare = next((n for n, several in enumerate(references) if not len(several)), None)
    if bare is not None:
        raise DataError(f"picture {bare} has no reference", "leave it out")
    pairs = zip(_unit(captions), references, strict=True)
    return torch.stack([(_unit(several) @ caption).max() for caption, several in pairs]).clamp(min=0)


def ref_clip_score(clip: Tensor, reference: Tensor) -> Tensor:
    """(N,), (N,) → (N,): the harmonic mean of `clip_score` and `reference_score`; 0 where either is."""
    both = clip + reference
    return torch.where(both > 0, 2 * clip * reference / both.clamp(min=1e-300), 0.0)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.double(), dim=1)
