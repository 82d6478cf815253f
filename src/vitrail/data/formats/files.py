"""JSON, JSON lines and pictures of a data set from strangers: typed, inside their folder, or refused."""

import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from tqdm import tqdm

from vitrail.errors import DataError

T = TypeVar("T")
Id = int | str

_QUICK = 100_000_000  # bytes
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_bytes(path: Path) -> bytes:
    """A regular file's bytes without the mark that Windows puts before UTF-8."""
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder", "name the file in it")
        if not path.exists():
            raise DataError(f"{path} does not exist", "check the spelling and the folder you are in")
        if not path.is_file():  # a pipe or a device could make us wait, or read, for ever
            raise DataError(f"{path} is not a regular file", "save it to a file first")
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
    """The whole of a UTF-8 file."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", "save it as UTF-8") from error


def decode(data: bytes | msgspec.Raw, kind: type[T] | Any, where: str, **how: Any) -> T:
    """JSON as `kind`; keys it does not name are passed over, wrong types are refused with their place."""
    try:
        return msgspec.json.decode(data, type=kind, **how)
    except msgspec.DecodeError as error:  # also wrong types
        raise DataError(f"{where}: {error}", "mend the file there, or check that it is what you think") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason}", "save it as UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply", "no data set needs that: check where it comes from") from error


def read_json(path: Path, kind: type[T] | Any, **how: Any) -> T:
    data = read_bytes(path)
    with _parsing(path, len(data)):
        return decode(data, kind, str(path), **how)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """The rows of a JSON list, or of JSON lines, whichever the file is."""
    if (data := read_bytes(path)).lstrip()[:1] == b"[":
        with _parsing(path, len(data)):
            return decode(data, list[kind], str(path))
    decoder = msgspec.json.Decoder(kind)
    rows = []
    with _parsing(path, len(data)) as bar:
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            bar.update(len(line))
            if line.strip():
                try:
                    rows.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    rows.append(decode(line, kind, f"{path}, line {number}"))  # says what is wrong
    return rows


def _parsing(path: Path, size: int) -> tqdm:
    """A bar for files that take over two seconds to parse. One JSON value is parsed in one go: there it only says that
    work goes on."""
    quick = True if size < _QUICK else None  # None: shown to people, not to files
    return tqdm(total=size, desc=f"parse {path.name}", unit="B", unit_scale=True, leave=False, disable=quick)


class Folder(NamedTuple):
    """Where a data set's pictures lie. Names that lead out of it are refused unless `anywhere`; `option` is what it is
    said with."""

    root: Path
    anywhere: bool = False
    option: str = "pictures"

    def find(self, name: str, sample: str, what: str = "picture") -> Path:
        """The file that a sample names."""
        who = f"sample {sample:.80}: {what} {name!r:.200}"
        if not name.strip():
            raise DataError(f"{who} is no name", "name the file, or leave the field out")
        if re.match(r"[a-z]+://", name):
            raise DataError(f"{who} is an address, not a file", "download it first")
        try:
            path = self.root / name
            if not self.anywhere and not path.resolve().is_relative_to(self.root.resolve()):
                raise DataError(
                    f"{who} leads out of {self.root}", "give anywhere=True if you trust the file; links count too"
                )
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError) as error:  # too long, null byte, links in a circle
            raise DataError(f"{who} is no usable name: {error!s:.200}", "mend the name") from error
        raise DataError(
            f"{who} is not in {self.root}", f"put it there, or say where {what}s lie with {self.option}=FOLDER"
        )


def folder_for(path: Path, pictures: str | Path | None, anywhere: bool, option: str = "pictures") -> Folder:
    """Where pictures, or videos, lie: as said, else beside the file."""
    root = path.parent if pictures is None else Path(pictures)
    if not root.is_dir():
        raise DataError(f"{root} is no folder", f"give the folder of the {option} as {option}=FOLDER")
    return Folder(root, anywhere, option)
