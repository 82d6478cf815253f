"""`vitrail eval MODEL needle`: one picture among the frames of a video, and a question that only it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.cli.eval_common import Common, device_of, tell, write_page
from vitrail.cli.written import check_written
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.data.formats import Sample
    from vitrail.evals.suites.needle import Found
    from vitrail.show.figure import Figure
    from vitrail.show.scored import Example

EACH = 4  # right, wrong and blind answers on a page


@Parameter(name="*")
@dataclass
class Alone(Common):
    """What a suite takes that asks one question at a time."""

    batch: Annotated[int, Parameter(parse=False)] = 1


ALONE = Alone()


def needle(
    model: str,
    /,
    *,
    frames: Annotated[tuple[int, ...], Parameter(negative="")] = (8, 32),
    depths: int = 5,
    video: Path | None = None,
    needles: Path | None = None,
    pictures: Path | None = None,
    count: int = 5,
    preset: str = "plain",
    side: int = 224,
    seed: int = 7171,
    atlas: str = "emoji",
    max_new: int = 24,
    template: str | None = None,
    show: Path | None = None,
    page: Path | None = None,
    common: Alone = ALONE,
) -> None:
    """Find a needle in a haystack: one picture among the frames of a video, and a question that only it answers.

    Every needle is asked about at every depth of every length, and once a length with no needle there. The frames are
    told to be a second apart.

    Parameters
    ----------
    model
        A vision-language model that reads videos: a folder or a hub id.
    frames
        Of the haystack, the needle not counted; may be repeated.
    depths
        How many, evenly from the beginning to the end.
    video
        A video whose frames are the haystack; scenes unless said.
    needles
        LongVA's dataset.json, or another JSON list of path, prompt and answer; pictures of a word each unless said.
    pictures
        The folder that the needles' pictures lie in; `images` beside the file unless said.
    count
        Needles; of a file the first.
    preset
        Scenes of the haystack; nothing is written in them.
    side
        Of scenes, and the shorter one of a video's frames, in pixels at most.
    seed
        Of scenes and words.
    atlas
        Sprites of the scenes: emoji, or a .safetensors file.
    max_new
        Tokens of an answer at most.
    template
        A chat template by name instead of the folder's own.
    show
        A PNG or SVG to draw the grid of lengths and depths to.
    page
        An HTML file to write the scores to, with the grid, and needles that were found and not.
    """
    from vitrail.data.formats import open_format
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.video import open_video
    from vitrail.evals.suites import haystacks
    from vitrail.evals.suites.needle import depths_of, fits, place, searched
    from vitrail.show.figure import check_figure
    from vitrail.studio import load, talks
    from vitrail.talker import Video

    at = depths_of(depths)
    for length in frames:
        place(length, 0)  # refuses what is no length
    check_written(common.out, "--out")
    check_written(page, "--page")
    if show is not None:
        check_figure(show)
    if not talks(model):
        raise ConfigError("a unified model reads no videos", "give a model that does, such as a Qwen3-VL")
    if count < 1 or side < 8:
        raise ConfigError(f"{count} needles in frames of {side} pixels", "give at least 1 needle, and 8 pixels")
    if pictures is not None and needles is None:
        raise ConfigError("--pictures are of needles from a file", "give --needles, too")
    sprites = cache(lambda: open_atlas(atlas))  # which a video with needles of its own does not need
    if video is not None:
        hay = haystacks.frames_of(open_video(video), side)
    else:
        hay = haystacks.scenes(sprites(), preset, side, seed)
    if needles is None:
        found: Sequence[Sample] = haystacks.words(sprites(), count, side, seed)
    else:
        told = open_format("v-niah", needles, **({} if pictures is None else {"pictures": pictures}))
        told.check()
        found = list(told)[:count]
    talker = load(model, template=template, device=device_of(common))

    def shown(pictures: "Sequence[Image.Image]") -> Video:
        return Video(pictures, seconds=range(len(pictures)))

    tokens = fits(lambda some, text: talker.tokens_of(shown(some), text, max_new=max_new), hay, found, frames)
    result = searched(lambda some, text: talker.ask(shown(some), text, max_new=max_new), hay, found, frames, at)
    settings: dict[str, Any] = {"frames": list(tokens), "depths": [float(depth) for depth in at], "tokens": tokens}
    settings |= {"haystack": preset if video is None else video.name, "count": len(found), "max_new": max_new}
    settings |= {"needles": "words" if needles is None else needles.name, "side": side, "seed": seed, "atlas": atlas}
    tell("needle", model, settings, result.scores, common)
    drawn = _grid(result, model)
    if show is not None:
        drawn.save(show)
        print(show)
    if page is not None:
        from vitrail.show.page import Section, drawing

        label = "The share of needles found, by depth and by number of frames"
        section = Section("Where needles are found", [drawing(drawn, label, label)])
        write_page(page, "needle", model, settings, result.scores, _examples(result, found), common, [section])


def _grid(result: "Found", model: str) -> "Figure":
    """Depths below each other, lengths beside each other."""
    from vitrail.show.heat import heat_map

    lengths = sorted({trial.frames for trial in result.trials})
    depths = sorted({trial.depth for trial in result.trials if trial.depth is not None})
    values = [[result.share(length, depth) for length in lengths] for depth in depths]
    rows, columns = [f"{float(depth):.0%}" for depth in depths], [f"{length:,}" for length in lengths]
    title = f"Needles found by {Path(model).name or model}"
    return heat_map(values, rows, columns, title=title, down="depth", across="frames of the haystack")


def _examples(result: "Found", needles: "Sequence[Sample]") -> "list[Example]":
    """The first of each kind."""
    from vitrail.show.page import marked
    from vitrail.show.scored import UNDER, Example

    kept: dict[str, list[Example]] = {UNDER["right"]: [], UNDER["wrong"]: [], "Without the needle": []}
    for trial in result.trials:
        needle = needles[trial.needle]
        under = "Without the needle" if trial.depth is None else UNDER["right" if trial.right else "wrong"]
        where = f"{trial.frames:,} frames" + ("" if trial.depth is None else f", at {float(trial.depth):.0%}")
        said = [needle.turns[0].text, where, marked(trial.right, f"answer: {trial.said or '(nothing)'}")]
        if len(kept[under]) < EACH:
            pictures = [] if trial.depth is None else [needle.image()]
            kept[under].append(Example(under, pictures, [*said, f"right: {needle.answers[0]}"]))
    return [example for some in kept.values() for example in some]
