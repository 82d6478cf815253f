"""Patch grid of an image or video: patch and token counts, without pixels or torch."""

from typing import Self

from vitrail.config import Config
from vitrail.errors import ConfigError


class Grid(Config):
    """A grid of t × h × w patches. Each block of merge_size × merge_size patches becomes one token.

    `t` counts temporal patches. A still image has one, regardless of how many frames a temporal patch spans. If
    `padded`, blocks at the lower and right edge may be incomplete: zeros take the place of the missing patches.
    """

    h: int
    w: int
    t: int = 1
    merge_size: int = 1
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("t", "h", "w", "merge_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Grid.{name} is {getattr(self, name)}", "give at least one patch on each axis")
        if not self.padded and (self.h % self.merge_size or self.w % self.merge_size):
            raise ConfigError(
                f"a grid of {self.h}×{self.w} patches is not divisible into blocks of "
                f"{self.merge_size}×{self.merge_size}",
                f"resize the image so that both sides hold a multiple of {self.merge_size} patches",
            )

    @classmethod
    def from_pixels(cls, height: int, width: int, patch_size: int, *, merge_size: int = 1, t: int = 1) -> Self:
        """Return the grid of an image of height × width pixels. The patches must cover it exactly."""
        if patch_size < 1:
            raise ConfigError(f"patch_size is {patch_size}", "give the side of a patch in pixels, such as 14 or 16")
        if height % patch_size or width % patch_size:
            raise ConfigError(
                f"{height}×{width} pixels are not divisible into patches of {patch_size}",
                f"resize to a multiple of {patch_size * merge_size}, such as "
                f"{_nearest_multiple(height, patch_size * merge_size)}×{_nearest_multiple(width, patch_size * merge_size)}",  # noqa: E501
            )
        return cls(t=t, h=height // patch_size, w=width // patch_size, merge_size=merge_size)

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def num_rows(self) -> int:
        """Number of token rows after merging."""
        return -(-self.h // self.merge_size)

    @property
    def num_columns(self) -> int:
        """Number of token columns after merging."""
        return -(-self.w // self.merge_size)

    @property
    def num_tokens(self) -> int:
        return self.t * self.num_rows * self.num_columns

    def pixel_size(self, patch_size: int) -> tuple[int, int]:
        """Return the (height, width) in pixels that patches of this size cover."""
        return self.h * patch_size, self.w * patch_size


def _nearest_multiple(size: int, factor: int) -> int:
    return max(factor, (size + factor // 2) // factor * factor)
