"""Options of a comparison of codecs and image formats."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from vitrail.config import Config
from vitrail.errors import ConfigError


class CodecComparison(Config):
    """Options of a comparison.

    codecs              codecs: folders or hub ids
    data                cifar10, fashion-mnist, an image source (`vitrail data list`), a folder, or a preset of scenes
    split               train or test, for datasets with classes
    limit               maximum number of images, sampled evenly
    image_size          side in pixels that images are resized and cropped to. Default: the original size, 64 for scenes
    seed                seed of the scenes. Use one that no codec is trained on
    atlas               sprites of the scenes: emoji, or a .safetensors file
    baseline            an image format: jpeg, webp or avif. May be repeated
    quality             quality of the image formats, 0 to 100. May be repeated. Default: nine qualities
    chroma_subsampling  4:2:0 or 4:4:4. WebP supports 4:2:0 only. May be repeated
    image_sheets        also encode many images as one image file, which shares the file header
    lpips               network of LPIPS. Its weights are fetched the first time
    frechet             also compute the Fréchet distance of ResNet-50 features. Fetches 95 MB the first time; needs
                        thousands of images
    recognizer          a contrastive model that classifies the reconstructions: a folder or a hub id
    probe_images        number of training images for a linear probe on the features of the recognizer. 0 trains none
    batch_size          images a batch, and at most on a sheet
    """

    codecs: tuple[str, ...] = ()
    data: str = "cifar10"
    split: Literal["train", "test"] = "test"
    limit: int | None = None
    image_size: int | None = None
    seed: int = 7171
    atlas: str = "emoji"
    baseline: tuple[str, ...] = ()
    quality: tuple[int, ...] = ()
    chroma_subsampling: tuple[Literal["4:2:0", "4:4:4"], ...] = ("4:2:0",)
    image_sheets: bool = False
    lpips: Literal["alexnet", "vgg16", "none"] = "alexnet"
    frechet: bool = False
    recognizer: str | None = None
    probe_images: int = 0
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.probe_images and self.recognizer is None:
            raise ConfigError(
                "--probe-images needs the features of a recognizer", "add --recognizer, or remove --probe-images"
            )
        if self.probe_images and self.split == "train":
            raise ConfigError(
                "a probe is trained on the train split, so it cannot be tested on it", "remove --split train"
            )
        if not self.codecs and not self.baseline:
            raise ConfigError("there is nothing to compare", "give codecs, or image formats with --baseline jpeg")

    @property
    def settings(self) -> dict[str, Any]:
        """The options as they are saved with the results."""
        return {
            "data": self.data,
            "split": self.split,
            "limit": self.limit,
            "image_size": self.image_size,
            "seed": self.seed,
            "atlas": self.atlas,
            "batch_size": self.batch_size,
            "probe_images": self.probe_images,
            "recognizer": None if self.recognizer is None else shorten_names([self.recognizer])[self.recognizer],
        }


def shorten_names(models: Iterable[str]) -> dict[str, str]:
    """Return display names: absolute paths are shortened to paths relative to their common parent folder."""
    paths = list(dict.fromkeys(models))
    absolute = [name for name in paths if Path(name).is_absolute()]
    parent = Path(os.path.commonpath([Path(name).parent for name in absolute])) if absolute else Path()
    return {name: str(Path(name).relative_to(parent)) if name in absolute else name for name in paths}
