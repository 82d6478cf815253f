"""Binary codes of LFQ and BSQ: signs as bits of an id, and the entropy of soft bits.

The soft assignment of a code is the softmax of −inv_temperature · |x − c|² over all 2^D codes. Codes are ±s in every
dimension, so the assignment is a product of independent bits, p = σ(4 · inv_temperature · s · x):

- The entropy of one vector's assignment is the sum over its bits, exactly.
- The entropy of the mean assignment of a batch needs a table of 2^D. With groups of g bits and a table of 2^g each, the
  sum of the groups' entropies is an upper bound, equal if groups are independent. One group of all bits is exact.

Shapes: N vectors, D bits, g bits of a group.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.quantizers import rank_statistics
from vitrail.codecs.quantizers.gradient_estimators import apply_straight_through
from vitrail.codecs.quantizers.quantizer import (
    C,
    Quantizer,
    QuantizerOutput,
    compute_entropy,
    mean_squared_error,
    upcast,
)
from vitrail.config import Config, PositiveFloat
from vitrail.errors import ConfigError

MAX_TABLE_BITS = 24  # largest number of bits whose probability table fits into memory


class BinaryQuantizerConfig(Config):
    """Config of a `BinaryQuantizer`.

    inv_temperature     of the soft assignment in the entropy loss
    diversity_weight    weight of the batch entropy against the entropy of each vector
    entropy_group_size  bits whose joint entropy is exact in the batch entropy
    """

    bits: int
    inv_temperature: PositiveFloat = 1.0
    diversity_weight: float = 1.0
    entropy_group_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 63:
            raise ConfigError(f"{self.bits} bits do not fit an int64 id", "use 1 … 63 bits, or several quantizers")
        fits = [g for g in range(1, min(self.bits, MAX_TABLE_BITS) + 1) if self.bits % g == 0]
        if self.entropy_group_size not in fits:
            raise ConfigError(
                f"entropy_group_size {self.entropy_group_size} does not divide {self.bits} bits, or is too large",
                f"choose from {', '.join(map(str, fits))}",
            )


class BinaryQuantizer(Quantizer[C]):
    """Base class of quantizers with codes of ±s in every dimension. The first dimension is the highest bit of an id.

    Subclasses set s as `code_value`, and the weight of the commitment loss. The losses compare vectors with codes of
    ±s; the decoder receives codes of ±`output_value`.
    """

    is_lattice = True
    code_value: float = 1.0
    output_value: float = 1.0
    commit_weight: int = 1

    def __init__(self, config: C | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.dim = self.config.bits  # pyrefly: ignore
        self.width = self.dim
        self.radices = (2,) * self.dim
        self.vocab_sizes = (2**self.dim,)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the vectors that are compared with the codes."""
        return x

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        c: Any = self.config
        with torch.autocast(x.device.type, enabled=False):
            signs = upcast(x) > 0  # before normalization, which may overflow
            z = self.normalize(upcast(x))
            hard = _codes(signs, z.dtype, self.code_value)
            logits = 4 * c.inv_temperature * self.code_value * z.reshape(-1, self.dim)
            losses = {
                "commit": mean_squared_error(z, hard) * self.commit_weight,
                "entropy": entropy_loss(logits, c.entropy_group_size, c.diversity_weight, self.training),
            }
            outputs = _codes(signs, z.dtype, self.output_value)
            codes = apply_straight_through(z * (self.output_value / self.code_value), outputs).to(x.dtype)
        return QuantizerOutput(codes, signs_to_ids(signs), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return _codes(ids_to_signs(ids, self.dim), torch.float32, self.output_value)


def _codes(signs: Tensor, kind: torch.dtype, value: float) -> Tensor:
    return (signs.to(kind) * 2 - 1) * value


def signs_to_ids(signs: Tensor) -> Tensor:
    """Convert signs (…, D) bool to ids (…), the first dimension as the highest bit."""
    return (signs.long() << _shifts(signs.shape[-1], signs.device)).sum(-1)


def ids_to_signs(ids: Tensor, bits: int) -> Tensor:
    """Convert ids (…) to signs (…, D) bool."""
    return (ids.long().unsqueeze(-1) >> _shifts(bits, ids.device) & 1).bool()


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(bits - 1, -1, -1, device=device)


def entropy_loss(logits: Tensor, group_size: int, diversity_weight: float, across_ranks: bool) -> Tensor:
    """Entropy loss: mean entropy of each vector's assignment − diversity_weight · entropy of the mean assignment, in
    nats.

    `logits` (N, D) are those of the bits. With `across_ranks`, the mean assignment is taken over all ranks.
    """
    own = _bit_entropy(logits).sum() / max(len(logits), 1)
    return own - diversity_weight * batch_entropy(logits, group_size, across_ranks) if diversity_weight else own


def _bit_entropy(logits: Tensor) -> Tensor:
    """Entropy of a bit from its logit, accurate where p rounds to 0 or 1."""
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def batch_entropy(logits: Tensor, group_size: int, across_ranks: bool) -> Tensor:
    """Entropy of the mean assignment, summed over groups of bits."""
    tables = _choice_tables(logits.unflatten(-1, (-1, group_size)).transpose(0, 1))  # (groups, 2^g)
    mean = rank_statistics.mean_over_ranks(tables, len(logits)) if across_ranks else tables / max(len(logits), 1)
    return compute_entropy(mean)


def _choice_tables(logits: Tensor) -> Tensor:
    """Sum the soft assignments of (groups, N, g) logits to tables (groups, 2^g).

    The outer product of two halves of the bits is summed over N by one matrix product, so (N, 2^g) is never stored.
    """
    half = logits.shape[-1] // 2
    high, low = (_outer_product(part) for part in (logits[..., :half], logits[..., half:]))
    return (high.transpose(1, 2) @ low).flatten(1)


def _outer_product(logits: Tensor) -> Tensor:
    """Return probabilities (groups, N, 2^b) of all values of b independent bits."""
    p = torch.sigmoid(logits)
    out = p.new_ones(*p.shape[:2], 1)
    for bit in p.unbind(-1):
        out = (out.unsqueeze(-1) * torch.stack([1 - bit, bit], -1).unsqueeze(-2)).flatten(-2)
    return out
