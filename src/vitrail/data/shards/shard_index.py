"""Index of a shard: which samples it holds, and the byte offsets of their members. Built in one pass and cached in a
file.

Shapes: S samples, M members.
"""

import contextlib
import hashlib
import os
import re
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from vitrail.data.shards.shard_file import BlockReader, FileState, RemoteFile, ShardFile, get_file_state
from vitrail.data.shards.tar import ReadAt, TarFault, TarMember, walk_tar
from vitrail.data.sources.fetch import get_cache_folder
from vitrail.errors import DataError

INDEX_SUFFIX = ".vidx"
MAGIC = b"vitrail shard index 1\n"
INTEGER = np.dtype("<i8")

SampleMembers: TypeAlias = list[tuple[str, dict[str, tuple[int, int]]]]  # key, {kind: (offset, length)}

# WebDataset's rule: the key is the path up to the first dot of the file name, the kind is the rest.
MEMBER_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
METADATA_NAME = re.compile(r"__[^/]*__($|/)")

COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}


class _StoredIndex(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Content of an index file. `state` tells whether it still matches the tar."""

    state: FileState
    kinds: list[str]
    keys: bytes
    arrays: list[bytes]  # key_ends, first, kind, offset, length
    faults: list[tuple[str, str]]
    ignored: int


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Samples of one shard as arrays: millions of samples need no Python objects, and forked workers share
    the memory."""

    file_state: FileState  # size and modification time of the indexed tar
    kinds: tuple[str, ...]
    keys: bytes  # all keys, concatenated
    key_ends: np.ndarray  # (S,) end of each key in `keys`
    first: np.ndarray  # (S + 1,) first member of each sample
    kind: np.ndarray  # (M,) index into `kinds`
    offset: np.ndarray  # (M,)
    length: np.ndarray  # (M,)
    faults: tuple[tuple[str, str], ...]  # member, reason
    ignored: int  # number of files that belong to no sample: without an ending, or hidden

    def __len__(self) -> int:
        return len(self.key_ends)

    def get_key(self, sample: int) -> str:
        """Return the key of a sample."""
        start = self.key_ends[sample - 1] if sample else 0
        return self.keys[start : self.key_ends[sample]].decode("utf-8", "replace")

    def get_members(self, sample: int) -> dict[str, tuple[int, int]]:
        """Return the members of a sample: kind → (offset, length)."""
        members = slice(self.first[sample], self.first[sample + 1])
        kinds, offsets, lengths = (a[members].tolist() for a in (self.kind, self.offset, self.length))
        return {self.kinds[k]: (o, n) for k, o, n in zip(kinds, offsets, lengths, strict=True)}


def load_index(path: ShardFile) -> ShardIndex:
    """Load the index of a shard, or build and save it: next to the shard, or in the cache folder for a remote one."""
    try:
        if isinstance(path, RemoteFile):
            index_path, state = _get_cached_index_path(path), path.read_state()
        elif path.is_file():
            index_path, state = path.with_name(path.name + INDEX_SUFFIX), get_file_state(path.stat())
        else:  # a pipe would block
            raise DataError(f"{path} is not a file", "give a tar file, a folder of them, or a pattern")
        index = _load_index(index_path, state)
        if index is None:
            index = scan_shard(path)
            _save_index(index_path, index)
        return index
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error


def _get_cached_index_path(shard: RemoteFile) -> Path:
    name = hashlib.sha256(shard.url.encode()).hexdigest()[:16]
    return get_cache_folder() / "shards" / f"{name}{INDEX_SUFFIX}"


def scan_shard(path: ShardFile) -> ShardIndex:
    """Index a tar by its headers."""
    if isinstance(path, RemoteFile):
        return _scan(path, BlockReader(path), path.read_state())
    with path.open("rb") as file:
        return _scan(path, partial(os.pread, file.fileno()), get_file_state(os.fstat(file.fileno())))


def _scan(path: ShardFile, read: ReadAt, state: FileState) -> ShardIndex:
    """Index a tar. Samples next to damage may lack members: they are left out and reported."""
    samples: SampleMembers = []
    faults: list[tuple[str, str]] = []
    # whether damage was just passed; key of the sample that is skipped because of it
    after_damage, skipped_key, ignored = False, None, 0
    _refuse_compressed(path, read(6, 0))
    for entry in walk_tar(read, state[0]):
        if isinstance(entry, TarFault):
            faults.append((entry.name, entry.reason))
            if entry.affects_neighbours:
                if samples and not after_damage and skipped_key is None:
                    faults.append((samples.pop()[0], "is next to damage and may lack members"))
                after_damage, skipped_key = True, None
            continue
        key, kind = _split_name(entry)
        if not kind:
            ignored += 1
            continue
        if after_damage:
            after_damage, skipped_key = False, key
            faults.append((key, "is next to damage and may lack members"))
        if key == skipped_key:
            continue
        skipped_key = None
        if not samples or samples[-1][0] != key or kind in samples[-1][1]:
            samples.append((key, {}))
        samples[-1][1][kind] = (entry.offset, entry.size)
    if not samples and faults and faults[0][0] == "byte 0":
        raise DataError(f"{path} is not a tar: {faults[0][1]} at byte 0", "copy or download it again")
    return _build_index(state, samples, faults, ignored)


def _split_name(member: TarMember) -> tuple[str, str]:
    """Split a member's name into key and kind. The kind is empty if the file belongs to no sample."""
    match = None if METADATA_NAME.match(member.name) else MEMBER_NAME.fullmatch(member.name)
    return (match[1], match[2].lower()) if match else ("", "")


def _refuse_compressed(path: ShardFile, start: bytes) -> None:
    for magic, tool in COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path} is compressed, so its members have no byte offsets",
                f"decompress it once: {tool} {path.name} (images do not get smaller by compression)",
            )


def _build_index(state: FileState, samples: SampleMembers, faults: list[tuple[str, str]], ignored: int) -> ShardIndex:
    keys = [key.encode("utf-8", "replace") for key, _ in samples]
    kinds = {
        kind: number
        for number, kind in enumerate(dict.fromkeys(k for _, members_of_sample in samples for k in members_of_sample))
    }
    members = [(kinds[kind], *place) for _, members_of_sample in samples for kind, place in members_of_sample.items()]
    table = np.array(members, dtype=INTEGER).reshape(-1, 3)  # (M, kind · offset · length)
    return ShardIndex(
        file_state=state,
        kinds=tuple(kinds),
        keys=b"".join(keys),
        key_ends=np.cumsum([len(key) for key in keys], dtype=INTEGER),
        first=np.cumsum([0, *(len(members_of_sample) for _, members_of_sample in samples)], dtype=INTEGER),
        kind=table[:, 0].copy(),
        offset=table[:, 1].copy(),
        length=table[:, 2].copy(),
        faults=tuple(faults),
        ignored=ignored,
    )


# ── the index file next to the shard ───────────────────────────────────────────────────────────────────────────────


def _save_index(path: Path, index: ShardIndex) -> None:
    """Save the index next to its shard. If the folder is read-only, the index is rebuilt next time."""
    arrays = (index.key_ends, index.first, index.kind, index.offset, index.length)
    packed = [a.tobytes() for a in arrays]
    stored = _StoredIndex(index.file_state, list(index.kinds), index.keys, packed, list(index.faults), index.ignored)
    data = msgspec.msgpack.encode(stored)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _load_index(path: Path, state: FileState) -> ShardIndex | None:
    """Load an index file, or return None if it is missing, damaged, or does not match the shard."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : start] != zlib.crc32(data[start:]).to_bytes(4, "little"):
        return None
    try:
        stored = msgspec.msgpack.decode(data[start:], type=_StoredIndex)
        key_ends, first, kind, offset, length = (np.frombuffer(a, INTEGER) for a in stored.arrays)
    except (msgspec.MsgspecError, ValueError):
        return None
    is_valid = (
        stored.state == state
        and len(first) == len(key_ends) + 1
        and len(kind) == len(offset) == len(length) == first[-1]
        and all((np.diff(a, prepend=0) >= 0).all() for a in (first, key_ends))
        and all((a >= 0).all() for a in (kind, offset, length))
        and (kind < len(stored.kinds)).all()
        and (offset + length <= state[0]).all()
    )
    if not is_valid:
        return None
    faults = tuple(stored.faults)
    return ShardIndex(
        state, tuple(stored.kinds), stored.keys, key_ends, first, kind, offset, length, faults, stored.ignored
    )
