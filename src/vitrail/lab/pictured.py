"""Pairs of pictures behind one prefix, and what the decoder of a model that reads them makes of both: branches whose
tokens are a picture's.

F pictures, P pairs, N tokens of a picture, K of the prefix, D width
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.fit import Fit
from vitrail.errors import ConfigError, DataError
from vitrail.generate.seen import rows
from vitrail.models.unified import Unified
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
    model: VLM | Unified,
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
    for part in torch.as_tensor(pairs).split(batch):
        shown = [pictures[i] for i in part.flatten().tolist()]  # 2P
        found = _read(model, shown, prefix) if isinstance(model, Unified) else _seen(model, shown, prefix, question)
        left, right = found[:, :length].unflatten(0, (-1, 2)).unbind(1)
        yield left, right


def _seen(model: VLM, pictures: Sequence[Image.Image], prefix: Sequence[int], question: Sequence[int]) -> Tensor:
    """(2P, N, D)"""
    config, shown = model.config, model.prepare(pictures)
    if model.queries is not None:
        shown = shown._replace(questions=([torch.tensor(question, dtype=torch.long)],) * len(shown.shapes))
    lead = [words(prefix)] if len(prefix) else []
    streams = [build([*lead, *config.parts(shape)], config.rules) for shape in shown.shapes]
    counts = {len(stream) - len(prefix) for stream in streams}
    if len(counts) > 1:
        raise DataError(f"pictures of {min(counts)} to {max(counts)} tokens among pairs", "give pictures of one size")
    [N] = counts
    _check_room(len(prefix), N, config.decoder.context)
    return model.hidden(rows(streams), shown)[:, len(prefix) :]


def _read(model: Unified, pictures: Sequence[Image.Image], prefix: Sequence[int]) -> Tensor:
    """(2P, N, D): behind each of the codes, and not behind the mark before them"""
    codec, N = model.codec, math.prod(model.grid)
    _check_room(len(prefix), 1 + N, model.config.decoder.context)
    fit = Fit().whole(codec)
    pixels = torch.stack([fit.apply(picture.convert("RGB"), codec.factor)[0] for picture in pictures])
    pieces = [model.shown(model.look(codec.pixels(pixels))[0])]
    if len(prefix):
        lead = torch.tensor(list(prefix), device=pieces[0].x.device)
        pieces.insert(0, model.words(lead.expand(len(pictures), -1)))
    return model(*pieces)[:, -N:]


def _check_room(prefix: int, tokens: int, context: int) -> None:
    if prefix + tokens > context:
        raise ConfigError(
            f"{prefix} + {tokens} tokens are more than the context of {context}", "make the prompt shorter"
        )
