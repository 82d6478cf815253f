"""JPEG, WebP and AVIF as Pillow writes them: what codecs stand beside.

The file of a small picture is mostly head: of an AVIF of 32 × 32 pixels, 288 bytes. So every file is weighed twice:
whole, and by what is `coded`, the bytes that tell its picture from others of its size and quality. Those of

    JPEG  the scan, with the Huffman tables that the standard prints, which a decoder can know, or with its own where it
          is smaller with them; the tables of the quality are the same for all, and count once for a whole set
    WebP  the VP8 frame without its start code and its size
    AVIF  the AV1 frame, without the sequence header and the boxes around it

A sheet is another way to share heads: many pictures side by side in one file.

B pictures, H, W pixels
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

from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.coders import Kept, Unit

QUALITIES = (5, 10, 20, 35, 50, 65, 80, 90, 95)
CHROMAS = ("4:2:0", "4:4:4")
BLOCK = 16  # pixels that all three code together: the pictures of a sheet begin at multiples of it
SHEET = 2**20  # pixels of a sheet at most

Chroma = Literal["4:2:0", "4:4:4"]


class Format(NamedTuple):
    """`coded` weighs what a file's bytes hold of the picture alone; `settings` are Pillow's, beside the quality."""

    feature: str
    coded: Callable[[bytes], int]
    settings: dict[str, Any]
    chromas: tuple[str, ...]
    since: str


class File(NamedTuple):
    """A picture or a sheet of them, and its bytes."""

    data: bytes
    image: Image.Image
    pictures: int
    size: tuple[int, int]  # of one of them


@dataclass(frozen=True)
class Baseline:
    """A format at one quality, as a coder. Colour is kept at half the resolution (4:2:0), as is usual, or at all of it;
    with `sheet`, the pictures that come together are one file, or a few."""

    format: str
    quality: int
    chroma: Chroma = "4:2:0"
    sheet: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"there is no baseline {self.format!r}", nearest(self.format, FORMATS))
        if not 0 <= self.quality <= 100:
            raise ConfigError(f"a {self.format} of quality {self.quality}", "give 0 … 100")
        if self.chroma not in self._row.chromas:
            raise ConfigError(f"{self.format} keeps no colour at {self.chroma}", f"give {self._row.chromas[0]}")
        Image.init()
        if self.format.upper() not in Image.SAVE or not features.check(self._row.feature):
            raise ConfigError(
                f"this Pillow ({PIL.__version__}) writes no {self.format}",
                f"leave it out, or install a Pillow with it: wheels have it since {self._row.since}",
            )

    @property
    def name(self) -> str:
        return f"{self.kind} q{self.quality}"

    @property
    def kind(self) -> str:
        """The same at every quality."""
        return self.format + f" {self.chroma}" * (self.chroma != "4:2:0") + " sheet" * self.sheet

    device = "cpu"

    @property
    def about(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "quality": self.quality,
            "chroma": self.chroma,
            "sheet": self.sheet,
            "settings": self._row.settings,
            "pillow": PIL.__version__,
            "library": features.version(self._row.feature),
        }

    def encode(self, pictures: Tensor) -> list[File]:
        """uint8 (B, 3, H, W) → files"""
        (H, W), most = pictures.shape[2:], 1
        if self.sheet:
            most = max(1, SHEET // (H * W))
        made = []
        for some in pictures.cpu().split(most):
            pixels = _laid(some) if self.sheet else some[0]
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            made.append(File(self._written(image), image, len(some), (H, W)))
        return made

    def decode(self, coded: list[File]) -> Tensor:
        """files → uint8 (B, 3, H, W)"""
        return torch.cat([_cut(_read(file.data), file) if self.sheet else _read(file.data)[None] for file in coded])

    def keep(self, coded: list[File]) -> list[Unit]:
        """What each file weighs."""
        units = []
        for file in coded:
            (H, W), bytes = file.size, self._row.coded(file.data)
            if self.format == "jpeg":
                bytes = min(bytes, _scan(self._written(file.image, optimize=False)))
            units.append(Unit(file.pictures * H * W, 8 * bytes, 8 * len(file.data)))
        return units

    def done(self) -> Kept:
        return Kept(once=8 * self._tables)

    @property
    def _row(self) -> Format:
        return FORMATS[self.format]

    @cached_property
    def _tables(self) -> int:
        """Bytes that say what a quality of JPEG is."""
        if self.format != "jpeg":
            return 0
        black = self._written(Image.new("RGB", (BLOCK, BLOCK)))
        return sum(length for marker, length in _segments(black) if marker == DQT)

    def _written(self, image: Image.Image, **more: Any) -> bytes:
        file = io.BytesIO()
        chroma = {} if len(self._row.chromas) == 1 else {"subsampling": self.chroma}
        try:
            image.save(file, self.format, quality=self.quality, **self._row.settings | chroma | more)
        except (OSError, ValueError) as error:
            size = f"{image.height} × {image.width}"
            raise DataError(f"a picture of {size} cannot be a {self.format}: {error}", "leave it out") from error
        return file.getvalue()


def _read(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


# ---- sheets -----------------------------------------------------------------------------------------------------


def _grid(count: int, H: int, W: int) -> tuple[int, int, int, int]:
    """Rows, columns, and the height and width of a place."""
    columns = math.ceil(math.sqrt(count))
    return math.ceil(count / columns), columns, H + -H % BLOCK, W + -W % BLOCK


def _laid(pictures: Tensor) -> Tensor:
    """(B, 3, H, W) → one (3, H, W) of all, each with its edges repeated up to whole blocks; empty places are grey."""
    B, _, H, W = pictures.shape
    rows, columns, h, w = _grid(B, H, W)
    padded = F.pad(pictures.float(), (0, w - W, 0, h - H), mode="replicate").to(torch.uint8)
    places = torch.full((rows * columns, 3, h, w), 128, dtype=torch.uint8)
    places[:B] = padded
    return places.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4).reshape(3, rows * h, columns * w)


def _cut(sheet: Tensor, file: File) -> Tensor:
    """(3, H, W) → the pictures on it (B, 3, H, W)"""
    H, W = file.size
    rows, columns, h, w = _grid(file.pictures, H, W)
    places = sheet.reshape(3, rows, h, columns, w).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return places[: file.pictures, :, :H, :W]


# ---- what of a file is the picture ------------------------------------------------------------------------------

DQT, DHT, SOS = 0xDB, 0xC4, 0xDA


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker and length of each segment of a JPEG of one scan; the last is the scan, without its head and the end."""
    at = 2
    while True:
        marker, length = data[at + 1], 2 + struct.unpack_from(">H", data, at + 2)[0]
        at += length
        if marker == SOS:
            yield SOS, len(data) - 2 - at
            return
        yield marker, length


def _scan(data: bytes) -> int:
    return sum(length for marker, length in _segments(data) if marker == SOS)


def _jpeg(data: bytes) -> int:
    return sum(length for marker, length in _segments(data) if marker in (DHT, SOS))


def _webp(data: bytes) -> int:
    """Of `VP8 ` all but a start code of three bytes and a size of four."""
    at = 12
    while data[at : at + 4] != b"VP8 ":
        at += 8 + -(-struct.unpack_from("<I", data, at + 4)[0] // 2) * 2
    return struct.unpack_from("<I", data, at + 4)[0] - 7


def _avif(data: bytes) -> int:
    """All units of `mdat` but those that delimit (2) and those of the sequence (1)."""
    at = 0
    while data[at + 4 : at + 8] != b"mdat":
        at += struct.unpack_from(">I", data, at)[0]
    end = at + struct.unpack_from(">I", data, at)[0]
    at, total = at + 8, 0
    while at < end:
        start, kind, extended = at, data[at] >> 3 & 15, data[at] >> 2 & 1
        at, size, shift = at + 1 + extended, 0, 0
        while True:  # seven bits a byte, lowest first
            byte = data[at]
            size |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        at += size
        total += at - start if kind not in (1, 2) else 0
    return total


FORMATS: dict[str, Format] = {
    "jpeg": Format("jpg", _jpeg, {"optimize": True}, CHROMAS, "ever"),
    "webp": Format("webp", _webp, {"method": 6}, CHROMAS[:1], "2.0"),
    "avif": Format("avif", _avif, {"speed": 6}, CHROMAS, "11.3"),
}
