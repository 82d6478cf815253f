"""Which samples a shard holds and where their members lie: one pass over its headers, kept beside it.

S samples, M members
"""

import contextlib
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from vitrail.data.shards.tar import Flaw, Member, walk
from vitrail.errors import DataError

SUFFIX = ".vidx"
MAGIC = b"vitrail shard index 1\n"
INTEGER = np.dtype("<i8")

Samples: TypeAlias = list[tuple[str, dict[str, tuple[int, int]]]]  # key, {kind: (offset, length)}

# As WebDataset splits names: the key up to the first dot of the last part, the kind behind it.
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
META = re.compile(r"__[^/]*__($|/)")

COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}


class Fault(NamedTuple):
    """Something that could not be read, by name."""

    shard: str
    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.member} {self.reason}"


class _Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An index as it lies in its file; the tar's state says whether it still fits."""

    state: tuple[int, int]
    kinds: list[str]
    keys: bytes
    arrays: list[bytes]  # key_ends, first, kind, offset, length
    faults: list[tuple[str, str]]
    ignored: int


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of one shard, as arrays: millions of them cost no Python objects, and forked workers share them."""

    state: tuple[int, int]  # size and time of the tar that was read
    kinds: tuple[str, ...]
    keys: bytes  # all keys, one behind the other
    key_ends: np.ndarray  # (S,) into keys
    first: np.ndarray  # (S + 1,) the first member of each sample
    kind: np.ndarray  # (M,) into kinds
    offset: np.ndarray  # (M,)
    length: np.ndarray  # (M,)
    faults: tuple[tuple[str, str], ...]  # member, reason
    ignored: int  # files that are no member of a sample: without an ending, or hidden

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, sample: int) -> str:
        start = self.key_ends[sample - 1] if sample else 0
        return self.keys[start : self.key_ends[sample]].decode("utf-8", "replace")

    def members(self, sample: int) -> dict[str, tuple[int, int]]:
        """kind → (offset, length)"""
        span = slice(self.first[sample], self.first[sample + 1])
        kinds, offsets, lengths = (a[span].tolist() for a in (self.kind, self.offset, self.length))
        return {self.kinds[k]: (o, n) for k, o, n in zip(kinds, offsets, lengths, strict=True)}


def index_of(path: Path) -> Index:
    """The index of a shard: the one beside it where it fits, or a new one, which is then left there."""
    try:
        if not path.is_file():  # a pipe would make us wait
            raise DataError(f"{path} is not a file", "name a tar, or a folder or pattern of them")
        beside = path.with_name(path.name + SUFFIX)
        found = _load(beside, state_of(path.stat()))
        if found is None:
            found = scan(path)
            _save(beside, found)
        return found
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error


def state_of(about: os.stat_result) -> tuple[int, int]:
    """What changes when the file does: its size and time."""
    return about.st_size, about.st_mtime_ns


def scan(path: Path) -> Index:
    """Read the headers of a tar. The samples on both sides of damage may lack members: they are left out, and named."""
    samples: Samples = []
    faults: list[tuple[str, str]] = []
    torn, lost, ignored = False, None, 0  # right behind damage; the sample that is passed over for it
    with path.open("rb") as file:
        _refuse_compressed(path, file.read(6))
        state = state_of(os.fstat(file.fileno()))
        for found in walk(file.fileno(), state[0]):
            if isinstance(found, Flaw):
                faults.append((found.name, found.reason))
                if found.tear:
                    if samples and not torn and lost is None:
                        faults.append((samples.pop()[0], "stands before the damage and may lack members"))
                    torn, lost = True, None
                continue
            key, kind = _split(found)
            if not kind:
                ignored += 1
                continue
            if torn:
                torn, lost = False, key
                faults.append((key, "stands behind the damage and may lack members"))
            if key == lost:
                continue
            lost = None
            if not samples or samples[-1][0] != key or kind in samples[-1][1]:
                samples.append((key, {}))
            samples[-1][1][kind] = (found.offset, found.size)
    if not samples and faults and faults[0][0] == "byte 0":
        raise DataError(f"{path} holds no tar: {faults[0][1]} at byte 0", "copy or download it again")
    return _index(state, samples, faults, ignored)


def _split(member: Member) -> tuple[str, str]:
    """key, kind; no kind where the file is no member of a sample."""
    match = None if META.match(member.name) else NAME.fullmatch(member.name)
    return (match[1], match[2].lower()) if match else ("", "")


def _refuse_compressed(path: Path, start: bytes) -> None:
    for magic, tool in COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path} is compressed, so nothing in it can be read by its place",
                f"unpack it once: {tool} {path.name} (pictures gain nothing from it)",
            )


def _index(state: tuple[int, int], samples: Samples, faults: list[tuple[str, str]], ignored: int) -> Index:
    keys = [key.encode("utf-8", "replace") for key, _ in samples]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(k for _, held in samples for k in held))}
    members = [(kinds[kind], *place) for _, held in samples for kind, place in held.items()]
    table = np.array(members, dtype=INTEGER).reshape(-1, 3)  # (M, kind · offset · length)
    return Index(
        state=state,
        kinds=tuple(kinds),
        keys=b"".join(keys),
        key_ends=np.cumsum([len(key) for key in keys], dtype=INTEGER),
        first=np.cumsum([0, *(len(held) for _, held in samples)], dtype=INTEGER),
        kind=table[:, 0].copy(),
        offset=table[:, 1].copy(),
        length=table[:, 2].copy(),
        faults=tuple(faults),
        ignored=ignored,
    )


# ── the file beside the shard ──────────────────────────────────────────────────────────────────────────────────


def _save(path: Path, index: Index) -> None:
    """Leave the index beside its shard. Where nothing may be written, it is made again next time."""
    arrays = (index.key_ends, index.first, index.kind, index.offset, index.length)
    packed = [a.tobytes() for a in arrays]
    stored = _Stored(index.state, list(index.kinds), index.keys, packed, list(index.faults), index.ignored)
    data = msgspec.msgpack.encode(stored)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()


def _load(path: Path, state: tuple[int, int]) -> Index | None:
    """The index in a file, or nothing if it is not there, damaged, or of another state of the shard."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : start] != zlib.crc32(data[start:]).to_bytes(4, "little"):
        return None
    try:
        stored = msgspec.msgpack.decode(data[start:], type=_Stored)
        key_ends, first, kind, offset, length = (np.frombuffer(a, INTEGER) for a in stored.arrays)
    except (msgspec.MsgspecError, ValueError):
        return None
    sound = (
        stored.state == state
        and len(first) == len(key_ends) + 1
        and len(kind) == len(offset) == len(length) == first[-1]
        and all((np.diff(a, prepend=0) >= 0).all() for a in (first, key_ends))
        and all((a >= 0).all() for a in (kind, offset, length))
        and (kind < len(stored.kinds)).all()
        and (offset + length <= state[0]).all()
    )
    if not sound:
        return None
    faults = tuple(stored.faults)
    return Index(state, tuple(stored.kinds), stored.keys, key_ends, first, kind, offset, length, faults, stored.ignored)
