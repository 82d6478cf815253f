"""Pairs of pictures behind one prefix, and what a vision-language model's decoder makes of both: branches whose tokens
are a picture's.

F pictures, P pairs, N tokens of a picture, K of the prefix, D width
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.generate.seen import rows
from vitrail.models.vlm import VLM
from vitrail.stream import build, words


def couples(count: int, most: int, seed: int = 0) -> np.ndarray:
    """(P, 2) of so many pictures any two, each two once; of more than `most` pairs so many are drawn."""
    if count < 2 or most < 1:
        raise DataError(f"{count} pictures make no {most} pairs", "give at least two pictures, and ask for a pair")
    first, second = np.triu_indices(count, 1)
    kept = np.sort(np.random.default_rng(seed).permutation(len(first))[:most])
    return np.stack([first[kept], second[kept]], 1)


@torch.no_grad()
def pictured(
    model: VLM,
    pictures: Sequence[Image.Image],
    pairs: np.ndarray,
    *,
    prefix: Sequence[int] = (),
    question: Sequence[int] = (),
    length: int | None = None,
    batch: int = 16,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (P, N, D) of both pictures of each pair: what the head reads behind each of their tokens, or behind
    the first `length` of them. `prefix` stands before both; queries that are fused with a question are told it."""
    config, asked = model.config, torch.tensor(question, dtype=torch.long)
    for part in torch.as_tensor(pairs).split(batch):
        shown = model.prepare([pictures[i] for i in part.flatten().tolist()])  # (2P)
        if model.queries is not None:
            shown = shown._replace(questions=([asked],) * len(shown.shapes))
        lead = [words(prefix)] if len(prefix) else []
        streams = [build([*lead, *config.parts(shape)], config.rules) for shape in shown.shapes]
        counts = {len(stream) - len(prefix) for stream in streams}
        if len(counts) > 1:
            raise DataError(
                f"pictures of {min(counts)} to {max(counts)} tokens among pairs", "give pictures of one size"
            )
        [N] = counts
        if len(prefix) + N > config.decoder.context:
            raise ConfigError(
                f"{len(prefix)} + {N} tokens are more than the context of {config.decoder.context}",
                "make the prompt shorter",
            )
        states = model.hidden(rows(streams), shown)[:, len(prefix) :][:, :length]
        left, right = states.unflatten(0, (-1, 2)).unbind(1)
        yield left, right
