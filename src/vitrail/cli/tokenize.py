"""`vitrail tokenize` and `vitrail detokenize`: pictures as tokens, and back."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.codec import load_codec
from vitrail.errors import ConfigError

NAMED = 20  # unreadable pictures that are named; the others are counted


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
    model = load_codec(codec, device)
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
        model = load_codec(codec, device)
        with tqdm(total=len(held), unit=" pictures", file=sys.stderr, disable=None) as bar:
            paths = write(model, held, out, batch=batch, progress=bar.update)
        print(f"{len(paths):,} pictures: {out}")
        _tell(held.faults)


def _tell(faults: dict[str, str], say: Callable[[str], Any] = lambda line: print(line, file=sys.stderr)) -> None:
    if not faults:
        return
    say(f"{len(faults):,} could not be read, and are named in the file:")
    for name, reason in list(faults.items())[:NAMED]:
        say(f"  {name}: {reason}")
    if len(faults) > NAMED:
        say(f"  … and {len(faults) - NAMED:,} more")
