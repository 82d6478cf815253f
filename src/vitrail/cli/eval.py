"""`vitrail eval`: what a contrastive model can do, each score with its interval and beside what is had without it."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.errors import CheckpointError, ConfigError, DataError, nearest

if TYPE_CHECKING:
    from vitrail.data.scenes.source import SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.contrastive import Embedder
    from vitrail.evals.shares import Score

app = App(
    name="eval",
    help="Test a contrastive model: classes by prompt, retrieval, a linear probe, and pairs of swapped captions.",
    help_epilogue="Example: vitrail eval out/clip/final zeroshot --data cifar10",
)


@Parameter(name="*")
@dataclass
class Common:
    """What every suite takes."""

    batch: int = 256
    "Pictures or texts that the model reads at once."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "Where it runs; auto is a GPU where there is one."
    out: Path | None = None
    "A JSON file to write the scores to."


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


COMMON, SCENES = Common(), Scenes()


@app.default
def evaluate(
    model: str, suite: str, /, *words: Annotated[str, Parameter(allow_leading_hyphen=True, negative="")]
) -> None:
    """Run one suite on a model. Its own options: `vitrail eval zeroshot --help`.

    Parameters
    ----------
    model
        A folder with a contrastive model, ours or Hugging Face's (CLIP, SigLIP), or a hub id.
    suite
        zeroshot, retrieval, probe, winoground or aro.
    words
        Options of the suite.
    """
    known = [name for name in app if not name.startswith("-")]
    if suite not in known:
        raise ConfigError(f"there is no suite {suite!r}", nearest(suite, known))
    app([suite, model, *words], result_action="return_value")  # commands are known by their first word


@app.command(help_epilogue="Example: vitrail eval out/clip/final zeroshot --data cifar10 --limit 1000")
def zeroshot(
    model: str,
    /,
    *,
    data: str = "cifar10",
    part: Literal["train", "test"] = "test",
    limit: int | None = None,
    template: Annotated[list[str] | None, Parameter(negative="")] = None,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    common: Common = COMMON,
) -> None:
    """Name pictures' classes by prompt: each is of the class whose prompts lie nearest.

    Parameters
    ----------
    model
        A contrastive model: a folder or a hub id.
    data
        cifar10, fashion-mnist, or a folder with a sub-folder a class.
    part
        train or test.
    limit
        Pictures at most, drawn alike from all.
    template
        A prompt with {} for the name; may be repeated, and stands for the built-in ones then.
    unseen
        Say that none of the classes was in the model's training: only then it is called zero-shot.
    """
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.zeroshot import TEMPLATES, classifier
    from vitrail.evals.suites.zeroshot import zeroshot as run

    embedder = _embedder(model, common)
    found, templates = sets.classes(data, part, limit), template or list(TEMPLATES)
    prompts = classifier(embedder.texts, found.names, templates)
    scores = run(embedder.images(found.pictures), found.labels, prompts, found.names, unseen=unseen)
    about = {"data": data, "part": part, "templates": templates, "unseen": unseen}
    _show("zeroshot", model, about, scores, embedder, common)


@app.command(help_epilogue="Example: vitrail eval out/clip/final retrieval --data twemoji")
def retrieval(model: str, /, *, data: str = "twemoji", limit: int | None = None, common: Common = COMMON) -> None:
    """Find pictures by their captions and captions by their pictures, over the whole gallery.

    Where pictures have several captions, also each picture's first caption by its others.

    Parameters
    ----------
    model
        A contrastive model: a folder or a hub id.
    data
        A file in COCO's captions format, a source of pictures (`vitrail data list`) or a folder, whose captions are
        the pictures' names.
    limit
        Pictures at most; a smaller gallery is an easier one.
    """
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.retrieval import both_ways

    embedder = _embedder(model, common)
    found = sets.gallery(data, limit, embedder.side)
    u, v = embedder.images(found.pictures), embedder.texts(found.captions)
    scores = both_ways(u, v, found.shown, found.told)
    about = {"data": data, "pictures": len(u), "captions": len(v)}
    print(f"a gallery of {len(u):,} pictures and {len(v):,} captions")
    _show("retrieval", model, about, scores, embedder, common)


@app.command(help_epilogue="Example: vitrail eval out/clip/final probe --data cifar10")
def probe(model: str, /, *, data: str = "cifar10", limit: int | None = None, common: Common = COMMON) -> None:
    """Train a linear classifier on the frozen picture tower's pooled features.

    Parameters
    ----------
    model
        A contrastive model: a folder or a hub id.
    data
        cifar10, fashion-mnist, or a folder with `train` and `test`, each with a sub-folder a class.
    limit
        Pictures of the training part at most, and of the test part.
    """
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.probe import probe as run

    embedder = _embedder(model, common, texts=False)
    train, test = sets.classes(data, "train", limit), sets.classes(data, "test", limit)
    if train.names != test.names:
        raise DataError(f"{data}: train and test have other classes", "give both the same sub-folders")
    x, z = (embedder.features(part.pictures).to(embedder.device) for part in (train, test))
    found = run(x, train.labels.to(x.device), z, test.labels.to(z.device), train.names)
    print(f"penalty {found.strength:g}, chosen on a tenth of {len(train.labels):,} training pictures{found.edge}")
    about = {"data": data, "trained_on": len(train.labels), "penalty": found.strength}
    _show("probe", model, about, found.scores, embedder, common)


@app.command(help_epilogue="Example: vitrail eval out/clip/final winoground --preset colours")
def winoground(
    model: str,
    /,
    *,
    preset: str = "colours",
    scenes: Scenes = SCENES,
    common: Common = COMMON,
) -> None:
    """Match two captions of the same words with two pictures: a scene, and the same with colours or places exchanged.

    Parameters
    ----------
    model
        A contrastive model: a folder or a hub id.
    preset
        Scenes: colours (colours are exchanged) or relations (places are).
    """
    import torch

    from vitrail.evals.suites import pairs

    embedder = _embedder(model, common)
    made = pairs.twins(*_scenes(preset, scenes, embedder.side), scenes.count)
    assert made.other is not None
    u = torch.stack([embedder.images(list(pixels)) for pixels in (made.pixels, made.other)], 1)  # (B, 2, E)
    v = torch.stack([embedder.texts(texts) for texts in (made.true, made.false)], 1)
    print(f"such as: {made.true[0]!r}, not {made.false[0]!r}")
    _show("winoground", model, {"preset": preset} | asdict(scenes), pairs.winoground(v @ u.mT), embedder, common)


@app.command(help_epilogue="Example: vitrail eval out/clip/final aro --preset relations")
def aro(
    model: str,
    /,
    *,
    preset: str = "relations",
    scenes: Scenes = SCENES,
    common: Common = COMMON,
) -> None:
    """Tell a scene's true caption from a false one of the same words.

    Parameters
    ----------
    model
        A contrastive model: a folder or a hub id.
    preset
        Scenes, which say what is swapped: colours, relations, counting (numbers) or plain (sizes).
    """
    from vitrail.evals.suites import pairs

    embedder = _embedder(model, common)
    made = pairs.captioned(*_scenes(preset, scenes, embedder.side), scenes.count)
    score = pairs.aro(embedder.images(list(made.pixels)), embedder.texts(made.true), embedder.texts(made.false))
    print(f"such as: {made.true[0]!r}, not {made.false[0]!r}")
    _show("aro", model, {"preset": preset} | asdict(scenes), [score], embedder, common)


# ---- shared -----------------------------------------------------------------------------------------------------


def _embedder(name: str, common: Common, *, texts: bool = True) -> "Embedder":
    import torch

    from vitrail import hub
    from vitrail.evals.contrastive import Embedder, Preprocessing
    from vitrail.hub.configs import resolve
    from vitrail.models.clip import Contrastive

    device = common.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here", "leave --device out, or say cpu")
    model = hub.load(name, dtype=torch.float32, device=device)
    if not isinstance(model, Contrastive):
        raise CheckpointError(
            f"{name} is a {type(model).__name__}, not a contrastive model", "give a CLIP or SigLIP, or train one"
        )
    folder = resolve(name)
    if texts and not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{name} has no tokenizer.json", "put the one that it was trained with beside its weights"
        )
    tokenizer = hub.tokenizer(name) if texts else None
    return Embedder(model, Preprocessing.read(folder, model.config.image), tokenizer, batch=common.batch)


def _scenes(preset: str, asked: Scenes, side: int) -> "tuple[SceneSource, Words, str]":
    """The scenes, the words about them, and the swap that the preset is made for"""
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.suites.pairs import SORTS

    if preset not in SORTS:
        raise ConfigError(f"no pairs are made of the scenes {preset!r}", nearest(preset, SORTS))
    scene: dict[str, object] = {"combinations": "all"}
    if asked.vendors:
        scene["vendors"] = list(asked.vendors)
    config = ScenesConfig(atlas=asked.atlas, preset=preset, scene=scene, side=side, seed=asked.seed)
    source = SceneSource(config, open_atlas(asked.atlas))
    return source, Words.of(source.atlas.table), SORTS[preset]


def _show(
    suite: str, model: str, about: dict[str, Any], scores: "list[Score]", embedder: "Embedder", common: Common
) -> None:
    import json

    wide, told = max(len(score.name) for score in scores), max(len(str(score)) for score in scores)
    for score in scores:
        print(f"{score.name:{wide}}  {score!s:{told}}  {score.baselines}")
    if embedder.cut:
        limit = embedder.model.config.text.context
        print(f"{embedder.cut:,} texts were longer than the tower's {limit} tokens, and were cut", file=sys.stderr)
    if common.out is not None:
        rows = [asdict(score) | {"name": score.name.strip()} for score in scores]
        found = {"suite": suite, "model": model, **about, "texts_cut": embedder.cut, "scores": rows}
        try:
            common.out.parent.mkdir(parents=True, exist_ok=True)
            common.out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{common.out} cannot be written: {error.strerror}", "give another file") from None
        print(common.out)
