"""Boxes and outlines of things in pictures, and an outline as a mask.

H, W picture; P corners of a polygon. COCO counts pixels down the columns, so flat indices here are x·H + y.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.errors import DataError
from vitrail.processing.images import MAX_PIXELS

FINE = 5  # COCO draws outlines on a grid five times finer


class Polygons(NamedTuple):
    """One or more closed outlines, each x, y, x, y, … in pixels; the thing is all of them together."""

    outlines: tuple[tuple[float, ...], ...]


class Rle(NamedTuple):
    """Lengths of runs down the columns, off first; or COCO's text of them."""

    size: tuple[int, int]  # height, width
    counts: tuple[int, ...] | str


class Instance(NamedTuple):
    """A thing in a picture; `box` is (left, top, right, bottom) in pixels."""

    category: str
    box: tuple[float, float, float, float]
    crowd: bool = False
    area: float = 0.0
    outline: Polygons | Rle | None = None

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        """Where it is, as bool (H, W)."""
        if self.outline is None:
            raise DataError(f"this {self.category} has no outline", "use its box")
        return mask(self.outline, size)


def mask(outline: Polygons | Rle, size: tuple[int, int]) -> np.ndarray:
    """An outline as bool (H, W), pixel for pixel as pycocotools draws it."""
    H, W = size
    if H < 1 or W < 1 or H * W > MAX_PIXELS:
        raise DataError(f"a mask of {H}×{W} pixels", f"sides are at least 1, and all within {MAX_PIXELS:,} pixels")
    if isinstance(outline, Polygons):
        drawn = np.zeros((H, W), bool)
        for corners in outline.outlines:
            drawn |= _fill(corners, H, W)
        return drawn
    if tuple(outline.size) != (H, W):
        raise DataError(f"runs for {tuple(outline.size)} pixels, the picture has {H}×{W}", "use the runs' own size")
    counts = uncompress(outline.counts) if isinstance(outline.counts, str) else outline.counts
    if any(count < 0 for count in counts) or sum(counts) != H * W:
        raise DataError(f"runs of {sum(counts):,} pixels for {H}×{W}", "they must add up to height × width")
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, np.array(counts, dtype=np.int64))  # (W·H,)
    return np.ascontiguousarray(flat.reshape(W, H).T)


def uncompress(text: str) -> list[int]:
    """COCO's text of runs: little-endian groups of five bits, a sixth says that more follow; from the fourth run on
    each is the difference to the run two before it."""
    counts: list[int] = []
    value, shift = 0, 0
    for char in text:
        bits = ord(char) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise DataError(f"compressed runs hold {char!r} where no number can", "export the annotations again")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    if shift:
        raise DataError("compressed runs end in the middle of a number", "export the annotations again")
    return counts


def _fill(corners: Sequence[float], H: int, W: int) -> np.ndarray:
    """The inside of one polygon: a pixel is in it if the outline crosses its column above it an odd number of times."""
    points = np.array(corners, dtype=np.float64)
    if len(points) < 6 or len(points) % 2:
        raise DataError(f"an outline of {len(points)} numbers", "give x and y of at least three corners")
    if not np.all(np.abs(points) <= 4 * max(H, W)):  # also NaN; the walk below would take for ever
        raise DataError(f"an outline reaches {np.abs(points).max():.3g} pixels from a picture of {H}×{W}", "mend it")
    fine = (FINE * points.reshape(-1, 2) + 0.5).astype(np.int64)  # (P, 2); rounds towards 0, as COCO's does
    crossings = np.zeros(W * H + 1, dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(fine, np.roll(fine, -1, axis=0), strict=True):
        np.add.at(crossings, _crossed(int(x0), int(y0), int(x1), int(y1), H, W), 1)
    return np.ascontiguousarray((np.cumsum(crossings[:-1]) % 2 == 1).reshape(W, H).T)


def _crossed(x0: int, y0: int, x1: int, y1: int, H: int, W: int) -> np.ndarray:
    """Flat indices of the first pixel below the edge in each column whose middle the edge crosses."""
    dx, dy = abs(x1 - x0), abs(y1 - y0)
    steps = np.arange(max(dx, dy) + 1)
    if (dx >= dy and x0 > x1) or (dx < dy and y0 > y1):  # always walked upwards, so that both ways round the same
        x0, y0, x1, y1, steps = x1, y1, x0, y0, steps[::-1]
    if dx >= dy:
        x, y = steps + x0, (y0 + (y1 - y0) / max(dx, 1) * steps + 0.5).astype(np.int64)
    else:
        x, y = (x0 + (x1 - x0) / dy * steps + 0.5).astype(np.int64), steps + y0
    moved = x[1:] != x[:-1]
    column = (np.where(x[1:] < x[:-1], x[1:], x[1:] - 1)[moved] + 0.5) / FINE - 0.5
    row = (np.minimum(y[1:], y[:-1])[moved] + 0.5) / FINE - 0.5
    inside = (np.floor(column) == column) & (column >= 0) & (column <= W - 1)
    rows = np.ceil(np.clip(row[inside], 0, H)).astype(np.int64)
    return column[inside].astype(np.int64) * H + rows
