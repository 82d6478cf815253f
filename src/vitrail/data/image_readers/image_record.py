"""Interface of all image readers: number of images, their metadata and their pixels.

Shapes: N images, H and W pixels, 4 channels (RGB and opacity).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ImageRecord:
    """Metadata of an image. Field names are keys of cached collections."""

    id: str  # "twemoji/1f436", unique across all sources
    vendor: str  # source of the image: "twemoji", "noto", "openclipart", "cifar10", …
    key: str  # codepoints "1f468-200d-1f33e" (the same for all emoji vendors), file stem, or number
    name: str  # "dog face"
    keywords: tuple[str, ...] = ()
    category: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # language code → name in that language


class ImageReader(Protocol):
    """An opened source of images. `image_size` is the longer side; vector graphics are rendered at this size."""

    def __len__(self) -> int: ...

    def get_record(self, item: int) -> ImageRecord:
        """Return the metadata of an image."""
        ...

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        """Load an image as uint8 (H, W, 4)."""
        ...


@dataclass(frozen=True)
class LabelledImages:
    """One split ("train" or "test") of a classification set, as arrays."""

    images: np.ndarray  # uint8 (N, H, W, 3)
    labels: np.ndarray  # int64 (N,)
    class_names: tuple[str, ...]  # class names
