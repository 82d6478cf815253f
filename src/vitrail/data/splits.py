"""Train-test splits that measure generalization to unseen concepts or to an unseen vendor, without leakage.

The split depends on hashes of keys, so it is the same on every machine. Near-duplicate images are never in both splits.
A split by concepts keeps them together. A split by vendor drops and counts the held-out images that look like training
images.

Shapes: N images, P pairs, S pixels a side of a thumbnail, F frequencies a side.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.image_readers.emoji import VENDORS, remove_skin_tone
from vitrail.data.image_readers.image_record import ImageReader, ImageRecord
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import ConfigError, suggest_name

FINGERPRINT_IMAGE_SIZE = 64  # size at which images are fingerprinted
S, F = 32, 8
MAX_DISTANCE = 6  # of 64 bits: below this an image is the same drawing resized, re-encoded or slightly altered
BLOCK_SIZE = 1024
SplitKind = Literal["concepts", "vendor"]


class ImageFingerprints(NamedTuple):
    """Fingerprints of images. Equal `exact` means the same image; `perceptual` hashes with few different bits mean
    near-duplicates."""

    exact: np.ndarray  # (N,) uint64
    perceptual: np.ndarray  # (N,) uint64


class DatasetSplit(NamedTuple):
    """Row numbers of each split, and of the rows dropped because they would leak."""

    train: np.ndarray
    test: np.ndarray
    dropped: np.ndarray

    def describe(self) -> str:
        """Summarize the sizes of the splits."""
        return f"{len(self.train):,} train, {len(self.test):,} test, {len(self.dropped):,} dropped"


def split_images(
    records: Sequence[ImageRecord],
    kind: SplitKind,
    fingerprints: ImageFingerprints,
    *,
    vendor: str = "",
    test_fraction: float = 0.1,
    max_distance: int = MAX_DISTANCE,
    seed: int = 0,
) -> DatasetSplit:
    """Split images into a training and a test set.

    - `concepts`: about `test_fraction` of all concepts are for testing. All vendors' images of one codepoint, its skin
      tones, images of one name, and near-duplicates stay together.
    - `vendor`: images of `vendor` are for testing, images of the others for training.
    """
    if len(records) != len(fingerprints.exact) or not 0 <= max_distance < 64:
        raise ConfigError(
            f"{len(records)} images, {len(fingerprints.exact)} fingerprints, max_distance {max_distance} of 64 bits",
            "give one fingerprint for each image, and a distance of 0 … 63",
        )
    if kind == "concepts":
        if not 0 < test_fraction < 1:
            raise ConfigError(f"test_fraction {test_fraction} leaves one split empty", "give a number between 0 and 1")
        groups = _group_images(records, fingerprints, max_distance)
        is_test = np.array([_hash_to_unit(group, seed) < test_fraction for group in groups], dtype=bool)
        is_dropped = np.zeros_like(is_test)
    else:
        vendors = {record.vendor for record in records}
        if vendor not in vendors or len(vendors) < 2:
            raise ConfigError(f"vendor {vendor!r} cannot be held out", suggest_name(vendor, sorted(vendors)))
        is_test = np.array([record.vendor == vendor for record in records])
        (held_out,), (others,) = is_test.nonzero(), (~is_test).nonzero()
        is_dropped = np.zeros_like(is_test)
        is_dropped[
            held_out[
                find_near_pairs(fingerprints.perceptual[held_out], fingerprints.perceptual[others], max_distance)[0]
            ]
        ] = True
    return DatasetSplit(*(mask.nonzero()[0] for mask in (~is_test & ~is_dropped, is_test & ~is_dropped, is_dropped)))


def count_leaks(
    split: DatasetSplit,
    records: Sequence[ImageRecord],
    fingerprints: ImageFingerprints,
    max_distance: int = MAX_DISTANCE,
) -> dict[str, int]:
    """Count what both splits share: ids, (vendor, key) pairs, identical images, and near-duplicate pairs."""
    sides = split.train, split.test
    ids, keys = ([{key_of(records[row]) for row in side} for side in sides] for key_of in (_get_id, _get_key))
    exact = [set(fingerprints.exact[side].tolist()) for side in sides]
    pairs, _ = find_near_pairs(fingerprints.perceptual[split.train], fingerprints.perceptual[split.test], max_distance)
    shared = {"ids": ids, "keys": keys, "images": exact}
    return {**{name: len(train & test) for name, (train, test) in shared.items()}, "near_duplicates": len(pairs)}


def collect_records(*readers: ImageReader) -> list[ImageRecord]:
    """Concatenate the image records of several readers."""
    return [reader.get_record(item) for reader in readers for item in range(len(reader))]


def compute_fingerprints(*readers: ImageReader) -> ImageFingerprints:
    """Compute the fingerprints of all images of several readers, concatenated."""
    total = sum(map(len, readers))
    exact, greys = np.zeros(total, np.uint64), np.zeros((total, S, S), np.float32)
    row = 0
    with progress_bar("fingerprinting images", total, unit="image") as progress:
        for reader in readers:
            for item in range(len(reader)):
                rgba = reader.load_rgba(item, FINGERPRINT_IMAGE_SIZE)
                digest = hashlib.blake2b(repr(rgba.shape).encode() + rgba.tobytes(), digest_size=8).digest()
                exact[row], greys[row] = int.from_bytes(digest, "little"), make_thumbnail(rgba)
                row += 1
                progress.update()
    return ImageFingerprints(exact, compute_perceptual_hash(greys))


def make_thumbnail(rgba: np.ndarray) -> np.ndarray:
    """Convert (H, W, 4) to (S, S) brightness on white, cropped to the opaque part because margins differ between
    vendors."""
    (x0, x1), (y0, y1) = (_extent(rgba[..., 3].max(axis) / 255) for axis in (0, 1))
    image = Image.fromarray(rgba).resize((S, S), Image.Resampling.BILINEAR, box=(x0, y0, x1, y1))
    small = np.asarray(image, np.float32)
    opacity = small[..., 3] / 255
    return small[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32) * opacity + 255 * (1 - opacity)


def _extent(opacity: np.ndarray) -> tuple[float, float]:
    """First and last opaque position of a row of pixels, with sub-pixel precision, so that it does not
    depend on size."""
    (opaque,) = (opacity > 1 / 16).nonzero()
    if not len(opaque):
        return 0, len(opacity)
    start, end = opaque[0] + 1 - opacity[opaque[0]], opaque[-1] + opacity[opaque[-1]]
    return (start, end) if end - start >= 1 else (opaque[0], opaque[-1] + 1)


def compute_perceptual_hash(thumbnails: np.ndarray) -> np.ndarray:
    """Compute a perceptual hash: (N, S, S) → (N,) 64 bits, one for each of the F × F lowest cosine frequencies above
    the median."""
    angle = np.pi * (np.arange(S) + 0.5) * np.arange(F)[:, None] / S
    basis = np.cos(angle) * np.sqrt(2 / S)  # (F, S)
    coefficients = np.einsum("fi,nij,gj->nfg", basis, thumbnails.astype(np.float64), basis).reshape(-1, F * F)
    coefficients = np.round(coefficients, 2)  # otherwise noise decides where a symmetric image has zero coefficients
    median = np.median(coefficients[:, 1:], axis=1, keepdims=True)
    bits = coefficients > median
    bits[:, 0] = False  # mean brightness is not a feature
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def find_near_pairs(a: np.ndarray, b: np.ndarray, max_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (P,) of `a` and of `b` whose hashes differ in at most `max_distance` bits."""
    right = _signs(b)
    rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with progress_bar("comparing", len(a), unit="image") as progress:
        for start in range(0, len(a), BLOCK_SIZE):
            # Each bit that differs reduces the dot product of 64 signs by two.
            is_near = _signs(a[start : start + BLOCK_SIZE]) @ right.T >= 64 - 2 * max_distance
            i, j = is_near.nonzero()
            rows.append(i + start)
            columns.append(j)
            progress.update(len(is_near))
    return np.concatenate(rows), np.concatenate(columns)


def _signs(looks: np.ndarray) -> np.ndarray:
    """Convert (N,) 64 bits to (N, 64) values of ±1, whose dot products are exact in float32."""
    bits = np.unpackbits(np.ascontiguousarray(looks).view(np.uint8).reshape(-1, 8), axis=1)
    return bits.astype(np.float32) * 2 - 1


def get_concept(record: ImageRecord) -> str:
    """Return the concept of an image: the codepoint without skin tone for emoji, otherwise the name."""
    return remove_skin_tone(record.key) if record.vendor in VENDORS else record.name.lower()


def _group_images(image_records: Sequence[ImageRecord], image_prints: ImageFingerprints, near: int) -> list[str]:
    """Group images that must not be separated, and name each group by its smallest concept (one for each image)."""
    parent = list(range(len(image_records)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    def join(pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            parent[root(a)] = root(b)

    first_of_key: dict[str, int] = {}
    for row, record in enumerate(image_records):
        join(
            (row, first_of_key.setdefault(key, row))
            for key in (f"concept {get_concept(record)}", f"name {record.name.lower()}")
        )
    join(
        zip(
            *(side.tolist() for side in find_near_pairs(image_prints.perceptual, image_prints.perceptual, near)),
            strict=True,
        )
    )
    group_names: dict[int, str] = {}
    for row, record in enumerate(image_records):
        group_names[root(row)] = min(group_names.get(root(row), get_concept(record)), get_concept(record))
    return [group_names[root(row)] for row in range(len(image_records))]


def _hash_to_unit(name: str, seed: int) -> float:
    """Hash name and seed to a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{name}".encode(), digest_size=8).digest(), "little") / 2**64


def _get_id(record: ImageRecord) -> str:
    return record.id


def _get_key(record: ImageRecord) -> tuple[str, str]:
    return record.vendor, record.key
