"""Extracts image features with the image tower of any model.

N images, B batch size, C channels, H, W pixels, D feature width
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.image_readers.rgba import trim_rgba
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.encoders.vit import Grids, ViT
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.processing.image_loading import ImageSource
from vitrail.processing.image_preprocessor import ImagePreprocessor

LazyImage: TypeAlias = "ImageSource | Callable[[], ImageSource]"
"""Anything that `load_image` accepts, or a function that returns it."""

_T = TypeVar("_T")


class ImageTower(Protocol):
    """Interface of image towers, ViT or convolutional. `config.image_size` is the image size in pixels.

    A tower with `config.pool == "none"` has no pooling; calling it returns patch features (B, N, D).
    """

    config: Any

    def forward_pooled(self, pixels: Tensor, /) -> Tensor:
        """(B, D)"""
        ...


def find_image_tower(model: object) -> ImageTower | None:
    """Find the image tower of a model: its `tower`, its `image`, or the model itself.

    Returns None for vision-language models: suites would not follow the image preparation of their config.
    """
    if hasattr(getattr(model, "config", None), "policy"):
        return None
    for part in (getattr(model, "tower", None), getattr(model, "image", None), model):
        image_size = getattr(getattr(part, "config", None), "image_size", None)
        if isinstance(image_size, int) and callable(getattr(part, "forward_pooled", None)):
            return cast(ImageTower, part)
    return None


class ImageFeatureExtractor:
    """Computes image features in float32 on the CPU."""

    model: Any  # the model that contains the tower
    num_truncated = 0  # texts truncated so far
    supports_matching = False  # whether it computes matching scores of image-text pairs

    def __init__(self, model: nn.Module, preprocessing: ImagePreprocessor, *, batch_size: int = 256):
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size}", "set at least 1")
        tower = find_image_tower(model)
        if tower is None:
            raise CheckpointError(f"{type(model).__name__} has no image tower", "use a model with an image tower")
        self.model, self.tower, self.preprocessing, self.batch_size = model.eval(), tower, preprocessing, batch_size

    @property
    def image_size(self) -> int:
        """Image size of the tower in pixels."""
        return self.preprocessing.image_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def describe_inputs(self) -> dict[str, Any]:
        """Return how inputs are prepared, and how many texts were truncated, for the settings of an evaluation."""
        return {"pictures_prepared": self.preprocessing.to_processor_config(), "texts_cut": self.num_truncated}

    @property
    def truncation_warning(self) -> str:
        """A warning if texts were truncated, else ""."""
        if not self.num_truncated:
            return ""
        config = self.model.config
        limit = getattr(config, "text", config).context_length
        return f"{self.num_truncated:,} texts are truncated to the {limit} tokens of the text tower"

    def extract_features(self, images: Sequence[LazyImage]) -> Tensor:
        """Pooled features (N, D) before projection, not normalised. Without pooling: the mean of the patch features."""
        if getattr(self.tower.config, "pool", None) == "none":
            return self._encode_images(images, self._mean_features)
        return self._encode_images(images, self.tower.forward_pooled)

    def _mean_features(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        """Mean of the features of each image, without padding."""
        tower = cast(Callable[..., Tensor], self.tower)
        if grids is None:
            return tower(pixels).mean(1)
        features = tower(pixels, grids)
        return torch.stack([x[: h * w].mean(0) for x, (h, w) in zip(features, grids, strict=True)])

    @torch.no_grad()
    def _encode_images(self, images: Sequence[LazyImage], encode: Callable[..., Tensor]) -> Tensor:
        """Encode images with a function of pixels (B, C, H, W), or of patches and grids of unequal images."""
        parts, dtype = [], next(self.model.parameters()).dtype
        for batch in self._iter_batches(images, "encoding images"):
            prepared = [self.preprocessing(p() if callable(p) else p) for p in batch]  # (C, H, W) each
            pixels, grids = batch_images(self.tower, prepared)
            parts.append(to_finite_cpu(encode(pixels.to(self.device, dtype), *([] if grids is None else [grids]))))
        return torch.cat(parts)

    def _iter_batches(self, items: Sequence[_T], description: str) -> Iterator[Sequence[_T]]:
        if not len(items):
            raise DataError("the dataset to evaluate is empty", "use another dataset, or raise the limit")
        with progress_bar(description, len(items), unit="") as progress:
            for start in range(0, len(items), self.batch_size):
                batch = items[start : start + self.batch_size]
                yield batch
                progress.update(len(batch))


def batch_images(tower: ImageTower, images: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]] | None]:
    """Batch preprocessed images (C, H, W) for a tower; see `ViT.batch_images`."""
    return tower.batch_images(images) if isinstance(tower, ViT) else (torch.stack(list(images)), None)


def trim_images(images: Sequence[LazyImage], image_size: int) -> list[LazyImage]:
    """Crop RGBA images to their opaque part when they are loaded, as in collections with `trim`."""
    return [partial(_trim_image, picture, image_size) for picture in images]


def _trim_image(picture: LazyImage, image_size: int) -> ImageSource:
    source = picture() if callable(picture) else picture
    if not isinstance(source, np.ndarray) or source.shape[2:] != (4,):
        raise DataError("only images of a source or a folder can be trimmed", "remove --trim")
    return trim_rgba(source, image_size)


def adjust_gamma(images: Sequence[LazyImage], gamma: float) -> list[LazyImage]:
    """Raise colours in 0…1 to the power e^gamma when images are loaded; gamma > 0 darkens midtones."""
    if not -2 <= gamma <= 2:
        raise ConfigError(f"gamma = {gamma:g} is out of range", "set −2 … 2")
    return [partial(_adjust_gamma, picture, gamma) for picture in images]


def _adjust_gamma(picture: LazyImage, gamma: float) -> ImageSource:
    source = picture() if callable(picture) else picture
    if not isinstance(source, np.ndarray) or source.dtype != np.uint8 or source.ndim != 3:
        raise DataError("gamma applies only to images of a source or a folder", "remove --gamma")
    colours, rest = source[..., :3], source[..., 3:]
    table = np.round(255 * (np.arange(256) / 255) ** np.exp(gamma)).astype(np.uint8)
    return np.concatenate([table[colours], rest], -1)


def to_finite_cpu(x: Tensor) -> Tensor:
    """Move to float32 on the CPU; raise an error if a value is not finite."""
    if not x.isfinite().all():
        raise CheckpointError("the model's embeddings are not finite", "check the weights of the checkpoint")
    return x.float().cpu()
