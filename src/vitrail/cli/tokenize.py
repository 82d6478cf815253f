"""`vitrail tokenize`, `vitrail detokenize`, `vitrail codec look`: pictures as tokens, back, and what that keeps."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.errors import CheckpointError, ConfigError

NAMED = 20  # unreadable pictures that are named; the others are counted

codec = App(
    name="codec",
    help="Look at what codecs keep of a picture.",
    help_epilogue="Example: vitrail codec look photo.jpg --codec out/bsq --codec out/fsq -o strip.png",
)


def tokenize(
    inputs: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    fit: Literal["cover", "pad", "crop"] = "cover",
    side: int | None = None,
    batch: int = 32,
    workers: int = 2,
    device: str | None = None,
) -> None:
    """Write pictures as the ids of a codec, bit-packed, to one file.

    Called again after it was stopped or killed, it goes on where it was. Pictures that cannot be read keep their place,
    with the reason, and are named at the end.

    Example: vitrail tokenize photos --codec out/bsq -o photos.vtok

    Parameters
    ----------
    inputs
        Pictures, folders of them (also in folders inside), shards (a .tar, a folder of them, "train-{000..009}.tar").
    codec
        The model: a folder, or a hub id.
    out
        The file to write.
    fit
        How a picture is made to divide into codes. cover: resized to cover the codec's own size, or a square of `side`,
        and cut to it; pad: at its own size, edges repeated up to a whole code, which decoding takes off again; crop: at
        its own size, without the few pixels left over at the right and the bottom.
    side
        Pixels of the square that `cover` makes; the codec's own size unless said.
    batch
        Pictures that go through the codec together.
    workers
        Threads that read pictures.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    from tqdm import tqdm

    from vitrail.codecs import tokens
    from vitrail.codecs.fit import Fit, find_pictures

    if side is not None and fit != "cover":
        raise ConfigError(f"--side makes squares, and fit {fit!r} leaves pictures as they are", "leave one of them out")
    how = Fit(how=fit, size=None if side is None else (side, side))
    pictures = find_pictures(inputs)
    model = _load(codec, device)
    with tqdm(total=len(pictures), unit=" pictures", file=sys.stderr, disable=None) as bar:
        settings: dict[str, Any] = {"batch": batch, "workers": workers, "progress": bar.update}
        file = tokens.tokenize(model, pictures, out, fit=how, name=Path(codec).resolve().name, **settings)
    with file:
        weight = out.stat().st_size
        print(f"{len(file):,} pictures, {model.bits} bits a code, {weight:,} bytes: {out}")
        _tell(file.faults)


def detokenize(
    file: Path,
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    batch: int = 32,
    device: str | None = None,
) -> None:
    """Write the pictures of a file of tokens as PNGs.

    The file must be whole, unaltered, and made by this codec with these weights; another is refused.

    Example: vitrail detokenize photos.vtok --codec out/bsq -o photos-again

    Parameters
    ----------
    file
        What `vitrail tokenize` wrote.
    codec
        The model that made it: a folder, or a hub id.
    out
        The folder to write to.
    batch
        Pictures that go through the codec together.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    from tqdm import tqdm

    from vitrail.codecs.container import TokenFile
    from vitrail.codecs.tokens import detokenize as write

    with TokenFile(file) as held:
        model = _load(codec, device)
        with tqdm(total=len(held), unit=" pictures", file=sys.stderr, disable=None) as bar:
            paths = write(model, held, out, batch=batch, progress=bar.update)
        print(f"{len(paths):,} pictures: {out}")
        _tell(held.faults)


@codec.command(help_epilogue="Example: vitrail codec look photo.jpg --codec out/bsq --codec out/fsq -o strip.png")
def look(
    picture: Path,
    /,
    *,
    codec: Annotated[list[str], Parameter(negative="")],
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/strip.png"),
    side: int | None = None,
    device: str | None = None,
) -> None:
    """Draw a picture as codecs give it back: original, reconstructions, differences, PSNR and bits a pixel.

    Parameters
    ----------
    picture
        Any picture file.
    codec
        Models: folders, or hub ids. May be repeated.
    out
        The strip to write.
    side
        Pixels of the square that is looked at, cut from the middle; the first codec's own size unless said.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    import torch
    from PIL import Image

    from vitrail.codecs.fit import Fit
    from vitrail.processing.images import load_image
    from vitrail.show.strip import Kept, decibel, draw_strip
    from vitrail.show.style import check_picture, save_picture

    check_picture(out)
    image = load_image(picture)
    models = {name: _load(name, device) for name in dict.fromkeys(codec)}
    size = next(iter(models.values())).size if side is None else (side, side)
    original, kept = None, []
    for name, model in models.items():
        pixels, _ = Fit(size=size).whole(model).apply(image, model.factor)
        with torch.no_grad():
            given = model.bytes(model.reconstruct(model.pixels(pixels[None])))[0].cpu()
        original = original or Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        kept.append(Kept(name, Image.fromarray(given.permute(1, 2, 0).contiguous().numpy()), model.bits_per_pixel))
    assert original is not None
    save_picture(draw_strip(original, kept, picture.name), out)
    for one in kept:
        print(f"{decibel(original, one.picture):7.2f} dB  {one.bits_per_pixel:8.4f} bits a pixel  {one.name}")
    print(out)


def _load(name: str, device: str | None) -> Any:
    import torch

    from vitrail import hub
    from vitrail.codecs.codec import CodecConfig
    from vitrail.hub.configs import read_config

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = read_config(name)
    if not isinstance(config, CodecConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise CheckpointError(
            f"{name} is a {kind} and has no codes", "give a codec: a folder that `vitrail train` wrote"
        )
    try:
        return hub.load(name, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {first}", "try --device cpu") from None


def _tell(faults: dict[str, str], say: Callable[[str], Any] = lambda line: print(line, file=sys.stderr)) -> None:
    if not faults:
        return
    say(f"{len(faults):,} could not be read, and are named in the file:")
    for name, reason in list(faults.items())[:NAMED]:
        say(f"  {name}: {reason}")
    if len(faults) > NAMED:
        say(f"  … and {len(faults) - NAMED:,} more")
