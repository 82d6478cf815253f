"""The files people bring, read alike: every format gives numbered `Sample`s."""

from vitrail.data.formats.kinds import KINDS, guess, open_format
from vitrail.data.formats.masks import Instance, Polygons, Rle, mask
from vitrail.data.formats.sample import Part, Sample, Samples, Turn

__all__ = [
    "KINDS",
    "Instance",
    "Part",
    "Polygons",
    "Rle",
    "Sample",
    "Samples",
    "Turn",
    "guess",
    "mask",
    "open_format",
]
