"""Small things that readers share: typed JSON, and words out of file names."""

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from vitrail.errors import DataError

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """A JSON file as a type; what the type does not name is passed over."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} cannot be read: {error}", "fetch its source again") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "check the file, or fetch its source again") from None


def spoken(stem: str) -> str:
    """A file's name as words: "what_s_up_doc_01" → "what s up doc"."""
    words = re.sub(r"[\W_]+", " ", stem).strip()
    return re.sub(r"( 0\d)+$", "", words) or stem
