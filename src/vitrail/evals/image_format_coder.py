"""JPEG, WebP and AVIF (by Pillow) as image coders: baselines of learned codecs.

Files of small images are mostly headers: 288 bytes in an AVIF of 32 × 32 pixels. So each file has two sizes: the whole
file, and its coded bytes, without headers that are equal for all images of one size and quality:

    JPEG  the scan, with the standard Huffman tables, or with its own tables if that is smaller. Quantization tables
          are equal for all images of one quality and count once per image set
    WebP  the VP8 frame without start code and size
    AVIF  the AV1 frame without sequence header and container boxes

A sheet shares headers in another way: it stores many images side by side in one file.

B images, H, W pixels
"""

import io
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image, features
from torch import Tensor

from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.image_coder import CodedUnit, CodingSummary

QUALITIES = (5, 10, 20, 35, 50, 65, 80, 90, 95)
CHROMA_SUBSAMPLINGS = ("4:2:0", "4:4:4")
BLOCK_SIZE = 16  # largest block of the three formats in pixels: images of a sheet start at multiples of it
MAX_SHEET_PIXELS = 2**20  # pixels

ChromaSubsampling = Literal["4:2:0", "4:4:4"]


class FormatSpec(NamedTuple):
    """A file format: the Pillow feature it needs, a function that counts coded bytes, and options for saving."""

    pillow_feature: str
    coded_bytes: Callable[[bytes], int]
    save_options: dict[str, Any]
    chromas: tuple[str, ...]
    since_version: str


class EncodedFile(NamedTuple):
    """An encoded image, or a sheet of several images."""

    data: bytes
    image: Image.Image
    num_images: int
    size: tuple[int, int]  # (height, width) of one image


@dataclass(frozen=True)
class ImageFormatCoder:
    """Image coder for one file format and quality.

    `chroma` selects half (4:2:0) or full (4:4:4) colour resolution. With `sheet`, each batch is stored as one file, or
    as few files as fit.
    """

    format: str
    quality: int
    chroma: ChromaSubsampling = "4:2:0"
    sheet: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"unknown image format {self.format!r}", suggest_name(self.format, FORMATS))
        if not 0 <= self.quality <= 100:
            raise ConfigError(f"quality {self.quality} of {self.format} is out of range", "set 0 … 100")
        if self.chroma not in self._format_spec.chromas:
            raise ConfigError(
                f"{self.format} does not support chroma {self.chroma}", f"use {self._format_spec.chromas[0]}"
            )
        Image.init()
        if self.format.upper() not in Image.SAVE or not features.check(self._format_spec.pillow_feature):
            raise ConfigError(
                f"Pillow {PIL.__version__} cannot write {self.format}",
                f"remove the format, or install Pillow {self._format_spec.since_version} or newer",
            )

    @property
    def name(self) -> str:
        return f"{self.kind} q{self.quality}"

    @property
    def kind(self) -> str:
        """Format name without the quality."""
        return self.format + f" {self.chroma}" * (self.chroma != "4:2:0") + " sheet" * self.sheet

    device = "cpu"

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "quality": self.quality,
            "chroma": self.chroma,
            "sheet": self.sheet,
            "settings": self._format_spec.save_options,
            "pillow": PIL.__version__,
            "library": features.version(self._format_spec.pillow_feature),
        }

    def encode(self, images: Tensor) -> list[EncodedFile]:
        """Encode uint8 images (B, 3, H, W) to files."""
        (H, W), per_file = images.shape[2:], 1
        if self.sheet:
            per_file = max(1, MAX_SHEET_PIXELS // (H * W))
        files = []
        for group in images.cpu().split(per_file):
            pixels = _build_sheet(group) if self.sheet else group[0]
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            files.append(EncodedFile(self._encode_file(image), image, len(group), (H, W)))
        return files

    def decode(self, coded_images: list[EncodedFile]) -> Tensor:
        """Decode files to uint8 images (B, 3, H, W)."""
        return torch.cat(
            [
                _split_sheet(_decode_image(file.data), file) if self.sheet else _decode_image(file.data)[None]
                for file in coded_images
            ]
        )

    def measure_bits(self, coded_images: list[EncodedFile]) -> list[CodedUnit]:
        """Measure the coded bits and file bits of each file."""
        units = []
        for file in coded_images:
            (H, W), bytes = file.size, self._format_spec.coded_bytes(file.data)
            if self.format == "jpeg":
                bytes = min(bytes, _scan_bytes(self._encode_file(file.image, optimize=False)))
            units.append(CodedUnit(file.num_images * H * W, 8 * bytes, 8 * len(file.data)))
        return units

    def finish(self) -> CodingSummary:
        return CodingSummary(shared_bits=8 * self._shared_table_bytes)

    @property
    def _format_spec(self) -> FormatSpec:
        return FORMATS[self.format]

    @cached_property
    def _shared_table_bytes(self) -> int:
        """Bytes of the JPEG quantization tables, which all images of one quality share."""
        if self.format != "jpeg":
            return 0
        example = self._encode_file(Image.new("RGB", (BLOCK_SIZE, BLOCK_SIZE)))
        return sum(length for marker, length in _jpeg_segments(example) if marker == DQT)

    def _encode_file(self, image: Image.Image, **options: Any) -> bytes:
        file = io.BytesIO()
        chroma = {} if len(self._format_spec.chromas) == 1 else {"subsampling": self.chroma}
        try:
            image.save(file, self.format, quality=self.quality, **self._format_spec.save_options | chroma | options)
        except (OSError, ValueError) as error:
            size = f"{image.height} × {image.width}"
            raise DataError(
                f"an image of {size} cannot be saved as {self.format}: {error}", "remove the image"
            ) from error
        return file.getvalue()


def _decode_image(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


# ---- sheets -----------------------------------------------------------------------------------------------------


def _sheet_grid(count: int, H: int, W: int) -> tuple[int, int, int, int]:
    """Rows, columns, cell height and cell width of a sheet."""
    columns = math.ceil(math.sqrt(count))
    return math.ceil(count / columns), columns, H + -H % BLOCK_SIZE, W + -W % BLOCK_SIZE


def _build_sheet(images: Tensor) -> Tensor:
    """Arrange images (B, 3, H, W) on one sheet (3, H, W). Edges are repeated to whole blocks; empty cells are grey."""
    B, _, H, W = images.shape
    rows, columns, h, w = _sheet_grid(B, H, W)
    padded = F.pad(images.float(), (0, w - W, 0, h - H), mode="replicate").to(torch.uint8)
    cells = torch.full((rows * columns, 3, h, w), 128, dtype=torch.uint8)
    cells[:B] = padded
    return cells.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4).reshape(3, rows * h, columns * w)


def _split_sheet(table: Tensor, file: EncodedFile) -> Tensor:
    """Split a sheet (3, H, W) into its images (B, 3, H, W)."""
    H, W = file.size
    rows, columns, h, w = _sheet_grid(file.num_images, H, W)
    cells = table.reshape(3, rows, h, columns, w).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return cells[: file.num_images, :, :H, :W]


# ---- coded bytes of files ---------------------------------------------------------------------------------------

DQT, DHT, SOS = 0xDB, 0xC4, 0xDA


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield marker and length of each segment of a one-scan JPEG; the last is the scan without header and end."""
    offset = 2
    while True:
        marker, length = data[offset + 1], 2 + struct.unpack_from(">H", data, offset + 2)[0]
        offset += length
        if marker == SOS:
            yield SOS, len(data) - 2 - offset
            return
        yield marker, length


def _scan_bytes(data: bytes) -> int:
    return sum(length for marker, length in _jpeg_segments(data) if marker == SOS)


def _jpeg_coded_bytes(data: bytes) -> int:
    return sum(length for marker, length in _jpeg_segments(data) if marker in (DHT, SOS))


def _webp_coded_bytes(data: bytes) -> int:
    """Bytes of the VP8 chunk without its start code (3 bytes) and frame size (4 bytes)."""
    offset = 12
    while data[offset : offset + 4] != b"VP8 ":
        offset += 8 + -(-struct.unpack_from("<I", data, offset + 4)[0] // 2) * 2
    return struct.unpack_from("<I", data, offset + 4)[0] - 7


def _avif_coded_bytes(data: bytes) -> int:
    """Bytes of all units of `mdat` except temporal delimiters (type 2) and sequence headers (type 1)."""
    offset = 0
    while data[offset + 4 : offset + 8] != b"mdat":
        offset += struct.unpack_from(">I", data, offset)[0]
    end = offset + struct.unpack_from(">I", data, offset)[0]
    offset, total = offset + 8, 0
    while offset < end:
        start, kind, extended = offset, data[offset] >> 3 & 15, data[offset] >> 2 & 1
        offset, size, shift = offset + 1 + extended, 0, 0
        while True:  # LEB128: seven bits per byte, lowest first
            byte = data[offset]
            size |= (byte & 127) << shift
            offset, shift = offset + 1, shift + 7
            if byte < 128:
                break
        offset += size
        total += offset - start if kind not in (1, 2) else 0
    return total


FORMATS: dict[str, FormatSpec] = {
    "jpeg": FormatSpec("jpg", _jpeg_coded_bytes, {"optimize": True}, CHROMA_SUBSAMPLINGS, "1.0"),
    "webp": FormatSpec("webp", _webp_coded_bytes, {"method": 6}, CHROMA_SUBSAMPLINGS[:1], "2.0"),
    "avif": FormatSpec("avif", _avif_coded_bytes, {"speed": 6}, CHROMA_SUBSAMPLINGS, "11.3"),
}
