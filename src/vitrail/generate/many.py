"""Texts by the thousand from one prompt: what a model writes when nobody reads along.

B rows, T new tokens, V vocabulary
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

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
    return _many(model, prompt, count, max_new, stops, sampling, known, rows)


@torch.no_grad()
def _many(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    max_new: int,
    stops: Collection[int],
    sampling: Sampling,
    known: int | None,
    rows: int,
) -> Iterator[Continued]:
    device = model.embed.weight.device
    ends = torch.tensor(sorted(stops), device=device)
    for start in range(0, count, rows):
        B = min(rows, count - start)
        dice = np.random.default_rng(None if sampling.seed is None else [sampling.seed, start])
        chance = torch.from_numpy(dice.random((max_new, rows))[:, :B]).to(device)
        stepper = fastest(model, B, len(prompt) + max_new)
        logits = stepper.prefill(torch.tensor([list(prompt)] * B), torch.full((B,), len(prompt)))
        found = torch.empty(B, max_new, dtype=torch.long, device=device)
        written = 0
        while written < max_new:
            token = choose(logits[:, :known], sampling, chance[written])  # (B,)
            found[:, written] = token
            written += 1
            if written == max_new:
                break
            if written % GLANCE == 0 and bool(torch.isin(found[:, :written], ends).any(1).all()):
                break
            logits = stepper.step(token)
        over = torch.isin(found[:, :written], ends).cumsum(1) > 0
        for ids, kept in zip(found[:, :written].tolist(), (~over).sum(1).tolist(), strict=True):
            yield Continued(ids[:kept], kept < written)
