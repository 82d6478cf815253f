"""Where the tokens of a part stand: the position rules of the field, a row each.

Text counts on with one index for all three axes. Vision stands at start + (t, h, w), and the text after it goes on
from the furthest id on any axis, plus one. Rules differ in what t counts and in how far the text moves on.

N tokens of a part
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.nn import grid_positions, text_positions
from vitrail.stream.parts import Run, Shape, runs


class PositionRule(NamedTuple):
    """`flat`: vision counts on like text. `absolute`: t is time, not the temporal patch's number. `apart`: every
    temporal patch is placed as a picture of its own. `short`: what follows moves on by the longer side alone."""

    says: str
    flat: bool = False
    absolute: bool = False
    apart: bool = False
    short: bool = False


POSITIONS = {
    "1d": PositionRule("one running index: LLaVA, BLIP-2, drawing with codes", flat=True),
    "qwen2-vl": PositionRule("t counts temporal patches"),
    "qwen2.5-vl": PositionRule("t is absolute time, tokens_per_second ids a second", absolute=True),
    "qwen3-vl": PositionRule("each temporal patch like a picture; its time is said in words before it", apart=True),
    "qwen2-vl/transformers": PositionRule("as transformers has it: text after a long video steps back", short=True),
    "qwen2.5-vl/transformers": PositionRule("the same, with absolute time", absolute=True, short=True),
}


def part_positions(rule: PositionRule, shape: Shape, start: int, step: float) -> tuple[Tensor, int]:
    """(N, 3) positions of a part that begins at `start`, and where the next part begins.

    `step` is how many ids a temporal patch lasts under an absolute rule.
    """
    if isinstance(shape, int):
        return text_positions(shape, start), start + shape
    pieces = []
    for run in runs(shape):
        if rule.flat:
            pieces.append(text_positions(run.tokens, start))
            start += run.tokens
            continue
        for one in [run._replace(t=1)] * run.t if rule.apart else [run]:
            piece, start = _lattice(one, start, step if rule.absolute else 1.0, rule.short)
            pieces.append(piece)
        if run.newline == "end":  # a word behind the picture
            pieces.append(text_positions(1, start))
            start += 1
    return torch.cat(pieces), start


def _lattice(run: Run, start: int, step: float, short: bool) -> tuple[Tensor, int]:
    """A newline behind each row is one more column."""
    piece = grid_positions(run.t, run.h, run.wide, start, step)
    if not len(piece):
        return piece, start
    return piece, start + max(run.h, run.wide) if short else int(piece.max()) + 1
