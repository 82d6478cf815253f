"""Data sets through a Q-Former that reads: several vectors a picture, one a text, and how well a pair matches.

N pictures, M texts, P pairs, L tokens, n features of a picture, D their width, Q queries, E width of the embedding
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.evals.contrastive import write_ids
from vitrail.evals.viewer import Picture, Viewer, finite
from vitrail.models.qformer import TextQFormer
from vitrail.processing.preprocessing import Preprocessing
from vitrail.processing.text import Tokenizer


class Read(NamedTuple):
    ids: Tensor  # (M, L), −1 where padded
    embeddings: Tensor  # (M, E), of length 1


class QueryEmbedder(Viewer):
    """What an `Embedder` is to a contrastive model: embeddings of length 1 on the CPU, in float32."""

    model: TextQFormer

    def __init__(self, model: TextQFormer, preprocessing: Preprocessing, tokenizer: Tokenizer, *, batch: int = 256):
        super().__init__(model, preprocessing, batch=batch)
        self.tokenizer = tokenizer
        self.cut = 0  # texts that were longer than it reads, so far

    def images(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, Q, E)"""
        return self.embedded(self.seen(pictures))

    def seen(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, n, D) what the tower makes of pictures"""
        return self._pictures(pictures, self.model.features)

    @torch.no_grad()
    def embedded(self, features: Tensor) -> Tensor:
        """(N, n, D) → (N, Q, E)"""
        parts = [finite(self.model.qformer(some.to(self._weight))) for some in features.split(self.batch)]
        return F.normalize(torch.cat(parts), dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(M, E)"""
        return self.read(texts).embeddings

    @torch.no_grad()
    def read(self, texts: Sequence[str]) -> Read:
        config = self.model.config
        ids, cut = write_ids(texts, self.tokenizer, ([config.cls], [config.eos], -1), config.context)
        if int(ids.max()) >= config.vocab:
            raise CheckpointError(
                f"the tokenizer gives id {int(ids.max())}, the model has {config.vocab}",
                "use the tokenizer that the model was trained with",
            )
        self.cut += cut
        parts = [finite(self.model.encode_text(some.to(self.device))) for some in ids.split(self.batch)]
        return Read(ids, F.normalize(torch.cat(parts), dim=-1))

    @torch.no_grad()
    def match(self, features: Tensor, ids: Tensor) -> Tensor:
        """Pairs of what was `seen` (P, n, D) and `read` (P, L) → (P,) the logit that they belong together"""
        pairs = zip(features.split(self.batch), ids.split(self.batch), strict=True)
        return torch.cat([finite(self.model.match(a.to(self._weight), b.to(self.device))[:, 1]) for a, b in pairs])

    @property
    def _weight(self) -> Tensor:
        return self.model.embed.weight
