"""Pictures through a tower, whichever model it is a part of.

N pictures, B of them at once, C channels, H, W pixels, D width of a pooled feature
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.pictures.pixels import trimmed
from vitrail.data.sources.progress import bar
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.processing.images import Source
from vitrail.processing.preprocessing import Preprocessing

Picture: TypeAlias = "Source | Callable[[], Source]"
"""What `load_image` reads, or a function that gives it when it is wanted."""

_T = TypeVar("_T")


class Tower(Protocol):
    """A picture tower: a ViT or a convolutional one. `config.image` is the side of the pictures it is made for.

    One whose config says `pool = "none"` gives its patches instead, (B, N, D), when it is called.
    """

    config: Any

    def pool(self, pixels: Tensor, /) -> Tensor:
        """(B, D)"""
        ...


class HasTower(Protocol):
    """A model with a picture tower in it; one whose tower is called `image` need not say it twice."""

    @property
    def tower(self) -> Tower: ...


def tower_of(model: object) -> Tower | None:
    """The picture tower of a model: its `tower`, its `image`, or itself.

    None of a vision-language model: its config says how its pictures are prepared, which suites would not follow.
    """
    if hasattr(getattr(model, "config", None), "policy"):
        return None
    for part in (getattr(model, "tower", None), getattr(model, "image", None), model):
        side = getattr(getattr(part, "config", None), "image", None)
        if isinstance(side, int) and callable(getattr(part, "pool", None)):
            return cast(Tower, part)
    return None


class Viewer:
    """A tower ready to look: pictures → features on the CPU, in float32."""

    model: Any  # whatever the tower is a part of

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, *, batch: int = 256):
        if batch < 1:
            raise ConfigError(f"batches of {batch}", "give at least 1")
        tower = tower_of(model)
        if tower is None:
            raise CheckpointError(f"a {type(model).__name__} has no picture tower", "give a model that looks")
        self.model, self.tower, self.preprocessing, self.batch = model.eval(), tower, preprocessing, batch

    @property
    def side(self) -> int:
        """Pixels of a side that the tower sees."""
        return self.preprocessing.side

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def features(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, D) what the tower pools, before any projection, not normalised: what probes are trained on. Of a tower
        without a pool the mean of its patches."""
        if getattr(self.tower.config, "pool", None) == "none":
            patches = cast(Callable[[Tensor], Tensor], self.tower)
            return self._pictures(pictures, lambda pixels: patches(pixels).mean(1))
        return self._pictures(pictures, self.tower.pool)

    @torch.no_grad()
    def _pictures(self, pictures: Sequence[Picture], encode: Callable[[Tensor], Tensor]) -> Tensor:
        parts, dtype = [], next(self.model.parameters()).dtype
        for some in self._batches(pictures, "looking at pictures"):
            pixels = torch.stack([self.preprocessing(p() if callable(p) else p) for p in some])  # (B, C, H, W)
            parts.append(finite(encode(pixels.to(self.device, dtype))))
        return torch.cat(parts)

    def _batches(self, items: Sequence[_T], what: str) -> Iterator[Sequence[_T]]:
        if not len(items):
            raise DataError("there is nothing to evaluate: the data set is empty", "name another, or raise the limit")
        with bar(what, len(items), unit="") as progress:
            for start in range(0, len(items), self.batch):
                some = items[start : start + self.batch]
                yield some
                progress.update(len(some))


def trim(pictures: Sequence[Picture], side: int) -> list[Picture]:
    """Pictures with opacity as a collection with `trim` has them, cut when they are looked at."""
    return [partial(_trimmed, picture, side) for picture in pictures]


def _trimmed(picture: Picture, side: int) -> Source:
    source = picture() if callable(picture) else picture
    if not isinstance(source, np.ndarray) or source.shape[2:] != (4,):
        raise DataError("only pictures of a source or a folder can be trimmed", "leave --trim out")
    return trimmed(source, side)


def bend(pictures: Sequence[Picture], gamma: float) -> list[Picture]:
    """Pictures whose colours, in 0…1, are raised to e^gamma as they are looked at: above 0 middle tones get darker."""
    if not -2 <= gamma <= 2:
        raise ConfigError(f"a gamma of {gamma:g}", "give −2 … 2")
    return [partial(_bent, picture, gamma) for picture in pictures]


def _bent(picture: Picture, gamma: float) -> Source:
    source = picture() if callable(picture) else picture
    if not isinstance(source, np.ndarray) or source.dtype != np.uint8 or source.ndim != 3:
        raise DataError("only pictures of a source or a folder can be made darker or lighter", "leave --gamma out")
    colours, rest = source[..., :3], source[..., 3:]
    table = np.round(255 * (np.arange(256) / 255) ** np.exp(gamma)).astype(np.uint8)
    return np.concatenate([table[colours], rest], -1)


def finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise CheckpointError("the model's embeddings are not finite", "are its weights whole?")
    return x.float().cpu()
