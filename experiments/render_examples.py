"""Renders the example scenes again, bit for bit: `python -m experiments.render_examples [FOLDER]`.

Each scene is the first of its seed that admits a question of every requested kind. No model was involved in the choice.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from vitrail.data.examples import FOLDER, GROUND_TRUTH_FILE
from vitrail.data.language import generate_questions
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import DataError

SEED, SIDE, TRIED = 90210, 96, 2048  # the first scene's seed; no recipe or benchmark uses it
OBJECT_NAMES = (
    "airplane", "banana", "bear", "bicycle", "bird", "bus", "butterfly", "cactus", "castle", "cat", "chair", "crab",
    "crown", "dog", "duck", "elephant", "fish", "fox", "frog", "guitar", "horse", "house", "key", "lion", "monkey",
    "mushroom", "octopus", "owl", "panda", "penguin", "pig", "pizza", "rabbit", "rocket", "snail", "star",
    "strawberry", "tiger", "umbrella", "whale",
)  # fmt: skip


class SceneRequest(NamedTuple):
    """A requested scene: its preset, changes to it, and the kinds of questions it must admit."""

    name: str
    preset: str
    scene: dict[str, object]
    kinds: tuple[str, ...]


SCENES = (
    SceneRequest(
        "places",
        "relations",
        {"objects": [3, 3], "sizes": [0.28, 0.4], "tint_probability": 0.0},
        ("existence_random", "position", "relation", "what", "unanswerable_position"),
    ),
    SceneRequest(
        "numbers",
        "counting",
        {"objects": [5, 6], "sizes": [0.22, 0.3], "max_groups": 2, "tint_probability": 0.0},
        ("counting", "amount", "existence_adversarial", "choice_count"),
    ),
    SceneRequest(
        "colours",
        "colours",
        {"objects": [3, 3], "sizes": [0.28, 0.4]},
        ("colour", "position", "existence_popular", "choice_colour", "unanswerable_colour"),
    ),
    SceneRequest(
        "words",
        "words",
        {
            "objects": [2, 3],
            "sizes": [0.28, 0.4],
            "word_probability": 0.5,
            "tint_probability": 0.0,
            "fonts": ["aileron-bold"],
        },
        ("reading", "what", "position", "existence_random"),
    ),
)


def render_examples(folder: Path, atlas: Atlas) -> list[dict[str, Any]]:
    """Write the images and their ground truth."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_render_scene(request, SEED + i, folder, atlas) for i, request in enumerate(SCENES)]
    document = {"made by": "python -m experiments.render_examples", "scenes": rows}
    (folder / GROUND_TRUTH_FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return rows


def _render_scene(request: SceneRequest, seed: int, folder: Path, atlas: Atlas) -> dict[str, Any]:
    """Render the first scene of a seed that admits all kinds of questions, and return its ground truth."""
    scene = {"vendors": ["noto"], "things": list(OBJECT_NAMES), "backgrounds": ["flat", "gradient"], **request.scene}
    source = SceneSource(
        SceneSourceConfig(atlas="emoji", preset=request.preset, scene=scene, image_size=SIDE, seed=seed), atlas
    )
    annotator = SceneAnnotator(source, num_questions=1)
    scenes = source.sample_scenes(torch.arange(TRIED))
    questions_by_kind = {kind: generate_questions(annotator.language, scenes, seed, kind) for kind in request.kinds}
    valid_numbers = torch.stack([batch.valid for batch in questions_by_kind.values()]).all(0).nonzero()[:, 0].tolist()
    if not valid_numbers:
        raise DataError(
            f"none of {TRIED} scenes {request.name!r} admits {', '.join(request.kinds)}", "request fewer kinds"
        )
    number = valid_numbers[0]
    annotation = next(annotator.annotate(number, number + 1))
    Image.fromarray(annotation.pixels).save(folder / f"{request.name}.png", optimize=True)
    to_texts, row = annotator.language.pieces.to_texts, slice(number, number + 1)
    questions = [
        {"kind": kind, "question": to_texts(batch.question[row])[0], "answer": to_texts(batch.answer[row])[0]}
        for kind, batch in questions_by_kind.items()
    ]
    entry = {"name": request.name, "seed": seed, "number": number, "caption": annotation.ground_truth["caption"]}
    return entry | {"questions": questions, "objects": annotation.ground_truth["objects"]}


if __name__ == "__main__":
    render_examples(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, open_atlas("emoji"))
