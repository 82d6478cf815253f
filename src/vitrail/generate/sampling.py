"""Token sampling: logit filters and one random draw per row.

The functions are pure functions of tensors. The caller passes random numbers, one in [0, 1) per row and step. So a
row's tokens depend only on its own seed, and CUDA graphs can capture the functions.

Shapes: B rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import Config, Fraction, PositiveFloat, PositiveInt, Seed
from vitrail.errors import CheckpointError, ConfigError
from vitrail.nn.parameters import find_nonfinite


class SamplingConfig(Config):
    """Sampling parameters. The defaults sample from the model's distribution.

    temperature         0 is greedy decoding, below 1 sharpens, above 1 flattens the distribution
    top_k               keep only the k most likely tokens
    top_p               keep only the most likely tokens that together reach this probability
    min_p               keep only tokens with at least this fraction of the highest probability
    repetition_penalty  above 1 makes tokens that the row already contains less likely, including the prompt
    seed                row i of a batch uses seed + i, so each row is reproducible alone; None: random seed

    Order: repetition_penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_k: PositiveInt | None = None
    top_p: float | None = None
    min_p: Fraction | None = None
    repetition_penalty: PositiveFloat = 1.0
    seed: Seed | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:  # else logits overflow or become equal
            raise ConfigError(f"temperature is {self.temperature}", "give 0 (greedy), or from 0.001 to 1000")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}", "give a number above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = SamplingConfig(temperature=0.0)


# ---- filters: logits (B, V) → logits (B, V), −∞ for excluded tokens ----------------------------------------------


def apply_repetition_penalty(logits: Tensor, seen_tokens: Tensor, penalty: float) -> Tensor:
    """Make the tokens with True in `seen_tokens` (B, V) less likely."""
    return torch.where(seen_tokens, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most likely tokens, including ties with the last one."""
    threshold = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities reach p."""
    ordered, order = logits.sort(dim=-1)  # ascending
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[:, -1] = False  # keep the most likely token regardless of rounding
    return logits.masked_fill(out.scatter(1, order, out), -torch.inf)


def keep_min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep tokens with at least `fraction` of the highest probability."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < fraction * probabilities.amax(-1, keepdim=True), -torch.inf)


def process_logits(logits: Tensor, sampling: SamplingConfig, seen_tokens: Tensor | None = None) -> Tensor:
    """Apply all filters in order, (B, V) → (B, V) float32. The repetition penalty needs `seen_tokens` (B, V)."""
    logits = logits.float()
    if sampling.repetition_penalty != 1 and seen_tokens is not None:
        logits = apply_repetition_penalty(logits, seen_tokens, sampling.repetition_penalty)
    if sampling.is_greedy:
        return logits
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def check_logits(logits: Tensor, model: nn.Module) -> None:
    """Raise if a row of logits (…, V) is NaN or infinite, which weights that are not finite cause, or an overflow."""
    if not bool(logits.amax(-1).isfinite().all()):
        bad = find_nonfinite(model.state_dict())
        raise CheckpointError(
            "the model gives NaN or infinite logits"
            + (f": its tensor {bad[0]!r} contains such values" if bad else ", although its weights are finite"),
            "load another checkpoint" if bad else "use dtype float32: values overflow in half precision",
        )


def transfer_tokens(tokens: Tensor, logits: Tensor, model: nn.Module) -> list[int]:
    """Return the tokens (B,) that were sampled from logits (B, V). Raise if a row of logits is NaN or infinite.

    Both are one transfer: the host waits for the device once.
    """
    ids, are_finite = torch.stack([tokens, logits.amax(-1).isfinite()]).tolist()
    if not all(are_finite):
        check_logits(logits, model)
    return ids


# ---- random draws -----------------------------------------------------------------------------------------------


def sample_tokens(
    logits: Tensor, sampling: SamplingConfig, uniforms: Tensor | None = None, seen_tokens: Tensor | None = None
) -> Tensor:
    """Sample one token per row (B,) from raw logits (B, V) and uniforms (B,) in [0, 1). Greedy needs no uniforms."""
    logits = process_logits(logits, sampling, seen_tokens)
    if sampling.is_greedy:
        return logits.argmax(-1)
    if uniforms is None:
        raise ConfigError("sampling needs one uniform in [0, 1) per row", "use RowRandom, or temperature 0")
    return sample_from_weights(logits.softmax(-1), uniforms)


def sample_from_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample from weights (B, V) by inverting the cumulative sum at uniforms (B,). Zero weights are never sampled."""
    reach = weights.double().cumsum(-1)  # float32 would lose the tail of a large vocabulary
    target = uniforms.to(reach)[:, None] * reach[:, -1:]
    token = torch.searchsorted(reach, target, right=True)  # the first whose sum is above the target
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.minimum(token, last)[:, 0]


class RowRandom:
    """One random stream per row. Row i uses `seed + i`, independent of the other rows. `stream` selects another one."""

    def __init__(self, rows: int, seed: int | None = None, device: torch.device | str = "cpu", stream: int = 0):
        if seed is not None and seed < 0:
            raise ConfigError(f"seed is {seed}", "give 0 or more")
        seeds = [None if seed is None else [seed + i, stream] if stream else seed + i for i in range(rows)]
        self._rows, self._device = [np.random.default_rng(one) for one in seeds], device

    def uniform(self, *shape: int) -> Tensor:
        """Return the next float64 numbers in [0, 1) of every row, with shape (B, *shape)."""
        return torch.from_numpy(np.stack([np.asarray(row.random(shape)) for row in self._rows])).to(self._device)
