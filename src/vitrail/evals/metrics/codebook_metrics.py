"""Bit rate and codebook usage."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError


class CodebookUsage(NamedTuple):
    """Usage of a codebook: its size, number of used codes, number of tokens, and entropy in bits per token.

    Usage and entropy grow with the number of tokens. They are limited by it if it is smaller than the codebook.
    """

    codes: int
    used: int
    tokens: int
    entropy: float

    @property
    def used_fraction(self) -> float:
        return self.used / self.codes

    @property
    def perplexity(self) -> float:
        """Number of equally used codes with the same entropy."""
        return 2**self.entropy

    def __str__(self) -> str:
        return (
            f"{self.used:,} of {self.codes:,} codes ({self.used_fraction:.1%}) in {self.tokens:,} tokens, "
            f"entropy {self.entropy:.3f} of {math.log2(self.codes):.3f} bits, perplexity {self.perplexity:,.1f}"
        )


def measure_codebook_usage(ids: Tensor | Iterable[Tensor], codebook_size: int) -> CodebookUsage:
    """Measure codebook usage over ids of any shape, in one tensor or in batches. Only used codes take memory."""
    if codebook_size < 1:
        raise ConfigError(f"codebook size {codebook_size}", "pass the size of the codebook")
    used_codes, counts = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    for batch in [ids] if isinstance(ids, Tensor) else ids:
        if batch.is_floating_point() or batch.dtype == torch.bool:
            raise DataError(f"ids have type {batch.dtype}, not an integer type", "pass ids, not codes")
        batch_codes, batch_counts = batch.flatten().unique(return_counts=True)
        if len(batch_codes) and (int(batch_codes[0]) < 0 or int(batch_codes[-1]) >= codebook_size):
            raise DataError(
                f"ids range from {int(batch_codes[0])} to {int(batch_codes[-1])}, "
                f"but the codebook has {codebook_size:,} codes"
            )
        used_codes, position = torch.cat([used_codes, batch_codes.cpu().long()]).unique(return_inverse=True)
        counts = torch.zeros(len(used_codes), dtype=torch.int64).index_add_(
            0, position, torch.cat([counts, batch_counts.cpu()])
        )
    tokens = int(counts.sum())
    if not tokens:
        raise DataError("there are no ids to count", "pass at least one")
    probabilities = counts.double() / tokens
    return CodebookUsage(
        codebook_size, len(used_codes), tokens, max(0.0, -(probabilities * probabilities.log2()).sum().item())
    )


def bits_per_pixel(bits: float, tokens: int, height: int, width: int) -> float:
    """Bits per pixel at `bits` per token: those of the codebook, or the entropy for an entropy coder."""
    if min(bits, tokens) < 0 or min(height, width) < 1:
        raise ConfigError(f"{tokens} tokens of {bits} bits for {height} × {width} pixels", "pass valid sizes")
    return bits * tokens / (height * width)


def compression_ratio(bits: float, tokens: int, height: int, width: int, *, raw_bits: int = 24) -> float:
    """Ratio of raw bits (`raw_bits` per pixel) to coded bits."""
    return raw_bits / bits_per_pixel(bits, tokens, height, width)
