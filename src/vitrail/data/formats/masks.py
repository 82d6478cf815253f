"""Boxes and segmentations of objects in images, and their masks.

Shapes: H and W image, P corners of a polygon. COCO counts pixels down the columns, so flat indices here are x·H + y.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.errors import DataError
from vitrail.processing.image_loading import MAX_PIXELS

SUBPIXELS = 5  # COCO draws polygons on a grid five times finer


class Polygons(NamedTuple):
    """One or more closed polygons, each x, y, x, y, … in pixels. The object is their union."""

    outlines: tuple[tuple[float, ...], ...]


class Rle(NamedTuple):
    """Run lengths down the columns, starting with background; as numbers or as COCO's compressed text."""

    size: tuple[int, int]  # height, width
    counts: tuple[int, ...] | str


class Instance(NamedTuple):
    """An object in an image; `box` is (left, top, right, bottom) in pixels."""

    category: str
    box: tuple[float, float, float, float]
    is_crowd: bool = False
    area: float = 0.0
    segmentation: Polygons | Rle | None = None

    def to_mask(self, size: tuple[int, int]) -> np.ndarray:
        """Rasterize the segmentation as bool (H, W)."""
        if self.segmentation is None:
            raise DataError(f"this {self.category} has no segmentation", "use its box")
        return rasterize_mask(self.segmentation, size)


def rasterize_mask(segmentation: Polygons | Rle, size: tuple[int, int]) -> np.ndarray:
    """Rasterize a segmentation as bool (H, W), identical to pycocotools."""
    H, W = size
    if H < 1 or W < 1 or H * W > MAX_PIXELS:
        raise DataError(f"a mask has {H}×{W} pixels", f"give sides of at least 1, and at most {MAX_PIXELS:,} pixels")
    if isinstance(segmentation, Polygons):
        filled = np.zeros((H, W), bool)
        for corners in segmentation.outlines:
            filled |= _fill_polygon(corners, H, W)
        return filled
    if tuple(segmentation.size) != (H, W):
        raise DataError(
            f"a run-length mask has {tuple(segmentation.size)} pixels, expected {H}×{W}", "use the mask's size"
        )
    counts = decompress_rle(segmentation.counts) if isinstance(segmentation.counts, str) else segmentation.counts
    if any(count < 0 for count in counts) or sum(counts) != H * W:
        raise DataError(f"run lengths add up to {sum(counts):,} for {H}×{W} pixels", "export the annotations again")
    values = np.repeat(np.arange(len(counts)) % 2 == 1, np.array(counts, dtype=np.int64))  # (W·H,)
    return np.ascontiguousarray(values.reshape(W, H).T)


def decompress_rle(text: str) -> list[int]:
    """Decompress COCO's text of run lengths.

    Numbers are little-endian groups of five bits, and a sixth bit says that more groups follow. From the fourth run on,
    each number is the difference to the run two before it.
    """
    counts: list[int] = []
    value, shift = 0, 0
    for char in text:
        bits = ord(char) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise DataError(
                f"compressed run lengths have the invalid character {char!r}", "export the annotations again"
            )
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    if shift:
        raise DataError("compressed run lengths end in the middle of a number", "export the annotations again")
    return counts


def _fill_polygon(corners: Sequence[float], H: int, W: int) -> np.ndarray:
    """Fill one polygon: a pixel is inside if the outline crosses its column above it an odd number of times."""
    points = np.array(corners, dtype=np.float64)
    if len(points) < 6 or len(points) % 2:
        raise DataError(f"a polygon has {len(points)} numbers", "give x and y of at least three corners")
    # also catches NaN; large values would make the loop below very long
    if not np.all(np.abs(points) <= 4 * max(H, W)):
        raise DataError(
            f"a polygon reaches coordinate {np.abs(points).max():.3g} in an image of {H}×{W}",
            "export the annotations again",
        )
    fine = (SUBPIXELS * points.reshape(-1, 2) + 0.5).astype(np.int64)  # (P, 2); rounds towards 0, like COCO's code
    crossings = np.zeros(W * H + 1, dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(fine, np.roll(fine, -1, axis=0), strict=True):
        np.add.at(crossings, _find_crossings(int(x0), int(y0), int(x1), int(y1), H, W), 1)
    return np.ascontiguousarray((np.cumsum(crossings[:-1]) % 2 == 1).reshape(W, H).T)


def _find_crossings(x0: int, y0: int, x1: int, y1: int, H: int, W: int) -> np.ndarray:
    """Flat indices of the first pixel below the edge, in each column whose centre the edge crosses."""
    dx, dy = abs(x1 - x0), abs(y1 - y0)
    steps = np.arange(max(dx, dy) + 1)
    if (dx >= dy and x0 > x1) or (dx < dy and y0 > y1):  # always in ascending order, so that both orientations agree
        x0, y0, x1, y1, steps = x1, y1, x0, y0, steps[::-1]
    if dx >= dy:
        x, y = steps + x0, (y0 + (y1 - y0) / max(dx, 1) * steps + 0.5).astype(np.int64)
    else:
        x, y = (x0 + (x1 - x0) / dy * steps + 0.5).astype(np.int64), steps + y0
    moved = x[1:] != x[:-1]
    column = (np.where(x[1:] < x[:-1], x[1:], x[1:] - 1)[moved] + 0.5) / SUBPIXELS - 0.5
    row = (np.minimum(y[1:], y[:-1])[moved] + 0.5) / SUBPIXELS - 0.5
    inside = (np.floor(column) == column) & (column >= 0) & (column <= W - 1)
    rows = np.ceil(np.clip(row[inside], 0, H)).astype(np.int64)
    return column[inside].astype(np.int64) * H + rows
