"""Pictures of one's own: a folder of files, or a dataset of the Hugging Face hub."""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.pictures.files import read_lines, spoken
from vitrail.data.pictures.pixels import SUFFIXES, fitted, read_rgba
from vitrail.data.pictures.record import About
from vitrail.errors import DataError
from vitrail.processing.images import load_image


class Folder:
    """Every picture below a folder. Its name is the text in a .txt of the same stem beside it, or else its file's; its
    category is the folder that it lies in."""

    def __init__(self, root: Path):
        self.root, self.vendor = root, root.resolve().name
        self.paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not self.paths:
            raise DataError(f"{root} holds no pictures", f"put some there: {', '.join(SUFFIXES)}")

    def __len__(self) -> int:
        return len(self.paths)

    def about(self, item: int) -> About:
        path = self.paths[item]
        place = path.relative_to(self.root)
        text = path.with_suffix(".txt")
        name = " ".join(" ".join(read_lines(text)).split()) if text.is_file() else ""
        category = place.parent.name
        # With its suffix: a.png and a.svg are two pictures.
        return About(
            f"{self.vendor}/{place.as_posix()}", self.vendor, place.as_posix(), name or spoken(path.stem), (), category
        )

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return read_rgba(self.paths[item], side)


class Dataset:
    """A dataset's folder, read through `datasets`: the first column of pictures, the first of text, and the first of
    classes, in the named split or the first."""

    def __init__(self, vendor: str, folder: Path, split: str | None = None):
        try:
            import datasets
        except ImportError:
            raise DataError(
                f"datasets is needed to read {vendor} and is not installed", "pip install datasets"
            ) from None
        try:
            parts = datasets.load_dataset(str(folder))
            self.rows: Any = parts[split or next(iter(parts))]
        # A folder by strangers: whatever its reader stumbles over is a fault of the data.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{vendor} in {folder} cannot be read: {reason}", "check that it holds pictures") from error
        self.vendor = vendor
        columns = self.rows.features
        self.picture = next((name for name, kind in columns.items() if isinstance(kind, datasets.Image)), None)
        self.classes = next((name for name, kind in columns.items() if isinstance(kind, datasets.ClassLabel)), None)
        self.text = next((name for name, kind in columns.items() if getattr(kind, "dtype", "") == "string"), None)
        if self.picture is None:
            raise DataError(f"{vendor} has no column of pictures", f"its columns: {', '.join(columns)}")
        told = [name for name in (self.text, self.classes) if name]
        # Without the pictures, which are long to read.
        self._words: Any = self.rows.select_columns(told) if told else None
        # As bytes: decoding is ours, with the checks that strangers' pictures need.
        self.rows = self.rows.cast_column(self.picture, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.rows)

    def about(self, item: int) -> About:
        row: dict[str, Any] = self._words[item] if self._words else {}
        label = row[self.classes] if self.classes else None
        unknown = label is None or label < 0  # as in a test part whose answers are kept back
        category = "" if unknown else self.rows.features[self.classes].int2str(label)
        text = " ".join((row[self.text] or "").split()) if self.text else ""
        key = f"{item:07d}"
        return About(f"{self.vendor}/{key}", self.vendor, key, text or category, (), category)

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        held = self.rows[item][self.picture]
        source = held["bytes"] if held["bytes"] is not None else held["path"]
        return fitted(load_image(source, frame=0).convert("RGBA"), side)
