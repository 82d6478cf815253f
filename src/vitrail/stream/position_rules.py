"""Position rules: assign (t, h, w) positions to the tokens of a part.

Text positions increase by one on all three axes. Vision tokens have start + (t, h, w). The text after them continues
at the largest position on any axis, plus one. Rules differ in the unit of t and in how far the text advances.

Shapes: N tokens of a part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.nn import build_grid_positions, build_text_positions
from vitrail.stream.stream_parts import PartShape, TokenRun, token_runs


class PositionRule(NamedTuple):
    """A position rule.

    is_1d            vision tokens count like text
    absolute_time    t is time instead of the index of the temporal patch
    per_frame        each temporal patch is placed like a separate image
    advance_by_side  the following text advances by the longer side only
    """

    description: str
    is_1d: bool = False
    absolute_time: bool = False
    per_frame: bool = False
    advance_by_side: bool = False


POSITION_RULES = {
    "1d": PositionRule("one running index: LLaVA, BLIP-2, image generation with codes", is_1d=True),
    "qwen2-vl": PositionRule("t counts temporal patches"),
    "qwen2.5-vl": PositionRule("t is absolute time, with tokens_per_second positions per second", absolute_time=True),
    "qwen3-vl": PositionRule("each temporal patch like an image, with a text timestamp before it", per_frame=True),
    "glm4v": PositionRule("each temporal patch like an image, with its second as text after it", per_frame=True),
    "qwen2-vl/transformers": PositionRule(
        "as in transformers: text after a long video moves back", advance_by_side=True
    ),
    "qwen2.5-vl/transformers": PositionRule(
        "as in transformers, with absolute time", absolute_time=True, advance_by_side=True
    ),
}


def compute_part_positions(rule: PositionRule, shape: PartShape, start: int, time_step: float) -> tuple[Tensor, int]:
    """Return the positions (N, 3) of a part that begins at `start`, and the start of the next part.

    `time_step` is the duration of a temporal patch in positions, for rules with absolute time.
    """
    if isinstance(shape, int):
        return build_text_positions(shape, start), start + shape
    return compute_run_positions(rule, token_runs(shape), start, time_step)


def compute_run_positions(
    rule: PositionRule, runs: Sequence[TokenRun], start: int, time_step: float, device: torch.device | None = None
) -> tuple[Tensor, int]:
    """Return the positions (N, 3) of runs that begin at `start`, and the start of the next part."""
    pieces = []
    for run in runs:
        if rule.is_1d:
            pieces.append(build_text_positions(run.num_tokens, start, device))
            start += run.num_tokens
            continue
        for one in [run._replace(t=1)] * run.t if rule.per_frame else [run]:
            sides, step = (one.h, one.row_length), time_step if rule.absolute_time else 1.0  # newlines are one column
            pieces.append(build_grid_positions(one.t, *sides, start, step, device))
            if len(pieces[-1]):
                start += max(sides) if rule.advance_by_side else max(int((one.t - 1) * step) + 1, *sides)
        if run.newline == "end":  # the newline after the image counts as text
            pieces.append(build_text_positions(1, start, device))
            start += 1
    return torch.cat(pieces), start
