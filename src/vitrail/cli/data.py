"""`vitrail data`: where pictures come from, and fetching them."""

from typing import Annotated

from cyclopts import App, Parameter

from vitrail.data.sources import SOURCES, home, kept
from vitrail.data.sources import get as fetch

app = App(
    name="data",
    help="List the sources of pictures, and fetch them.",
    help_epilogue="Example: vitrail data get twemoji openmoji",
)


@app.command(name="list", help_epilogue="Example: vitrail data list")
def list_sources() -> None:
    """List the sources that are known by name: where each comes from, its licence, and what it takes to download."""
    rows = [("name", "", "from", "licence", "to fetch", "what")]
    for name, row in SOURCES.items():
        mark = "✓" if kept(name) else ""
        origin = f"{row.client} {row.package} {row.version}"
        rows.append((name, mark, origin, row.licence, f"{row.megabytes:.0f} MB", row.says))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n✓ is here already, in {home() / 'data'}; where pictures are read, a folder or hf:owner/name will do too")


@app.command(help_epilogue="Example: vitrail data get twemoji openmoji")
def get(names: Annotated[list[str], Parameter(negative="")], /) -> None:
    """Fetch sources: download, verify, unpack and keep. What is here already is not fetched again.

    Parameters
    ----------
    names
        Names that `vitrail data list` shows, or hf:owner/name.
    """
    for name in names:
        print(fetch(name))
