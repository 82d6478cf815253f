"""Tokenize images to a token file and back, in batches, and resume an interrupted run.

Shapes: H, W pixels, h, w codes along a side.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.codec import Codec, compute_codec_identity
from vitrail.codecs.image_sources import ImageResizeConfig, ImageSource, find_duplicate
from vitrail.codecs.token_file import ImageTokens, TokenFile, TokenFileHeader
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.data.formats.media_folders import IMAGE_SUFFIXES
from vitrail.data.shards.batch_loader import load_batches
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.processing.image_loading import load_image

# ---- images to tokens -------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """Image that was read, or the reason why it was not."""

    name: str
    pixels: Tensor | None  # uint8 (3, H, W)
    size: tuple[int, int] = (0, 0)
    source: tuple[int, int] = (0, 0)
    fault: str = ""


class _Reader:
    """Index to image, for several loader threads."""

    def __init__(self, pictures: Sequence[ImageSource], fit: ImageResizeConfig, factor: int):
        self.pictures, self.fit, self.factor = pictures, fit, factor

    def __getitem__(self, number: int) -> _Read:
        picture = self.pictures[number]
        try:
            image = load_image(picture.load())
            pixels, size = self.fit.apply(image, self.factor)
        except VitrailError as error:
            return _Read(picture.name, None, fault=error.problem)
        return _Read(picture.name, pixels, size, (image.height, image.width))


def build_header(codec: Codec, resize: ImageResizeConfig, codec_name: str) -> TokenFileHeader:
    if not codec.vocab_sizes:
        raise ConfigError("this codec has continuous codes, which have no ids", "use a codec with a codebook")
    if codec.training:
        raise ConfigError("the codec is in training mode, so its codebook may change", "call codec.eval()")
    return TokenFileHeader(
        model=compute_codec_identity(codec),
        name=codec_name,
        sizes=codec.vocab_sizes,
        groups=codec.has_id_groups,
        factor=codec.downsample_factor,
        fit=json.loads(json.dumps(resize.to_dict())),  # the same types as after reading the file
    )


def tokenize_images(
    codec: Codec,
    images: Sequence[ImageSource],
    output_path: str | Path,
    *,
    resize: ImageResizeConfig | None = None,
    codec_name: str = "codec",
    batch_size: int = 32,
    num_workers: int = 2,
    progress: Callable[[int], Any] | None = None,
) -> TokenFile:
    """Write the ids of images to a token file.

    An interrupted run resumes when it is called again; a finished file is returned as it is. Images that cannot be read
    are listed in `errors` of the file.
    """
    resize = (resize or ImageResizeConfig()).resolve_size(codec)
    header = build_header(codec, resize, codec_name)
    output_path = Path(output_path)
    names = [image.name for image in images]
    if batch_size < 1 or num_workers < 1:
        raise ConfigError(f"batch_size is {batch_size}, num_workers is {num_workers}", "give values of at least 1")
    try:
        assign_output_paths(names)  # raises if the file could not be detokenized
    except DataError as error:
        raise DataError(error.problem, "rename the image, or tokenize it separately") from None
    if output_path.exists():
        return _finished(output_path, header, names)
    # Resume at a batch boundary: rounding may depend on the other images of a batch.
    with TokenFileWriter(output_path, header, record_multiple=batch_size) as writer:
        start = len(writer.completed_names)
        check_same_order(writer.partial_path, writer.completed_names, names[:start])
        if progress is not None:
            progress(start)
        spans = (range(at, min(at + batch_size, len(names))) for at in range(start, len(names), batch_size))
        for read in load_batches(
            _Reader(images, resize, codec.downsample_factor), spans, num_workers=num_workers, collate=list
        ):
            ids = _encode(codec, read)
            for one in read:
                if one.pixels is None:
                    writer.skip(one.name, one.fault)
                else:
                    writer.add(one.name, ids[one.name], one.size, one.source)
            writer.flush()
            if progress is not None:
                progress(len(read))
        writer.finish()
    return TokenFile(output_path)


def count_cropped_images(file: TokenFile) -> int:
    """Count the images of which resizing removed pixels at the edges."""
    mode = file.header.fit["how"]
    if mode == "pad":
        return 0
    sizes = ((tokens.image_size, tokens.source_size) for tokens in file)
    if mode == "crop":
        return sum(size != source for size, source in sizes)
    return sum(size[0] * source[1] != size[1] * source[0] for size, source in sizes)  # another aspect ratio


def _finished(out: Path, header: TokenFileHeader, names: list[str]) -> TokenFile:
    file = TokenFile(out, codec_identity=header.model)
    recorded_names = set(file.names) | set(file.errors)
    if file.header.replace(name=header.name) != header or recorded_names != set(names):
        raise DataError(f"{out} exists and has other images or settings", "remove it, or give another path")
    return file


def check_same_order(path: Path, done: list[str], names: list[str]) -> None:
    """Raise `DataError` if the names that a file has are not those given, in order."""
    for place, before in enumerate(done):
        now = names[place] if place < len(names) else None
        if before != now:
            raise DataError(
                f"{path} has {before!r} at position {place}, but {f'{now!r}' if now else 'nothing'} was given",
                "give the same files as before, or remove the file",
            )


@torch.no_grad()
def _encode(codec: Codec, read: Sequence[_Read]) -> dict[str, Tensor]:
    """Encode images to ids by name; images of one size are encoded together."""
    sizes: dict[tuple[int, ...], list[_Read]] = {}
    for one in read:
        if one.pixels is not None:
            sizes.setdefault(tuple(one.pixels.shape), []).append(one)
    ids_by_name: dict[str, Tensor] = {}
    for same in sizes.values():
        pixels = torch.stack([one.pixels for one in same if one.pixels is not None])
        ids = codec.encode(codec.to_pixels(pixels)).ids
        assert ids is not None  # build_header has checked this
        ids_by_name |= {one.name: own for one, own in zip(same, ids.cpu(), strict=True)}
    return ids_by_name


# ---- tokens to images -------------------------------------------------------------------------------------------


@torch.no_grad()
def decode_images(codec: Codec, tokens: Sequence[ImageTokens]) -> list[Image.Image]:
    """Decode tokens to images of their own sizes; tokens of one grid are decoded together."""
    grids: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(tokens):
        grids.setdefault(tuple(one.ids.shape), []).append(number)
    images: dict[int, Image.Image] = {}
    for numbers in grids.values():
        ids = torch.stack([tokens[number].ids for number in numbers]).to(codec.device)
        decoded = codec.to_uint8(codec.decode(codec.lookup(ids)))  # uint8 (B, 3, H, W)
        for number, pixels in zip(numbers, decoded.cpu(), strict=True):
            H, W = tokens[number].image_size
            images[number] = Image.fromarray(pixels[:, :H, :W].permute(1, 2, 0).contiguous().numpy())
    return [images[number] for number in range(len(tokens))]


def detokenize_images(
    codec: Codec,
    token_file: TokenFile,
    output_folder: str | Path,
    *,
    batch_size: int = 32,
    progress: Callable[[int], Any] | None = None,
) -> list[Path]:
    """Verify the digest of a token file, and write its images as PNG files to a folder."""
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}", "give at least 1")
    if token_file.header.model != compute_codec_identity(codec):
        raise DataError(
            f"{token_file.path} was written by another codec: {token_file.header.name}", "give the codec that wrote it"
        )
    token_file.verify_digest()
    places = assign_output_paths(token_file.names)
    output_folder = Path(output_folder)
    paths = []
    for start in range(0, len(token_file), batch_size):
        some = [token_file[number] for number in range(start, min(start + batch_size, len(token_file)))]
        for one, image in zip(some, decode_images(codec, some), strict=True):
            path = output_folder / places[one.name]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be written: {error}", "choose another folder") from error
            paths.append(path)
        if progress is not None:
            progress(len(some))
    return paths


def assign_output_paths(
    names: Sequence[str], source_suffixes: Collection[str] = IMAGE_SUFFIXES, suffix: str = ".png"
) -> dict[str, PurePosixPath]:
    """Map each name to a path below a folder, with `suffix` instead of that of the source.

    Names that would collide, such as a.jpg and a.webp, keep their suffix. Names that lead out of the folder are
    refused, since a token file may be untrusted.
    """
    plain: dict[str, PurePosixPath] = {}
    for name in names:
        path = PurePosixPath(name)
        if not name or "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts or not path.name:
            raise DataError(f"the name {name!r} leads out of the output folder", "do not trust this token file")
        plain[name] = path.with_suffix("") if path.suffix.lower() in source_suffixes else path
    counts: dict[PurePosixPath, int] = {}
    for path in plain.values():
        counts[path] = counts.get(path, 0) + 1
    places = {name: PurePosixPath(f"{path if counts[path] == 1 else name}{suffix}") for name, path in plain.items()}
    duplicate = find_duplicate([str(path) for path in places.values()])
    if duplicate is not None:
        raise DataError(f"two files would be written to {duplicate}", "read them one by one with `TokenFile`")
    return places
