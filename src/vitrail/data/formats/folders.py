"""Folders of pictures or videos: classes by sub-folder, captions in files beside them, or Hugging Face's metadata."""

import csv
import io
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitrail.data.formats.files import Folder, read_json, read_rows, read_text
from vitrail.data.formats.sample import Sample, Samples, progress, refuse_twins
from vitrail.errors import DataError

# fmt: off
PICTURES = frozenset({
    ".png", ".jpg", ".jpeg", ".jpe", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".ppm", ".pgm", ".pbm", ".jp2", ".j2k",
    ".avif", ".tga", ".mpo",
})
VIDEOS = frozenset({
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".3gp",
})
# fmt: on
METADATA = ("metadata.jsonl", "metadata.csv")
CAPTIONS = ("caption", "captions", "text")  # keys of JSON and of metadata that are words about the picture


class _Row(NamedTuple):
    name: str  # below the root
    label: str | None
    beside: tuple[str, ...]  # caption files
    told: dict[str, Any]  # a row of metadata


def open_images(path: Path, *, anywhere: bool = False, classes: bool = True) -> Samples:
    """A folder of pictures, in the order of their names.

    With `metadata.jsonl` or `.csv` (column `file_name`), the pictures it names. Else all pictures below it: the first
    sub-folder is the class (`classes=False`: none), and `x.txt` or `x.json` beside `x.jpg` is its caption.
    """
    return _open("images", PICTURES, path, anywhere, classes)


def open_videos(path: Path, *, anywhere: bool = False, classes: bool = True) -> Samples:
    """The same for videos; a sample's `film()` opens one."""
    return _open("videos", VIDEOS, path, anywhere, classes)


def _open(kind: str, suffixes: frozenset[str], path: Path, anywhere: bool, classes: bool) -> Samples:
    if not path.is_dir():
        raise DataError(f"{path} is no folder", f"give the folder that holds the {kind}")
    folder = Folder(path, anywhere)
    told = [path / name for name in METADATA if (path / name).is_file()]
    if len(told) > 1:
        raise DataError(f"{path} holds {' and '.join(METADATA)}", "keep one of them")
    if told:
        rows, skipped = _from_metadata(told[0]), {}
    else:
        names, others = _walk(path, anywhere)
        rows, skipped = _from_names(path, names, others, suffixes, classes)
    labels = sorted({row.label for row in rows if row.label is not None})
    make = partial(_sample, folder, kind == "videos")
    return Samples(kind, path, rows, make, names=labels, skipped=skipped)


def _walk(root: Path, anywhere: bool) -> tuple[list[str], Counter[str]]:
    """All files below a folder as names with `/`, sorted by code point so that every machine agrees."""
    names, others, seen = [], Counter(), set()
    for here, below, files in progress(os.walk(root, onerror=_refuse, followlinks=anywhere), root.name):
        at = Path(here)
        if anywhere:
            if (real := at.resolve()) in seen:  # a link back up
                below.clear()
                continue
            seen.add(real)
        else:
            links = [name for name in below if (at / name).is_symlink()]
            if links:
                raise DataError(f"{at / links[0]} is a link to another folder", "give anywhere=True to follow it")
        others["hidden"] += sum(name.startswith(".") for name in (*below, *files))
        below[:] = [name for name in below if not name.startswith(".")]
        prefix = at.relative_to(root)
        names += [(prefix / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names), others


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}", "check its permissions") from error


def _from_names(
    root: Path, names: list[str], others: Counter[str], suffixes: frozenset[str], classes: bool
) -> tuple[list[_Row], dict[str, int]]:
    paths = [PurePosixPath(name) for name in names]
    wanted = [path for path in paths if path.suffix.lower() in suffixes]
    if classes and len({len(path.parts) > 1 for path in wanted}) > 1:
        loose = next(path for path in wanted if len(path.parts) == 1)
        raise DataError(
            f"{root}: {loose} lies beside sub-folders with others, so it has no class",
            "move it into one, or read all without classes: classes=False",
        )
    aside = {path.as_posix() for path in paths if path.suffix in (".txt", ".json")}
    rows, used = [], set()
    for path in wanted:
        beside = tuple(name for end in (".txt", ".json") if (name := path.with_suffix(end).as_posix()) in aside)
        used.update(beside)
        rows.append(_Row(path.as_posix(), path.parts[0] if classes and len(path.parts) > 1 else None, beside, {}))
    taken = {row.name for row in rows} | used
    others.update(path.suffix.lower() or path.name for path in paths if path.as_posix() not in taken)
    return rows, {what: count for what, count in sorted(others.items()) if count}


def _from_metadata(path: Path) -> list[_Row]:
    if path.suffix == ".csv":
        try:
            told: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(read_text(path)), strict=True))
        except csv.Error as error:
            raise DataError(f"{path}: {error}", "save it as UTF-8 with commas between cells") from error
    else:
        told = read_rows(path, dict[str, Any])
    rows = []
    for number, row in enumerate(told):
        name = row.pop("file_name", None)
        if not isinstance(name, str) or None in row:  # DictReader keeps cells too many under None
            raise DataError(f"{path}, row {number}: no file_name, or more cells than columns", "name a file a row")
        label = row.pop("label", None)
        rows.append(_Row(name, None if label is None else str(label), (), row))
    refuse_twins([row.name for row in rows], path)
    return rows


def _sample(folder: Folder, moving: bool, row: _Row) -> Sample:
    file = folder.find(row.name, row.name, "video" if moving else "picture")
    captions: list[str] = []
    notes = dict(row.told)
    for name in row.beside:
        beside = folder.find(name, row.name, "caption")
        if name.endswith(".txt"):
            captions.append(read_text(beside).strip())
        else:
            notes |= read_json(beside, dict[str, Any])
    for key in CAPTIONS:
        captions += _words(notes.pop(key), f"sample {row.name:.80}, {key}") if key in notes else ()
    captions = list(dict.fromkeys(captions))  # img2dataset writes the same words in both files
    sample = Sample(id=row.name, label=row.label, captions=tuple(captions), notes=notes)
    return replace(sample, videos=(file,)) if moving else replace(sample, pictures=(file,))


def _words(value: Any, who: str) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if words is None:
        return []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{who} is {type(value).__name__}", "give words, or a list of them")
    return words
