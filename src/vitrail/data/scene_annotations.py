"""Annotated scenes in plain Python values: captions, questions, boxes. Used to write datasets and draw contact sheets.

Shape: B scenes.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.data.language import (
    QA_DRAFTERS,
    QA_KINDS,
    BlindBaseline,
    SceneLanguage,
    SceneQABatch,
    balance_answers,
    generate_mixed_questions,
    generate_preference_pairs,
    generate_swap_pairs,
    measure_baselines,
)
from vitrail.data.language.templates import OPTIONAL_KINDS, SWAP_KINDS
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError

QUESTION_KINDS = tuple(kind for kind in QA_DRAFTERS if not kind.startswith("caption") and kind not in OPTIONAL_KINDS)
BATCH_SIZE = 256
BALANCE_SCENES = 4096  # scenes used to balance the answers


@dataclass(frozen=True)
class SceneAnnotation:
    """A scene: its image and its ground truth."""

    key: str
    pixels: Any  # uint8 (H, W, 3)
    ground_truth: dict[str, Any]

    def to_sample(self) -> dict[str, Any]:
        """Convert to the members of a shard sample."""
        return {"__key__": self.key, "png": self.pixels, "txt": self.ground_truth["caption"], "json": self.ground_truth}


def build_scene_language(source: SceneSource, *, extra_templates: bool = False) -> SceneLanguage:
    """Build the language of a source's scenes, with answers balanced over its last scenes, which training rarely
    reaches.

    Objects that the source never draws are never asked about: their absence would be known without the image.
    `extra_templates` adds more wordings than usual in training.
    """
    scene_config, count = source.config.scene_config(), source.config.num_samples
    max_objects = max(scene_config.objects[1], scene_config.slots)
    language = SceneLanguage.build(
        source.atlas.table, max_objects=max_objects, sprite_rows=source.sprite_rows, extra_templates=extra_templates
    )
    return balance_answers(
        language, source.sample_scenes(torch.arange(count - 1, max(-1, count - 1 - BALANCE_SCENES), -1))
    )


class SceneAnnotator:
    """Annotate the scenes of a source by index. `held_out` uses paraphrases that training never uses."""

    def __init__(self, source: SceneSource, *, num_questions: int = 6, held_out: bool = False):
        self.source, self.num_questions, self.held_out = source, num_questions, held_out
        self.language = build_scene_language(source)

    @property
    def settings_id(self) -> str:
        """Hash of everything that determines the annotations. Datasets with other settings have no key in common."""
        settings = json.dumps(
            [self.source.config.to_dict(), self.source.fingerprint, self.num_questions, self.held_out], sort_keys=True
        )
        return hashlib.sha256(settings.encode()).hexdigest()[:8]

    def annotate(self, start: int, stop: int) -> Iterator[SceneAnnotation]:
        """Yield the annotations of scenes `start` to `stop` - 1."""
        if not 0 <= start < stop <= self.source.config.num_samples:
            raise ConfigError(
                f"scenes {start:,} to {stop:,} of {self.source.config.num_samples:,}",
                "give 0 ≤ start < stop within the source",
            )
        for first in range(start, stop, BATCH_SIZE):
            yield from self._annotate_batch(torch.arange(first, min(first + BATCH_SIZE, stop)))

    def compute_baselines(self, start: int, stop: int) -> list[BlindBaseline]:
        """Measure how often these scenes' questions can be answered without the image."""
        scenes = self.source.sample_scenes(torch.arange(start, stop))
        return measure_baselines(self._generate_questions(scenes, QUESTION_KINDS, len(QUESTION_KINDS)))

    def _generate_questions(self, scenes: SceneBatch, kinds: tuple[str, ...], n: int) -> SceneQABatch:
        return generate_mixed_questions(
            self.language, scenes, self.source.config.seed, kinds, n, held_out=self.held_out
        )

    def _annotate_batch(self, index: torch.Tensor) -> Iterator[SceneAnnotation]:
        rendered = self.source.render_indices(index)
        scenes, seed, to_texts = rendered.scenes, self.source.config.seed, self.language.pieces.to_texts
        short, long = (
            to_texts(self._generate_questions(scenes, (kind,), 1).answer) for kind in ("caption_short", "caption_long")
        )
        qa = self._generate_questions(scenes, QUESTION_KINDS, self.num_questions)
        questions, answers = to_texts(qa.question), to_texts(qa.answer)
        pair = generate_preference_pairs(self.language, scenes, seed, held_out=self.held_out)
        swap_pairs = {
            sort: generate_swap_pairs(self.language, scenes, seed, sort, held_out=self.held_out) for sort in SWAP_KINDS
        }
        pixels = rendered.pixels.permute(0, 2, 3, 1).numpy()
        n, settings = self.num_questions, self.settings_id
        for b in range(len(index)):
            rows = [i for i in range(b * n, (b + 1) * n) if qa.valid[i]]
            ground_truth: dict[str, Any] = {
                "objects": self._list_objects(scenes[b : b + 1]),
                "caption": short[b],
                "description": long[b],
                "questions": [
                    {"kind": QA_KINDS[int(qa.kind[i])], "question": questions[i], "answer": answers[i]} for i in rows
                ],
            }
            if pair.valid[b]:
                chosen, rejected = (to_texts(x[b : b + 1])[0] for x in (pair.true_caption, pair.false_caption))
                ground_truth["preference"] = {"chosen": chosen, "rejected": rejected}
            for sort, swap_pair in swap_pairs.items():
                if swap_pair.valid[b]:
                    true, false = (to_texts(x[b : b + 1])[0] for x in (swap_pair.true_caption, swap_pair.false_caption))
                    ground_truth.setdefault("swaps", []).append({"sort": sort, "true": true, "false": false})
            yield SceneAnnotation(f"{settings}-{int(index[b]):010}", pixels[b], ground_truth)

    def _list_objects(self, scene: SceneBatch) -> list[dict[str, Any]]:
        """List the objects from the farthest to the nearest."""
        table = self.source.atlas.table
        objects = []
        for slot in range(int(scene.num_objects)):
            row = int(scene.sprite[0, slot])
            objects.append(
                {
                    "name": table.names[int(table.concept[row])],
                    "sprite": table.id[row],
                    "kind": table.kind[row],
                    "colour": COLOURS[int(scene.colour[0, slot])].name,
                    "box": [int(x) / GRID for x in scene.box[0, slot]],
                    "inside": int(scene.frame_slot[0, slot]),
                }
            )
        return objects
