"""Pairs of continuations of one prefix, as a text holds them, and what a decoder makes of both.

Axes: P pairs, K tokens of a prefix, N of a continuation, D width.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError, DataError


def branches(ids: Sequence[int] | np.ndarray, prefix: int, length: int, most: int, seed: int = 0) -> np.ndarray:
    """Starts (P, 2) of windows of prefix + length tokens that agree in the prefix and in nothing right behind it.

    Both are real text, and do not overlap. Of every prefix there is one pair, so that none outweighs the others; of
    more than `most` pairs so many are drawn.
    """
    if prefix < 1 or length < 1 or most < 1:
        raise ConfigError(f"{most} pairs of {length} tokens after {prefix}", "give at least one of each")
    seen: dict[tuple[int, ...], dict[int, int]] = {}  # prefix → what followed it → where it began first
    found: list[tuple[int, int]] = []
    ids = np.asarray(ids).tolist()
    done: set[tuple[int, ...]] = set()
    for start in range(len(ids) - prefix - length + 1):
        key = tuple(ids[start : start + prefix])
        if key in done:
            continue
        after = ids[start + prefix]
        others = (first for other, first in seen.get(key, {}).items() if other != after)
        partner = next((first for first in others if start - first >= prefix + length), None)
        if partner is None:
            seen.setdefault(key, {}).setdefault(after, start)
        else:
            found.append((partner, start))
            done.add(key)
    if not found:
        raise DataError(
            f"no {prefix} tokens of the text go on in two ways for {length} more", "give more text, or a shorter prefix"
        )
    order = np.random.default_rng(seed).permutation(len(found))[:most]
    return np.array(found)[np.sort(order)]


@torch.no_grad()
def hidden(
    model: Decoder,
    ids: Sequence[int] | np.ndarray,
    starts: np.ndarray,
    prefix: int,
    length: int,
    *,
    bos: int | None = None,
    batch: int = 16,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (P, N, D) of both continuations: what the head reads behind each of their tokens."""
    lead = [] if bos is None else [bos]
    if len(lead) + prefix + length > model.config.context:
        raise ConfigError(
            f"{prefix} + {length} tokens are more than the context of {model.config.context}", "make them fewer"
        )
    text = torch.as_tensor(np.asarray(ids), dtype=torch.long)
    device = model.embed.weight.device
    for part in torch.as_tensor(starts).split(batch):
        windows = text[part.flatten()[:, None] + torch.arange(prefix + length)]  # (2P, K + N)
        first = torch.tensor(lead, dtype=torch.long).expand(len(windows), -1)
        states = model.hidden(torch.cat([first, windows], 1).to(device))[:, len(lead) + prefix :]
        left, right = states.unflatten(0, (-1, 2)).unbind(1)
        yield left, right
