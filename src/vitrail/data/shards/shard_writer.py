"""Writes samples to WebDataset tars. The same samples give the same bytes, and an interrupted writer resumes."""

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from vitrail.data.shards.member_codecs import MEMBER_CODECS, get_codec
from vitrail.data.shards.shard_index import MEMBER_NAME, METADATA_NAME, load_index
from vitrail.data.sources.verification import CHECKSUM_SUFFIX, write_checksums
from vitrail.errors import DataError, VitrailError

KEY_FIELD = "__key__"


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    folder: str | os.PathLike[str],
    *,
    name: str = "shard",
    max_samples: int = 10_000,
    max_bytes: int = 1_000_000_000,
    quiet: bool = False,
) -> list[Path]:
    """Write `NAME-000000.tar`, … of at most `max_samples` samples and about `max_bytes` bytes each, with their indexes.

    A sample is {"__key__": name, ending: value, …}. Bytes are written unchanged; other values are encoded by ending:
    `jpg`, `png` and `webp` from anything `load_image` accepts, `txt` from a string, and `json`, `cls`, `npy`. Shards
    appear atomically. A repeated call with the same samples continues after the existing shards.
    """
    if max_samples < 1 or max_bytes < 1 or not re.fullmatch(r"[\w.-]+", name):
        raise DataError(
            f"invalid shards: name {name!r}, max_samples {max_samples}, max_bytes {max_bytes}",
            "use letters, digits, dots and dashes in the name, and at least one sample and byte",
        )
    folder, tar = Path(folder), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{name}-*.partial"):
            leftover.unlink()
        shards = _list_finished(folder, name)
        for shard in shards:  # a writer that was killed may have left a shard without one
            if not shard.with_name(shard.name + CHECKSUM_SUFFIX).is_file():
                write_shard_checksum(shard)
        num_written = sum(len(load_index(shard)) for shard in shards)
        total = len(samples) if hasattr(samples, "__len__") else None  # pyrefly: ignore
        remaining = _skip_written(samples, shards, num_written)
        for key, members in tqdm(
            _encode_samples(remaining),
            desc=name,
            total=total,
            initial=num_written,
            unit="sample",
            disable=quiet or None,
        ):
            weight = sum(len(data) for _, data in members)
            if tar is not None and (tar.samples == max_samples or tar.bytes + weight > max_bytes):
                shards.append(tar.finish())
                tar = None
            tar = tar or _ShardWriter(folder / f"{name}-{len(shards):06}.tar")
            tar.add(key, members)
        if tar is not None:
            shards.append(tar.finish())
    except OSError as error:
        raise DataError(
            f"shards cannot be written to {folder}: {error}", "free some space or choose another folder, and try again"
        ) from error
    finally:
        if tar is not None:
            tar.abandon()
    return shards


class _ShardWriter:
    """Writes one shard under a temporary name until it is complete and on disk."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.samples = 0
        self.bytes = 0
        self.tar = tarfile.open(self.partial, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (closed by its owner)

    def add(self, key: str, members: list[tuple[str, bytes]]) -> None:
        for ending, data in members:
            info = tarfile.TarInfo(f"{key}.{ending}")  # owner 0, time 0: only names and bytes differ
            info.size = len(data)
            self.tar.addfile(info, io.BytesIO(data))
            self.bytes += len(data)
        self.samples += 1

    def finish(self) -> Path:
        self.tar.close()
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.replace(self.path)
        load_index(self.path)
        write_shard_checksum(self.path)
        return self.path

    def abandon(self) -> None:
        """Delete an unfinished shard."""
        self.tar.fileobj.close()  # pyrefly: ignore
        self.partial.unlink(missing_ok=True)


def write_shard_checksum(shard: Path) -> None:
    """Write NAME.tar.sha256 beside a shard. `vitrail data verify` and `sha256sum --check` read it."""
    write_checksums(shard.parent, shard.with_name(shard.name + CHECKSUM_SUFFIX), [shard])


def _list_finished(folder: Path, name: str) -> list[Path]:
    """List the existing shards, which must be numbered without gaps."""
    found = sorted(path for path in folder.glob(f"{name}-*.tar") if re.fullmatch(r"\d{6,}", path.stem[len(name) + 1 :]))
    for number, path in enumerate(found):
        if path.name != (expected := f"{name}-{number:06}.tar"):
            raise DataError(f"{folder} holds {path.name}, but no {expected}", "restore it, or start in an empty folder")
    return found


def _skip_written(
    samples: Iterable[Mapping[str, Any]], shards: list[Path], num_written: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the samples that are not written yet. Indexable samples are skipped by index, a stream is read
    past them."""
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
        if num_written:
            last = load_index(shards[-1])
            sample = samples[num_written - 1] if num_written <= len(samples) else None  # pyrefly: ignore
            _check_same_key(sample, last.get_key(len(last) - 1), shards[-1])
        yield from (samples[i] for i in range(num_written, len(samples)))  # pyrefly: ignore
        return
    stream = iter(samples)
    for shard in shards:
        index = load_index(shard)
        for i in range(len(index)):
            _check_same_key(next(stream, None), index.get_key(i), shard)
    yield from stream


def _check_same_key(sample: Mapping[str, Any] | None, key: str, shard: Path) -> None:
    """Check that a sample is the one already written."""
    new_key = None if sample is None else sample.get(KEY_FIELD)
    if new_key != key:
        raise DataError(
            f"{shard} holds {key!r} where the samples {f'have {new_key!r}' if sample else 'have ended'}",
            "give the same samples as before, or another folder or name",
        )


def _encode_samples(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Yield key and [(ending, bytes), …] of each sample, checked so that they can be read back."""
    previous_key = None
    for sample in samples:
        key = _check_key(sample.get(KEY_FIELD))
        if key == previous_key:
            raise DataError(
                f"two samples in a row have the key {key!r}", "give each its own key: they would be read as one"
            )
        members = [
            (ending, _encode_member(f"{key}.{ending}", ending, value))
            for ending, value in sample.items()
            if not (ending.startswith("__") and ending.endswith("__"))
        ]
        if not members:
            raise DataError(f"sample {key!r} is empty", "give it at least one member, such as {'txt': 'a caption'}")
        previous_key = key
        yield key, members


def _check_key(key: Any) -> str:
    parts = PurePosixPath(key).parts if isinstance(key, str) else ("..",)
    match = MEMBER_NAME.fullmatch(f"{key}.x")
    is_valid = match and match[1] == key and not METADATA_NAME.match(key) and "\0" not in key
    if not is_valid or ".." in parts or parts[:1] == ("/",) or not _is_encodable(key):
        raise DataError(
            f"a sample has the invalid {KEY_FIELD} {key!r:.200}",
            "give a relative path without dots, such as 'cats/0001'; a dot starts the ending",
        )
    return key


def _encode_member(name: str, ending: str, value: Any) -> bytes:
    if ending != ending.lower() or "/" in ending or "\0" in ending or not ending or not _is_encodable(ending):
        raise DataError(f"{name!r} has the invalid ending {ending!r}", "use lower case, such as 'jpg' or 'left.png'")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    kind = get_codec(ending)
    if kind is None:
        raise DataError(
            f"{name!r} has type {type(value).__name__}, which cannot be encoded as {ending!r}",
            f"give bytes, or use one of the endings {', '.join(MEMBER_CODECS)}",
        )
    try:
        return kind.encode(value)
    except (VitrailError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{name!r} cannot be encoded: {error}", f"give a value that fits {ending}, or bytes") from error


def _is_encodable(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
