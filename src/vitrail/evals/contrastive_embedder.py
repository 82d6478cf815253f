"""Embeds images and texts with a contrastive model, using its own preprocessing and tokenizer.

N images or texts, L tokens, E embedding width
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.encoders.text_tower import TextTowerConfig, find_special_tokens
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor, LazyImage, to_finite_cpu
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.tokenizer import Tokenizer


def pad_token_ids(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    special_tokens: tuple[Sequence[int], Sequence[int], int],
    context_length: int,
    *,
    pad_to_context: bool = False,
) -> tuple[Tensor, int]:
    """Tokenize and pad texts; return ids (N, L) and the number of truncated texts.

    `special_tokens` are the prefix ids, suffix ids and padding id. Truncated texts keep their suffix. Texts are padded
    to the context length if `pad_to_context`, else to the longest.
    """
    prefix, suffix, padding_id = special_tokens
    rows, max_length, num_truncated = [], context_length - len(prefix) - len(suffix), 0
    for row in tokenizer.encode_batch(texts):
        num_truncated += len(row) > max_length
        rows.append([*prefix, *row[:max_length], *suffix])
    length = context_length if pad_to_context else max(map(len, rows), default=0)
    ids = torch.tensor([row + [padding_id] * (length - len(row)) for row in rows], dtype=torch.int64)
    return ids.view(len(rows), length), num_truncated


def tokenize_texts(texts: Sequence[str], tokenizer: Tokenizer, config: TextTowerConfig) -> tuple[Tensor, int]:
    """Tokenize texts for a text tower; return ids (N, L) and the number of truncated texts.

    Truncated texts keep their end token. Bidirectional towers attend to padding, so their texts are padded to the full
    context, as in SigLIP's training. Causal towers do not.
    """
    whole = not config.causal or config.pool == "last"
    ids, num_truncated = pad_token_ids(
        texts, tokenizer, find_special_tokens(tokenizer, config), config.context_length, pad_to_context=whole
    )
    if ids.numel() and int(ids.max()) >= config.vocab_size:
        raise CheckpointError(
            f"the tokenizer returns id {int(ids.max())}, but the text tower has a vocabulary of {config.vocab_size}",
            "use the tokenizer that the model was trained with",
        )
    return ids, num_truncated


class ContrastiveEmbedder(ImageFeatureExtractor):
    """Computes image and text embeddings of length 1, in float32 on the CPU."""

    model: ContrastiveModel

    def __init__(
        self,
        model: ContrastiveModel,
        preprocessing: ImagePreprocessor,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 256,
    ):
        super().__init__(model, preprocessing, batch_size=batch_size)
        self.tokenizer = tokenizer

    def embed_images(self, images: Sequence[LazyImage]) -> Tensor:
        """(N, E)"""
        return F.normalize(self._encode_images(images, self.model.encode_image), dim=-1)

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, E)"""
        if self.tokenizer is None:
            raise CheckpointError("the checkpoint has no tokenizer", "add its tokenizer.json to the folder")
        parts = []
        for batch in self._iter_batches(texts, "encoding texts"):
            ids, num_truncated = tokenize_texts(batch, self.tokenizer, self.model.config.text)
            self.num_truncated += num_truncated
            parts.append(to_finite_cpu(self.model.encode_text(ids.to(self.device))))
        return F.normalize(torch.cat(parts), dim=-1)


def truncate_embeddings(x: Tensor, width: int) -> Tensor:
    """Truncate embeddings (N, E) to (N, width) and normalise them again (Matryoshka)."""
    if not 1 <= width <= x.shape[-1]:
        raise ConfigError(f"width {width} is outside the embedding width {x.shape[-1]}", f"set 1 … {x.shape[-1]}")
    return F.normalize(x[..., :width], dim=-1)
