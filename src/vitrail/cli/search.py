"""`vitrail search`: find pictures in a folder by words, or by another picture."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError, DataError

NAMED = 20  # unreadable files that are named; the others are counted


def search(
    folder: Path,
    query: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    model: str,
    without: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    count: int = 12,
    out: Path = Path("out/search.png"),
    device: str | None = None,
) -> None:
    """Find pictures in a folder by words, or by another picture.

    Prints score and path, best first, and draws a contact sheet. The folder's index is made on the first call and
    brought up to date on every other: only pictures that are new or changed are looked at.

    Example: vitrail search photos "a red bicycle" --model openai/clip-vit-base-patch16

    Example: vitrail search photos bicycle.jpg --without "a person" --model out/clip/final

    Parameters
    ----------
    folder
        Pictures, also in folders inside it. Hidden ones and links are left alone.
    query
        Words, or a picture file; of both, what is like both.
    model
        A CLIP or SigLIP: a folder, or a hub id.
    without
        Words for what should not be there. May be repeated.
    count
        How many pictures to show.
    out
        The contact sheet; it is no part of the search, wherever it lies.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    from vitrail.search.index import endings, update
    from vitrail.search.query import Query, draw_found, find, shown
    from vitrail.show.style import check_picture, save_picture

    asked = Query.read(query, without)
    check_picture(out)
    if count < 1:
        raise ConfigError(f"--count is {count}", "ask for at least one picture")
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder", "name the folder of your pictures")
    if out.resolve() in {path.resolve() for path in asked.pictures}:
        raise ConfigError(f"{out} is what is searched for", "give another path with --out")

    from vitrail.search.eye import open_eye

    eye = open_eye(model, device=device)
    vector = asked.vector(eye)
    index = update(folder, eye, skip=[out])
    hits = find(index, vector, count)
    for hit in hits:
        print(f"{hit.score:6.3f}  {shown(hit.path)}")
    if hits:
        save_picture(draw_found(folder, hits, str(asked), f"{len(index.paths):,} pictures in {folder}"), out)
        print(out)
    counts = {"pictures": len(index.paths), "new": index.new, "changed": index.changed, "gone": index.gone}
    print(", ".join(f"{value:,} {name}" for name, value in counts.items()), file=sys.stderr)
    unread = index.unread
    if unread:
        print(f"{len(unread):,} could not be read, and are left out until they change:", file=sys.stderr)
        for reason in list(unread.values())[:NAMED]:
            print(f"  {shown(reason)}", file=sys.stderr)
        if len(unread) > NAMED:
            print(f"  … and {len(unread) - NAMED:,} more", file=sys.stderr)
    if not hits:
        raise DataError(
            f"{folder} holds no picture that can be read", f"name a folder of {', '.join(sorted(endings()))}"
        )
