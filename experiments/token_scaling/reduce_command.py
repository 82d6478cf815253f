"""`python -m experiments.token_scaling reduce`: evaluate a model with fewer visual tokens than in training."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from tqdm import tqdm

from experiments.token_scaling.contrasts import (
    Contrast,
    QuestionHits,
    ScorePoint,
    compare_exponents,
    compare_exponents_by_question,
    get_raw_score,
    get_score_above_chance,
)
from experiments.token_scaling.exact_match import ExactMatchBenchmark
from experiments.token_scaling.patch_reduction import REDUCTIONS
from experiments.token_scaling.run_command import FLAT_KIND, STEEP_KIND, write_experiment_report
from experiments.token_scaling.token_reduction import score_reductions
from vitrail.api import find_recipe_scenes
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.suites.answer_suites import QuestionSuite
from vitrail.evals.suites.scene_options import check_question_kinds, resolve_things
from vitrail.hub.checkpoint_info import resolve_path
from vitrail.hub.delta_checkpoint import checksum_weights
from vitrail.hub.safetensors_files import write_json
from vitrail.pipelines.unified import UnifiedPipeline

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_KINDS = ("existence_random", "counting", "colour", "position", "relation", "what", "reading")
FULL_METHOD = "random"  # with all tokens, the methods are equivalent
MAX_SEQUENCE_TOKENS = 96  # maximum tokens of a question with its answer

HitsByMethod = dict[str, dict[int, list[bool]]]
"""method → number of tokens → which questions are answered correctly"""


def evaluate_fewer_tokens(
    model: str,
    /,
    *,
    out: Path,
    preset: str = "mixed",
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = DEFAULT_KINDS,
    tokens: Annotated[tuple[int, ...], Parameter(negative="")] = (1, 4, 8, 16, 32, 64),
    things: str = "",
    batch_size: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    count: int = 400,
    seed: int = 7171,
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    atlas: str = "emoji",
    fonts: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Evaluate a trained model with few and many image tokens, and fit the law of every kind of question.

    Also tests whether the accuracy of reading grows faster with the number of tokens than that of existence. Nothing is
    trained.

    Methods: tokens with high attention and little redundancy (VisPruner), the same with means of the rest (VisionZip),
    means of equal cells (pool), and random tokens as a baseline. The same command resumes an interrupted run.

    Parameters
    ----------
    model
        A unified model: mini or a folder.
    out
        Folder for scaling.json, scaling.svg, a table of scores for each method, and the correctness of every answer.
    preset
        Preset of the scenes.
    kinds
        Kinds of questions. May be repeated.
    tokens
        Numbers of tokens, ascending and below the full number, which is always evaluated. May be repeated.
    things
        Things in the scenes: hundred (those that mini draws), thirty (a subset of them), or the things of a recipe's
        scenes, as RECIPE:SOURCE. Default: all.
    batch_size
        Questions a batch.
    device
        cpu, cuda or auto: cuda if available.
    count
        Number of questions of each kind.
    seed
        Seed of the scenes. Use one that the model is not trained on.
    vendors
        Vendors of the sprites. May be repeated. Default: all.
    atlas
        Sprites: emoji, or a .safetensors file.
    fonts
        Fonts of words in the scenes. May be repeated. Default: all.
    """
    import torch

    from vitrail.data.scenes.config import PRESETS

    check_question_kinds(kinds)
    if preset not in PRESETS:
        raise ConfigError(f"there is no preset {preset!r}", suggest_name(preset, PRESETS))
    where = resolve_device(device)
    model_pipeline = UnifiedPipeline.load(model, device=where, dtype=torch.float32)
    every = math.prod(model_pipeline.model.grid)
    if not tokens or list(tokens) != sorted(set(tokens)) or not 1 <= tokens[0] <= tokens[-1] < every:
        raise ConfigError(f"--tokens is {tokens}", f"give ascending numbers from 1 to {every - 1}")
    changes: dict[str, object] = {"things": resolve_things(things, find_recipe_scenes)} if things else {}
    scenes = QuestionSuite(count=count, seed=seed, vendors=vendors, atlas=atlas, fonts=fonts)
    source = scenes.open_scenes(preset, model_pipeline.model.codec.image_size[0], changes)
    settings = {
        "model": model,
        "preset": preset,
        "tokens": tokens,
        "batch": batch_size,
        **scenes.scene_settings,
        **changes,
    }
    settings["weights"] = checksum_weights(resolve_path(model))
    del settings["count"]  # a later run may have more questions
    settings, correctness, guess = json.loads(json.dumps(settings)), {}, {}
    for kind in kinds:
        correctness[kind], guess[kind] = _answer_questions(
            model_pipeline, source, kind, count, settings, out / "hits" / f"{kind}.json", where
        )
    points = [
        ScorePoint(
            method=method, tokens=n, seed=0, kind=kind, value=sum(hits) / len(hits), count=len(hits), blind=guess[kind]
        )
        for kind, methods in correctness.items()
        for method, by in methods.items()
        for n, hits in by.items()
    ]
    design = settings | {"kinds": list(kinds), "count": count}
    write_experiment_report(
        points,
        compute_contrasts(correctness, points, guess),
        out,
        design,
        "a model without training for fewer tokens",
        where,
    )


def _answer_questions(
    pipeline: UnifiedPipeline,
    source: SceneSource,
    kind: str,
    count: int,
    settings: dict[str, Any],
    file: Path,
    device: str,
) -> tuple[HitsByMethod, float]:
    """Evaluate one kind of question. Returns the hits and the blind score. Batches in the file are reused."""
    every, batch, kept = math.prod(pipeline.model.grid), settings["batch"], _read_hits_file(file, settings)
    runs = [(FULL_METHOD, every), *((method, n) for method in REDUCTIONS for n in settings["tokens"])]
    done: list[dict[str, str]] = kept.get("batches", [])
    if len(done) * batch < count:
        exam = ExactMatchBenchmark(
            source, [kind], pipeline.tokenizer, count=count, max_length=MAX_SEQUENCE_TOKENS, device=device
        )
        kept["blind"] = exam.baselines[kind]["blind"]
        for first in tqdm(range(len(done) * batch, count, batch), desc=kind, unit="batch", disable=None):
            sheet = exam.question_batches[kind].select(slice(first, first + batch))
            found = score_reductions(pipeline.model, sheet, pipeline.tokenizer, runs)
            done.append({f"{method} {n}": _encode_hits(one) for (method, n), one in zip(runs, found, strict=True)})
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"settings": settings, "blind": kept["blind"], "batches": done})

    def one(run: str) -> list[bool]:
        return [hit == "1" for part in done for hit in part[run]]

    return {
        method: {n: one(f"{method} {n}") for n in settings["tokens"]} | {every: one(f"{FULL_METHOD} {every}")}
        for method in REDUCTIONS
    }, kept["blind"]


def compute_contrasts(
    hits: Mapping[str, HitsByMethod], points: Sequence[ScorePoint], blind_scores: Mapping[str, float]
) -> dict[str, Contrast | None]:
    """Compare the exponents of reading and existence for every method: over questions, and from the fits."""
    found: dict[str, Contrast | None] = {}
    if not {STEEP_KIND, FLAT_KIND} <= set(hits):
        return found
    for method in REDUCTIONS:
        ours, theirs = (QuestionHits(hits[kind][method], blind_scores[kind]) for kind in (STEEP_KIND, FLAT_KIND))
        label = f"α of {STEEP_KIND} − α of {FLAT_KIND}, {{}}, {method}"
        found[label.format("above chance, over questions")] = compare_exponents_by_question(ours, theirs)
        found[label.format("above chance")] = compare_exponents(
            points, method, STEEP_KIND, FLAT_KIND, get_score_above_chance
        )
        found[label.format("as scored")] = compare_exponents(points, method, STEEP_KIND, FLAT_KIND, get_raw_score)
    return found


def _read_hits_file(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the results of a run with the same settings. An incomplete last batch is dropped."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        complete = [part for part in found["batches"] if all(len(row) == settings["batch"] for row in part.values())]
        return {"blind": found["blind"], "batches": complete} if found["settings"] == settings else {}
    except (OSError, ValueError, KeyError):
        return {}


def _encode_hits(hits: "Tensor") -> str:
    return "".join("01"[hit] for hit in hits.int().tolist())
