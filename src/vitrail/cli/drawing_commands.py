"""`vitrail caption`, `vitrail draw` and `vitrail package`."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BATCH_SIZE = 16  # images of one batch
ImagePaths = Annotated[list[str], Parameter(negative="")]


def caption_images(images: ImagePaths, /, *, model: str = "mini", device: DeviceOption = None) -> None:
    """Write captions of images.

    Example: vitrail caption scene.png photo.jpg

    Parameters
    ----------
    images
        Image files.
    model
        A unified model or a vision-language model: mini, mini-vlm, a folder or a hub id.
    """
    from vitrail.pipelines.loading import load
    from vitrail.pipelines.unified import CAPTION_PROMPT

    loaded = load(model, device=device)
    for path in images:
        caption = loaded.ask(path, CAPTION_PROMPT)
        print(f"{path}  {caption}" if len(images) > 1 else caption)


def draw_images(
    prompt: str,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    model: str = "mini",
    count: int = 1,
    tries: int = 1,
    negative_prompt: str | None = None,
    guidance_scale: float = 3.0,
    steps: int = 24,
    temperature: float = 1.0,
    top_p: float | None = None,
    seed: int | None = None,
    init_image: str | None = None,
    box: Annotated[tuple[float, float, float, float] | None, Parameter(negative="")] = None,
    redraw_fraction: float | None = None,
    draft_model: str | None = None,
    device: DeviceOption = None,
) -> None:
    """Draw an image from a prompt, in-paint a part of an image, or vary an image.

    Example: vitrail draw "a red dog to the left of a cat" -o dog.png --seed 1

    Parameters
    ----------
    prompt
        What to draw. "" draws without a prompt.
    out
        The PNG to write. With several images, -1, -2, … is inserted before the extension. Default: a name made from the
        prompt that is not in use, such as a-red-dog.png.
    model
        A unified model: mini or a folder.
    count
        Number of images. Each has its own seed.
    tries
        Draw every image so many times and keep the best. The model scores each image by answering questions about the
        counts, colours and positions that the prompt names.
    negative_prompt
        What the image should not show.
    guidance_scale
        Strength of classifier-free guidance. 1 turns it off.
    steps
        Decoding steps of a masked model. An autoregressive model takes one step a code.
    temperature
        Sampling temperature of the codes. 0 is greedy.
    top_p
        Sample only from the likeliest codes whose probabilities sum to this value.
    seed
        The same seed gives the same image.
    init_image
        An image to edit: --box redraws a region of it, --redraw-fraction redraws random codes of it.
    box
        The region to redraw: x0 y0 x1 y1, each in 0 … 1.
    redraw_fraction
        Fraction of the codes to redraw, in 0 … 1.
    draft_model
        A smaller unified model with the same tokenizer and codec, for speculative decoding of an autoregressive model.
        The distribution of the images does not change.
    """
    if (init_image is None) != (box is None and redraw_fraction is None) or (
        box is not None and redraw_fraction is not None
    ):
        raise ConfigError(
            "--init-image needs either --box or --redraw-fraction", "give the image and exactly one of the two"
        )
    if count < 1:
        raise ConfigError(f"--count is {count}", "draw at least one image")
    if draft_model is not None and init_image is not None:
        raise ConfigError("--draft-model does not support --init-image", "remove one of the two options")
    out = find_unused_png_path(prompt, count) if out is None else out
    check_png_path(out)
    from vitrail.pipelines.unified import UnifiedPipeline

    pipeline = UnifiedPipeline.load(model, device=device)
    options: dict[str, Any] = {"steps": steps, "temperature": temperature, "top_p": top_p}
    options |= {"tries": tries, "guidance_scale": guidance_scale, "negative_prompt": negative_prompt}
    small = None if draft_model is None else UnifiedPipeline.load(draft_model, device=device)
    with progress_bar() as progress:
        # Images are saved batch by batch, so an interrupted run keeps finished ones.
        for start in range(0, count, MAX_BATCH_SIZE):
            some = min(MAX_BATCH_SIZE, count - start)

            def show_progress(done: int, of: int, start: int = start, some: int = some) -> None:
                progress(start * of + some * done, count * of)

            options |= {"progress": show_progress, "seed": None if seed is None else seed + start}
            if init_image is None:
                pictures = pipeline.draw([prompt] * some, draft=small, **options)
            elif redraw_fraction is not None:
                pictures = pipeline.vary(init_image, prompt, redraw_fraction=redraw_fraction, count=some, **options)
            else:
                assert box is not None
                pictures = pipeline.inpaint(init_image, [prompt] * some, box, **options)
            for number, picture in enumerate(pictures, start + 1):
                save_image(picture, out if count == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}"))


def package_model(
    model: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    base: str | None = None,
    episodes: Path | None = None,
) -> None:
    """Quantize a unified, vision-language or world model to 8 bits a weight, and report how much its outputs change.

    Example: vitrail package out/mini/final -o packages/mini/vitrail_mini/mini

    Example: vitrail package out/mini-vlm/final -o packages/mini/vitrail_mini/mini-vlm --base stories15M

    Example: vitrail package out/genie/final -o packages/mini/vitrail_mini/mini-world --episodes out/episodes/coinrun

    Prints the largest difference of the logits, in standard deviations of the logits, on the example scenes or the
    start images of the episodes.

    Parameters
    ----------
    model
        A folder with a unified model, a vision-language model or a world model.
    out
        The folder to create. The folders of packages/mini/vitrail_mini are the distribution vitrail-mini.
    base
        The language model that a vision-language model is trained from: a package (stories15M, smollm2-135m) or a
        folder. Only the difference from it is saved, so loading the result needs the base as well.
    episodes
        For world models: recorded episodes. They provide start images and the mapping from controls to actions.
    """
    from vitrail.hub.checkpoint_info import resolve_path
    from vitrail.pipelines import packaging

    difference = packaging.package_model(model, out, base=base, episodes=episodes)
    sizes = f"{_count_megabytes(out):.1f} MB{f', without {base}' if base else ''}"
    print(f"{out}: {sizes}, from {_count_megabytes(resolve_path(model)):.1f} MB")
    print(difference)


def _count_megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], Any]]:
    """Show a progress bar; yields a function of the finished and the total number of steps."""
    from tqdm import tqdm

    with tqdm(total=1.0, file=sys.stderr, disable=None, bar_format="{percentage:3.0f}% {bar} {elapsed}") as bar:
        yield lambda done, of: bar.update(done / of - bar.n)


def check_png_path(path: Path) -> None:
    """Check a PNG path before any image is drawn."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path} is not a PNG file name", "use the extension .png")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist", "create it first")


def save_image(image: "Image", path: Path) -> None:
    try:
        image.save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", "give another path") from None
    print(path)


def find_unused_png_path(prompt: str, count: int = 1) -> Path:
    """Return a file name made from a prompt, with a number if a file of that name exists."""
    stem = "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:60].strip("-") or "drawing"
    for number in itertools.count(1):
        path = Path(f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
        files = [path] if count == 1 else [path.with_name(f"{path.stem}-{i}.png") for i in range(1, count + 1)]
        if not any(file.exists() for file in files):
            return path
    raise AssertionError
