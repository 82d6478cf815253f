"""The pictures of a folder as vectors, kept in one file that is brought up to date whenever it is asked for.

N pictures, E width of the embedding
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from vitrail.data.sources.fetch import home, keeping, to_stderr
from vitrail.errors import ImageError
from vitrail.processing.images import FORMATS, load_image

HIDDEN, FILE = ".vitrail", "index.safetensors"
BATCH = 32  # pictures that a model looks at together
EVERY = 30.0  # seconds of work that a kill can cost at most


class Eye(Protocol):
    """What turns pictures into vectors: `read` one at a time, on several threads, then `embed` a batch of them.

    `key` names all that the vectors depend on; another key has another index.
    """

    key: str

    def read(self, picture: Image.Image) -> Any: ...

    def embed(self, pictures: Sequence[Any]) -> np.ndarray:
        """(N, E), each of length one."""
        ...


class Entry(NamedTuple):
    """A file as it was when it was looked at. One that could not be read has the reason instead of a vector."""

    size: int
    mtime_ns: int
    vector: np.ndarray | None  # (E,) float16
    reason: str = ""

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.mtime_ns


class Index(NamedTuple):
    """Entries by path, in order of path, and what the last update did."""

    entries: dict[str, Entry]
    new: int = 0
    changed: int = 0
    gone: int = 0

    @property
    def paths(self) -> list[str]:
        """Of the pictures that could be read: the rows of `vectors`."""
        return [path for path, entry in self.entries.items() if entry.vector is not None]

    @property
    def vectors(self) -> np.ndarray:
        """(N, E) float32"""
        rows = [entry.vector for entry in self.entries.values() if entry.vector is not None]
        return np.stack(rows).astype(np.float32) if rows else np.zeros((0, 0), np.float32)

    @property
    def unread(self) -> dict[str, str]:
        """Why a file could not be read, by path."""
        return {path: entry.reason for path, entry in self.entries.items() if entry.vector is None}


def update(
    folder: Path,
    eye: Eye,
    *,
    skip: Collection[Path] = (),
    every: float = EVERY,
    say: Callable[[str], Any] = to_stderr,
) -> Index:
    """The index of a folder, in which only what is new or has another size or time is looked at.

    One process works on it at a time and others wait. What was done is written every so many seconds, and when it is
    interrupted; the next call goes on from there. `skip` are files that are no part of the folder.
    """
    place = _place(folder, eye.key)
    with keeping(place, say) as partial:
        kept = _load(place / FILE, eye.key, say)
        found = _pictures(folder, {path.resolve() for path in skip}, say)
        entries = {path: entry for path, entry in kept.items() if found.get(path) == entry.stamp}
        due = [path for path in found if path not in entries]

        def write() -> None:
            _save(entries, partial / FILE, eye.key)
            (partial / FILE).replace(place / FILE)

        written = time.monotonic()
        try:
            for path, entry in _look(folder, {path: found[path] for path in due}, eye):
                entries[path] = entry
                if time.monotonic() - written >= every:
                    write()
                    written = time.monotonic()
        finally:
            if entries.keys() != kept.keys() or due:
                write()
    changed = sum(path in kept for path in due)
    return Index(dict(sorted(entries.items())), len(due) - changed, changed, len(kept.keys() - found.keys()))


def _look(folder: Path, stamps: Mapping[str, tuple[int, int]], eye: Eye) -> Iterator[tuple[str, Entry]]:
    def read(path: str) -> Any:
        try:
            return eye.read(load_image(folder / path, frame=0))  # an animation is found by how it begins
        except ImageError as error:
            return error

    paths = list(stamps)
    bar = tqdm(total=len(paths), desc=f"index {folder.name}", unit=" pictures", file=sys.stderr, disable=None)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            read_ = dict(zip(batch, pool.map(read, batch), strict=True))
            seen = {path: pixels for path, pixels in read_.items() if not isinstance(pixels, ImageError)}
            vectors = eye.embed(list(seen.values())).astype(np.float16) if seen else ()
            done = {path: Entry(*stamps[path], vector) for path, vector in zip(seen, vectors, strict=True)}
            for path, error in read_.items():
                yield path, done[path] if path in done else Entry(*stamps[path], None, str(error.problem))
            bar.update(len(batch))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def endings() -> set[str]:
    """The endings of the files that are taken for pictures."""
    return {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}


def _pictures(folder: Path, skip: Collection[Path], say: Callable[[str], Any]) -> dict[str, tuple[int, int]]:
    """Size and time of every picture file, by its path inside the folder. What is hidden is left alone, and so are
    links: what they lead to inside is found in its own place."""
    known, found = endings(), {}

    def left_out(error: OSError) -> None:
        say(f"{error.filename} cannot be listed: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=left_out):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix.lower() not in known or path.is_symlink() or path.resolve() in skip:
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:  # deleted a moment ago
                continue
            found[path.relative_to(folder).as_posix()] = stat.st_size, stat.st_mtime_ns
    return dict(sorted(found.items()))


def _place(folder: Path, key: str) -> Path:
    """Inside the folder, or at home where nothing can be written there."""
    inside = folder / HIDDEN / key
    try:
        inside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=inside):
            return inside
    except OSError:
        return home() / "search" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16] / key


def _save(entries: Mapping[str, Entry], file: Path, key: str) -> None:
    """One file, so that vectors and names cannot come apart. The names are a tensor of bytes, because a header has a
    limit; as ASCII, because a file's name need not be Unicode."""
    rows = [(path, entry.size, entry.mtime_ns, entry.reason) for path, entry in entries.items()]
    vectors = [entry.vector for entry in entries.values() if entry.vector is not None]
    save_file(
        {
            "rows": np.frombuffer(json.dumps([key, rows]).encode(), np.uint8),
            "vectors": np.stack(vectors) if vectors else np.zeros((0, 0), np.float16),
        },
        file,
    )


def _load(file: Path, key: str, say: Callable[[str], Any]) -> dict[str, Entry]:
    """What an earlier call wrote; nothing, with a line said, where that cannot be trusted."""
    if not file.exists():
        return {}
    try:
        tensors = load_file(file)
        vectors = tensors["vectors"]
        its, rows = json.loads(tensors["rows"].tobytes())
        entries, at = {}, 0
        for path, size, mtime_ns, reason in rows:
            entries[path] = Entry(size, mtime_ns, None if reason else vectors[at], reason)
            at += not reason
        if its == key and at == len(vectors) and vectors.dtype == np.float16 and np.isfinite(vectors).all():
            return entries
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    say(f"{file} is no index of this model, or broken: it is made anew")
    return {}
