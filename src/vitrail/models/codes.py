"""Codes in and out of a transformer by the same rows: what is learned of one holds for those that are like it.

Where a code is a point of a lattice (FSQ, LFQ, BSQ), its row is one of its own and one of each of its digits, summed.
Rows of their own alone would each have to be seen often.

… any axes, K codes, W width
"""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import Quantizer, digits
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh


class CodeRows(nn.Module):
    """ids (…) → (…, W), and by `logits` the way back"""

    def __init__(self, quantizer: Quantizer, width: int):
        super().__init__()
        (codes,) = quantizer.sizes
        self.radices, self.low_first = quantizer.radices if quantizer.lattice else (), quantizer.low_first
        self.own = nn.Embedding(codes, width)
        self.digits = nn.Embedding(sum(self.radices), width) if self.radices else None  # those of each behind another
        self.first = tuple(itertools.accumulate(self.radices, initial=0))[:-1]  # the row of each that is its zero
        # A code's row, all that is summed, has length one at first: as logits, rows of 0.02 are too flat to learn by.
        std = (width * (1 + len(self.radices))) ** -0.5
        for table in self.children():
            nn.init.normal_(table.get_parameter("weight"), std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.own(ids)
        if self.digits is not None:
            for first, digit in zip(
                self.first, digits.split(ids, self.radices, self.low_first).unbind(-1), strict=True
            ):
                x = x + self.digits(first + digit)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """x (…, W) → (…, K), the product of x with every row; digits are multiplied before they are summed, which are
        few where codes are many"""
        said = F.linear(x, self.own.weight)
        if self.digits is not None:
            each = F.linear(x, self.digits.weight).split(self.radices, -1)
            total, *lower = each[::-1] if self.low_first else each  # the highest digit first
            for digit in lower:
                total = (total[..., None] + digit[..., None, :]).flatten(-2)
            said = said + total
        return said


@cost.flops.register
def _(module: CodeRows, work: Work) -> int:
    """Of the way back."""
    return 2 * module.own.embedding_dim * (module.own.num_embeddings + sum(module.radices)) * work.tokens


@cost.bytes.register
def _(module: CodeRows, work: Work) -> cost.Bytes:
    """Rows are there once, and all read: as the way back."""
    size = weigh(module)
    return cost.Bytes(weights=size, read=size)
