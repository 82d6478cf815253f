"""Boxes: RefCOCO and its like."""

from dataclasses import replace

import torch

from vitrail.evals.metrics.boxes import iou, read_boxes
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, mean


def overlaps(sheet: Sheet, said: Said, *, boxes: str = "qwen3-vl") -> Values:
    """How well the first box of each answer lies on the right one; 0 without a box."""
    values = []
    for answer, sample in zip(said, sheet.samples, strict=True):
        found = read_boxes(answer, boxes, sample.size or (1, 1))
        right = torch.tensor([sample.instances[0].box], dtype=torch.float64)
        values.append(iou(torch.tensor(found[:1], dtype=torch.float64), right).item() if found else 0.0)
    return values


def unread(sheet: Sheet, said: Said, *, boxes: str = "qwen3-vl") -> list[bool]:
    return [not read_boxes(answer, boxes, (1, 1)) for answer in said]


def located(sheet: Sheet, said: Said, *, boxes: str = "qwen3-vl") -> list[Score]:
    each = overlaps(sheet, said, boxes=boxes)
    none = [float(lost) for lost in unread(sheet, said, boxes=boxes)]
    right = torch.tensor([sample.instances[0].box for sample in sheet.samples], dtype=torch.float64)
    sizes = torch.tensor([[0, 0, W, H] for H, W in (sample.size or (1, 1) for sample in sheet.samples)])
    whole = iou(sizes.double(), right)
    scores = [
        mean("accuracy at IoU .5", [float(value >= 0.5) for value in each], sheet.pictures, binary=True),
        mean("mean IoU", each, sheet.pictures),
    ]
    beside = ((whole >= 0.5).double().mean().item(), whole.mean().item())
    return [
        *(replace(score, beside={"whole picture": value}) for score, value in zip(scores, beside, strict=True)),
        mean("no box", none, sheet.pictures, binary=True),
    ]
