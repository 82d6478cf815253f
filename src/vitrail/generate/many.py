"""Texts by the thousand from one prompt: what a model writes when nobody reads along.

B rows, T new tokens, V vocabulary
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError
from vitrail.generate.sampling import Sampling, choose
from vitrail.generate.text import fastest

ROWS = 128  # side by side; on a GPU sixteen times as many
GLANCE = 16  # tokens after which it is looked whether all rows have ended


@torch.no_grad()
def many(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    max_new: int,
    stops: Collection[int],
    sampling: Sampling,
    known: int | None = None,
    rows: int | None = None,
) -> Iterator[list[int]]:
    """Ids of `count` continuations of a prompt, each without what ended it; of the vocabulary the first `known` rows.
    The rows of a batch share one stream of chance: the same seed writes the same texts in as many `rows`."""
    room = model.config.context - len(prompt)
    if not prompt or not 1 <= max_new <= room:
        raise ConfigError(
            f"{max_new} tokens behind {len(prompt)} of a prompt", f"begin with at least one, and ask for 1 … {room}"
        )
    if sampling.repetition != 1:
        raise ConfigError("a penalty on repetition needs texts one by one", "leave it out")
    device = model.embed.weight.device
    rows = rows or (16 * ROWS if device.type == "cuda" else ROWS)
    for start in range(0, count, rows):
        B = min(rows, count - start)
        dice = np.random.default_rng(None if sampling.seed is None else [sampling.seed, start])
        chance = torch.from_numpy(dice.random((max_new, B))).to(device)
        stepper = fastest(model, B, len(prompt) + max_new)
        logits = stepper.prefill(torch.tensor([list(prompt)] * B), torch.full((B,), len(prompt)))
        found = torch.empty(B, max_new, dtype=torch.long, device=device)
        ended = torch.zeros(B, dtype=torch.bool, device=device)
        ends = torch.tensor(sorted(stops), device=device)
        written = 0
        while written < max_new:
            token = choose(logits[:, :known], sampling, chance[written])  # (B,)
            found[:, written] = token
            ended |= torch.isin(token, ends)
            written += 1
            if written < max_new:
                if written % GLANCE == 0 and bool(ended.all()):
                    break
                logits = stepper.step(token)
        over = torch.isin(found[:, :written], ends).cumsum(1) > 0
        for ids, cut in zip(found[:, :written].tolist(), (~over).sum(1).tolist(), strict=True):
            yield ids[:cut]
