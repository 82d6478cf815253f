"""Embed images and texts for the search index with a contrastive model.

Shapes: N images or texts, E embedding width.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.sources.fetch import log_to_stderr
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.pipelines.embedding import EmbeddingPipeline
from vitrail.processing.image_preprocessor import ImagePreprocessor


class ContrastiveEmbedder:
    """An `EmbeddingPipeline` as an `ImageEmbedder` of the index. Truncated texts are logged."""

    def __init__(self, pipeline: EmbeddingPipeline, log: Callable[[str], Any] = log_to_stderr):
        self.pipeline, self.log = pipeline, log
        self.key = _compute_key(pipeline.model, pipeline.preprocessing)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare one image for `embed_images`."""
        return self.pipeline.preprocessing(image)

    def embed_images(self, images: Sequence[Tensor]) -> np.ndarray:
        """Return unit vectors (N, E) of preprocessed images."""
        return self.pipeline.encode_pixels(images).numpy()

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors (N, E) of texts."""
        before = self.pipeline.num_truncated
        vectors = self.pipeline.encode_texts(texts)
        if truncated := self.pipeline.num_truncated - before:
            context = self.pipeline.model.config.text.context_length
            self.log(f"{truncated} text{'s' * (truncated > 1)} exceeded {context} tokens and were truncated")
        return vectors.numpy()


def load_embedder(model: str, *, device: str | None = None) -> ContrastiveEmbedder:
    """Load the embedder of a CLIP or SigLIP model from a folder or a hub id."""
    return ContrastiveEmbedder(EmbeddingPipeline.load(model, device=device))


def _compute_key(model: ContrastiveModel, preprocessing: ImagePreprocessor) -> str:
    """Hash everything an image vector depends on: the tower's config, its weights and the preprocessing."""
    digest = hashlib.sha256(json.dumps(model.config.image.to_dict(), sort_keys=True).encode())
    digest.update(repr(preprocessing).encode())
    for part in (model.image, model.image_projection):
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]
