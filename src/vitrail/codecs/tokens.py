"""Pictures → a file of tokens → pictures: many at a time, and on where a killed run stopped.

H, W pixels, h, w codes along a side
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.codec import Codec, identity
from vitrail.codecs.container import Header, TokenFile, Tokens
from vitrail.codecs.fit import Fit, Picture, first_twice
from vitrail.codecs.writer import TokenWriter
from vitrail.data.formats.folders import PICTURES
from vitrail.data.shards.load import batches
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.processing.images import load_image

# ---- there ------------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """A picture that was read, or why it was not."""

    name: str
    pixels: Tensor | None  # uint8 (3, H, W)
    size: tuple[int, int] = (0, 0)
    source: tuple[int, int] = (0, 0)
    fault: str = ""


class _Reader:
    """number → picture, by several threads at a time."""

    def __init__(self, pictures: Sequence[Picture], fit: Fit, factor: int):
        self.pictures, self.fit, self.factor = pictures, fit, factor

    def __getitem__(self, number: int) -> _Read:
        picture = self.pictures[number]
        try:
            image = load_image(picture.read())
            pixels, size = self.fit.apply(image, self.factor)
        except VitrailError as error:
            return _Read(picture.name, None, fault=error.problem)
        return _Read(picture.name, pixels, size, (image.height, image.width))


def header_of(codec: Codec, fit: Fit, name: str) -> Header:
    if not codec.sizes:
        raise ConfigError("this codec's codes are continuous: they have no ids to keep", "give a codec with a codebook")
    if codec.training:
        raise ConfigError("the codec is in training: its codes would move while they are written", "call codec.eval()")
    return Header(
        model=identity(codec),
        name=name,
        sizes=codec.sizes,
        groups=codec.grouped,
        factor=codec.factor,
        fit=json.loads(json.dumps(fit.plain())),  # as it is read back
    )


def tokenize(
    codec: Codec,
    pictures: Sequence[Picture],
    out: str | Path,
    *,
    fit: Fit | None = None,
    name: str = "codec",
    batch: int = 32,
    workers: int = 2,
    progress: Callable[[int], Any] = lambda count: None,
) -> TokenFile:
    """Write the ids of pictures to `out`. Called again after it was killed, it goes on; called again when all is done,
    it finds that so. What cannot be read has its reason in the file's `faults`."""
    fit = (fit or Fit()).whole(codec)
    header, out, names = header_of(codec, fit, name), Path(out), [picture.name for picture in pictures]
    if batch < 1 or workers < 1:
        raise ConfigError(f"batches of {batch} pictures by {workers} workers", "give at least 1 of both")
    try:
        places_for(names)  # or the file could not be unpacked again
    except DataError as error:
        raise DataError(error.problem, "rename the picture, or tokenize it apart") from None
    if out.exists():
        return _finished(out, header, names)
    # Whole batches are kept, so that a picture always meets the same others: products may round by who is beside.
    with TokenWriter(out, header, multiple=batch) as writer:
        start = len(writer.done)
        _same_order(writer.partial, writer.done, names[:start])
        progress(start)
        spans = (range(at, min(at + batch, len(names))) for at in range(start, len(names), batch))
        for read in batches(_Reader(pictures, fit, codec.factor), spans, workers=workers, collate=list):
            ids = _encode(codec, read)
            for one in read:
                if one.pixels is None:
                    writer.skip(one.name, one.fault)
                else:
                    writer.add(one.name, ids[one.name], one.size, one.source)
            writer.flush()
            progress(len(read))
        writer.finish()
    return TokenFile(out)


def _finished(out: Path, header: Header, names: list[str]) -> TokenFile:
    file = TokenFile(out, model=header.model)
    left = set(file.names) | set(file.faults)
    if file.header.with_(name=header.name) != header or left != set(names):
        raise DataError(
            f"{out} exists already, and holds other pictures or settings", "remove it, or give another path"
        )
    return file


def _same_order(path: Path, done: list[str], names: list[str]) -> None:
    for place, before in enumerate(done):
        now = names[place] if place < len(names) else None
        if before != now:
            raise DataError(
                f"{path} was begun with {before!r} where {f'{now!r} is' if now else 'there is nothing'} now",
                "give the pictures it was begun with, or remove it",
            )


@torch.no_grad()
def _encode(codec: Codec, read: Sequence[_Read]) -> dict[str, Tensor]:
    """Name → ids; pictures of one size go through together."""
    sizes: dict[tuple[int, ...], list[_Read]] = {}
    for one in read:
        if one.pixels is not None:
            sizes.setdefault(tuple(one.pixels.shape), []).append(one)
    found: dict[str, Tensor] = {}
    for same in sizes.values():
        pixels = torch.stack([one.pixels for one in same if one.pixels is not None])
        ids = codec.encode(codec.pixels(pixels)).ids
        assert ids is not None  # `header_of` has refused a codec without
        found |= {one.name: own for one, own in zip(same, ids.cpu(), strict=True)}
    return found


# ---- and back ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def decode(codec: Codec, tokens: Sequence[Tokens]) -> list[Image.Image]:
    """The pictures of tokens, each of its own size; those of one grid go through together."""
    grids: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(tokens):
        grids.setdefault(tuple(one.ids.shape), []).append(number)
    pictures: dict[int, Image.Image] = {}
    for numbers in grids.values():
        ids = torch.stack([tokens[number].ids for number in numbers]).to(codec.device)
        decoded = codec.bytes(codec.decode(codec.lookup(ids)))  # uint8 (B, 3, H, W)
        for number, pixels in zip(numbers, decoded.cpu(), strict=True):
            H, W = tokens[number].size
            pictures[number] = Image.fromarray(pixels[:, :H, :W].permute(1, 2, 0).contiguous().numpy())
    return [pictures[number] for number in range(len(tokens))]


def detokenize(
    codec: Codec,
    file: TokenFile,
    folder: str | Path,
    *,
    batch: int = 32,
    progress: Callable[[int], Any] = lambda count: None,
) -> list[Path]:
    """Write the pictures of a file as PNGs below a folder, after the whole of it was compared with its digest."""
    if batch < 1:
        raise ConfigError(f"batches of {batch} pictures", "give at least 1")
    if file.header.model != identity(codec):
        raise DataError(f"{file.path} was made by another codec: {file.header.name}", "give the codec that made it")
    file.check()
    places = places_for(file.names)
    folder = Path(folder)
    paths = []
    for start in range(0, len(file), batch):
        some = [file[number] for number in range(start, min(start + batch, len(file)))]
        for one, picture in zip(some, decode(codec, some), strict=True):
            path = folder / places[one.name]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be written: {error}", "give another folder") from error
            paths.append(path)
        progress(len(some))
    return paths


def places_for(names: Sequence[str]) -> dict[str, PurePosixPath]:
    """Name → where its PNG goes below a folder. Two that would be one, a.jpg and a.webp, keep their endings. A name
    that leads elsewhere is refused: a file of tokens may be a stranger's."""
    plain: dict[str, PurePosixPath] = {}
    for name in names:
        path = PurePosixPath(name)
        if not name or "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts or not path.name:
            raise DataError(f"a picture is called {name!r}, which leads out of its folder", "do not trust this file")
        plain[name] = path.with_suffix("") if path.suffix.lower() in PICTURES else path
    counts: dict[PurePosixPath, int] = {}
    for path in plain.values():
        counts[path] = counts.get(path, 0) + 1
    places = {name: PurePosixPath(f"{path if counts[path] == 1 else name}.png") for name, path in plain.items()}
    twice = first_twice([str(path) for path in places.values()])
    if twice is not None:
        raise DataError(f"two pictures would be {twice}", "read them one by one with `TokenFile`")
    return places
