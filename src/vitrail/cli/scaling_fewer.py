"""`vitrail scaling fewer`: a trained model that is asked with fewer visual tokens than it learned with."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from tqdm import tqdm

from vitrail.cli.eval_common import SCENES, Common, Scenes, device_of
from vitrail.cli.eval_reader import check_kinds, scenes_of
from vitrail.cli.eval_unified import things
from vitrail.cli.scaling_run import FLAT, STEEP, write_told
from vitrail.data.scenes.source import SceneSource
from vitrail.errors import ConfigError, nearest
from vitrail.hub.based import checksum
from vitrail.hub.configs import resolve
from vitrail.hub.files import write_json
from vitrail.lab.contrasts import (
    Asked,
    Contrast,
    Point,
    above_chance,
    as_scored,
    steeper,
    steeper_by_questions,
)
from vitrail.lab.exact import Exam
from vitrail.lab.fewer import answered
from vitrail.lab.reduced import REDUCTIONS
from vitrail.studio import Studio

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("existence_random", "counting", "colour", "position", "relation", "what", "reading")
WHOLE = "random"  # any way will do where all patches are kept
LENGTH = 96  # tokens of a question with its answer, at most

Hits = dict[str, dict[int, list[bool]]]
"""way → tokens → which questions were answered"""


def fewer(
    model: str,
    /,
    *,
    out: Path,
    preset: str = "mixed",
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = KINDS,
    tokens: Annotated[tuple[int, ...], Parameter(negative="")] = (1, 4, 8, 16, 32, 64),
    names: str = "",
    batch: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    scenes: Scenes = SCENES,
) -> None:
    """Ask a trained model with few and many of a picture's tokens, fit the law of every kind of question, and say
    whether reading grows faster than existence. Nothing is trained.

    Tokens are those that patches look at most and that repeat others least (VisPruner), those and means of the rest
    (VisionZip), means of equal cells (pooling), or any, by lot (random): the floor. The same command goes on after any
    interruption.

    Parameters
    ----------
    model
        A unified model: mini, or a folder.
    out
        Folder for what is found: scaling.json, scaling.svg, a table of scores a way, and which questions were answered.
    preset
        Scenes.
    kinds
        Of questions; may be repeated.
    tokens
        How many, ascending, below all that there are, which are asked with too. May be repeated.
    names
        Which things appear: "hundred", those that mini draws, "thirty" of them, or those of a recipe's scenes, as
        RECIPE:SOURCE. All unless said.
    batch
        Questions at once.
    device
        Where the model runs; auto is a GPU where there is one.
    """
    import torch

    from vitrail.data.scenes.config import PRESETS

    check_kinds(kinds)
    if preset not in PRESETS:
        raise ConfigError(f"there are no scenes {preset!r}", nearest(preset, PRESETS))
    where = device_of(Common(device=device))
    studio = Studio.load(model, device=where, dtype=torch.float32)
    every = math.prod(studio.model.grid)
    if not tokens or list(tokens) != sorted(set(tokens)) or not 1 <= tokens[0] <= tokens[-1] < every:
        raise ConfigError(f"numbers of tokens {tokens}", f"give some from 1 to {every - 1}, ascending")
    changes: dict[str, object] = {"names": things(names)} if names else {}
    source, _ = scenes_of(preset, scenes, studio.model.codec.size[0], changes)
    asked = {"model": model, "preset": preset, "tokens": tokens, "batch": batch} | asdict(scenes) | changes
    asked["weights"] = checksum(resolve(model))
    del asked["count"]  # more may be asked later
    asked, told, guess = json.loads(json.dumps(asked)), {}, {}
    for kind in kinds:
        told[kind], guess[kind] = _hits(studio, source, kind, scenes.count, asked, out / "hits" / f"{kind}.json", where)
    points = [
        Point(way=way, tokens=n, seed=0, kind=kind, value=sum(hits) / len(hits), of=len(hits), blind=guess[kind])
        for kind, ways in told.items()
        for way, by in ways.items()
        for n, hits in by.items()
    ]
    design = asked | {"kinds": list(kinds), "count": scenes.count}
    write_told(points, answers(told, points, guess), out, design, "of a model that is not trained for it", where)


def _hits(
    studio: Studio, source: SceneSource, kind: str, count: int, asked: dict[str, Any], file: Path, device: str
) -> tuple[Hits, float]:
    """What of a kind is answered, and what guessing has. Batches that the file has are not asked again, and count."""
    every, batch, kept = math.prod(studio.model.grid), asked["batch"], _read(file, asked)
    runs = [(WHOLE, every), *((way, n) for way in REDUCTIONS for n in asked["tokens"])]
    done: list[dict[str, str]] = kept.get("batches", [])
    if len(done) * batch < count:
        exam = Exam(source, [kind], studio.words, count=count, length=LENGTH, device=device)
        kept["blind"] = exam.beside[kind]["blind"]
        for first in tqdm(range(len(done) * batch, count, batch), desc=kind, unit="batch", disable=None):
            sheet = exam.sheets[kind].some(slice(first, first + batch))
            found = answered(studio.model, sheet, studio.words, runs)
            done.append({f"{way} {n}": _written(one) for (way, n), one in zip(runs, found, strict=True)})
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"asked": asked, "blind": kept["blind"], "batches": done})

    def one(run: str) -> list[bool]:
        return [hit == "1" for part in done for hit in part[run]]

    return {
        way: {n: one(f"{way} {n}") for n in asked["tokens"]} | {every: one(f"{WHOLE} {every}")} for way in REDUCTIONS
    }, kept["blind"]


def answers(
    told: Mapping[str, Hits], points: Sequence[Point], guess: Mapping[str, float]
) -> dict[str, Contrast | None]:
    """Whether reading grows faster than existence, in every way: by questions, and by how well laws fit."""
    found: dict[str, Contrast | None] = {}
    if not {STEEP, FLAT} <= set(told):
        return found
    for way in REDUCTIONS:
        ours, theirs = (Asked(told[kind][way], guess[kind]) for kind in (STEEP, FLAT))
        said = f"α of {STEEP} − α of {FLAT}, {{}}, {way}"
        found[said.format("above chance, over questions")] = steeper_by_questions(ours, theirs)
        found[said.format("above chance")] = steeper(points, way, STEEP, FLAT, above_chance)
        found[said.format("as scored")] = steeper(points, way, STEEP, FLAT, as_scored)
    return found


def _read(file: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked before, just so. A last batch that is not whole is asked again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        whole = [part for part in found["batches"] if all(len(row) == asked["batch"] for row in part.values())]
        return {"blind": found["blind"], "batches": whole} if found["asked"] == asked else {}
    except (OSError, ValueError, KeyError):
        return {}


def _written(hits: "Tensor") -> str:
    return "".join("01"[hit] for hit in hits.int().tolist())
