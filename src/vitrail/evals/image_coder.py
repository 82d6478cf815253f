"""Image coders turn images into bits and back. Codecs are here; file formats are in `image_format_coder`.

B images, H, W pixels, h, w codes per side, G groups of a code
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.codec import Codec, compute_codec_identity
from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.codecs.image_tokenization import build_header
from vitrail.codecs.token_file import TokenFile
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.errors import ConfigError
from vitrail.evals.metrics import CodebookUsage, measure_codebook_usage

CODE_COUNT_BATCH = 256  # images whose codes are counted at a time


class CodedUnit(NamedTuple):
    """Size of an image, or of several images in one file.

    Holds the pixels, the coded bits and the file bits. Bits are None for continuous codes, and file bits are None if
    all images share one file.
    """

    pixels: int
    coded_bits: int | None
    file_bits: int | None


class CodingSummary(NamedTuple):
    """Totals of an image set: bits that all images share, bits of a common file, and codebook usage per code group."""

    shared_bits: int = 0
    file_bits: int | None = None
    codebook_usage: tuple[CodebookUsage, ...] = ()


class ImageCoder(Protocol):
    """Interface of image coders.

    `encode` and `decode` are timed. After each batch, `measure_bits` takes the result of `encode`; `finish` is called
    after the last batch.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """Coders of the same kind form one line in a plot."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def metadata(self) -> dict[str, Any]: ...

    def encode(self, images: Tensor, /) -> Any:
        """uint8 (B, 3, H, W)"""
        ...

    def decode(self, coded_images: Any, /) -> Tensor:
        """uint8 (B, 3, H, W)"""
        ...

    def measure_bits(self, coded_images: Any, /) -> list[CodedUnit]: ...

    def finish(self) -> CodingSummary: ...


class CodedImages(NamedTuple):
    """Codes of a batch of images of one size."""

    ids: Tensor | None  # (B, h, w) or (B, h, w, G)
    codes: Tensor | None  # (B, h, w, d) if the codec is continuous
    size: tuple[int, int]


@dataclass
class CodecCoder:
    """Image coder for a codec.

    It decodes from ids and writes ids to a real token file in a temporary folder. Images whose size is not divisible
    by the downsample factor are padded by repeating edges, as in `vitrail tokenize --fit pad`; padding codes count.
    """

    codec: Codec
    name: str

    kind = "codec"

    def __post_init__(self) -> None:
        if self.codec.training:
            raise ConfigError(
                f"the codec {self.name} is in training mode, so its codes would change", "call codec.eval()"
            )
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._writer: TokenFileWriter | None = None
        self._count = 0

    @property
    def device(self) -> str:
        where = self.codec.device
        return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"

    @property
    def metadata(self) -> dict[str, Any]:
        codec = self.codec
        return {
            "model": compute_codec_identity(codec),
            "config": codec.config.to_dict(),
            "factor": codec.downsample_factor,
            "bits": codec.bits,
            "parameters": sum(p.numel() for p in codec.parameters()),
        }

    @torch.no_grad()
    def encode(self, images: Tensor) -> CodedImages:
        H, W = images.shape[2:]
        pad_bottom, pad_right = (-side % self.codec.downsample_factor for side in (H, W))
        pixels = self.codec.to_pixels(images)
        if pad_bottom or pad_right:
            pixels = F.pad(pixels, (0, pad_right, 0, pad_bottom), mode="replicate")
        encoded = self.codec.encode(pixels)
        self._synchronize()
        return CodedImages(encoded.ids, None if encoded.ids is not None else encoded.codes, (H, W))

    @torch.no_grad()
    def decode(self, coded_images: CodedImages) -> Tensor:
        codes = coded_images.codes if coded_images.ids is None else self.codec.lookup(coded_images.ids)
        assert codes is not None
        H, W = coded_images.size
        images = self.codec.to_uint8(self.codec.decode(codes))[..., :H, :W]
        self._synchronize()
        return images

    def measure_bits(self, coded_images: CodedImages) -> list[CodedUnit]:
        H, W = coded_images.size
        if coded_images.ids is None:
            assert coded_images.codes is not None
            return [CodedUnit(H * W, None, None)] * len(coded_images.codes)
        if self._writer is None:
            self._folder = tempfile.TemporaryDirectory()
            header = build_header(self.codec, ImageResizeConfig(how="pad"), self.name)
            self._writer = TokenFileWriter(Path(self._folder.name) / "tokens", header)
        for ids in coded_images.ids.cpu():
            self._writer.add(str(self._count), ids, coded_images.size)
            self._count += 1
        h, w = coded_images.ids.shape[1:3]
        return [CodedUnit(H * W, h * w * self.codec.bits, None)] * len(coded_images.ids)

    def finish(self) -> CodingSummary:
        if self._writer is None or self._folder is None:
            return CodingSummary()
        with self._folder, self._writer, TokenFile(self._writer.finish()) as file:
            usage = tuple(
                measure_codebook_usage(_iter_group_ids(file, g), size) for g, size in enumerate(self.codec.vocab_sizes)
            )
            summary = CodingSummary(file_bits=8 * file.path.stat().st_size, codebook_usage=usage)
        self.__post_init__()
        return summary

    def _synchronize(self) -> None:
        if self.codec.device.type == "cuda":
            torch.cuda.synchronize(self.codec.device)


def _iter_group_ids(file: TokenFile, group: int) -> Iterator[Tensor]:
    """Yield the ids of one group, many images at a time."""
    for start in range(0, len(file), CODE_COUNT_BATCH):
        batch = (file[number].ids for number in range(start, min(start + CODE_COUNT_BATCH, len(file))))
        yield torch.cat([(ids[..., group] if file.header.groups else ids).flatten() for ids in batch])
