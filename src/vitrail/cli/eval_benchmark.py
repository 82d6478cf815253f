"""`vitrail eval MODEL vqav2 --data FILE`: published benchmarks, asked from their own files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.eval_common import ASKED, Asked, Common, device_of, how_read, open_embedder, tell, write_page
from vitrail.cli.fewer import FEWER, Fewer
from vitrail.cli.written import check_written
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.evals.suites.benchmarks import Benchmark


def benchmark(
    name: str,
    model: str,
    /,
    *,
    data: Path,
    pictures: Path | None = None,
    videos: Path | None = None,
    annotations: Path | None = None,
    instances: Path | None = None,
    synonyms: Path | None = None,
    part: str | None = None,
    limit: int | None = None,
    prompt: str | None = None,
    blind: Annotated[bool, Parameter(negative="--no-blind")] = True,
    circular: Annotated[bool, Parameter(negative="")] = False,
    by: Literal["answers", "likelihood"] = "answers",
    mode: str | None = None,
    boxes: str | None = None,
    tokenizer: str | None = None,
    meteor: Annotated[bool, Parameter(negative="")] = False,
    clip: str | None = None,
    max_new: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    template: str | None = None,
    answers: Path | None = None,
    page: Path | None = None,
    fewer: Fewer = FEWER,
    common: Asked = ASKED,
) -> None:
    """Ask the questions of a published benchmark, and score the answers as it does.

    Parameters
    ----------
    name
        vqav2, textvqa, gqa, docvqa, chartqa, ocrbench, ocrvqa, pope, mme, hallusionbench, mmbench, mmmu,
        realworldqa, winoground, aro, captions, chair, refcoco, charades, qvhighlights or activitynet.
    model
        A vision-language model or a unified one: a folder or a hub id.
    data
        The benchmark's own file, or folder (POPE's three files, MME), or the parquet of a hub.
    pictures
        The folder that its pictures lie in; beside the file unless said.
    videos
        The folder that its videos lie in; beside the file unless said.
    annotations
        VQAv2's answers, which are a file of their own.
    instances
        COCO's instances, for CHAIR.
    synonyms
        For CHAIR: a line a thing, its name and synonyms apart by commas.
    part
        Of OCR-VQA's own file, which holds all: train, val or test, which it is unless said.
    limit
        Samples at most, drawn alike from all; where several are scored together (both questions about a picture of
        MME, all orders of a choice), so many of those.
    prompt
        Instead of the benchmark's own: {question}, {choices} and {hint} stand for the sample's.
    blind
        Ask everything again without pictures, and put that beside.
    circular
        Multiple choice: ask in every order that turning the options round gives; right is what is right in all.
    by
        Of multiple choice, Winoground and ARO: what the model answers, or the likeliest option as an answer to the
        question alone; of captions the likeliest given the picture, which is ARO's own rule.
    mode
        Of POPE: pope, lmms-eval or vlmevalkit, which read and count differently.
    boxes
        How the model writes boxes: qwen-vl, qwen2.5-vl, qwen3-vl, internvl, llava or pixels.
    tokenizer
        Of captions: plain, or ptb, COCO's own, which needs Java.
    meteor
        Also METEOR, which needs Java.
    clip
        Of captions: a contrastive model, a folder or a hub id, to have CLIPScore and RefCLIPScore by.
    max_new
        Tokens of an answer at most.
    frames
        How many frames are read of each video.
    fps
        How many frames are read of each second of a video; as the model's folder says, unless given.
    template
        A chat template by name instead of the folder's own.
    answers
        A file that every answer is added to as it comes. What it holds already of the same model, by name, is not
        asked again.
    page
        An HTML file to write the scores to, with examples of right, wrong and unread answers and their pictures.
    """
    from PIL import Image

    from vitrail.evals.suites import benchmarks
    from vitrail.evals.suites.answered import answers as answered
    from vitrail.evals.suites.likely import likely
    from vitrail.evals.suites.scored.depicted import Depicted
    from vitrail.studio import load, talks

    row = benchmarks.benchmark(name)
    where: dict[str, Any] = {"pictures": pictures, "annotations": annotations, "instances": instances, "part": part}
    scored: dict[str, Any] = {"mode": mode, "boxes": boxes, "tokenizer": tokenizer, "synonyms": synonyms}
    where |= {"videos": videos}
    where, scored = ({key: value for key, value in some.items() if value is not None} for some in (where, scored))
    scored |= {"meteor": True} if meteor else {}
    row.check(scored | ({} if clip is None else {"clip": clip}))
    samples = row.read(data, limit=limit, circular=circular, **where)
    # What cannot be asked, scored or written is said before the weights are read.
    check_written(common.out, "--out")
    check_written(answers, "--answers")
    check_written(page, "--page")
    samples.check()
    if samples.skipped:
        print(samples)
    read = _read(model, bool(samples[0].videos), frames, fps)
    row.question(samples[0], prompt)
    row.score(samples, [""] * len(samples), **scored)
    if by == "likelihood":
        _check_weighed(row, max_new)
    seen = {} if clip is None else {"clip": Depicted(open_embedder(clip, Common(device=common.device)), samples)}
    asker = load(model, template=template, device=device_of(common), reduce=fewer.chosen)
    # A unified model has to see something.
    how: dict[str, Any] = {
        "keep": answers,
        "model": fewer.named(model if template is None else f"{model} ({template})"),
        "nothing": [] if talks(model) else Image.new("RGB", (64, 64), "grey"),
        "batch": common.batch,
    }

    def ask(blind: bool) -> list[str]:
        if by == "likelihood":
            return likely(asker.likelihoods, row, samples, prompt=prompt, blind=blind, **how)
        more: dict[str, Any] = {} if max_new is None else {"max_new": max_new}
        if blind or not samples[0].videos:
            more["together"] = asker.answers if talks(model) else asker.ask
        else:  # which are asked about one at a time
            more |= read
        return answered(asker, samples, lambda sample: row.question(sample, prompt), blind=blind, **how, **more)

    said, unseen = ask(blind=False), ask(blind=True) if blind else None
    scores = row.score(samples, said, unseen, **scored, **seen)
    asked = prompt or (row.weighed if by == "likelihood" else row.prompt)
    settings = {"data": data, "by": by, "prompt": asked, "limit": limit, "circular": circular, "max_new": max_new}
    settings = {**settings, **where, **scored, **read, **fewer.plain}
    settings |= {"skipped": samples.skipped} if samples.skipped else {}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    cut = ""
    if clip is not None:
        read, cut = how_read(seen["clip"].embedder)
        plain["clip"] = {"model": clip, **read}
    tell(name, model, plain, scores, common, cut)
    if page is not None:
        from vitrail.show.scored import examples_of

        questions = [row.question(sample, prompt) for sample in samples]
        examples = examples_of(row, samples, questions, said, unseen, **scored)
        write_page(page, name, model, plain, scores, examples, common)


def _read(model: str, filmed: bool, frames: int | None, fps: float | None) -> dict[str, Any]:
    """How much of each video is read, where that is said."""
    from vitrail.studio import talks

    read = {name: value for name, value in (("frames", frames), ("fps", fps)) if value is not None}
    if read and not filmed:
        raise ConfigError("--frames and --fps are of videos, and there is none", "leave them out")
    if len(read) > 1:
        raise ConfigError("--frames and --fps both say how many frames are read", "give one of the two")
    if filmed and not talks(model):
        raise ConfigError("a unified model reads no videos", "give a model that does, such as a Qwen3-VL")
    return read


def _check_weighed(row: "Benchmark", max_new: int | None) -> None:
    if not row.weighed:
        raise ConfigError(f"{row.format} is no choice between options", "leave --by out")
    if max_new is not None:
        raise ConfigError("options are weighed and nothing is written", "leave --max-new out")
