"""`vitrail eval MODEL questions`, `stress` and `drawing`: what a model reads, and what a unified one draws."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, SCENES, Common, Scenes, device_of, tell
from vitrail.cli.eval_reader import check_kinds, open_reader, scenes_of
from vitrail.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vitrail.studio import Studio

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
    scenes: Scenes = SCENES,
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
        Which things appear: "hundred", those that mini draws, or those of a recipe's scenes, as RECIPE:SOURCE. All
        unless said.
    sizes
        Of things, from … to, in shares of the picture's side; the preset's unless said.
    """
    from vitrail.data.scenes.config import PRESETS
    from vitrail.evals.suites.talking import answered

    check_kinds(kinds)
    if preset not in PRESETS:
        raise ConfigError(f"there are no scenes {preset!r}", nearest(preset, PRESETS))
    changes: dict[str, object] = {"names": _names(names)} if names else {}
    if sizes is not None:
        changes["sizes"] = sizes
    reader = open_reader(model, common)
    source, words = scenes_of(preset, scenes, reader.side, changes)
    scores = answered(reader.answerer, source, words, kinds, scenes.count, held_out=unseen, batch=common.batch)
    tell("questions", model, {"preset": preset, "unseen": unseen} | asdict(scenes) | changes, scores, common)


def _names(asked: str) -> list[str]:
    """A group of things, or those that a recipe's scenes show."""
    from vitrail import recipe
    from vitrail.data.scenes.source import ScenesConfig
    from vitrail.data.scenes.things import GROUPS

    if asked in GROUPS:
        return [asked]
    name, _, source = asked.rpartition(":")
    if not name:
        raise ConfigError(f"--names {asked} says no recipe", f"write RECIPE:SOURCE, or {', '.join(GROUPS)}")
    sources = {key: one for key, one in recipe.read(name).sources.items() if isinstance(one, ScenesConfig)}
    if source not in sources:
        raise ConfigError(f"recipe {name!r} has no scenes {source!r}", nearest(source, sources))
    found = sources[source].asked().names
    if not found:
        raise ConfigError(f"the scenes {source!r} of {name!r} name no things: they show all", "leave --names out")
    return list(found)


def stress(
    model: str,
    /,
    *,
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    scenes: Scenes = SCENES,
    common: Common = COMMON,
) -> None:
    """Ask the same about ordinary scenes and hard ones: transparent, smaller than a patch, occluded, crowded.

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
    reader = open_reader(model, common)
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
    tell("stress", model, settings | asdict(scenes), scores, common, said)


def drawing(
    model: str,
    /,
    *,
    judge: str = "judge",
    count: int = 50,
    concepts: int | None = None,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    guidance: float = 3.0,
    steps: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
    atlas: str = "emoji",
    common: Common = COMMON,
) -> None:
    """Have prompts of GenEval's six kinds drawn, and a judge look at the drawings.

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
    guidance
        How strongly the prompt leads.
    steps
        Passes of a model that draws all codes at once.
    temperature
        Of the choice of codes.
    seed
        Of the prompts and of the drawings.
    atlas
        Sprites whose names are asked for: emoji, or a .safetensors file.
    """
    import torch

    from vitrail import hub
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.judge import Judge
    from vitrail.evals.suites.talking import drawn
    from vitrail.models.detector import Detector

    studio = _studio(model, common)
    detector = hub.load(judge, dtype=torch.float32, device=device_of(common))
    if not isinstance(detector, Detector):
        raise ConfigError(f"{judge} is a {type(detector).__name__}, and no detector", "give one that `judge` trained")
    names = detector.config.concepts[:concepts]
    source = SceneSource(ScenesConfig(atlas=atlas), open_atlas(atlas)).only(names)
    table = source.atlas.table
    known = Judge(detector, Words.of(table).to(device_of(common)), table)

    def drawer(texts: list[str], first: int) -> torch.Tensor:
        how = {"guidance": guidance, "steps": steps, "temperature": temperature}
        ids = studio.draw_ids(texts, seed=seed + first, **how)
        pixels, side = studio.model.pixels(ids).float(), detector.config.image.image
        if pixels.shape[-1] != side:  # at the size that the judge was made for
            pixels = torch.nn.functional.interpolate(pixels, (side, side), mode="bicubic", antialias=True)
        return studio.model.codec.bytes(pixels)

    scores = drawn(drawer, known, count, seed=seed, held_out=unseen, batch=common.batch)
    settings = {
        "judge": judge, "count": count, "concepts": len(names), "unseen": unseen, "guidance": guidance, "steps": steps,
        "temperature": temperature, "seed": seed,
    }  # fmt: skip
    tell("drawing", model, settings, scores, common)


def _studio(model: str, common: Common) -> "Studio":
    from vitrail.studio import Studio

    return Studio.load(model, device=device_of(common))
