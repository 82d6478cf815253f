"""`vitrail grid`: how pictures are cut into tokens."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ImageError
from vitrail.processing.images import MAX_PIXELS, load_image
from vitrail.processing.resolution import POLICIES, Policy, named
from vitrail.show.grid import draw_grid, sizes
from vitrail.show.style import save_picture


def grid(
    images: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    out: Path = Path("out/grid"),
    policy: Annotated[list[str] | None, Parameter(negative="")] = None,
    frame: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Show how pictures are cut into tokens under every resolution policy.

    Prints the views and tokens of each and draws one sheet a picture. A broken picture is named at the end; the
    others are done.

    Example: vitrail grid photo.jpg scan.png --policy anyres --policy qwen3-vl

    Parameters
    ----------
    images
        Picture files.
    out
        Folder for the sheets, called after their pictures: photo-grid.png.
    policy
        Only this policy: naive, letterbox, framed, crop, anyres, native, naflex, hd9, tiles, canvas, or a preset: clip,
        siglip-384, llava-1.5, deepseek-vl, llava-next, llava-onevision, qwen2-vl, qwen3-vl, siglip2-naflex, internvl,
        llama-3.2-vision. May be repeated.
    frame
        Which frame of an animation, or page of a TIFF, counted from 0.
    max_pixels
        Pictures that claim more are refused before they are decoded.
    """
    if not images or Path() in images:
        raise ImageError("no picture given", "name its file: vitrail grid photo.jpg")
    policies = {name: named(name) for name in policy or POLICIES}
    broken: list[ImageError] = []
    taken = {path.resolve() for path in images}  # a sheet never lies on a picture
    for path in images:
        try:
            picture = load_image(path, frame=frame, max_pixels=max_pixels)
        except ImageError as error:
            broken.append(error)
            continue
        sheet = _free(out, path.stem, taken)
        save_picture(draw_grid(picture, policies, title=path.name), sheet)
        print(f"{path}  {picture.width}×{picture.height}  → {sheet}")
        print(table(picture.height, picture.width, policies))
    if len(images) == 1 and broken:
        raise broken[0]
    if broken:
        raise ImageError(
            f"{len(broken)} of {len(images)} pictures could not be used:\n"
            + "\n".join(f"  {error.problem}\n    → {error.remedy}" for error in broken)
        )


def table(height: int, width: int, policies: dict[str, Policy]) -> str:
    """A row a policy: name, views, tokens, what the tower sees."""
    wide = max(map(len, policies))
    lines = [f"  {'policy':{wide}}  views  tokens  seen"]
    for name, policy in policies.items():
        try:
            cut = policy.cut(height, width)
        except ImageError as error:
            lines.append(f"  {name:{wide}}  {'—':>5}  {'—':>6}  refused: {error.problem}")
        else:
            lines.append(f"  {name:{wide}}  {len(cut.views):5}  {cut.tokens:6,}  {sizes(cut)}")
    return "\n".join(lines)


def _free(folder: Path, stem: str, taken: set[Path]) -> Path:
    """A name for the sheet; pictures of one name from several folders get a number."""
    path, count = folder / f"{stem}-grid.png", 1
    while path.resolve() in taken:
        count += 1
        path = folder / f"{stem}-grid-{count}.png"
    taken.add(path.resolve())
    return path
