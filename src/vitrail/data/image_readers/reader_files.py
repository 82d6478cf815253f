"""Helpers of the readers: typed JSON, lines, and words from file names."""

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from vitrail.errors import DataError

T = TypeVar("T")


def read_json(path: Path, type_: type[T]) -> T:
    """Read a JSON file as a type. Unknown keys are ignored."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", "fetch its source again") from None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "check the file, or fetch its source again") from None


def stem_to_words(stem: str) -> str:
    """Convert a file stem to words: "what_s_up_doc_01" → "what s up doc"."""
    words = re.sub(r"[\W_]+", " ", stem).strip()
    return re.sub(r"( 0\d)+$", "", words) or stem
