"""Draw the example scenes again, the same to the last bit: `python -m vitrail.data.examples.make [FOLDER]`.

Each is the first scene of its seed that admits a question of every kind that is asked of it; no model was looked at.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from vitrail.data.examples import FOLDER, TRUTH
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.told import Teller
from vitrail.data.words import ask
from vitrail.errors import DataError

SEED, SIDE, TRIED = 90210, 96, 2048  # of the first scene; no recipe and no suite uses one of these
NAMES = (
    "airplane", "banana", "bear", "bicycle", "bird", "bus", "butterfly", "cactus", "castle", "cat", "chair", "crab",
    "crown", "dog", "duck", "elephant", "fish", "fox", "frog", "guitar", "horse", "house", "key", "lion", "monkey",
    "mushroom", "octopus", "owl", "panda", "penguin", "pig", "pizza", "rabbit", "rocket", "snail", "star",
    "strawberry", "tiger", "umbrella", "whale",
)  # fmt: skip


class Wanted(NamedTuple):
    """A scene: its preset and what is altered in it, and the kinds of questions it must admit."""

    name: str
    preset: str
    scene: dict[str, object]
    kinds: tuple[str, ...]


SCENES = (
    Wanted(
        "places",
        "relations",
        {"objects": [3, 3], "sizes": [0.28, 0.4], "tint": 0.0},
        ("existence_random", "position", "relation", "what", "unanswerable_position"),
    ),
    Wanted(
        "numbers",
        "counting",
        {"objects": [5, 6], "sizes": [0.22, 0.3], "groups": 2, "tint": 0.0},
        ("counting", "amount", "existence_adversarial", "choice_count"),
    ),
    Wanted(
        "colours",
        "colours",
        {"objects": [3, 3], "sizes": [0.28, 0.4]},
        ("colour", "position", "existence_popular", "choice_colour", "unanswerable_colour"),
    ),
    Wanted(
        "words",
        "words",
        {"objects": [2, 3], "sizes": [0.28, 0.4], "word": 0.5, "tint": 0.0, "fonts": ["aileron-bold"]},
        ("reading", "what", "position", "existence_random"),
    ),
)


def make(folder: Path, atlas: Atlas) -> list[dict[str, Any]]:
    """Write the pictures and their truth."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_scene(wanted, SEED + i, folder, atlas) for i, wanted in enumerate(SCENES)]
    told = {"made by": "python -m vitrail.data.examples.make", "scenes": rows}
    (folder / TRUTH).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return rows


def _scene(wanted: Wanted, seed: int, folder: Path, atlas: Atlas) -> dict[str, Any]:
    scene = {"vendors": ["noto"], "names": list(NAMES), "backgrounds": ["flat", "gradient"], **wanted.scene}
    source = SceneSource(ScenesConfig(atlas="emoji", preset=wanted.preset, scene=scene, side=SIDE, seed=seed), atlas)
    teller = Teller(source, questions=1)
    scenes = source.scenes(torch.arange(TRIED))
    said = {kind: ask(teller.words, scenes, seed, kind) for kind in wanted.kinds}
    admits = torch.stack([each.valid for each in said.values()]).all(0).nonzero()[:, 0].tolist()
    if not admits:
        raise DataError(f"none of {TRIED} scenes {wanted.name!r} admits {', '.join(wanted.kinds)}", "ask for less")
    number = admits[0]
    told = next(teller.told(number, number + 1))
    Image.fromarray(told.pixels).save(folder / f"{wanted.name}.png", optimize=True)
    read, row = teller.words.pieces.read, slice(number, number + 1)
    questions = [
        {"kind": kind, "question": read(each.question[row])[0], "answer": read(each.answer[row])[0]}
        for kind, each in said.items()
    ]
    kept = {"name": wanted.name, "seed": seed, "number": number, "caption": told.truth["caption"]}
    return kept | {"questions": questions, "objects": told.truth["objects"]}


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, open_atlas("emoji"))
