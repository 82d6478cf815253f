"""Readers of images and their metadata, for every source, behind one interface."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vitrail.data.image_readers.class_images import ClassImagesReader, SplitName
from vitrail.data.image_readers.clipart import OpenClipartReader, TuxPaintReader
from vitrail.data.image_readers.emoji import VENDORS, Emojibase, EmojiReader
from vitrail.data.image_readers.iconify import IconifyReader
from vitrail.data.image_readers.image_folder import HubDatasetReader, ImageFolderReader
from vitrail.data.image_readers.image_record import ImageReader, ImageRecord, LabelledImages
from vitrail.data.sources import SOURCES, fetch_source
from vitrail.errors import DataError, suggest_name

__all__ = ["READERS", "ImageReader", "ImageRecord", "LabelledImages", "load_labelled_images", "open_images"]


def _open_emoji(vendor: str, root: Path | None) -> ImageReader:
    reader = IconifyReader if VENDORS[vendor].endswith(".json") else EmojiReader
    return reader(vendor, fetch_source(vendor, root=root), Emojibase(fetch_source("emojibase", root=root)))


# Name of a source → its reader, given the cache folder.
READERS: dict[str, Callable[[Path | None], ImageReader]] = {
    "cifar10": lambda root: ClassImagesReader("cifar10", fetch_source("cifar10", root=root)),
    "fashion-mnist": lambda root: ClassImagesReader("fashion-mnist", fetch_source("fashion-mnist", root=root)),
    **{vendor: partial(_open_emoji, vendor) for vendor in VENDORS},
    "openclipart": lambda root: OpenClipartReader(fetch_source("openclipart", root=root)),
    "tuxpaint": lambda root: TuxPaintReader(fetch_source("tuxpaint", root=root)),
}


def open_images(name: str, root: Path | None = None) -> ImageReader:
    """Open a source of images: a name of `vitrail data list`, hf:owner/name, or a folder. The first call fetches it.

    `root` replaces the cache folder $VITRAIL_HOME.
    """
    if name in READERS:
        return READERS[name](root)
    if name.startswith("hf:"):
        return HubDatasetReader(name, fetch_source(name, root=root))
    if name not in SOURCES and Path(name).is_dir():
        return ImageFolderReader(Path(name))
    problem = f"{name!r} holds no images" if name in SOURCES else f"no source or folder is called {name!r}"
    raise DataError(problem, suggest_name(name, READERS))


def load_labelled_images(name: str, split: SplitName, root: Path | None = None) -> LabelledImages:
    """Load a split of a classification set as arrays."""
    opened = open_images(name, root)
    if not isinstance(opened, ClassImagesReader):
        raise DataError(f"{name} has no labelled splits", "use cifar10 or fashion-mnist")
    return opened.load_split(split)
