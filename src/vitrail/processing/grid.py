"""The integer record that counts visual tokens. No pixels, no torch: it is compared before any forward pass."""

from typing import Self

from vitrail.config import Config
from vitrail.errors import ConfigError


class Grid(Config):
    """T × H × W patches of which every merge × merge block becomes one token.

    `t` counts temporal patches: a still picture has one, however many frames a temporal patch spans.
    """

    h: int
    w: int
    t: int = 1
    merge: int = 1

    def __post_init__(self) -> None:
        for name in ("t", "h", "w", "merge"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Grid.{name} is {getattr(self, name)}", "a grid has at least one patch on each axis")
        if self.h % self.merge or self.w % self.merge:
            raise ConfigError(
                f"a grid of {self.h}×{self.w} patches does not divide into blocks of {self.merge}×{self.merge}",
                f"resize the picture so that both sides hold a multiple of {self.merge} patches",
            )

    @classmethod
    def of(cls, height: int, width: int, patch: int, *, merge: int = 1, t: int = 1) -> Self:
        """The grid of a picture of height × width pixels, which the patches must cover exactly."""
        if patch < 1:
            raise ConfigError(f"a patch of {patch} pixels", "give the side of a patch in pixels, such as 14 or 16")
        if height % patch or width % patch:
            raise ConfigError(
                f"{height}×{width} pixels do not divide into patches of {patch}",
                f"resize to a multiple of {patch * merge}, such as "
                f"{_near(height, patch * merge)}×{_near(width, patch * merge)}",
            )
        return cls(t=t, h=height // patch, w=width // patch, merge=merge)

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def rows(self) -> int:
        """Rows of tokens, after merging."""
        return self.h // self.merge

    @property
    def columns(self) -> int:
        """Columns of tokens, after merging."""
        return self.w // self.merge

    @property
    def tokens(self) -> int:
        return self.t * self.rows * self.columns

    def pixels(self, patch: int) -> tuple[int, int]:
        """(height, width) of the picture that patches of this side cover."""
        return self.h * patch, self.w * patch


def _near(size: int, factor: int) -> int:
    return max(factor, (size + factor // 2) // factor * factor)
