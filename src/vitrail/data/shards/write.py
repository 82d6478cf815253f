"""Samples → WebDataset tars: the same samples give the same bytes, and a writer that was killed goes on."""

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from vitrail.data.shards.index import META, NAME, index_of
from vitrail.data.shards.kinds import KINDS, kind_of
from vitrail.errors import DataError, VitrailError

KEY = "__key__"


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    folder: str | os.PathLike[str],
    *,
    name: str = "shard",
    count: int = 10_000,
    size: int = 1_000_000_000,
    quiet: bool = False,
) -> list[Path]:
    """Write `NAME-000000.tar`, … of at most `count` samples and about `size` bytes each, with their indexes.

    A sample is {"__key__": name, ending: value, …}. Bytes are written as they are, other values as the ending says:
    `jpg`, `png` and `webp` from whatever `load_image` takes, `txt` from a string, `json`, `cls`, `npy`. A shard appears
    whole or not at all. Called again with the same samples, it goes on behind the shards that are there.
    """
    if count < 1 or size < 1 or not re.fullmatch(r"[\w.-]+", name):
        raise DataError(
            f"shards {name!r} of {count} samples and {size} bytes",
            "give a name of letters, digits, dots and dashes, and at least one sample and byte",
        )
    folder, tar = Path(folder), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".{name}-*.partial"):
            left.unlink()
        shards = _finished(folder, name)
        done = sum(len(index_of(shard)) for shard in shards)
        total = len(samples) if hasattr(samples, "__len__") else None  # pyrefly: ignore
        rest = _behind(samples, shards, done)
        for key, members in tqdm(
            _encoded(rest), desc=name, total=total, initial=done, unit="sample", disable=quiet or None
        ):
            weight = sum(len(data) for _, data in members)
            if tar is not None and (tar.samples == count or tar.bytes + weight > size):
                shards.append(tar.finish())
                tar = None
            tar = tar or _Tar(folder / f"{name}-{len(shards):06}.tar")
            tar.add(key, members)
        if tar is not None:
            shards.append(tar.finish())
    except OSError as error:
        raise DataError(
            f"shards cannot be written to {folder}: {error}", "make room or choose another folder, and call it again"
        ) from error
    finally:
        if tar is not None:
            tar.abandon()
    return shards


class _Tar:
    """One shard, under another name until it is whole and on the disk."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.samples = self.bytes = 0
        self.tar = tarfile.open(self.partial, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (closed by its owner)

    def add(self, key: str, members: list[tuple[str, bytes]]) -> None:
        for ending, data in members:
            about = tarfile.TarInfo(f"{key}.{ending}")  # owner 0, time 0: only names and bytes differ
            about.size = len(data)
            self.tar.addfile(about, io.BytesIO(data))
            self.bytes += len(data)
        self.samples += 1

    def finish(self) -> Path:
        self.tar.close()
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.replace(self.path)
        index_of(self.path)
        return self.path

    def abandon(self) -> None:
        """Leave nothing of a shard that is not finished."""
        self.tar.fileobj.close()  # pyrefly: ignore
        self.partial.unlink(missing_ok=True)


def _finished(folder: Path, name: str) -> list[Path]:
    """The shards that are there, which must be the first ones."""
    found = sorted(path for path in folder.glob(f"{name}-*.tar") if re.fullmatch(r"\d{6,}", path.stem[len(name) + 1 :]))
    for number, path in enumerate(found):
        if path.name != (expected := f"{name}-{number:06}.tar"):
            raise DataError(
                f"{folder} holds {path.name}, but no {expected}", "put it back, or begin in an empty folder"
            )
    return found


def _behind(samples: Iterable[Mapping[str, Any]], shards: list[Path], done: int) -> Iterator[Mapping[str, Any]]:
    """The samples behind those that are written. What can be asked for by number is; a stream is read past them."""
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
        if done:
            last = index_of(shards[-1])
            _same(samples[done - 1] if done <= len(samples) else None, last.key(len(last) - 1), shards[-1])  # pyrefly: ignore
        yield from (samples[i] for i in range(done, len(samples)))  # pyrefly: ignore
        return
    stream = iter(samples)
    for shard in shards:
        index = index_of(shard)
        for i in range(len(index)):
            _same(next(stream, None), index.key(i), shard)
    yield from stream


def _same(sample: Mapping[str, Any] | None, key: str, shard: Path) -> None:
    given = None if sample is None else sample.get(KEY)
    if given != key:
        raise DataError(
            f"{shard} holds {key!r} where the samples {f'have {given!r}' if sample else 'have ended'}",
            "give the samples it was begun with, or another folder or name",
        )


def _encoded(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """key, [(ending, bytes), …] of each sample, checked to be read back as they are."""
    before = None
    for sample in samples:
        key = _checked(sample.get(KEY))
        if key == before:
            raise DataError(
                f"two samples in a row are called {key!r}", "give each its own key: they would be read as one"
            )
        members = [
            (ending, _encode(f"{key}.{ending}", ending, value))
            for ending, value in sample.items()
            if not (ending.startswith("__") and ending.endswith("__"))
        ]
        if not members:
            raise DataError(f"sample {key!r} holds nothing", "give it at least one member, as {'txt': 'words'}")
        before = key
        yield key, members


def _checked(key: Any) -> str:
    parts = PurePosixPath(key).parts if isinstance(key, str) else ("..",)
    match = NAME.fullmatch(f"{key}.x")
    plain = match and match[1] == key and not META.match(key) and "\0" not in key
    if not plain or ".." in parts or parts[:1] == ("/",) or not _encodes(key):
        raise DataError(
            f"a sample's {KEY} is {key!r:.200}",
            "give a name without dots (they begin the ending), as 'cats/0001': no absolute path, no '..'",
        )
    return key


def _encode(name: str, ending: str, value: Any) -> bytes:
    if ending != ending.lower() or "/" in ending or "\0" in ending or not ending or not _encodes(ending):
        raise DataError(f"{name!r} has the ending {ending!r}", "use small letters, as 'jpg' or 'left.png'")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    kind = kind_of(ending)
    if kind is None:
        raise DataError(
            f"{name!r} is {type(value).__name__}, and nobody knows how to write that as {ending!r}",
            f"give bytes, or one of {', '.join(KINDS)}",
        )
    try:
        return kind.encode(value)
    except (VitrailError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{name!r} cannot be written: {error}", f"give what a {ending} holds, or its bytes") from error


def _encodes(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
