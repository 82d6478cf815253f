"""`vitrail eval MODEL questions`, `stress` and `drawing`: what a model reads, and what a unified one draws."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, SCENES, Common, Scenes, tell, write_page
from vitrail.cli.eval_easel import HAND, Easel, Hand, judge_of, open_detector
from vitrail.cli.eval_reader import check_kinds, open_reader, scenes_of
from vitrail.cli.fewer import FEWER, Fewer
from vitrail.cli.written import check_written
from vitrail.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vitrail.data.scenes.source import ScenesConfig

KINDS = (
    "existence_random", "existence_popular", "existence_adversarial", "counting", "colour", "position", "relation",
    "what", "reading", "unanswerable_colour", "unanswerable_position",
)  # fmt: skip


def questions(
    model: str,
    /,
    *,
    preset: str = "mixed",
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = KINDS,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    names: str = "",
    sizes: tuple[float, float] | None = None,
    page: Path | None = None,
    scenes: Scenes = SCENES,
    fewer: Fewer = FEWER,
    common: Common = COMMON,
) -> None:
    """Ask about scenes whose truth is known, beside the best guess without looking.

    Parameters
    ----------
    model
        A unified model, or a vision-language model: a folder.
    preset
        Scenes.
    kinds
        Of questions; may be repeated.
    unseen
        Ask in paraphrases that training never uses.
    names
        Which things appear: "hundred", those that mini draws, "thirty" of them, or those of a recipe's scenes, as
        RECIPE:SOURCE. All unless said.
    sizes
        Of things, from … to, in shares of the picture's side; the preset's unless said.
    page
        An HTML file to write the scores to, with right and wrong answers of each kind and their pictures.
    """
    from vitrail.data.scenes.config import PRESETS
    from vitrail.evals.suites.talking import answered
    from vitrail.show.scored import Gathered

    check_kinds(kinds)
    check_written(page, "--page")
    if preset not in PRESETS:
        raise ConfigError(f"there are no scenes {preset!r}", nearest(preset, PRESETS))
    changes: dict[str, object] = {"names": things(names)} if names else {}
    if sizes is not None:
        changes["sizes"] = sizes
    reader = open_reader(model, common, fewer)
    source, words = scenes_of(preset, scenes, reader.side, changes)
    seen, settings = (
        Gathered("questions"),
        {"preset": preset, "unseen": unseen} | asdict(scenes) | changes | fewer.plain,
    )
    scores = answered(
        reader.answerer, source, words, kinds, scenes.count, held_out=unseen, batch=common.batch, watch=seen
    )
    tell("questions", model, settings, scores, common)
    if page is not None:
        write_page(page, "questions", model, settings, scores, seen.examples, common)


def things(asked: str) -> list[str]:
    """A group of things, or those that a recipe's scenes show."""
    from vitrail.data.scenes.things import GROUPS

    if asked in GROUPS:
        return [asked]
    if ":" not in asked:
        raise ConfigError(f"--names {asked} says no recipe", f"write RECIPE:SOURCE, or {', '.join(GROUPS)}")
    found = scenes_in(asked).asked().names
    if not found:
        raise ConfigError(f"the scenes {asked} name no things: they show all", "leave --names out")
    return list(found)


def scenes_in(asked: str) -> "ScenesConfig":
    """RECIPE:SOURCE → the scenes of a recipe"""
    from vitrail import recipe
    from vitrail.data.scenes.source import ScenesConfig

    name, _, source = asked.rpartition(":")
    if not name:
        raise ConfigError(f"{asked!r} says no recipe", "write RECIPE:SOURCE, such as mini:draw")
    sources = {key: one for key, one in recipe.read(name).sources.items() if isinstance(one, ScenesConfig)}
    if source not in sources:
        raise ConfigError(f"recipe {name!r} has no scenes {source!r}", nearest(source, sources))
    return sources[source]


def stress(
    model: str,
    /,
    *,
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    scenes: Scenes = SCENES,
    fewer: Fewer = FEWER,
    common: Common = COMMON,
) -> None:
    """Ask the same about ordinary scenes and hard ones: transparent, smaller than a patch, moving, occluded, crowded.

    Parameters
    ----------
    model
        A unified model, or a vision-language model: a folder.
    kinds
        Of questions; those that all these scenes admit, unless said. May be repeated.
    unseen
        Ask in paraphrases that training never uses.
    """
    from vitrail.evals.suites import stress as suite

    kinds = kinds or suite.KINDS
    check_kinds(kinds)
    reader = open_reader(model, common, fewer)
    scores = suite.stressed(
        reader.answerer,
        lambda preset, changes: scenes_of(preset, scenes, reader.side, changes),
        kinds,
        scenes.count,
        patch=reader.patch,
        held_out=unseen,
        batch=common.batch,
    )
    left = sorted(set(suite.STRESSES) - {score.part["scenes"] for score in scores})
    said = f"left out: {', '.join(left)}, since a patch is {reader.patch:.3f} of the side" if left else ""
    settings = {"unseen": unseen, "patch": reader.patch, "left_out": left}
    tell("stress", model, settings | asdict(scenes) | fewer.plain, scores, common, said)


def drawing(
    model: str,
    /,
    *,
    judge: str = "judge",
    count: int = 50,
    concepts: int | None = None,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    atlas: str = "emoji",
    true: str = "flat",
    page: Path | None = None,
    hand: Hand = HAND,
    common: Common = COMMON,
) -> None:
    """Have prompts of GenEval's six kinds drawn, and a judge look at the drawings: beside what drawings for other
    prompts would have, and true pictures in the model's codes.

    Parameters
    ----------
    model
        A unified model: a folder.
    judge
        A detector: a folder, or the one that ships with the package.
    count
        Prompts of each kind.
    concepts
        Only so many of the things that the judge knows; all unless given.
    unseen
        Ask in paraphrases that training never uses.
    atlas
        Sprites whose names are asked for: emoji, or a .safetensors file.
    true
        Sprites that the true pictures are made of: those that the model learned to draw; or the scenes of a recipe, as
        RECIPE:SOURCE. "" for none.
    page
        An HTML file to write the scores to, with drawings of each kind that the judge took for right and for wrong.
    """
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.evals.suites.talking import drawn, redrawn
    from vitrail.show.scored import Gathered

    check_written(page, "--page")
    more: dict[str, object] = {"repeat": 0.3, "tint": 0.5}  # so that there is something of every kind
    config = scenes_in(true) if ":" in true else ScenesConfig(atlas=true, preset="drawing", scene=more)
    easel, detector = Easel(model, hand, common), open_detector(judge, common)
    easel.shows = detector.config.image.image
    names = detector.config.concepts[:concepts]
    source = SceneSource(ScenesConfig(atlas=atlas), open_atlas(atlas)).only(names)
    known = judge_of(detector, source, common)
    seen = Gathered("drawing")
    scores = drawn(easel.draw, known, count, seed=hand.seed, held_out=unseen, batch=common.batch, watch=seen)
    if true:
        there = SceneSource(config.with_(side=easel.side), open_atlas(config.atlas)).only(names)
        scores.append(redrawn(easel.through, judge_of(detector, there, common), there, count, batch=common.batch))
    settings = {"judge": judge, "count": count, "concepts": len(names), "unseen": unseen, **asdict(hand), "true": true}
    tell("drawing", model, settings, scores, common)
    if page is not None:
        write_page(page, "drawing", model, settings, scores, seen.examples, common)
