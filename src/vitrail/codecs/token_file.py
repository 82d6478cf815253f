"""Token files: images or videos as bit-packed ids, with a header that names the codec that decodes them.

    magic · version · header            shared by all records, with a checksum
    record, record, …                   length and checksum, then name, sizes and ids
    index · trailer                     offset of each record; digest of all bytes before; checksums

The reader verifies what it uses: a record whose bytes changed, moved or are missing is refused.
`vitrail.codecs.token_file_writer` writes token files; `vitrail.codecs.video_token_file` has the records of videos.

Shapes: h, w codes along the sides of an image, G id groups of a code.
"""

import hashlib
import math
import os
import struct
import zlib
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.bit_packing import compute_packed_size, pack_ids, unpack_ids
from vitrail.codecs.quantizers import bits_per_id
from vitrail.config import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from vitrail.errors import ConfigError, DataError

FILE_MAGIC, END_MAGIC = b"\x89VTOK\r\n\x1a", b"VTOKEND\n"
FORMAT_VERSION = 3  # version 2 has no videos; version 1 identified codecs by the names of an earlier release
OLDEST_VERSION = 2
HEADER_STRUCT = struct.Struct("<8sHI")  # magic, version, length of the header; then the header and its checksum
RECORD_STRUCT = struct.Struct("<II")  # length of a record's body, checksum
# Offset and length of the index, digest of all bytes before, checksum, end magic.
TRAILER_STRUCT = struct.Struct("<QQ32sI8s")
CHECKSUM_STRUCT = struct.Struct("<I")
REGENERATE_HINT = "tokenize again, or copy the file again"

MIN_FPS, MAX_FPS = 0.001, 1000.0

ImageSize = tuple[int, int]


class VideoTokenSettings(Config):
    """How the videos of a token file are encoded.

    temporal_factor  frames of one latent frame, but for the first of a segment
    frame_multiple   frames m by which a video grows: segments have 1 + m·n frames; a multiple of temporal_factor
    segment_frames   frames that are coded independently of those before
    chunk_frames     frames that are encoded at a time: a multiple of m
    latent_dtype     dtype of continuous latents; None for ids
    latent_width     width of continuous latents; 0 for ids
    start, end       part of each source that is encoded, in seconds
    fps              frame rate to which the source is resampled; None for its own timestamps
    """

    temporal_factor: PositiveInt
    frame_multiple: PositiveInt
    segment_frames: PositiveInt
    chunk_frames: PositiveInt
    latent_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    latent_width: NonNegativeInt = 0
    start: NonNegativeFloat = 0.0
    end: PositiveFloat | None = None
    fps: PositiveFloat | None = None

    def __post_init__(self) -> None:
        m = self.frame_multiple
        if m % self.temporal_factor:
            raise ConfigError(
                f"frame_multiple is {m}, temporal_factor is {self.temporal_factor}", "use a multiple of it"
            )
        if (self.segment_frames - 1) % m:
            n = max(1, round((self.segment_frames - 1) / m))
            raise ConfigError(
                f"segments of {self.segment_frames} frames do not divide into 1 + {m}·n frames",
                f"use segments of {1 + m * n} frames",
            )
        if self.chunk_frames % m:
            raise ConfigError(
                f"chunks of {self.chunk_frames} frames do not divide into {m} frames", f"use a multiple of {m}"
            )
        if (self.latent_dtype is None) != (self.latent_width == 0):
            raise ConfigError(
                f"latent_dtype is {self.latent_dtype}, latent_width is {self.latent_width}", "give both or none"
            )
        if self.fps is not None and not MIN_FPS <= self.fps <= MAX_FPS:
            raise ConfigError(f"fps is {self.fps}", f"give {MIN_FPS} … {MAX_FPS:,.0f}")
        if not math.isfinite(self.start) or (self.end is not None and not math.isfinite(self.end)):
            raise ConfigError(f"start is {self.start} s, end is {self.end} s", "give finite times")
        if self.end is not None and not self.start < self.end:
            raise ConfigError(f"start is {self.start} s, end is {self.end} s", "give an end after the start")


class TokenFileHeader(Config):
    """Header that all records share.

    model   identity of the codec: a hash of its config and weights
    name    display name of the codec
    sizes   number of values of an id in each group
    groups  whether ids have a group axis; if not, there is one size
    factor  pixels along a side of a code
    fit     how images are resized (see `ImageResizeConfig`)
    video   settings of videos; None for images
    """

    model: str
    name: str
    sizes: tuple[int, ...]
    groups: bool
    factor: int
    fit: dict[str, Any]
    video: VideoTokenSettings | None = None

    def __post_init__(self) -> None:
        if self.video is not None and self.video.latent_dtype is not None:
            if self.sizes or self.groups or self.factor < 1:
                raise ConfigError("the header has both ids and latents", "give either")
            return
        if not self.sizes or min(self.sizes) < 1 or max(self.sizes) > 2**63 or self.factor < 1:
            raise ConfigError(
                f"the header has id sizes {self.sizes} and factor {self.factor}",
                "give sizes of 1 … 2⁶³ and a factor of at least 1",
            )
        if not self.groups and len(self.sizes) > 1:
            raise ConfigError(f"ids without groups have sizes {self.sizes}", "give one size")

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of an id in each group."""
        return tuple(map(bits_per_id, self.sizes))


class ImageTokens(NamedTuple):
    """One image as ids.

    `image_size` is the height and width of the decoded image, `source_size` that of the original image. The codes may
    cover a few pixels more than `image_size`.
    """

    name: str
    ids: Tensor  # int64 (h, w) or (h, w, G)
    image_size: ImageSize
    source_size: ImageSize


class TokenRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Record as stored in the file. A record of an unreadable image has only a name and an error."""

    name: str
    error: str | None
    grid: ImageSize
    image_size: ImageSize
    source_size: ImageSize
    packed_ids: bytes


class TokenFileIndex(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    offsets: bytes  # int64 offset of each record with ids
    names: list[str]
    errors: list[tuple[str, str]]
    first_records: list[int] = msgspec.field(default_factory=list)  # for videos: number of the record of each


# ---- reading ----------------------------------------------------------------------------------------------------


class TokenFileReader:
    """Verified access to the records of a token file: base class of `TokenFile` and `VideoTokenFile`.

    Several threads and processes can read one file at the same time. With `codec_identity`, a file of another codec is
    refused.
    """

    media: ClassVar[str]  # images or videos

    def __init__(self, path: str | Path, *, codec_identity: str | None = None):
        self.path = Path(path)
        self._open()
        if codec_identity is not None and codec_identity != self.header.model:
            raise DataError(
                f"{self.path} was written by another codec: {self.header.name} ({self.header.model[:12]}), "
                f"not the one given ({codec_identity[:12]})",
                "give the codec that wrote it, with the same weights",
            )

    @property
    def errors(self) -> dict[str, str]:
        """Names of the images or videos that could not be read when the file was written, with the reasons."""
        return dict(self._index.errors)

    @property
    def names(self) -> list[str]:
        return self._index.names

    def verify_digest(self) -> None:
        """Read the whole file and compare it with its digest."""
        digest = hashlib.sha256()
        for start in range(0, self._trailer_start, 1 << 20):
            digest.update(self._read_bytes(start, min(1 << 20, self._trailer_start - start)))
        if digest.digest() != self._digest:
            raise DataError(f"{self.path} is corrupted: its digest does not match", REGENERATE_HINT)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()

    # ---- reading bytes ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._file = _open_file(self.path)
        self.header, first = read_header(self._file, self.path)
        if (self.header.video is not None) != (self.media == "videos"):
            other = "VideoTokenFile" if self.header.video is not None else "TokenFile"
            raise DataError(f"{self.path} does not hold {self.media}", f"read it with `{other}`")
        size = os.fstat(self._file.fileno()).st_size
        self._trailer_start = size - TRAILER_STRUCT.size
        if self._trailer_start < first:
            raise self._truncation_error()
        start, length, self._digest, check, end = TRAILER_STRUCT.unpack(
            self._read_bytes(self._trailer_start, TRAILER_STRUCT.size)
        )
        if end != END_MAGIC:
            raise self._truncation_error()
        if encode_trailer(start, length, self._digest)[-12:-8] != CHECKSUM_STRUCT.pack(check):
            raise self._corruption_error("trailer")
        if start < first or start + length + CHECKSUM_STRUCT.size != self._trailer_start:
            raise self._corruption_error("trailer")
        body = self._read_bytes(start, length)
        if CHECKSUM_STRUCT.pack(zlib.crc32(body)) != self._read_bytes(start + length, CHECKSUM_STRUCT.size):
            raise self._corruption_error("index")
        try:
            self._index = msgspec.msgpack.decode(body, type=TokenFileIndex)
            self._offsets = np.frombuffer(self._index.offsets, "<i8")
        except (msgspec.DecodeError, ValueError):
            raise self._corruption_error("index") from None
        self._index_by_name = {name: number for number, name in enumerate(self._index.names)}
        self._records_start, self._records_end = first, start
        if not self._is_index_valid():
            raise self._corruption_error("index")

    def _is_index_valid(self) -> bool:
        """Whether the index has one record for each name."""
        return len(self._offsets) == len(self._index.names)

    def _read_record_data(self, number: int, culprit: str) -> bytes:
        """Read the body of a record, and verify its checksum."""
        start = int(self._offsets[number])
        if not self._records_start <= start <= self._records_end - RECORD_STRUCT.size:
            raise self._corruption_error(culprit)
        length, check = RECORD_STRUCT.unpack(self._read_bytes(start, RECORD_STRUCT.size))
        if length > self._records_end - start - RECORD_STRUCT.size:
            raise self._corruption_error(culprit)
        data = self._read_bytes(start + RECORD_STRUCT.size, length)
        if compute_record_checksum(start, data) != check:
            raise self._corruption_error(culprit)
        return data

    def _read_bytes(self, start: int, length: int) -> bytes:
        """Read at a position, without a shared file offset, so that threads and forked processes can share the file."""
        data = os.pread(self._file.fileno(), length, start)
        while len(data) < length:
            chunk = os.pread(self._file.fileno(), length - len(data), start + len(data))
            if not chunk:
                raise self._truncation_error()
            data += chunk
        return data

    def _corruption_error(self, part: str) -> DataError:
        return DataError(f"{self.path} is corrupted: the checksum of its {part} does not match", REGENERATE_HINT)

    def _truncation_error(self) -> DataError:
        return DataError(
            f"{self.path} is truncated or was never finished",
            f"{REGENERATE_HINT}; `vitrail tokenize` resumes a partial file",
        )


class TokenFile(TokenFileReader, Sequence[ImageTokens]):
    """Read-only sequence of the images of a token file, by index or name."""

    media = "images"

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, key: int | str) -> ImageTokens:  # type: ignore[override]
        if isinstance(key, str):
            if key not in self._index_by_name:
                raise DataError(f"{self.path} has no image {key!r}", "choose one of `names`")
            key = self._index_by_name[key]
        if not -len(self) <= key < len(self):
            raise IndexError(key)
        return self._read_record(range(len(self))[key])

    def _read_record(self, number: int) -> ImageTokens:
        name = self._index.names[number]
        culprit = f"record {number} ({name!r})"
        data = self._read_record_data(number, culprit)
        try:
            body = msgspec.msgpack.decode(data, type=TokenRecord)
            ids = self._unpack_ids(body)
        except (msgspec.DecodeError, ValueError, RuntimeError, DataError):
            raise self._corruption_error(culprit) from None
        if body.name != name or ids is None:
            raise self._corruption_error(culprit)
        return ImageTokens(name, ids, body.image_size, body.source_size)

    def _unpack_ids(self, body: TokenRecord) -> Tensor | None:
        """Unpack the ids of a record; None if the header does not allow them."""
        if not is_size_covered(body.image_size, body.grid, self.header.factor):
            return None
        return unpack_groups(body.packed_ids, body.grid, self.header)


# ---- shared by reading and writing -----------------------------------------------------------------------------------


def split_groups(ids: Tensor, header: TokenFileHeader) -> tuple[Tensor, ...]:
    return ids.unbind(-1) if header.groups else (ids,)


def is_size_covered(size: ImageSize, grid: ImageSize, factor: int) -> bool:
    """Whether an image of at least one pixel lies within the codes of a grid."""
    return all(0 < side <= cells * factor for side, cells in zip(size, grid, strict=True))


def pack_groups(ids: Tensor, header: TokenFileHeader) -> bytes:
    """Pack ids of any shape, with a last axis of groups if the header says so: one group after the other."""
    return b"".join(pack_ids(part, bits) for part, bits in zip(split_groups(ids, header), header.bits, strict=True))


def unpack_groups(data: bytes, shape: tuple[int, ...], header: TokenFileHeader) -> Tensor | None:
    """Invert `pack_groups` for ids of a shape without the axis of groups; None if the header does not allow them."""
    count = math.prod(shape)
    weights = [compute_packed_size(count, bits) for bits in header.bits]
    if min(shape) < 1 or sum(weights) != len(data):
        return None
    parts, at = [], 0
    for bits, weight, size in zip(header.bits, weights, header.sizes, strict=True):
        part = unpack_ids(data[at : at + weight], bits, count).reshape(shape)
        if part.min() < 0 or part.max() > size - 1:
            return None
        parts.append(part)
        at += weight
    return torch.stack(parts, dim=-1) if header.groups else parts[0]


def compute_record_checksum(start: int, data: bytes) -> int:
    """Compute the checksum of a record and its offset, so that a moved record is refused."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<QI", start, len(data))))


def encode_header(header: TokenFileHeader) -> bytes:
    data = msgspec.json.encode(header)
    return HEADER_STRUCT.pack(FILE_MAGIC, FORMAT_VERSION, len(data)) + data + CHECKSUM_STRUCT.pack(zlib.crc32(data))


def encode_trailer(start: int, length: int, digest: bytes) -> bytes:
    check = zlib.crc32(struct.pack("<QQ32s", start, length, digest))
    return TRAILER_STRUCT.pack(start, length, digest, check, END_MAGIC)


def read_token_file_header(path: str | Path) -> TokenFileHeader:
    """Read the header of a token file of images or videos."""
    with _open_file(Path(path)) as file:
        return read_header(file, Path(path))[0]


def _open_file(path: Path) -> FileIO:
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file", "give a file that `vitrail tokenize` wrote")
        return FileIO(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path") from error


def read_header(file: BinaryIO | FileIO, path: Path) -> tuple[TokenFileHeader, int]:
    """Read the header and the offset of the first record."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    prefix = file.read(HEADER_STRUCT.size)
    if len(prefix) < HEADER_STRUCT.size or prefix[:8] != FILE_MAGIC:
        raise DataError(f"{path} is not a token file", "give a file that `vitrail tokenize` wrote")
    _, version, length = HEADER_STRUCT.unpack(prefix)
    if not OLDEST_VERSION <= version <= FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}, but this vitrail reads versions {OLDEST_VERSION} to "
            f"{FORMAT_VERSION}",
            "use the version of vitrail that wrote it" if version > FORMAT_VERSION else REGENERATE_HINT,
        )
    corruption_error = DataError(f"{path} is corrupted: the checksum of its header does not match", REGENERATE_HINT)
    if length > size - HEADER_STRUCT.size - CHECKSUM_STRUCT.size:
        raise corruption_error
    data = file.read(length)
    if file.read(CHECKSUM_STRUCT.size) != CHECKSUM_STRUCT.pack(zlib.crc32(data)):
        raise corruption_error
    try:
        return TokenFileHeader.from_dict(msgspec.json.decode(data)), HEADER_STRUCT.size + length + CHECKSUM_STRUCT.size
    except (ValueError, ConfigError, RecursionError):
        raise corruption_error from None
