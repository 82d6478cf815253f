"""Readers of local image folders and of datasets of the Hugging Face hub."""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.image_readers.reader_files import read_lines, stem_to_words
from vitrail.data.image_readers.rgba import READABLE_SUFFIXES, ImageFileReader, resize_rgba
from vitrail.errors import DataError
from vitrail.processing.image_loading import load_image


class ImageFolderReader(ImageFileReader):
    """All images below a folder.

    The name is the text of a .txt file of the same stem, or else the file stem. The category is the parent folder.
    """

    def __init__(self, root: Path):
        self.root, self.vendor = root, root.resolve().name
        self.paths = sorted(
            path for path in root.rglob("*") if path.suffix.lower() in READABLE_SUFFIXES and path.is_file()
        )
        if not self.paths:
            raise DataError(f"{root} holds no images", f"add some: {', '.join(READABLE_SUFFIXES)}")

    def get_record(self, item: int) -> ImageRecord:
        path = self.paths[item]
        place = path.relative_to(self.root)
        text = path.with_suffix(".txt")
        name = " ".join(" ".join(read_lines(text)).split()) if text.is_file() else ""
        category = place.parent.name
        # The key includes the suffix: a.png and a.svg are two images.
        return ImageRecord(
            f"{self.vendor}/{place.as_posix()}",
            self.vendor,
            place.as_posix(),
            name or stem_to_words(path.stem),
            (),
            category,
        )


class HubDatasetReader:
    """A dataset folder read through `datasets`: the first columns of images, text and classes, in one split."""

    def __init__(self, vendor: str, folder: Path, split: str | None = None):
        try:
            import datasets
        except ImportError:
            raise DataError(
                f"{vendor} needs the package datasets, which is not installed", "pip install datasets"
            ) from None
        try:
            parts = datasets.load_dataset(str(folder))
            self.rows: Any = parts[split or next(iter(parts))]
        # Untrusted data: any error of the reader is an error of the data.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{vendor} in {folder} cannot be read: {reason}", "check that it holds images") from error
        self.vendor = vendor
        columns = self.rows.features
        self.image_column = next((name for name, kind in columns.items() if isinstance(kind, datasets.Image)), None)
        self.class_column = next(
            (name for name, kind in columns.items() if isinstance(kind, datasets.ClassLabel)), None
        )
        self.text_column = next(
            (name for name, kind in columns.items() if getattr(kind, "dtype", "") == "string"), None
        )
        if self.image_column is None:
            raise DataError(f"{vendor} has no image column", f"its columns: {', '.join(columns)}")
        text_columns = [name for name in (self.text_column, self.class_column) if name]
        # Without images, which are slow to read.
        self._text_rows: Any = self.rows.select_columns(text_columns) if text_columns else None
        # As bytes: untrusted images are decoded by `load_image`.
        self.rows = self.rows.cast_column(self.image_column, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.rows)

    def get_record(self, item: int) -> ImageRecord:
        row: dict[str, Any] = self._text_rows[item] if self._text_rows else {}
        label = row[self.class_column] if self.class_column else None
        unknown = label is None or label < 0  # as in a test split without labels
        category = "" if unknown else self.rows.features[self.class_column].int2str(label)
        text = " ".join((row[self.text_column] or "").split()) if self.text_column else ""
        key = f"{item:07d}"
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, text or category, (), category)

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        entry = self.rows[item][self.image_column]
        source = entry["bytes"] if entry["bytes"] is not None else entry["path"]
        return resize_rgba(load_image(source, frame=0).convert("RGBA"), image_size)
