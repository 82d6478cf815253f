"""What the suites of `vitrail eval` share: their options, the model they open, and how scores are shown."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail import __version__
from vitrail.cli.written import command_line
from vitrail.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from vitrail.data.scenes.source import SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.contrastive import Embedder
    from vitrail.evals.queried import QueryEmbedder
    from vitrail.evals.shares import Score
    from vitrail.evals.viewer import Viewer
    from vitrail.processing.preprocessing import Preprocessing
    from vitrail.processing.text import Tokenizer
    from vitrail.show.page import Section
    from vitrail.show.scored import Example


@Parameter(name="*")
@dataclass
class Common:
    """What every suite takes."""

    batch: int = 256
    "Pictures or texts that the model reads at once."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "Where it runs; auto is a GPU where there is one."
    out: Path | None = None
    "A JSON file to write the settings and the scores to."


@Parameter(name="*")
@dataclass
class Asked(Common):
    """What benchmarks take: a language model keeps far more of a question than a tower of a picture."""

    batch: int = 16
    "Questions that the model answers side by side."


@Parameter(name="*")
@dataclass
class Scenes:
    """What the suites that draw scenes take."""

    count: int = 400
    "Pairs."
    seed: int = 7171
    "Of the scenes: not one that the model was trained on."
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Whose sprites; all unless said. May be repeated."
    atlas: str = "emoji"
    "Sprites: emoji, or a .safetensors file."
    fonts: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "In which fonts words are drawn; all unless said. May be repeated."

    def changes(self) -> dict[str, Any]:
        """What is asked of the scenes besides their preset."""
        asked = {"vendors": list(self.vendors), "fonts": list(self.fonts)}
        return {name: value for name, value in asked.items() if value}


COMMON, ASKED, SCENES = Common(), Asked(), Scenes()


def open_viewer(name: str, common: Common) -> "Viewer":
    """Any model with a picture tower."""
    from vitrail.evals.viewer import Viewer, tower_of
    from vitrail.hub.configs import resolve
    from vitrail.processing.preprocessing import Preprocessing

    model = _loaded(name, common)
    tower = tower_of(model)
    if tower is None:
        raise CheckpointError(f"{name} is a {type(model).__name__}, which has no picture tower", "give one that looks")
    preprocessing = Preprocessing.read(resolve(name), tower.config, fixed=tower is not model)
    return Viewer(model, preprocessing, batch=common.batch)


def open_embedder(name: str, common: Common) -> "Embedder":
    """A contrastive model with its tokenizer."""
    from vitrail.evals.contrastive import Embedder
    from vitrail.models.clip import Contrastive

    model = _loaded(name, common)
    model = getattr(model, "contrastive", model)  # QLIP's
    if not isinstance(model, Contrastive):
        raise CheckpointError(
            f"{name} is a {type(model).__name__}, not a contrastive model", "give a CLIP or SigLIP, or train one"
        )
    return Embedder(model, *_read_by(name, model.config.image), batch=common.batch)


def open_retriever(name: str, common: Common) -> "Embedder | QueryEmbedder":
    """A contrastive model, or a Q-Former that reads, with its tokenizer."""
    from vitrail.evals.queried import QueryEmbedder
    from vitrail.hub.configs import read_config
    from vitrail.models.qformer import TextQFormerConfig

    config = read_config(name)
    if not isinstance(config, TextQFormerConfig):
        return open_embedder(name, common)
    return QueryEmbedder(_loaded(name, common), *_read_by(name, config.tower), batch=common.batch)


def _read_by(name: str, tower: Any) -> "tuple[Preprocessing, Tokenizer]":
    """How a model's pictures and texts are prepared."""
    from vitrail import hub
    from vitrail.hub.configs import resolve
    from vitrail.processing.preprocessing import Preprocessing

    folder = resolve(name)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{name} has no tokenizer.json", "put the one that it was trained with beside its weights"
        )
    return Preprocessing.read(folder, tower), hub.tokenizer(name)


def _loaded(name: str, common: Common) -> Any:
    import torch

    from vitrail import hub

    return hub.load(name, dtype=torch.float32, device=device_of(common))


def device_of(common: Common) -> str:
    from vitrail.devices import usable

    return usable(None if common.device == "auto" else common.device)


def open_scenes(preset: str, asked: Scenes, side: int) -> "tuple[SceneSource, Words, str]":
    """The scenes, the words about them, and the swap that the preset is made for."""
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.suites.pairs import SORTS

    if preset not in SORTS:
        raise ConfigError(f"no pairs are made of the scenes {preset!r}", nearest(preset, SORTS))
    scene = {"combinations": "all", **asked.changes()}
    config = ScenesConfig(atlas=asked.atlas, preset=preset, scene=scene, side=side, seed=asked.seed)
    source = SceneSource(config, open_atlas(asked.atlas))
    return source, Words.of(source.atlas.table), SORTS[preset]


def show(
    suite: str, model: str, settings: dict[str, Any], scores: "Sequence[Score]", viewer: "Viewer", common: Common
) -> None:
    """What a suite of pictures and texts found: also how pictures were prepared, and how many texts were cut."""
    more, said = how_read(viewer)
    tell(suite, model, settings | more, scores, common, said)


def how_read(viewer: "Viewer") -> tuple[dict[str, Any], str]:
    """How a model was shown pictures and texts, as settings, and what is to be said of it."""
    cut: int = getattr(viewer, "cut", 0)  # of one that reads texts
    said = ""
    if cut:
        config = viewer.model.config
        limit = getattr(config, "text", config).context
        said = f"{cut:,} texts were longer than the tower's {limit} tokens, and were cut"
    return {"pictures_prepared": viewer.preprocessing.plain(), "texts_cut": cut}, said


def tell(
    suite: str, model: str, settings: dict[str, Any], scores: "Sequence[Score]", common: Common, said: str = ""
) -> None:
    """Print the table, and write it with its settings where that is asked for."""
    import json

    wide, told = max(len(score.title) for score in scores), max(len(str(score)) for score in scores)
    for score in scores:
        print(f"{score.title:{wide}}  {score!s:{told}}  {score.baselines}")
    if said:
        print(said, file=sys.stderr)
    if common.out is not None:
        found = {
            "suite": suite,
            "model": model,
            "vitrail": __version__,
            **settings,
            "scores": [score.plain for score in scores],
        }
        try:
            common.out.parent.mkdir(parents=True, exist_ok=True)
            common.out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{common.out} cannot be written: {error.strerror}", "give another file") from None
        print(common.out)


def write_page(
    path: Path,
    suite: str,
    model: str,
    settings: dict[str, Any],
    scores: "Sequence[Score]",
    examples: "Sequence[Example]",
    common: Common,
    drawn: "Sequence[Section]" = (),
) -> None:
    """The same as a page, with examples."""
    from vitrail.lab.origin import origin
    from vitrail.show.scored import scored

    text = scored(suite, model, {**settings, **origin(command_line(), device_of(common))}, scores, examples, drawn)
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "give another file with --page") from None
    print(path)
