"""From logits to a token: filters that forbid, and one draw a row.

Everything here is a pure function of tensors. Chance comes in from outside, as one number in [0, 1) a row and step, so
that a row's tokens depend on its own seed alone and the whole can be captured in a graph.

B rows, V vocabulary
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError


class Sampling(Config):
    """How the next token is chosen; without further choice from all tokens, as the model weighs them.

    temperature  0 takes the likeliest token, below 1 sharpens, above 1 flattens
    top_k        only the k likeliest
    top_p        only the likeliest that together reach this probability
    min_p        only those at least this fraction as likely as the likeliest
    repetition   above 1 makes what the row already holds, prompt included, less likely
    seed         row i of a batch draws from seed + i, so it can be had again alone; without one, chance decides

    They apply in this order: repetition, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        sane = self.temperature == 0 or 1e-3 <= self.temperature <= 1e3  # beyond, logits overflow or all are alike
        _within("temperature", self.temperature, sane, "0, which takes the likeliest token, or from 0.001 to 1000")
        _within("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1")
        _within("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1")
        _within("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1")
        _within("repetition", self.repetition, self.repetition > 0, "above 0; 1 changes nothing")
        _within("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _within(name: str, value: Any, holds: bool, says: str) -> None:
    if not holds:  # also where the value is not a number
        raise ConfigError(f"sampling: {name} is {value}", f"it must be {says}")


GREEDY = Sampling(temperature=0.0)


# ---- filters: logits (B, V) → logits (B, V), −∞ where a token is out --------------------------------------------


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens in seen (B, V), booleans, less likely."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k likeliest; what ties with the last of them stays too."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probabilities reach p."""
    ordered, order = logits.sort(dim=-1)  # rising: the unlikely end is what is cut
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[:, -1] = False  # the likeliest stays whatever rounding says
    return logits.masked_fill(out.scatter(1, order, out), -torch.inf)


def keep_min_p(logits: Tensor, fraction: float) -> Tensor:
    """Those at least `fraction` as likely as the likeliest."""
    chances = logits.softmax(-1)
    return logits.masked_fill(chances < fraction * chances.amax(-1, keepdim=True), -torch.inf)


def shape(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """All filters in order, (B, V) → (B, V) float32. `seen` (B, V) is needed where repetition is penalised."""
    logits = logits.float()
    if sampling.repetition != 1 and seen is not None:
        logits = penalize(logits, seen, sampling.repetition)
    if sampling.greedy:
        return logits
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


# ---- the draw ---------------------------------------------------------------------------------------------------


def choose(logits: Tensor, sampling: Sampling, chance: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """One token a row, (B,), from raw logits (B, V) and chance (B,) in [0, 1), which greedy choice does not need."""
    logits = shape(logits, sampling, seen)
    if sampling.greedy:
        return logits.argmax(-1)
    if chance is None:
        raise ConfigError("a draw needs chance: one number in [0, 1) a row", "use Dice, or temperature 0")
    return pick(logits.softmax(-1), chance)


def pick(weights: Tensor, chance: Tensor) -> Tensor:
    """The token at which the running sum of weights (B, V) passes chance (B,) of the whole; never one of weight 0."""
    reach = weights.double().cumsum(-1)  # in float32 the tail of a large vocabulary would be lost
    target = chance.to(reach)[:, None] * reach[:, -1:]
    token = torch.searchsorted(reach, target, right=True)  # the first whose sum is above the target
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.minimum(token, last)[:, 0]


class Dice:
    """One stream of chance a row: row i has the seed `seed + i`, whoever else is in the batch. Streams of another `use`
    are others."""

    def __init__(self, rows: int, seed: int | None = None, device: torch.device | str = "cpu", use: int = 0):
        if seed is not None and seed < 0:
            raise ConfigError(f"a seed of {seed}", "give 0 or more")
        seeds = [None if seed is None else [seed + i, use] if use else seed + i for i in range(rows)]
        self._rows, self._device = [np.random.default_rng(one) for one in seeds], device

    def roll(self, *shape: int) -> Tensor:
        """The next number of every row, (B,), or so many, (B, *shape); float64."""
        return torch.from_numpy(np.stack([np.asarray(row.random(shape)) for row in self._rows])).to(self._device)
