"""`vitrail data`: where pictures come from, fetching them, showing them, making scenes and recording worlds."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.data.sources import SOURCES, home, kept
from vitrail.data.sources import get as fetch
from vitrail.errors import ConfigError, nearest

app = App(
    name="data",
    help="List the sources of pictures, fetch them, show any data set as one picture, make scenes, and record worlds.",
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
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/data.png"),
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
        colours, small, crowded, transparent, moving, occluded, sub-patch, words, drawing, to-five, few, mixed), shards
        (a .tar, a folder of them, "train-{000..009}.tar"), a folder of episodes, or a file or folder in any format that
        is read: LLaVA, COCO, VQA, GQA, TextVQA, POPE, MMBench, MME, pictures, videos.
    out
        The picture to write. Of episodes it may be a clip (.gif, .mp4), in which they play side by side.
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
    from vitrail.data.episodes.read import are_episodes
    from vitrail.show.data import draw_data
    from vitrail.show.episodes import CLIPS, play_episodes
    from vitrail.show.style import check_picture, save_picture

    if out.suffix.lower() in CLIPS and are_episodes(Path(what)):
        play_episodes(Path(what), out, count=count, seed=seed)
        print(out)
        return
    check_picture(out)
    sheet = draw_data(what, count=count, seed=seed, side=side, pictures=pictures, vendors=vendors, atlas=atlas)
    save_picture(sheet, out)
    print(out)


@app.command(help_epilogue="Example: vitrail data make pocket -o out/pocket --episodes 50 --workers 2")
def make(
    what: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    count: Annotated[int | None, Parameter(name=("--count", "--episodes"))] = None,
    side: int | None = None,
    seed: int = 0,
    start: int | None = None,
    questions: int | None = None,
    held_out: bool | None = None,
    combinations: Literal["train", "test", "all"] | None = None,
    vendors: Annotated[tuple[str, ...] | None, Parameter(negative="")] = None,
    atlas: str | None = None,
    policy: str | None = None,
    steps: int | None = None,
    repeat: int | None = None,
    video: Literal["lossless", "small"] | None = None,
    workers: int | None = None,
) -> None:
    """Write scenes as WebDataset shards (pictures, captions, and as JSON every box, name, colour, question and answer),
    or record episodes of a world.

    Of scenes, prints what can be had of the questions without looking: the majority and the blind baseline, by kind. A
    world whose simulator is not installed gets an environment of its own, once. Called again with the same settings,
    either goes on where it stopped.

    Parameters
    ----------
    what
        Scenes: plain, relations, inside, counting, counting-more, colours, small, crowded, transparent, moving,
        occluded, sub-patch, words, drawing, to-five, few or mixed. A world: pocket, pocket-curtain, coinrun,
        coinrun-hard, pusht, carracing, doom.
    out
        Folder for the shards.
    count
        Scenes (1000 unless said), or episodes (100).
    side
        Pixels of a side; 128 for scenes, the world's own for episodes.
    seed
        Of the scenes or episodes; other seeds share none.
    start
        Scenes: number of the first.
    questions
        Scenes: questions of each, of different kinds; 6 unless said.
    held_out
        Scenes: speak in paraphrases that training never uses.
    combinations
        Scenes: colours that things wear: those of training, the one of each thing that is kept for testing, or all.
    vendors
        Scenes: whose sprites; all unless said. May be repeated.
    atlas
        Scenes: sprites: emoji, or a .safetensors file.
    policy
        Worlds: who acts: random, seeker (pocket), onward or strolling (coinrun), pusher (pusht), driver (carracing),
        explorer (doom). Unless told, random in pocket, onward in coinrun, and elsewhere who is not random.
    steps
        Worlds: actions of an episode, at most.
    repeat
        Worlds: steps of the simulator that an action lasts.
    video
        Worlds: lossless, or small, which changes colours a little.
    workers
        Worlds: simulators at a time.
    """
    from vitrail.data.episodes import WORLDS
    from vitrail.data.scenes.config import PRESETS

    ours = {"policy": policy, "steps": steps, "repeat": repeat, "video": video}
    scenes = {"start": start, "questions": questions, "held_out": held_out, "combinations": combinations}
    scenes |= {"vendors": vendors, "atlas": atlas}
    if what in WORLDS:
        _refuse(what, scenes, "a world")
        _record(what, out, 100 if count is None else count, seed, side, 1 if workers is None else workers, ours)
    elif what not in PRESETS:
        raise ConfigError(f"there are no scenes and no world {what!r}", nearest(what, [*PRESETS, *WORLDS]))
    else:
        _refuse(what, ours | {"workers": workers}, "scenes")
        given: dict[str, Any] = {name: value for name, value in scenes.items() if value is not None}
        _make_scenes(what, out, 1000 if count is None else count, seed, 128 if side is None else side, **given)


def _refuse(what: str, options: dict[str, Any], kind: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{what} is {kind}, which has no --{name.replace('_', '-')}", "leave it out")


def _record(
    world: str, out: Path, episodes: int, seed: int, side: int | None, workers: int, options: dict[str, Any]
) -> None:
    from vitrail.data.episodes import Episodes, RecordConfig, record

    given = {name: value for name, value in options.items() if value is not None}
    config = RecordConfig(world=world, seed=seed, side=side, **given)
    shards = record(config, out, episodes=episodes, workers=workers)
    made = Episodes(out)
    ended = sum(about.ended for about in made.about)
    print(f"{len(made):,} episodes of {world}, {made.lengths.sum():,} frames in {len(shards)} shards: {out}")
    mean = sum(about.reward for about in made.about) / len(made)
    print(f"{ended:,} came to an end by themselves; the mean reward is {mean:.3g}")


def _make_scenes(
    preset: str,
    out: Path,
    count: int,
    seed: int,
    side: int,
    *,
    start: int = 0,
    questions: int = 6,
    held_out: bool = False,
    combinations: str = "train",
    vendors: tuple[str, ...] = (),
    atlas: str = "emoji",
) -> None:
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


app.command(
    "vitrail.cli.instruct:instruct",
    name="instruct",
    help="Make instruction data from captions and boxes: a text model writes, a filter reads, LLaVA's format is kept.",
    help_epilogue="Example: vitrail data instruct mixed --out out/instruct --model smollm2-135m --count 100",
)
