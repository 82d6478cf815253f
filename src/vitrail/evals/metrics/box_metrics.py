"""Parses boxes from model answers and computes their IoU. Boxes are (left, top, right, bottom) in pixels.

N boxes
"""

import re
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, score_mean
from vitrail.evals.scores import Score

Box = tuple[float, float, float, float]

_NUMBER = r"\s*(-?\d+(?:\.\d+)?|-?\.\d+)\s*"
_FOUR_NUMBERS = ",".join([_NUMBER] * 4)
_POINTS = rf"\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)"


class BoxStyle(NamedTuple):
    """Box format of a model family. `coordinate_range` is the coordinate of the far edge; None means input pixels."""

    pattern: re.Pattern[str]
    coordinate_range: float | None


BOX_STYLES = {
    "qwen-vl": BoxStyle(re.compile(_POINTS), 1000),  # <box>(x1,y1),(x2,y2)</box>, <|box_start|>… from Qwen2-VL on
    "qwen2.5-vl": BoxStyle(re.compile(rf'"bbox_2d"\s*:\s*\[{_FOUR_NUMBERS}\]'), None),
    "qwen3-vl": BoxStyle(re.compile(rf'"bbox_2d"\s*:\s*\[{_FOUR_NUMBERS}\]'), 1000),
    "internvl": BoxStyle(re.compile(rf"\[{_FOUR_NUMBERS}\]"), 1000),  # <box>[[x1, y1, x2, y2], …]</box>
    "llava": BoxStyle(re.compile(rf"\[{_FOUR_NUMBERS}\]"), 1),  # [x1, y1, x2, y2] as fractions of width and height
    "pixels": BoxStyle(re.compile(rf"\[{_FOUR_NUMBERS}\]"), None),
}


def parse_boxes(
    text: str, style: str, image_size: tuple[int, int], model_size: tuple[int, int] | None = None
) -> list[Box]:
    """Parse the boxes of an answer, in pixels of an image of size (height, width).

    `model_size` is the size of the resized model input, for styles that use input pixels; default `image_size`.
    """
    if style not in BOX_STYLES:
        raise ConfigError(f"unknown box style {style!r}", suggest_name(style, BOX_STYLES))
    box_style = BOX_STYLES[style]
    (H, W), (h, w) = (
        image_size,
        (box_style.coordinate_range, box_style.coordinate_range)
        if box_style.coordinate_range
        else model_size or image_size,
    )
    boxes = []
    for match in box_style.pattern.finditer(text):
        a, b, c, d = map(float, match.groups())
        left, right, top, bottom = *sorted((a * W / w, c * W / w)), *sorted((b * H / h, d * H / h))
        boxes.append((left, top, right, bottom))
    return boxes


def iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU (N,) of boxes (N, 4) and (N, 4); 0 for two empty boxes."""
    intersection = _box_area(torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], 1))
    union = _box_area(a) + _box_area(b) - intersection
    return torch.where(union > 0, intersection / union.clamp(min=1e-300), 0.0)


def _box_area(box: Tensor) -> Tensor:
    return (box[:, 2:] - box[:, :2]).clamp(min=0).prod(1)


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


def box_ious(table: ScoringTable, answers: AnswerTexts, *, boxes: str = "qwen3-vl") -> ItemScores:
    """IoU of the first box of each answer with the reference box; 0 without a box."""
    values = []
    for answer, sample in zip(answers, table.samples, strict=True):
        parsed = parse_boxes(answer, boxes, sample.size or (1, 1))
        reference = torch.tensor([sample.instances[0].box], dtype=torch.float64)
        values.append(iou(torch.tensor(parsed[:1], dtype=torch.float64), reference).item() if parsed else 0.0)
    return values


def find_missing_boxes(table: ScoringTable, answers: AnswerTexts, *, boxes: str = "qwen3-vl") -> list[bool]:
    """Whether each answer has no box."""
    return [not parse_boxes(answer, boxes, (1, 1)) for answer in answers]


def score_boxes(table: ScoringTable, answers: AnswerTexts, *, boxes: str = "qwen3-vl") -> list[Score]:
    """Score accuracy at IoU 0.5, mean IoU, and answers without a box."""
    ious = box_ious(table, answers, boxes=boxes)
    no_box = [float(lost) for lost in find_missing_boxes(table, answers, boxes=boxes)]
    reference_boxes = torch.tensor([sample.instances[0].box for sample in table.samples], dtype=torch.float64)
    sizes = torch.tensor([[0, 0, W, H] for H, W in (sample.size or (1, 1) for sample in table.samples)])
    whole_image_ious = iou(sizes.double(), reference_boxes)
    scores = [
        score_mean("accuracy at IoU .5", [float(value >= 0.5) for value in ious], table.image_keys, binary=True),
        score_mean("mean IoU", ious, table.image_keys),
    ]
    baselines = ((whole_image_ious >= 0.5).double().mean().item(), whole_image_ious.mean().item())
    return [
        *(replace(score, baselines={"whole picture": value}) for score, value in zip(scores, baselines, strict=True)),
        score_mean("no box", no_box, table.image_keys, binary=True),
    ]
