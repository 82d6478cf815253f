"""Typed reading of untrusted JSON, JSON lines and media files. Invalid files and paths outside their folder are
refused."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from tqdm import tqdm

from vitrail.errors import DataError

T = TypeVar("T")
Id = int | str

_BAR_BYTES = 100_000_000  # bytes
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def check_file(path: Path) -> None:
    """Raise `DataError` if a path is not a regular file."""
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder", "give the file inside it")
        if not path.exists():
            raise DataError(f"{path} does not exist", "check the path and the current folder")
        if not path.is_file():  # a pipe or a device could block, or never end
            raise DataError(f"{path} is not a regular file", "save it to a file first")
    except (OSError, ValueError) as error:  # no permission, name too long, null byte in the name
        raise DataError(f"{path!s:.200} cannot be read: {error}", "check the file and its permissions") from error


def read_bytes(path: Path) -> bytes:
    """Read a regular file, without a UTF-8 byte order mark."""
    check_file(path)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # no permission, name too long, null byte in the name
        raise DataError(f"{path!s:.200} cannot be read: {error}", "check the file and its permissions") from error
    for mark, name in _BOMS.items():
        if data.startswith(mark):
            raise DataError(f"{path} is {name}", "save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path} is empty", "copy or download it again")
    return data


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", "save it as UTF-8") from error


def decode_json(data: bytes | msgspec.Raw, type_: type[T] | Any, where: str, **options: Any) -> T:
    """Decode JSON as a type. Unknown keys are ignored; wrong types raise `DataError` with their position."""
    try:
        return msgspec.json.decode(data, type=type_, **options)
    except msgspec.DecodeError as error:  # includes wrong types
        raise DataError(f"{where}: {error}", "fix the file, or check that it has the right format") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason}", "save it as UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply", "check where the file comes from") from error


def read_json(path: Path, type_: type[T] | Any, **options: Any) -> T:
    """Read a JSON file as a type."""
    data = read_bytes(path)
    with _parse_bar(path, len(data)):
        return decode_json(data, type_, str(path), **options)


def read_json_rows(path: Path, type_: type[T]) -> list[T]:
    """Read the rows of a JSON list or of JSON lines."""
    if (data := read_bytes(path)).lstrip()[:1] == b"[":
        with _parse_bar(path, len(data)):
            return decode_json(data, list[type_], str(path))
    decoder = msgspec.json.Decoder(type_)
    rows = []
    with _parse_bar(path, len(data)) as bar:
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            bar.update(len(line))
            if line.strip():
                try:
                    rows.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # Raises the error with its position.
                    rows.append(decode_json(line, type_, f"{path}, line {number}"))
    return rows


def _parse_bar(path: Path, size: int) -> tqdm:
    """Progress bar for large files. A single JSON value is parsed in one step, so there the bar only shows activity."""
    disable = True if size < _BAR_BYTES else None  # None: shown on a terminal only
    return tqdm(total=size, desc=f"parse {path.name}", unit="B", unit_scale=True, leave=False, disable=disable)


class MediaFolder(NamedTuple):
    """Folder of a dataset's images or videos. Names that lead out of it are refused unless `allow_outside`.

    `option` is the name of the option that sets this folder, for error messages.
    """

    root: Path
    allow_outside: bool = False
    option: str = "image_folder"

    def find_file(self, name: str, sample_id: str, media_kind: str = "image") -> Path:
        """Return the path of a file that a sample names."""
        who = f"sample {sample_id:.80}: {media_kind} {name!r:.200}"
        if not name.strip():
            raise DataError(f"{who} is an empty name", "name the file, or remove the field")
        if re.match(r"[a-z]+://", name):
            raise DataError(f"{who} is a URL, not a file", "download it first")
        try:
            path = self.root / name
            if not self.allow_outside and not self._is_inside(path):
                raise DataError(
                    f"{who} leads out of {self.root}",
                    "set allow_outside=True if you trust the file; links count too",
                )
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError) as error:  # too long, null byte, cyclic links
            raise DataError(f"{who} is not a valid file name: {error!s:.200}", "correct the name") from error
        raise DataError(
            f"{who} is not in {self.root}", f"put it there, or give the folder of {media_kind}s as {self.option}=FOLDER"
        )

    def _is_inside(self, path: Path) -> bool:
        """Whether a path, with all links followed, is in the folder."""
        root = _resolve(self.root.absolute())
        is_plain = path.name not in ("", "..") and "\0" not in path.name and not path.is_symlink()
        if is_plain and _resolve(path.parent.absolute()).is_relative_to(root):
            return True
        return path.resolve().is_relative_to(root)


@lru_cache(maxsize=1 << 16)  # of folders: a dataset has many files in each
def _resolve(folder: Path) -> Path:
    return folder.resolve()


def open_media_folder(
    path: Path, image_folder: str | Path | None, allow_outside: bool, option: str = "image_folder"
) -> MediaFolder:
    """Open the folder of images or videos: the given one, or else the dataset's own folder."""
    own = path if path.is_dir() else path.parent
    root = own if image_folder is None else Path(image_folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder", f"give an existing folder as {option}=FOLDER")
    return MediaFolder(root, allow_outside, option)
