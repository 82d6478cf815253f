"""`vitrail tokenize` and `vitrail detokenize`: encode images to codec tokens, and decode them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import ConfigError

_FIT_DESCRIPTIONS = {
    "cover": "resized to cover the image size, then center-cropped (--fit pad keeps all pixels)",
    "pad": "kept at their size, padded to full patches",
    "crop": "kept at their size, cropped to full patches (--fit pad keeps all pixels)",
}
MAX_NAMED_FILES = 20  # unreadable images that are listed; the others are counted


def tokenize_images(
    inputs: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    fit: Literal["cover", "pad", "crop"] = "cover",
    image_size: int | None = None,
    batch_size: int = 32,
    num_workers: int = 2,
    device: DeviceOption = None,
) -> None:
    """Encode images, folders and shards to a bit-packed file of codec token ids.

    The same command resumes an interrupted run. Unreadable images keep their index in the file, with the reason, and
    are listed at the end.

    Example: vitrail tokenize photos --codec out/bsq -o photos.vtok

    Parameters
    ----------
    inputs
        Images, folders (searched recursively), and shards (a .tar, a folder of them, "train-{000..009}.tar").
    codec
        A codec: a folder or a hub id.
    out
        The file to write.
    fit
        How images are fitted to the grid of codes. The number of cropped images is printed. cover: resize to cover the
        image size of the codec or --image-size, then crop the centre. pad: keep the size and replicate edges to full
        patches; decoding removes the padding. crop: keep the size and drop the remaining pixels at the right and
        bottom edge.
    image_size
        Side of the square of `cover` in pixels. Default: the image size of the codec.
    batch_size
        Images a batch.
    num_workers
        Number of threads that read images.
    """
    from tqdm import tqdm

    from vitrail.api import tokenize
    from vitrail.codecs import image_tokenization
    from vitrail.pipelines.codec_pipeline import CodecPipeline

    if image_size is not None and fit != "cover":
        raise ConfigError(f"--image-size needs --fit cover, not {fit!r}", "remove one of the two options")
    pipeline = CodecPipeline.load(codec, device=device)
    with tqdm(unit=" images", file=sys.stderr, disable=None) as bar:

        def show(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        file = tokenize(
            inputs,
            pipeline,
            out,
            fit=fit,
            image_size=image_size,
            batch_size=batch_size,
            num_workers=num_workers,
            progress=show,
        )
    with file:
        weight = out.stat().st_size
        print(f"{len(file):,} images, {pipeline.model.bits} bits a code, {weight:,} bytes: {out}")
        cropped = image_tokenization.count_cropped_images(file)
        print(f"--fit {fit}: {_FIT_DESCRIPTIONS[fit]}; {cropped:,} of {len(file):,} images lost pixels at their edges")
        _print_faults(file.errors)


def detokenize_images(
    file: Path,
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    batch_size: int = 32,
    device: DeviceOption = None,
) -> None:
    """Decode a token file to PNG images.

    The file must be complete, and written with the same codec and weights. Any other file is refused.

    Example: vitrail detokenize photos.vtok --codec out/bsq -o photos-again

    Parameters
    ----------
    file
        A token file that `vitrail tokenize` wrote.
    codec
        The codec that wrote it: a folder or a hub id.
    out
        The folder to write to.
    batch_size
        Images a batch.
    """
    from tqdm import tqdm

    from vitrail.codecs.image_tokenization import detokenize_images as write
    from vitrail.codecs.token_file import TokenFile
    from vitrail.pipelines import CodecPipeline

    with TokenFile(file) as token_file:
        model = CodecPipeline.load(codec, device=device).model
        with tqdm(total=len(token_file), unit=" images", file=sys.stderr, disable=None) as bar:
            paths = write(model, token_file, out, batch_size=batch_size, progress=bar.update)
        print(f"{len(paths):,} images: {out}")
        _print_faults(token_file.errors)


def _print_faults(
    faults: dict[str, str], log: Callable[[str], Any] = lambda line: print(line, file=sys.stderr)
) -> None:
    if not faults:
        return
    log(f"{len(faults):,} cannot be read; the reasons are saved in the file:")
    for name, reason in list(faults.items())[:MAX_NAMED_FILES]:
        log(f"  {name}: {reason}")
    if len(faults) > MAX_NAMED_FILES:
        log(f"  … and {len(faults) - MAX_NAMED_FILES:,} more")
