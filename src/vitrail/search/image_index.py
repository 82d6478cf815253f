"""Index of a folder's images as vectors. Each call of `update_index` brings the index file up to date.

Shapes: N images, E embedding width.
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

from vitrail.data.sources.fetch import get_cache_folder, log_to_stderr, prepare_folder
from vitrail.errors import ImageError
from vitrail.processing.image_loading import IMAGE_FORMATS, load_image

INDEX_FOLDER, INDEX_FILE = ".vitrail", "index.safetensors"
BATCH_SIZE = 32  # images that are embedded at once
SAVE_INTERVAL = 30.0  # seconds between saves; an interruption loses at most this much work


class ImageEmbedder(Protocol):
    """Protocol of a model that turns images into vectors.

    `preprocess` runs for one image at a time on several threads, `embed_images` for a batch. `key` identifies
    everything the vectors depend on; each key has its own index.
    """

    key: str

    def preprocess(self, image: Image.Image) -> Any: ...

    def embed_images(self, images: Sequence[Any]) -> np.ndarray:
        """Return unit vectors (N, E)."""
        ...


class IndexEntry(NamedTuple):
    """One image file: its size and time when it was embedded, and its vector or the reason it could not be read."""

    size: int
    mtime_ns: int
    vector: np.ndarray | None  # (E,) float16
    error: str = ""

    @property
    def file_stamp(self) -> tuple[int, int]:
        return self.size, self.mtime_ns


class ImageIndex(NamedTuple):
    """Entries by path, sorted by path, and the number of files that the last update added, changed and removed."""

    entries: dict[str, IndexEntry]
    added: int = 0
    changed: int = 0
    removed: int = 0

    @property
    def paths(self) -> list[str]:
        """Return the paths of the readable images: the rows of `vectors`."""
        return [path for path, entry in self.entries.items() if entry.vector is not None]

    @property
    def vectors(self) -> np.ndarray:
        """Return the vectors of the readable images, (N, E) float32."""
        rows = [entry.vector for entry in self.entries.values() if entry.vector is not None]
        return np.stack(rows).astype(np.float32) if rows else np.zeros((0, 0), np.float32)

    @property
    def unreadable(self) -> dict[str, str]:
        """Return the reasons of the unreadable files by path."""
        return {path: entry.error for path, entry in self.entries.items() if entry.vector is None}


def update_index(
    folder: Path,
    embedder: ImageEmbedder,
    *,
    skip: Collection[Path] = (),
    save_interval: float = SAVE_INTERVAL,
    log: Callable[[str], Any] = log_to_stderr,
) -> ImageIndex:
    """Return the up-to-date index of a folder. Embeds only files that are new or whose size or time changed.

    One process updates an index at a time; others wait. The index is saved every `save_interval` seconds and on an
    interruption, and the next call continues from there. `skip` lists files to leave out.
    """
    index_folder = _find_index_folder(folder, embedder.key)
    with prepare_folder(index_folder, log) as partial:
        saved = _load_entries(index_folder / INDEX_FILE, embedder.key, log)
        stamps = _list_images(folder, {path.resolve() for path in skip}, log)
        entries = {path: entry for path, entry in saved.items() if stamps.get(path) == entry.file_stamp}
        outdated = [path for path in stamps if path not in entries]

        def save() -> None:
            _save_entries(entries, partial / INDEX_FILE, embedder.key)
            (partial / INDEX_FILE).replace(index_folder / INDEX_FILE)

        last_save = time.monotonic()
        try:
            for path, entry in _embed_files(folder, {path: stamps[path] for path in outdated}, embedder):
                entries[path] = entry
                if time.monotonic() - last_save >= save_interval:
                    save()
                    last_save = time.monotonic()
        finally:
            if entries.keys() != saved.keys() or outdated:
                save()
    changed = sum(path in saved for path in outdated)
    return ImageIndex(
        dict(sorted(entries.items())), len(outdated) - changed, changed, len(saved.keys() - stamps.keys())
    )


def _embed_files(
    folder: Path, stamps: Mapping[str, tuple[int, int]], image_embedder: ImageEmbedder
) -> Iterator[tuple[str, IndexEntry]]:
    def read(path: str) -> Any:
        try:
            return image_embedder.preprocess(load_image(folder / path, frame=0))  # the first frame of an animation
        except ImageError as error:
            return error

    paths = list(stamps)
    progress_bar = tqdm(total=len(paths), desc=f"index {folder.name}", unit=" images", file=sys.stderr, disable=None)
    with progress_bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), BATCH_SIZE):
            batch = paths[start : start + BATCH_SIZE]
            results = dict(zip(batch, pool.map(read, batch), strict=True))
            inputs = {path: pixels for path, pixels in results.items() if not isinstance(pixels, ImageError)}
            vectors = image_embedder.embed_images(list(inputs.values())).astype(np.float16) if inputs else ()
            embedded = {path: IndexEntry(*stamps[path], vector) for path, vector in zip(inputs, vectors, strict=True)}
            for path, error in results.items():
                yield path, embedded[path] if path in embedded else IndexEntry(*stamps[path], None, str(error.problem))
            progress_bar.update(len(batch))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_image_suffixes() -> set[str]:
    """Return the suffixes of image files."""
    return {ending for ending, kind in Image.registered_extensions().items() if kind in IMAGE_FORMATS}


def _list_images(folder: Path, skip: Collection[Path], report: Callable[[str], Any]) -> dict[str, tuple[int, int]]:
    """Return size and time of every image file by its path in the folder.

    Hidden files and links are left out; the target of a link inside the folder is found at its own path.
    """
    suffixes, stamps = list_image_suffixes(), {}

    def log_error(error: OSError) -> None:
        report(f"{error.filename} cannot be listed: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=log_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if (
                name.startswith(".")
                or path.suffix.lower() not in suffixes
                or path.is_symlink()
                or path.resolve() in skip
            ):
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:  # deleted while listing
                continue
            stamps[path.relative_to(folder).as_posix()] = stat.st_size, stat.st_mtime_ns
    return dict(sorted(stamps.items()))


def _find_index_folder(folder: Path, key: str) -> Path:
    """Return the folder of the index: inside the image folder, or in the cache folder if that is read-only."""
    inside = folder / INDEX_FOLDER / key
    try:
        inside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=inside):
            return inside
    except OSError:
        return get_cache_folder() / "search" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16] / key


def _save_entries(entries: Mapping[str, IndexEntry], file: Path, key: str) -> None:
    """Save vectors and paths to one file.

    The paths are stored as a tensor of bytes, because the header of safetensors has a size limit. They are ASCII JSON,
    because a file name need not be valid Unicode.
    """
    rows = [(path, entry.size, entry.mtime_ns, entry.error) for path, entry in entries.items()]
    vectors = [entry.vector for entry in entries.values() if entry.vector is not None]
    save_file(
        {
            "rows": np.frombuffer(json.dumps([key, rows]).encode(), np.uint8),
            "vectors": np.stack(vectors) if vectors else np.zeros((0, 0), np.float16),
        },
        file,
    )


def _load_entries(file: Path, key: str, report: Callable[[str], Any]) -> dict[str, IndexEntry]:
    """Load the entries of an earlier call. Returns none, and logs it, if the file is damaged."""
    if not file.exists():
        return {}
    try:
        tensors = load_file(file)
        vectors = tensors["vectors"]
        saved_key, rows = json.loads(tensors["rows"].tobytes())
        entries, row = {}, 0
        for path, size, mtime_ns, reason in rows:
            entries[path] = IndexEntry(size, mtime_ns, None if reason else vectors[row], reason)
            row += not reason
        if saved_key == key and row == len(vectors) and vectors.dtype == np.float16 and np.isfinite(vectors).all():
            return entries
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    report(f"{file} is damaged or belongs to another model: it is rebuilt")
    return {}
