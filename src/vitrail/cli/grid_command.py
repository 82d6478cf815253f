"""`vitrail grid`: the tokens of an image under every resolution policy."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ImageError
from vitrail.plots.style import save_image
from vitrail.plots.token_grid import describe_sizes, draw_token_grid
from vitrail.processing.image_layout import ResolutionPolicy
from vitrail.processing.image_loading import MAX_PIXELS, load_image
from vitrail.processing.resolution_policies import PRESETS, get_policy
from vitrail.registry import RESOLUTION_POLICIES

POLICY_HELP = (
    f"A policy: {', '.join(RESOLUTION_POLICIES)}; or a preset: {', '.join(PRESETS)}. May be repeated. "
    "Default: all policies."
)


def draw_grids(
    images: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    out: Path = Path("out/grid"),
    policy: Annotated[list[str] | None, Parameter(negative="", help=POLICY_HELP)] = None,
    frame: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Draw how every resolution policy splits an image into views and tokens.

    Prints the number of views and tokens, and draws one sheet an image. Unreadable images are skipped and listed at the
    end.

    Example: vitrail grid photo.jpg scan.png --policy anyres --policy qwen3-vl

    Parameters
    ----------
    images
        Image files.
    out
        Folder for the sheets. Their names follow the images: photo-grid.png.
    frame
        Frame of an animation, or page of a TIFF, counted from 0.
    max_pixels
        Images with more pixels are refused before they are decoded.
    """
    if not images or Path() in images:
        raise ImageError("no image is given", "add a file: vitrail grid photo.jpg")
    policies = {name: get_policy(name) for name in policy or RESOLUTION_POLICIES}
    broken: list[ImageError] = []
    taken = {path.resolve() for path in images}  # a sheet never overwrites an image
    for path in images:
        try:
            picture = load_image(path, frame=frame, max_pixels=max_pixels)
        except ImageError as error:
            broken.append(error)
            continue
        sheet = _unused_path(out, path.stem, taken)
        save_image(draw_token_grid(picture, policies, title=path.name), sheet)
        print(f"{path}  {picture.width}×{picture.height}  → {sheet}")
        print(format_policy_table(picture.height, picture.width, policies))
    if len(images) == 1 and broken:
        raise broken[0]
    if broken:
        raise ImageError(
            f"{len(broken)} of {len(images)} images cannot be read:\n"
            + "\n".join(f"  {error.problem}\n    → {error.remedy}" for error in broken)
        )


def format_policy_table(height: int, width: int, policies: dict[str, ResolutionPolicy]) -> str:
    """Format a table with one row a policy: name, views, tokens, and the sizes of the views."""
    wide = max(map(len, policies))
    lines = [f"  {'policy':{wide}}  views  tokens  sizes"]
    for name, policy in policies.items():
        try:
            cut = policy.layout(height, width)
        except ImageError as error:
            lines.append(f"  {name:{wide}}  {'—':>5}  {'—':>6}  refused: {error.problem}")
        else:
            lines.append(f"  {name:{wide}}  {len(cut.views):5}  {cut.num_tokens:6,}  {describe_sizes(cut)}")
    return "\n".join(lines)


def _unused_path(folder: Path, stem: str, used: set[Path]) -> Path:
    """Return an unused path for a sheet. Images of the same name from several folders get a number."""
    path, count = folder / f"{stem}-grid.png", 1
    while path.resolve() in used:
        count += 1
        path = folder / f"{stem}-grid-{count}.png"
    used.add(path.resolve())
    return path
