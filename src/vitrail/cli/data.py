"""`vitrail data`: where pictures come from, fetching them, showing them, and making scenes."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from vitrail.data.sources import SOURCES, home, kept
from vitrail.data.sources import get as fetch
from vitrail.errors import ConfigError

app = App(
    name="data",
    help="List the sources of pictures, fetch them, show any data set as one picture, and make scenes.",
    help_epilogue="Example: vitrail data show crowded --out crowded.png",
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


@app.command(help_epilogue="Example: vitrail data show crowded --out crowded.png")
def show(
    what: str,
    /,
    *,
    out: Path = Path("out/data.png"),
    count: int = 24,
    seed: int = 0,
    side: int = 192,
    pictures: Path | None = None,
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    atlas: str = "emoji",
) -> None:
    """Draw a contact sheet of a data set: some of its pictures, with their words and boxes.

    Parameters
    ----------
    what
        A source (`vitrail data list`), scenes by their preset (plain, relations, inside, counting, counting-more,
        colours, small, crowded, words, drawing, mixed), shards (a .tar, a folder of them, "train-{000..009}.tar"), or a
        file or folder in any format that is read: LLaVA, COCO, VQA, GQA, TextVQA, POPE, MMBench, MME, pictures, videos.
    out
        The picture to write.
    count
        Samples on the sheet.
    seed
        Which samples: another seed shows others.
    side
        Pixels of a scene's side.
    pictures
        Folder the pictures of a file lie in; beside it unless said.
    vendors
        Whose sprites scenes are made of; all unless said. May be repeated.
    atlas
        Sprites that scenes are made of: emoji, or a .safetensors file.
    """
    from vitrail.show.data import draw_data
    from vitrail.show.style import check_picture, save_picture

    check_picture(out)
    sheet = draw_data(what, count=count, seed=seed, side=side, pictures=pictures, vendors=vendors, atlas=atlas)
    save_picture(sheet, out)
    print(out)


@app.command(help_epilogue="Example: vitrail data make crowded --out scenes --count 10000 --side 128")
def make(
    preset: str,
    /,
    *,
    out: Path,
    count: int = 1000,
    side: int = 128,
    seed: int = 0,
    start: int = 0,
    questions: int = 6,
    held_out: bool = False,
    combinations: Literal["train", "test", "all"] = "train",
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    atlas: str = "emoji",
) -> None:
    """Write scenes as WebDataset shards: pictures, captions, and as JSON every box, name, colour, question and answer.

    Prints what can be had of the questions without looking: the majority and the blind baseline, by kind. Called again
    with the same settings, it goes on where it stopped.

    Parameters
    ----------
    preset
        plain, relations, inside, counting, counting-more, colours, small, crowded, words, drawing or mixed.
    out
        Folder for the shards.
    count
        Scenes.
    side
        Pixels of a side.
    seed
        Of the scenes; other seeds share none.
    start
        Number of the first scene.
    questions
        Questions a scene, of different kinds.
    held_out
        Speak in paraphrases that training never uses.
    combinations
        Colours that things wear: those of training, the one of each thing that is kept for testing, or all.
    vendors
        Whose sprites; all unless said. May be repeated.
    atlas
        Sprites: emoji, or a .safetensors file.
    """
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.shards import write_shards
    from vitrail.data.told import Teller
    from vitrail.data.words import table

    scene: dict[str, object] = {"combinations": combinations, "vendors": list(vendors)}
    config = ScenesConfig(atlas=atlas, preset=preset, scene=scene, side=side, seed=seed)
    teller = Teller(SceneSource(config, open_atlas(atlas)), questions=questions, held_out=held_out)
    if not 0 <= start < start + count <= config.count:
        raise ConfigError(
            f"{count} scenes from number {start}",
            f"give a count of at least 1, and numbers from 0 to {config.count - 1}",
        )
    stop = min(start + max(count, 2000), config.count)
    shards = write_shards((told.sample() for told in teller.told(start, start + count)), out, name=preset)
    print(f"{count:,} scenes in {len(shards)} shards: {out}")
    print(f"\nwithout looking, over {stop - start:,} scenes:")
    print(table(teller.baselines(start, stop)))
