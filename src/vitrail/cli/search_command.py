"""`vitrail search`: search a folder of images by text or by another image."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import ConfigError, DataError

MAX_NAMED_FILES = 20  # unreadable files that are listed; the others are counted


def search_images(
    folder: Path,
    query: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    model: str,
    exclude: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    count: int = 12,
    out: Path = Path("out/search.png"),
    device: DeviceOption = None,
) -> None:
    """Search a folder of images by text or by another image.

    Prints scores and paths, best first, and draws a contact sheet. The first call builds an index of the folder. Later
    calls update it: only new and changed images are encoded.

    Example: vitrail search photos "a red bicycle" --model openai/clip-vit-base-patch16

    Example: vitrail search photos bicycle.jpg --exclude "a person" --model out/clip/final

    Parameters
    ----------
    folder
        Folder of the images, searched recursively. Hidden files and links are skipped.
    query
        Text, or an image file. With both, finds images similar to both.
    model
        A CLIP or SigLIP model: a folder or a hub id.
    exclude
        Text of what the images should not show. May be repeated.
    count
        Number of images to show.
    out
        The contact sheet. It is never part of the search.
    """
    from vitrail.plots.style import check_image_path, save_image
    from vitrail.search.image_index import list_image_suffixes, update_index
    from vitrail.search.query import SearchQuery, draw_search_results, find_nearest, to_printable_path

    search = SearchQuery.parse(query, exclude)
    check_image_path(out)
    if count < 1:
        raise ConfigError(f"--count is {count}", "give at least 1")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", "give a folder of images")
    if out.resolve() in {path.resolve() for path in search.images}:
        raise ConfigError(f"{out} is what is searched for", "give another path with --out")

    from vitrail.search.embedder import load_embedder

    image_embedder = load_embedder(model, device=device)
    vector = search.embed(image_embedder)
    index = update_index(folder, image_embedder, skip=[out])
    hits = find_nearest(index, vector, count)
    for hit in hits:
        print(f"{hit.score:6.3f}  {to_printable_path(hit.path)}")
    if hits:
        save_image(draw_search_results(folder, hits, str(search), f"{len(index.paths):,} images in {folder}"), out)
        print(out)
    counts = {"images": len(index.paths), "new": index.added, "changed": index.changed, "gone": index.removed}
    print(", ".join(f"{value:,} {name}" for name, value in counts.items()), file=sys.stderr)
    unread = index.unreadable
    if unread:
        print(f"{len(unread):,} cannot be read and are skipped until they change:", file=sys.stderr)
        for reason in list(unread.values())[:MAX_NAMED_FILES]:
            print(f"  {to_printable_path(reason)}", file=sys.stderr)
        if len(unread) > MAX_NAMED_FILES:
            print(f"  … and {len(unread) - MAX_NAMED_FILES:,} more", file=sys.stderr)
    if not hits:
        raise DataError(
            f"{folder} contains no readable image", f"give a folder of {', '.join(sorted(list_image_suffixes()))} files"
        )
