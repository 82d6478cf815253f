"""What codes cost and how well a codebook is used."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError


class Use(NamedTuple):
    """Of a codebook of so many `codes`, how many were `used` by so many tokens, and the entropy of a token in bits.

    Both can only grow with more tokens: with fewer than the codebook has codes, they tell of the tokens.
    """

    codes: int
    used: int
    tokens: int
    entropy: float

    @property
    def share(self) -> float:
        return self.used / self.codes

    @property
    def perplexity(self) -> float:
        """How many codes, used equally, would have this entropy."""
        return 2**self.entropy

    def __str__(self) -> str:
        return (
            f"{self.used:,} of {self.codes:,} codes ({self.share:.1%}) in {self.tokens:,} tokens, "
            f"entropy {self.entropy:.3f} of {math.log2(self.codes):.3f} bits, perplexity {self.perplexity:,.1f}"
        )


def codebook_use(ids: Tensor | Iterable[Tensor], codes: int) -> Use:
    """Counted over all ids, of any shape and in any number of batches. Only codes that occur take memory."""
    if codes < 1:
        raise ConfigError(f"a codebook of {codes} codes is none", "give its size")
    seen, counts = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    for batch in [ids] if isinstance(ids, Tensor) else ids:
        if batch.is_floating_point() or batch.dtype == torch.bool:
            raise DataError(f"ids of {batch.dtype} are no integers", "give the ids, not the codes")
        new, more = batch.flatten().unique(return_counts=True)
        if len(new) and (int(new[0]) < 0 or int(new[-1]) >= codes):
            raise DataError(f"ids reach from {int(new[0])} to {int(new[-1])} in a codebook of {codes:,} codes")
        seen, place = torch.cat([seen, new.cpu().long()]).unique(return_inverse=True)
        counts = torch.zeros(len(seen), dtype=torch.int64).index_add_(0, place, torch.cat([counts, more.cpu()]))
    tokens = int(counts.sum())
    if not tokens:
        raise DataError("there are no ids to count", "give at least one")
    share = counts.double() / tokens
    return Use(codes, len(seen), tokens, max(0.0, -(share * share.log2()).sum().item()))


def bits_per_pixel(bits: float, tokens: int, height: int, width: int) -> float:
    """What a picture costs at `bits` a token: those of the codebook, or the entropy that a good coder comes near to."""
    if min(bits, tokens) < 0 or min(height, width) < 1:
        raise ConfigError(f"{tokens} tokens of {bits} bits for {height} × {width} pixels", "give sizes that can be")
    return bits * tokens / (height * width)


def times_smaller(bits: float, tokens: int, height: int, width: int, *, raw: int = 24) -> float:
    """How many times fewer bits than pixels of `raw` bits each."""
    return raw / bits_per_pixel(bits, tokens, height, width)
