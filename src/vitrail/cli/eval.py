"""`vitrail eval`: what a model can do, each score with its interval and beside what is had without it."""

from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import App, Parameter

from vitrail.cli.eval_benchmark import benchmark
from vitrail.cli.eval_common import (
    COMMON,
    SCENES,
    Common,
    Scenes,
    open_embedder,
    open_retriever,
    open_scenes,
    open_viewer,
    show,
)
from vitrail.cli.eval_compare import compare
from vitrail.cli.eval_dpg import dpg
from vitrail.cli.eval_fidelity import fidelity
from vitrail.cli.eval_imitation import imitation
from vitrail.cli.eval_naming import naming
from vitrail.cli.eval_needle import needle
from vitrail.cli.eval_text import text
from vitrail.cli.eval_unified import drawing, questions, stress
from vitrail.cli.eval_world import world
from vitrail.errors import ConfigError, DataError, nearest

Several = Annotated[tuple[str, ...], Parameter(negative="")]
Widths = Annotated[tuple[int, ...], Parameter(negative="")]

app = App(
    name="eval",
    help="Test what a model can do, each score with its interval and beside what is had without it; or compare two by "
    "the answers that were kept.",
    help_epilogue="Example: vitrail eval out/clip/final zeroshot --data cifar10",
)


@app.default
def evaluate(
    model: str, suite: str, /, *words: Annotated[str, Parameter(allow_leading_hyphen=True, negative="")]
) -> None:
    """Run one suite on a model. Its own options: `vitrail eval zeroshot --help`.

    Parameters
    ----------
    model
        A folder or a hub id. For zeroshot, retrieval, winoground and aro a contrastive model, ours or Hugging Face's
        (CLIP, SigLIP), and for retrieval BLIP-2 after its first stage; for a probe any with a picture tower; for
        questions, naming, stress and benchmarks one that answers: a unified or a vision-language model; for drawing,
        fidelity and dpg a unified one; for world and imitation a world model; for benchmarks of words alone also a
        language model.
    suite
        zeroshot, retrieval, probe, winoground, aro, questions, naming, needle,
        stress, drawing, fidelity, dpg, world or imitation; or a
        benchmark, which takes --data: vqav2, textvqa, gqa, docvqa, chartqa, ocrbench, ocrvqa, pope, mme,
        hallusionbench, mmbench, mmmu, realworldqa, winoground, aro, captions, chair, refcoco,
        charades, qvhighlights or activitynet; or one of words alone, which
        takes it too: arc, hellaswag, piqa, siqa or winogrande.
    words
        Options of the suite.
    """
    from vitrail.evals.suites.benchmarks import BENCHMARKS
    from vitrail.evals.suites.texts import TEXTS

    known = [name for name in app if not name.startswith("-") and name != "compare"]
    filed = any(word.partition("=")[0] == "--data" for word in words)
    if suite in BENCHMARKS and (filed or suite not in known):
        app(["benchmark", suite, model, *words], result_action="return_value")
        return
    if suite in TEXTS:
        app(["text", suite, model, *words], result_action="return_value")
        return
    if suite not in known:
        every = dict.fromkeys([*known, *BENCHMARKS, *TEXTS])
        raise ConfigError(f"there is no suite {suite!r}", nearest(suite, list(every)))
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
    width: Widths = (),
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
    width
        Of embeddings only their first so many numbers (Matryoshka); may be repeated.
    """
    from vitrail.evals.contrastive import narrowed
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.zeroshot import TEMPLATES, averaged, prompts
    from vitrail.evals.suites.zeroshot import zeroshot as run

    embedder = open_embedder(model, common)
    found, templates = sets.classes(data, part, limit), template or list(TEMPLATES)
    v = embedder.texts(prompts(found.names, templates))
    for chosen in width:
        narrowed(v, chosen)  # one that cannot be is said before the pictures are looked at
    u, scores = embedder.images(found.pictures), []
    for chosen in width or (v.shape[1],):
        classes = averaged(narrowed(v, chosen), len(found.names))
        told = {"width": chosen} if width else {}
        scores += run(narrowed(u, chosen), found.labels, classes, found.names, unseen=unseen, part=told)
    settings = {"data": data, "part": part, "limit": limit, "templates": templates, "unseen": unseen, "widths": width}
    show("zeroshot", model, settings, scores, embedder, common)


@app.command(
    help_epilogue="Example: vitrail eval out/clip/final retrieval --data twemoji --language de --without flags"
)
def retrieval(
    model: str,
    /,
    *,
    data: str = "twemoji",
    limit: int | None = None,
    texts: Literal["names", "keywords"] = "names",
    language: str | None = None,
    all_languages: Annotated[bool, Parameter(negative="")] = False,
    without: Several = (),
    by_category: Annotated[bool, Parameter(negative="")] = False,
    width: Widths = (),
    trim: Annotated[bool, Parameter(negative="")] = False,
    gamma: float = 0.0,
    rerank: int | None = None,
    common: Common = COMMON,
) -> None:
    """Find pictures by their captions and captions by their pictures, over the whole gallery.

    Where pictures have several captions, also each picture's other captions by its first.

    Parameters
    ----------
    model
        A contrastive model, or BLIP-2 after its first stage: a folder or a hub id.
    data
        A file in COCO's captions format, a source of pictures (`vitrail data list`) or a folder, whose captions are
        the pictures' names.
    limit
        Pictures at most; a smaller gallery is an easier one.
    texts
        keywords: ask by all keywords of a name at once, and find the name; no picture is looked at.
    language
        Names in another language, such as de. Pictures without one stay in the gallery.
    all_languages
        Recall@1 in every language that the pictures have names in.
    without
        A category that is not asked for, such as flags; its pictures stay in the gallery. May be repeated.
    by_category
        Also recall@1 of each category.
    width
        Of embeddings only their first so many numbers (Matryoshka); may be repeated.
    trim
        Cut pictures to what is opaque: for a model that was trained on such (`trim = true` in its recipe).
    gamma
        Raise colours, in 0…1, to e^gamma before the model sees them: above 0 middle tones get darker. Shows how much of
        an error is one of tone.
    rerank
        BLIP-2: also put the first so many in order by reading picture and text together.
    """
    from vitrail.evals.queried import QueryEmbedder
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.asking import Asking, ask
    from vitrail.evals.suites.matched import matched
    from vitrail.evals.viewer import bend
    from vitrail.evals.viewer import trim as trim_pictures

    embedder = open_retriever(model, common)
    if rerank is not None and not isinstance(embedder, QueryEmbedder):
        raise ConfigError(f"{model} compares pictures and texts, and cannot read them together", "leave --rerank out")
    asking = Asking(texts, language, all_languages, without, by_category, width)
    album = sets.album(data, limit, 2 * embedder.side if trim else embedder.side)
    if trim:
        album.pictures = trim_pictures(album.pictures, embedder.side)
    if gamma:
        album.pictures = bend(album.pictures, gamma)
    found = ask(embedder, album, asking)
    print(found)
    settings = {"data": data, "limit": limit, "trim": trim, "gamma": gamma, **asking._asdict(), **found.counts}
    scores = found.scores
    if rerank is not None and isinstance(embedder, QueryEmbedder):
        scores = scores + matched(embedder, album.pictures, album.gallery(language), rerank)
        settings["rerank"] = rerank
    show("retrieval", model, settings, scores, embedder, common)


@app.command(help_epilogue="Example: vitrail eval out/clip/final probe --data cifar10")
def probe(model: str, /, *, data: str = "cifar10", limit: int | None = None, common: Common = COMMON) -> None:
    """Train a linear classifier on a frozen picture tower's pooled features, or its patches' mean if it pools nothing.

    Parameters
    ----------
    model
        Any model with a picture tower, or a tower alone: a folder or a hub id.
    data
        cifar10, fashion-mnist, or a folder with `train` and `test`, each with a sub-folder a class.
    limit
        Pictures of the training part at most, and of the test part.
    """
    from vitrail.evals.suites import sets
    from vitrail.evals.suites.probe import probe as run

    viewer = open_viewer(model, common)
    train, test = (sets.classes(data, part, limit, parted=True) for part in ("train", "test"))
    if train.names != test.names:
        raise DataError(f"{data}: train and test have other classes", "give both the same sub-folders")
    x, z = (viewer.features(part.pictures).to(viewer.device) for part in (train, test))
    found = run(x, train.labels.to(x.device), z, test.labels.to(z.device), train.names)
    print(f"penalty {found.strength:g}, chosen on a tenth of {len(train.labels):,} training pictures{found.edge}")
    tried = {f"{strength:g}": share.value for strength, share in found.tried.items()}
    settings = {"data": data, "limit": limit, "trained_on": len(train.labels), "features": x.shape[1]}
    settings |= {"penalty": found.strength, "penalties_tried": tried}
    show("probe", model, settings, found.scores, viewer, common)


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

    embedder = open_embedder(model, common)
    made = pairs.twins(*open_scenes(preset, scenes, embedder.side), scenes.count)
    assert made.other is not None
    u = torch.stack([embedder.images(list(pixels)) for pixels in (made.pixels, made.other)], 1)  # (B, 2, E)
    v = torch.stack([embedder.texts(texts) for texts in (made.true, made.false)], 1)
    print(f"such as: {made.true[0]!r}, not {made.false[0]!r}")
    show("winoground", model, {"preset": preset} | asdict(scenes), pairs.winoground(v @ u.mT), embedder, common)


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

    embedder = open_embedder(model, common)
    made = pairs.captioned(*open_scenes(preset, scenes, embedder.side), scenes.count)
    score = pairs.aro(embedder.images(list(made.pixels)), embedder.texts(made.true), embedder.texts(made.false))
    print(f"such as: {made.true[0]!r}, not {made.false[0]!r}")
    show("aro", model, {"preset": preset} | asdict(scenes), [score], embedder, common)


app.command(benchmark, help_epilogue="Example: vitrail eval llava-hf/llava-1.5-7b-hf pope --data coco_pope_random.json")
app.command(text, help_epilogue="Example: vitrail eval stories15M hellaswag --data hellaswag_val.jsonl --limit 500")
app.command(
    compare, help_epilogue="Example: vitrail eval compare pope first.jsonl second.jsonl --data coco_pope_random.json"
)
app.command(questions, help_epilogue="Example: vitrail eval out/mini/final questions --vendors twemoji --unseen")
app.command(naming, help_epilogue="Example: vitrail eval out/mini/final naming --data cifar10 --limit 1000")
app.command(needle, help_epilogue="Example: vitrail eval Qwen/Qwen3-VL-2B-Instruct needle --frames 64 --video film.mp4")
app.command(stress, help_epilogue="Example: vitrail eval out/mini/final stress --vendors twemoji")
app.command(drawing, help_epilogue="Example: vitrail eval out/mini/final drawing --count 50 --guidance 3")
app.command(fidelity, help_epilogue="Example: vitrail eval out/mini/final fidelity --true mini:draw --count 400")
app.command(dpg, help_epilogue="Example: vitrail eval out/mini/final dpg --count 50 --drawings 4")
app.command(world, help_epilogue="Example: vitrail eval out/genie/final world --data out/episodes/coinrun --steps 2")
app.command(imitation, help_epilogue="Example: vitrail eval out/genie/final imitation --data out/seeker --labels 32")
