"""What every reader of pictures gives: how many there are, what is known of each, and its pixels.

Axes: N pictures, H, W pixels, 4 channels (red, green, blue, opacity).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class About:
    """What is known of a picture."""

    id: str  # "twemoji/1f436", unique over all sources
    vendor: str  # who drew it: "twemoji", "noto", "openclipart", "cifar10", …
    key: str  # codepoints "1f468-200d-1f33e" (alike for all emoji vendors: lower case, no fe0f), file stem, or number
    name: str  # "dog face"
    keywords: tuple[str, ...] = ()
    category: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # language code → the name in it


class Pictures(Protocol):
    """An opened source of pictures. `side` is the longer side wanted: vector drawings are rasterised at it."""

    def __len__(self) -> int: ...

    def about(self, item: int) -> About: ...

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        """uint8 (H, W, 4)."""
        ...


@dataclass(frozen=True)
class Labelled:
    """One part ("train" or "test") of a set with classes, as arrays."""

    images: np.ndarray  # uint8 (N, H, W, 3)
    labels: np.ndarray  # int64 (N,)
    names: tuple[str, ...]  # of the classes
