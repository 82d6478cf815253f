"""Boxes in what models write, and how well they lie: (left, top, right, bottom) in pixels.

N boxes
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, nearest

Box = tuple[float, float, float, float]

_NUMBER = r"\s*(-?\d+(?:\.\d+)?|-?\.\d+)\s*"
_FOUR = ",".join([_NUMBER] * 4)
_POINTS = rf"\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)"


class Style(NamedTuple):
    """How a family writes boxes. `side` is what it takes every side for; None: pixels of what it was shown."""

    pattern: re.Pattern[str]
    side: float | None


STYLES = {
    "qwen-vl": Style(re.compile(_POINTS), 1000),  # <box>(x1,y1),(x2,y2)</box>, <|box_start|>… from Qwen2-VL on
    "qwen2.5-vl": Style(re.compile(rf'"bbox_2d"\s*:\s*\[{_FOUR}\]'), None),
    "qwen3-vl": Style(re.compile(rf'"bbox_2d"\s*:\s*\[{_FOUR}\]'), 1000),
    "internvl": Style(re.compile(rf"\[{_FOUR}\]"), 1000),  # <box>[[x1, y1, x2, y2], …]</box>
    "llava": Style(re.compile(rf"\[{_FOUR}\]"), 1),  # [x1, y1, x2, y2] as shares of the sides
    "pixels": Style(re.compile(rf"\[{_FOUR}\]"), None),
}


def read_boxes(text: str, style: str, size: tuple[int, int], shown: tuple[int, int] | None = None) -> list[Box]:
    """The boxes of an answer, in pixels of a picture of `size` (height, width). Where a model writes pixels of what it
    was shown, `shown` is the size of that; the same unless said. Corners come in the order left, top, right, bottom."""
    if style not in STYLES:
        raise ConfigError(f"there is no style of boxes {style!r}", nearest(style, STYLES))
    row = STYLES[style]
    (H, W), (h, w) = size, (row.side, row.side) if row.side else shown or size
    found = []
    for match in row.pattern.finditer(text):
        a, b, c, d = map(float, match.groups())
        left, right, top, bottom = *sorted((a * W / w, c * W / w)), *sorted((b * H / h, d * H / h))
        found.append((left, top, right, bottom))
    return found


def iou(a: Tensor, b: Tensor) -> Tensor:
    """(N, 4), (N, 4) → (N,): what two boxes share of what they cover together; 0 of two without an area"""
    shared = _area(torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], 1))
    covered = _area(a) + _area(b) - shared
    return torch.where(covered > 0, shared / covered.clamp(min=1e-300), 0.0)


def _area(box: Tensor) -> Tensor:
    return (box[:, 2:] - box[:, :2]).clamp(min=0).prod(1)
