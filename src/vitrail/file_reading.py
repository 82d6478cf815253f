"""Read small untrusted files whole: regular files of limited size, UTF-8 text, JSON and TOML.

Every failure is an OSError or a ValueError, so that a caller can name its file and remedy. JSON that a Python parser
accepts can still fail later: these functions refuse deep nesting and text that has no UTF-8 form.
"""

import errno
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from vitrail.limited_process import BYTES_VARIABLE, get_file_limits

MEMORY_PER_BYTE = 20  # largest memory of parsed JSON in bytes, for each byte of its text


def read_regular_file(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Read a file. Raises OSError for folders, pipes and devices, and for more than `max_bytes` bytes.

    By default, the limit of a file's memory allows to parse the content as JSON.
    """
    path = Path(path)
    most = get_file_limits().bytes // MEMORY_PER_BYTE if max_bytes is None else max_bytes
    # A pipe without a writer would block when it is opened.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_size > most:
            hint = f" ({BYTES_VARIABLE} raises it)" if max_bytes is None else ""
            raise OSError(errno.EFBIG, f"its {status.st_size:,} bytes exceed the limit of {most:,}{hint}")
        return file.read(most)


def read_text_file(path: str | Path) -> str:
    """Read a UTF-8 file, without a byte order mark. Raises OSError or UnicodeDecodeError."""
    return read_regular_file(path).decode("utf-8-sig")


def parse_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        tree = json.loads(data)
        has_escapes = b"\\u" in data if isinstance(data, bytes) else "\\u" in data
        if has_escapes:  # an escape may stand for half a character
            json.dumps(tree, ensure_ascii=False).encode()
        return tree
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a text contains an unpaired surrogate") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_file(path: str | Path) -> Any:
    """Read and parse a JSON file. Raises OSError or ValueError."""
    return parse_json(read_regular_file(path))
