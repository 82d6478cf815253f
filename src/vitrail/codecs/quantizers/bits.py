"""What LFQ and BSQ share: signs as the bits of an id, and the entropy of soft bits.

The soft choice of a code is softmax of −sharpness · |x − c|² over all 2^D codes. Codes are ±s in every dimension, so it
is a product of independent bits, p = σ(4 · sharpness · s · x), and needs no table:

- the entropy of a vector's choice is the sum over its bits, exactly;
- the entropy of the batch's mean choice is that of a 2^D table. Over bits, or over groups of g bits with a 2^g table
  each, the sum of the groups' entropies is an upper bound, equal where groups vary independently. With one group of
  all bits it is the value itself.

N vectors, D bits, g bits of a group
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.quantizers import ranks
from vitrail.codecs.quantizers.base import entropy_of
from vitrail.errors import ConfigError

WIDEST = 24  # bits whose table of probabilities is still held


def check(bits: int, group: int, sharpness: float) -> None:
    if not 1 <= bits <= 63:
        raise ConfigError(f"{bits} bits make no int64 id", "use 1 … 63, or several quantizers side by side")
    if not 1 <= group <= min(bits, WIDEST) or bits % group:
        fits = [g for g in range(1, min(bits, WIDEST) + 1) if bits % g == 0]
        raise ConfigError(
            f"the entropy of {bits} bits cannot be taken in groups of {group}",
            f"choose from {', '.join(map(str, fits))}",
        )
    if not sharpness > 0:
        raise ConfigError(f"a sharpness of {sharpness} tells no codes apart", "use a number above 0")


def ids_of(signs: Tensor) -> Tensor:
    """signs (…, D) bool → ids (…), the first dimension highest, in integers."""
    return (signs.long() << _shifts(signs.shape[-1], signs.device)).sum(-1)


def signs_of(ids: Tensor, bits: int) -> Tensor:
    """ids (…) → (…, D) bool"""
    return (ids.long().unsqueeze(-1) >> _shifts(bits, ids.device) & 1).bool()


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(bits - 1, -1, -1, device=device)


def entropy(logits: Tensor, group: int, diversity: float, shared: bool) -> Tensor:
    """Mean entropy of a vector's choice − diversity · entropy of the mean choice, in nats. logits (N, D) of the bits;
    `shared`: the mean is over all ranks."""
    own = _each(logits).sum() / max(len(logits), 1)
    return own - diversity * mean_entropy(logits, group, shared) if diversity else own


def _each(logits: Tensor) -> Tensor:
    """The entropy of a bit, from its logit: right where p rounds to 0 or 1."""
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def mean_entropy(logits: Tensor, group: int, shared: bool) -> Tensor:
    """The entropy of the mean choice, summed over groups of bits."""
    tables = _tables(logits.unflatten(-1, (-1, group)).transpose(0, 1))  # (groups, 2^g)
    mean = ranks.mean(tables, len(logits)) if shared else tables / max(len(logits), 1)
    return entropy_of(mean)


def _tables(logits: Tensor) -> Tensor:
    """(groups, N, g) → how often each of 2^g values is chosen, softly (groups, 2^g): the outer product of two halves
    of the bits, summed over N by one matrix product, so that no (N, 2^g) is held."""
    half = logits.shape[-1] // 2
    high, low = (_outer(part) for part in (logits[..., :half], logits[..., half:]))
    return (high.transpose(1, 2) @ low).flatten(1)


def _outer(logits: Tensor) -> Tensor:
    """(groups, N, b) → probabilities of all values of b independent bits (groups, N, 2^b)"""
    p = torch.sigmoid(logits)
    out = p.new_ones(*p.shape[:2], 1)
    for bit in p.unbind(-1):
        out = (out.unsqueeze(-1) * torch.stack([1 - bit, bit], -1).unsqueeze(-2)).flatten(-2)
    return out
