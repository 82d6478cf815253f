"""Scenes with all that is true of them, in plain values: what a data set of scenes writes, and what a sheet shows.

B scenes
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.data.scenes.scene import COLOURS, GRID, Scenes
from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import DRAFTS, KINDS, Baseline, Said, Words, ask_several, balanced, baselines, preference, swap
from vitrail.data.words.templates import SWAPS
from vitrail.errors import ConfigError

QUESTIONS = tuple(kind for kind in DRAFTS if not kind.startswith("caption"))
BATCH = 256
FITTED = 4096  # scenes that the balance of answers is fitted to


@dataclass(frozen=True)
class Told:
    """A scene: its picture and its truth."""

    key: str
    pixels: Any  # uint8 (H, W, 3)
    truth: dict[str, Any]

    def sample(self) -> dict[str, Any]:
        """As a shard holds it."""
        return {"__key__": self.key, "png": self.pixels, "txt": self.truth["caption"], "json": self.truth}


def words_about(source: SceneSource, *, many: bool = False) -> Words:
    """What can be said of a source's scenes, its answers balanced over scenes like these: the last there are, which a
    run of fewer never reaches. What is never drawn is never asked about: its absence would be known without looking.
    `many` has more wordings than are usual in training."""
    asked, count = source.config.asked(), source.config.count
    most = max(asked.objects[1], asked.slots)
    words = Words.of(source.atlas.table, objects=most, sprites=source.rows, many=many)
    return balanced(words, source.scenes(torch.arange(count - 1, max(-1, count - 1 - FITTED), -1)))


class Teller:
    """Tells the scenes of a source by number. Answers are balanced over scenes like these; `held_out` speaks in
    paraphrases that training never uses."""

    def __init__(self, source: SceneSource, *, questions: int = 6, held_out: bool = False):
        self.source, self.questions, self.held_out = source, questions, held_out
        self.words = words_about(source)

    @property
    def settings(self) -> str:
        """A name for all that decides what is told: data sets of other settings share no key."""
        about = json.dumps(
            [self.source.config.plain(), self.source.fingerprint, self.questions, self.held_out], sort_keys=True
        )
        return hashlib.sha256(about.encode()).hexdigest()[:8]

    def told(self, start: int, stop: int) -> Iterator[Told]:
        if not 0 <= start < stop <= self.source.config.count:
            raise ConfigError(
                f"scenes {start:,} to {stop:,} of {self.source.config.count:,}", "count at least one, from 0 on"
            )
        for first in range(start, stop, BATCH):
            yield from self._batch(torch.arange(first, min(first + BATCH, stop)))

    def baselines(self, start: int, stop: int) -> list[Baseline]:
        """What can be had of these scenes' questions without looking."""
        scenes = self.source.scenes(torch.arange(start, stop))
        return baselines(self._ask(scenes, QUESTIONS, len(QUESTIONS)))

    def _ask(self, scenes: Scenes, kinds: tuple[str, ...], n: int) -> Said:
        return ask_several(self.words, scenes, self.source.config.seed, kinds, n, held_out=self.held_out)

    def _batch(self, index: torch.Tensor) -> Iterator[Told]:
        drawn = self.source.draw(index)
        scenes, seed, read = drawn.scenes, self.source.config.seed, self.words.pieces.read
        short, long = (read(self._ask(scenes, (kind,), 1).answer) for kind in ("caption_short", "caption_long"))
        said = self._ask(scenes, QUESTIONS, self.questions)
        questions, answers = read(said.question), read(said.answer)
        pair = preference(self.words, scenes, seed, held_out=self.held_out)
        swaps = {sort: swap(self.words, scenes, seed, sort, held_out=self.held_out) for sort in SWAPS}
        pixels = drawn.pixels.permute(0, 2, 3, 1).numpy()
        n, settings = self.questions, self.settings
        for b in range(len(index)):
            rows = [i for i in range(b * n, (b + 1) * n) if said.valid[i]]
            truth: dict[str, Any] = {
                "objects": self._objects(scenes[b : b + 1]),
                "caption": short[b],
                "description": long[b],
                "questions": [
                    {"kind": KINDS[int(said.kind[i])], "question": questions[i], "answer": answers[i]} for i in rows
                ],
            }
            if pair.valid[b]:
                chosen, rejected = (read(x[b : b + 1])[0] for x in (pair.true, pair.false))
                truth["preference"] = {"chosen": chosen, "rejected": rejected}
            for sort, each in swaps.items():
                if each.valid[b]:
                    true, false = (read(x[b : b + 1])[0] for x in (each.true, each.false))
                    truth.setdefault("swaps", []).append({"sort": sort, "true": true, "false": false})
            yield Told(f"{settings}-{int(index[b]):010}", pixels[b], truth)

    def _objects(self, scene: Scenes) -> list[dict[str, Any]]:
        """From the farthest to the nearest."""
        table = self.source.atlas.table
        found = []
        for slot in range(int(scene.count)):
            row = int(scene.sprite[0, slot])
            found.append(
                {
                    "name": table.names[int(table.concept[row])],
                    "sprite": table.id[row],
                    "kind": table.kind[row],
                    "colour": COLOURS[int(scene.colour[0, slot])].name,
                    "box": [int(x) / GRID for x in scene.box[0, slot]],
                    "inside": int(scene.inside[0, slot]),
                }
            )
        return found
