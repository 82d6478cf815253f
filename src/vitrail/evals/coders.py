"""Whatever turns pictures into bits and back: codecs here, the usual formats in `vitrail.evals.baselines`.

B pictures, H, W pixels, h, w codes along a side, G groups of a code
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.codec import Codec, identity
from vitrail.codecs.container import TokenFile
from vitrail.codecs.fit import Fit
from vitrail.codecs.tokens import header_of
from vitrail.codecs.writer import TokenWriter
from vitrail.errors import ConfigError
from vitrail.evals.metrics import Use, codebook_use

COUNTED = 256  # pictures whose codes are counted at a time


class Unit(NamedTuple):
    """A picture, or several that are one file: its pixels, and its bits without and with a file around them, where
    there are any and each has its own."""

    pixels: int
    coded: int | None
    file: int | None


class Kept(NamedTuple):
    """What is known when all pictures are through: bits that they share beside their own, and of one file of them all;
    how the codes were used."""

    once: int = 0
    file: int | None = None
    use: tuple[Use, ...] = ()


class Coder(Protocol):
    """`encode` and `decode` are timed. What `encode` gave goes to `keep`, a batch at a time, and then comes `done`."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """Those of one kind are a line in a plot; a codec is a kind of its own."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def about(self) -> dict[str, Any]: ...

    def encode(self, pictures: Tensor, /) -> Any:
        """uint8 (B, 3, H, W)"""
        ...

    def decode(self, coded: Any, /) -> Tensor:
        """uint8 (B, 3, H, W)"""
        ...

    def keep(self, coded: Any, /) -> list[Unit]: ...

    def done(self) -> Kept: ...


class Coded(NamedTuple):
    ids: Tensor | None  # (B, h, w) or (B, h, w, G)
    codes: Tensor | None  # (B, h, w, d) of a codec without ids
    size: tuple[int, int]


@dataclass
class CodecCoder:
    """A codec as a coder. It decodes what its ids give back, and its ids go into a real file of tokens, in a folder
    that is gone afterwards; a picture that does not divide has its edges repeated up to whole codes, as with
    `vitrail tokenize --fit pad`, and the codes of those count."""

    codec: Codec
    name: str

    kind = "codec"

    def __post_init__(self) -> None:
        if self.codec.training:
            raise ConfigError(f"the codec {self.name} is in training: its codes would move", "call codec.eval()")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._writer: TokenWriter | None = None
        self._count = 0

    @property
    def device(self) -> str:
        where = self.codec.device
        return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"

    @property
    def about(self) -> dict[str, Any]:
        codec = self.codec
        return {
            "model": identity(codec),
            "config": codec.config.plain(),
            "factor": codec.factor,
            "bits": codec.bits,
            "parameters": sum(p.numel() for p in codec.parameters()),
        }

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Coded:
        H, W = pictures.shape[2:]
        down, right = (-side % self.codec.factor for side in (H, W))
        pixels = self.codec.pixels(pictures)
        if down or right:
            pixels = F.pad(pixels, (0, right, 0, down), mode="replicate")
        found = self.codec.encode(pixels)
        self._wait()
        return Coded(found.ids, None if found.ids is not None else found.codes, (H, W))

    @torch.no_grad()
    def decode(self, coded: Coded) -> Tensor:
        codes = coded.codes if coded.ids is None else self.codec.lookup(coded.ids)
        assert codes is not None
        H, W = coded.size
        pictures = self.codec.bytes(self.codec.decode(codes))[..., :H, :W]
        self._wait()
        return pictures

    def keep(self, coded: Coded) -> list[Unit]:
        H, W = coded.size
        if coded.ids is None:
            assert coded.codes is not None
            return [Unit(H * W, None, None)] * len(coded.codes)
        if self._writer is None:
            self._folder = tempfile.TemporaryDirectory()
            header = header_of(self.codec, Fit(how="pad"), self.name)
            self._writer = TokenWriter(Path(self._folder.name) / "tokens", header)
        for ids in coded.ids.cpu():
            self._writer.add(str(self._count), ids, coded.size)
            self._count += 1
        h, w = coded.ids.shape[1:3]
        return [Unit(H * W, h * w * self.codec.bits, None)] * len(coded.ids)

    def done(self) -> Kept:
        if self._writer is None or self._folder is None:
            return Kept()
        with self._folder, self._writer, TokenFile(self._writer.finish()) as file:
            use = tuple(codebook_use(_ids(file, g), size) for g, size in enumerate(self.codec.sizes))
            kept = Kept(file=8 * file.path.stat().st_size, use=use)
        self.__post_init__()
        return kept

    def _wait(self) -> None:
        if self.codec.device.type == "cuda":
            torch.cuda.synchronize(self.codec.device)


def _ids(file: TokenFile, group: int) -> Iterator[Tensor]:
    """One group's, many pictures at a time."""
    for start in range(0, len(file), COUNTED):
        some = (file[number].ids for number in range(start, min(start + COUNTED, len(file))))
        yield torch.cat([(ids[..., group] if file.header.groups else ids).flatten() for ids in some])
