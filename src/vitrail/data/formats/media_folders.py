"""Folders of images or videos, with classes by sub-folder, caption files, or Hugging Face's metadata files."""

import csv
import io
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitrail.data.formats.data_files import MediaFolder, read_json, read_json_rows, read_text
from vitrail.data.formats.sample import Sample, SampleDataset, check_unique_ids, show_progress
from vitrail.errors import DataError

# fmt: off
IMAGE_SUFFIXES = frozenset({
    ".png", ".jpg", ".jpeg", ".jpe", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".ppm", ".pgm", ".pbm", ".jp2", ".j2k",
    ".avif", ".tga", ".mpo",
})
VIDEO_SUFFIXES = frozenset({
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".3gp",
})
# fmt: on
METADATA_FILES = ("metadata.jsonl", "metadata.csv")
CAPTION_KEYS = ("caption", "captions", "text")  # keys of JSON and metadata files that hold captions


class _Row(NamedTuple):
    """One media file and what is known of it."""

    name: str  # relative to the root
    label: str | None
    caption_files: tuple[str, ...]  # caption files of the same name
    metadata: dict[str, Any]  # its row in the metadata file


def open_images(path: Path, *, allow_outside: bool = False, with_classes: bool = True) -> SampleDataset:
    """Open a folder of images, in the order of their names.

    With `metadata.jsonl` or `metadata.csv` (column `file_name`) in the folder or in its sub-folders, the images listed
    there. Otherwise all images below
    the folder: the first sub-folder is the class (`with_classes=False`: no classes), and `x.txt` or `x.json` next to
    `x.jpg` holds captions.
    """
    return _open_folder("images", IMAGE_SUFFIXES, path, allow_outside, with_classes)


def open_videos(path: Path, *, allow_outside: bool = False, with_classes: bool = True) -> SampleDataset:
    """Open a folder of videos, like `open_images`. `Sample.open_video()` opens one."""
    return _open_folder("videos", VIDEO_SUFFIXES, path, allow_outside, with_classes)


def _open_folder(kind: str, suffixes: frozenset[str], path: Path, allow_outside: bool, classes: bool) -> SampleDataset:
    if not path.is_dir():
        raise DataError(f"{path} is not a folder", f"give the folder that holds the {kind}")
    folder = MediaFolder(path, allow_outside)
    metadata_files = _find_metadata_files(path)
    if metadata_files:
        rows, skipped = [row for file in metadata_files for row in _rows_from_metadata(file, path)], {}
    else:
        names, others = _list_files(path, allow_outside)
        rows, skipped = _rows_from_names(path, names, others, suffixes, classes)
    labels = sorted({row.label for row in rows if row.label is not None})
    make = partial(_sample, folder, kind == "videos")
    return SampleDataset(kind, path, rows, make, names=labels, skipped=skipped)


def _find_metadata_files(path: Path) -> list[Path]:
    """Find the metadata file of a folder, or those of its sub-folders, such as train and test."""
    found = [path / name for name in METADATA_FILES if (path / name).is_file()]
    found = found or sorted(file for name in METADATA_FILES for file in path.glob(f"*/{name}"))
    for folder in {file.parent for file in found}:
        if sum(file.parent == folder for file in found) > 1:
            raise DataError(f"{folder} holds both {' and '.join(METADATA_FILES)}", "keep one of them")
    return found


def _list_files(root: Path, anywhere: bool) -> tuple[list[str], Counter[str]]:
    """List all files below a folder as names with `/`, sorted by code point so that every machine agrees."""
    names, skipped, visited = [], Counter(), set()
    for folder, subfolders, files in show_progress(
        os.walk(root, onerror=_raise_unreadable, followlinks=anywhere), root.name
    ):
        path = Path(folder)
        if anywhere:
            if (resolved := path.resolve()) in visited:  # a link to a folder already visited
                subfolders.clear()
                continue
            visited.add(resolved)
        else:
            links = [name for name in subfolders if (path / name).is_symlink()]
            if links:
                raise DataError(f"{path / links[0]} is a link to another folder", "set allow_outside=True to follow it")
        skipped["hidden"] += sum(name.startswith(".") for name in (*subfolders, *files))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        prefix = path.relative_to(root)
        names += [(prefix / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names), skipped


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}", "check its permissions") from error


def _rows_from_names(
    root: Path, names: list[str], skipped: Counter[str], suffixes: frozenset[str], classes: bool
) -> tuple[list[_Row], dict[str, int]]:
    paths = [PurePosixPath(name) for name in names]
    media_paths = [path for path in paths if path.suffix.lower() in suffixes]
    if classes and len({len(path.parts) > 1 for path in media_paths}) > 1:
        unclassified = next(path for path in media_paths if len(path.parts) == 1)
        raise DataError(
            f"{root}: {unclassified} is not in a sub-folder like the other files, so it has no class",
            "move it into a sub-folder, or read without classes: with_classes=False",
        )
    sidecars = {path.as_posix() for path in paths if path.suffix in (".txt", ".json")}
    rows, used = [], set()
    for path in media_paths:
        caption_files = tuple(
            name for suffix in (".txt", ".json") if (name := path.with_suffix(suffix).as_posix()) in sidecars
        )
        used.update(caption_files)
        rows.append(
            _Row(path.as_posix(), path.parts[0] if classes and len(path.parts) > 1 else None, caption_files, {})
        )
    used_names = {row.name for row in rows} | used
    skipped.update(path.suffix.lower() or path.name for path in paths if path.as_posix() not in used_names)
    return rows, {what: count for what, count in sorted(skipped.items()) if count}


def _rows_from_metadata(path: Path, root: Path) -> list[_Row]:
    """Read the rows of a metadata file. Its names are relative to its own folder."""
    if path.suffix == ".csv":
        try:
            rows_read: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(read_text(path)), strict=True))
        except csv.Error as error:
            raise DataError(f"{path}: {error}", "save it as UTF-8 with commas between cells") from error
    else:
        rows_read = read_json_rows(path, dict[str, Any])
    rows = []
    for number, row in enumerate(rows_read):
        name = row.pop("file_name", None)
        if not isinstance(name, str) or None in row:  # DictReader stores surplus cells under None
            raise DataError(
                f"{path}, row {number}: no file_name, or more cells than columns", "give one file_name in each row"
            )
        label = row.pop("label", None)
        if path.parent != root:
            name = f"{path.parent.relative_to(root).as_posix()}/{name}"
        rows.append(_Row(name, None if label is None else str(label), (), row))
    check_unique_ids([row.name for row in rows], path)
    return rows


def _sample(folder: MediaFolder, is_video: bool, row: _Row) -> Sample:
    file = folder.find_file(row.name, row.name, "video" if is_video else "image")
    captions: list[str] = []
    metadata = dict(row.metadata)
    for name in row.caption_files:
        caption_file = folder.find_file(name, row.name, "caption")
        if name.endswith(".txt"):
            captions.append(read_text(caption_file).strip())
        else:
            metadata |= read_json(caption_file, dict[str, Any])
    for key in CAPTION_KEYS:
        captions += _caption_texts(metadata.pop(key), f"sample {row.name:.80}, {key}") if key in metadata else ()
    captions = list(dict.fromkeys(captions))  # img2dataset writes the same caption to both files
    sample = Sample(id=row.name, label=row.label, captions=tuple(captions), metadata=metadata)
    return replace(sample, videos=(file,)) if is_video else replace(sample, images=(file,))


def _caption_texts(value: Any, who: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{who} is {type(value).__name__}", "give a text, or a list of texts")
    return texts
