"""Embedding of quantizer codes with tied output rows.

If a code is a lattice point (FSQ, LFQ, BSQ), its row is the sum of its own row and one row for each digit. Similar
codes share digit rows, so rare codes are learned too.

Shapes: … any axes, K codes, W width.
"""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import Quantizer, mixed_radix
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes


class CodeEmbedding(nn.Module):
    """Embed ids (…) to (…, W); `compute_logits` uses the same rows as output layer."""

    def __init__(self, quantizer: Quantizer, width: int):
        super().__init__()
        (codes,) = quantizer.vocab_sizes
        self.radices = quantizer.radices if quantizer.is_lattice else ()
        self.lowest_digit_first = quantizer.lowest_digit_first
        self.table = nn.Embedding(codes, width)
        self.digits = nn.Embedding(sum(self.radices), width) if self.radices else None  # concatenated over digits
        self.digit_offsets = tuple(itertools.accumulate(self.radices, initial=0))[:-1]  # row of value 0 of each digit
        # The summed row of a code starts with length 1: with std 0.02, logits are too flat to learn from.
        std = (width * (1 + len(self.radices))) ** -0.5
        for table in self.children():
            nn.init.normal_(table.get_parameter("weight"), std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.digits is not None:
            for first, digit in zip(
                self.digit_offsets,
                mixed_radix.split_digits(ids, self.radices, self.lowest_digit_first).unbind(-1),
                strict=True,
            ):
                x = x + self.digits(first + digit)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits (…, K): the product of x (…, W) with every row. Digit rows are multiplied before they are
        summed.
        """
        logits = F.linear(x, self.table.weight)
        if self.digits is not None:
            each = F.linear(x, self.digits.weight).split(self.radices, -1)
            total, *lower = each[::-1] if self.lowest_digit_first else each  # highest digit first
            for digit in lower:
                total = (total[..., None] + digit[..., None, :]).flatten(-2)
            logits = logits + total
        return logits


@cost.count_flops.register
def _(module: CodeEmbedding, work: Workload) -> int:
    """Count the output layer."""
    return 2 * module.table.embedding_dim * (module.table.num_embeddings + sum(module.radices)) * work.tokens


@cost.count_bytes.register
def _(module: CodeEmbedding, work: Workload) -> cost.MemoryBytes:
    """Count the rows once, read completely by the output layer."""
    size = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=size, read=size)
