"""Embeds images and texts with a Q-Former: several vectors per image, one per text, and a matching score per pair.

N images, M texts, P pairs, L tokens, n features of an image, D feature width, Q queries, E embedding width
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.evals.contrastive_embedder import pad_token_ids
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor, LazyImage, to_finite_cpu
from vitrail.models.text_qformer import TextQFormer
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.tokenizer import Tokenizer


class TextEmbeddings(NamedTuple):
    """Token ids of texts and their embeddings."""

    ids: Tensor  # (M, L), padded with −1
    embeddings: Tensor  # (M, E), of length 1


class QFormerEmbedder(ImageFeatureExtractor):
    """Computes image and text embeddings of a Q-Former, of length 1, in float32 on the CPU."""

    model: TextQFormer
    supports_matching = True

    def __init__(
        self, model: TextQFormer, preprocessing: ImagePreprocessor, tokenizer: Tokenizer, *, batch_size: int = 256
    ):
        super().__init__(model, preprocessing, batch_size=batch_size)
        self.tokenizer = tokenizer

    def embed_images(self, images: Sequence[LazyImage]) -> Tensor:
        """(N, Q, E)"""
        return self.embed_features(self.encode_images(images))

    def encode_images(self, images: Sequence[LazyImage]) -> Tensor:
        """Vision features (N, n, D) of images."""
        return self._encode_images(images, self.model.forward_features)

    @torch.no_grad()
    def embed_features(self, features: Tensor) -> Tensor:
        """Query embeddings (N, Q, E) of vision features (N, n, D)."""
        parts = [to_finite_cpu(self.model.qformer(batch.to(self._weight))) for batch in features.split(self.batch_size)]
        return F.normalize(torch.cat(parts), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(M, E)"""
        return self.encode_texts(texts).embeddings

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> TextEmbeddings:
        config = self.model.config
        ids, num_truncated = pad_token_ids(
            texts, self.tokenizer, ([config.cls_token_id], [config.eos_token_id], -1), config.context_length
        )
        if int(ids.max()) >= config.vocab_size:
            raise CheckpointError(
                f"the tokenizer returns id {int(ids.max())}, but the model has a vocabulary of {config.vocab_size}",
                "use the tokenizer that the model was trained with",
            )
        self.num_truncated += num_truncated
        parts = [to_finite_cpu(self.model.encode_text(batch.to(self.device))) for batch in ids.split(self.batch_size)]
        return TextEmbeddings(ids, F.normalize(torch.cat(parts), dim=-1))

    @torch.no_grad()
    def compute_match_logits(self, features: Tensor, ids: Tensor) -> Tensor:
        """Matching logits (P,) of pairs of vision features (P, n, D) and token ids (P, L)."""
        pairs = zip(features.split(self.batch_size), ids.split(self.batch_size), strict=True)
        return torch.cat(
            [
                to_finite_cpu(self.model.compute_match_logits(a.to(self._weight), b.to(self.device))[:, 1])
                for a, b in pairs
            ]
        )

    @property
    def _weight(self) -> Tensor:
        return self.model.embed.weight
