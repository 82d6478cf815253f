"""Texts by the thousand from one prompt: what a model writes when nobody reads along.

B rows, T new tokens, V vocabulary
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError
from vitrail.generate.sampling import Sampling, choose
from vitrail.generate.text import fastest

ROWS = 256  # side by side; of 256 tokens each a GPU records its step
GLANCE = 16  # tokens after which it is looked whether all rows have ended


class Continued(NamedTuple):
    ids: list[int]  # without what ended it
    ended: bool  # or cut, having as many tokens as it may


def many(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    max_new: int,
    stops: Collection[int],
    sampling: Sampling,
    known: int | None = None,
    rows: int = ROWS,
) -> Iterator[Continued]:
    """`count` continuations of a prompt; of the vocabulary the first `known` rows. Rows share a stream of chance, which
    the seed and the number of the first of them decide: more texts begin with those of fewer."""
    room = model.config.context - len(prompt)
    if not prompt or not 1 <= max_new <= room:
        raise ConfigError(
            f"{max_new} tokens behind {len(prompt)} of a prompt", f"begin with at least one, and ask for 1 … {room}"
        )
    if sampling.repetition != 1 or sampling.greedy:
        raise ConfigError(
            "many texts are drawn by chance, each by itself", "leave out a penalty on repetition, and temperature 0"
        )
    dice = (_chance(sampling.seed, start, max_new, rows)[:, : count - start] for start in range(0, count, rows))
    return (one for chance in dice for one in _written(model, prompt, chance, stops, sampling, known))


def _chance(seed: int | None, start: int, tokens: int, rows: int) -> Tensor:
    """(T, rows) in [0, 1)"""
    dice = np.random.default_rng(None if seed is None else [seed, start])
    return torch.from_numpy(dice.random((tokens, rows)))


@torch.no_grad()
def _written(
    model: Decoder,
    prompt: Sequence[int],
    chance: Tensor,
    stops: Collection[int],
    sampling: Sampling,
    known: int | None,
) -> list[Continued]:
    """As many tokens of as many rows as there is chance (T, B) for, or until all have ended."""
    (T, B), device = chance.shape, model.embed.weight.device
    chance, ends = chance.to(device), torch.tensor(sorted(stops), device=device)
    stepper = fastest(model, B, len(prompt) + T)
    logits = stepper.prefill(torch.tensor([list(prompt)] * B), torch.full((B,), len(prompt)))
    tokens: list[Tensor] = []
    while True:
        tokens.append(choose(logits[:, :known], sampling, chance[len(tokens)]))  # (B,)
        looks = len(tokens) % GLANCE == 0
        if len(tokens) == T or (looks and bool(torch.isin(torch.stack(tokens, 1), ends).any(1).all())):
            break
        logits = stepper.step(tokens[-1])
    found = torch.stack(tokens, 1)  # (B, tokens)
    before = torch.isin(found, ends).cumsum(1) == 0
    rows = zip(found.tolist(), before.sum(1).tolist(), strict=True)
    return [Continued(ids[:kept], kept < len(ids)) for ids, kept in rows]
