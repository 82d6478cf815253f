"""Readers of dataset files. Every format is read as numbered `Sample`s."""

from vitrail.data.formats.masks import Instance, Polygons, Rle, rasterize_mask
from vitrail.data.formats.registry import FORMATS, detect_format, open_dataset
from vitrail.data.formats.sample import ContentPart, Sample, SampleDataset, Turn

__all__ = [
    "FORMATS",
    "ContentPart",
    "Instance",
    "Polygons",
    "Rle",
    "Sample",
    "SampleDataset",
    "Turn",
    "detect_format",
    "open_dataset",
    "rasterize_mask",
]
