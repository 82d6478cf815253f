"""Pictures with what is known of them, from any source, through one small interface."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vitrail.data.pictures.classes import Classes, Part
from vitrail.data.pictures.clipart import Clipart, Stamps
from vitrail.data.pictures.emoji import VENDORS, Emoji, Emojibase
from vitrail.data.pictures.folder import Dataset, Folder
from vitrail.data.pictures.iconify import Icons
from vitrail.data.pictures.record import About, Labelled, Pictures
from vitrail.data.sources import SOURCES, get
from vitrail.errors import DataError, nearest

__all__ = ["READERS", "About", "Labelled", "Pictures", "labelled", "pictures"]


def _emoji(vendor: str, root: Path | None) -> Pictures:
    reader = Icons if VENDORS[vendor].endswith(".json") else Emoji
    return reader(vendor, get(vendor, root=root), Emojibase(get("emojibase", root=root)))


# Name of a source → its reader, given where sources are kept.
READERS: dict[str, Callable[[Path | None], Pictures]] = {
    "cifar10": lambda root: Classes("cifar10", get("cifar10", root=root)),
    "fashion-mnist": lambda root: Classes("fashion-mnist", get("fashion-mnist", root=root)),
    **{vendor: partial(_emoji, vendor) for vendor in VENDORS},
    "openclipart": lambda root: Clipart(get("openclipart", root=root)),
    "tuxpaint": lambda root: Stamps(get("tuxpaint", root=root)),
}


def pictures(name: str, root: Path | None = None) -> Pictures:
    """Open a source of pictures, fetching it the first time: a name of the table, hf:owner/name, or a folder.

    `root` is where sources are kept, instead of $VITRAIL_HOME.
    """
    if name in READERS:
        return READERS[name](root)
    if name.startswith("hf:"):
        return Dataset(name, get(name, root=root))
    if name not in SOURCES and Path(name).is_dir():
        return Folder(Path(name))
    problem = f"{name!r} holds no pictures" if name in SOURCES else f"no source and no folder is called {name!r}"
    raise DataError(problem, nearest(name, READERS))


def labelled(name: str, part: Part, root: Path | None = None) -> Labelled:
    """A part of a set with classes, as arrays."""
    opened = pictures(name, root)
    if not isinstance(opened, Classes):
        raise DataError(f"{name} has no labelled parts", "use cifar10 or fashion-mnist")
    return opened.part(part)
