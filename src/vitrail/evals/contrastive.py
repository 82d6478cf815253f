"""Data sets through a contrastive model: pictures by its own preprocessing, texts by its own tokenizer.

N pictures or texts, L tokens, E width of the embedding
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.encoders.text import TextConfig, frame
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.viewer import Picture, Viewer, finite
from vitrail.models.clip import Contrastive
from vitrail.processing.preprocessing import Preprocessing
from vitrail.processing.text import Tokenizer


def write_ids(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    frame: tuple[Sequence[int], Sequence[int], int],
    context: int,
    *,
    whole: bool = False,
) -> tuple[Tensor, int]:
    """ids (N, L) with what stands before and behind each text and fills it up, and how many texts were cut to fit the
    context; their ends stay. Filled up to the `whole` of it, or to the longest."""
    front, back, fill = frame
    rows, room, cut = [], context - len(front) - len(back), 0
    for row in tokenizer.encode_batch(texts):
        cut += len(row) > room
        rows.append([*front, *row[:room], *back])
    length = context if whole else max(map(len, rows), default=0)
    ids = torch.tensor([row + [fill] * (length - len(row)) for row in rows], dtype=torch.int64)
    return ids.view(len(rows), length), cut


def to_ids(texts: Sequence[str], tokenizer: Tokenizer, config: TextConfig) -> tuple[Tensor, int]:
    """ids (N, L), and how many texts were cut because the tower reads no longer ones.

    A text ends with its end token, also one that was cut. A tower that reads both ways sees the padding, so its texts
    are filled up to its whole context, as in SigLIP's training; one that reads forwards never does.
    """
    whole = not config.causal or config.pool == "last"
    ids, cut = write_ids(texts, tokenizer, frame(tokenizer, config), config.context, whole=whole)
    if ids.numel() and int(ids.max()) >= config.vocab:
        raise CheckpointError(
            f"the tokenizer gives id {int(ids.max())}, the text tower has {config.vocab}",
            "use the tokenizer that the model was trained with",
        )
    return ids, cut


class Embedder(Viewer):
    """A contrastive model ready to read: pictures and texts → embeddings of length 1 on the CPU, in float32."""

    model: Contrastive

    def __init__(
        self, model: Contrastive, preprocessing: Preprocessing, tokenizer: Tokenizer | None = None, *, batch: int = 256
    ):
        super().__init__(model, preprocessing, batch=batch)
        self.tokenizer = tokenizer
        self.cut = 0  # texts that were longer than the tower reads, so far

    def images(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, E)"""
        return F.normalize(self._pictures(pictures, self.model.encode_image), dim=-1)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """(N, E)"""
        if self.tokenizer is None:
            raise CheckpointError("the model came without a tokenizer", "put its tokenizer.json beside it")
        parts = []
        for some in self._batches(texts, "reading texts"):
            ids, cut = to_ids(some, self.tokenizer, self.model.config.text)
            self.cut += cut
            parts.append(finite(self.model.encode_text(ids.to(self.device))))
        return F.normalize(torch.cat(parts), dim=-1)


def narrowed(x: Tensor, width: int) -> Tensor:
    """(N, E) → (N, width): the first numbers of each embedding, of length 1 again (Matryoshka)."""
    if not 1 <= width <= x.shape[-1]:
        raise ConfigError(f"a width of {width}, of embeddings of {x.shape[-1]} numbers", f"give 1 … {x.shape[-1]}")
    return F.normalize(x[..., :width], dim=-1)
