"""What tasks that learn from captioned pictures share: samples made on the device, and which of them belong together.

B samples, M texts, L tokens
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.captions import Captions, captions
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import Asked, SceneSource, by_source
from vitrail.data.views import PLAIN, views
from vitrail.data.words.pieces import TokenTable
from vitrail.encoders.text import Frame
from vitrail.errors import ConfigError
from vitrail.processing.text import Tokenizer
from vitrail.train.task import Batch

_TEXT = 1 << 62  # labels from here on are those of texts, below of concepts


class Made(NamedTuple):
    """A batch on the device: pictures, ids (B, L) of their captions, and which belong together."""

    pixels: Tensor  # (B, 3, S, S)
    true: Tensor
    false: Tensor | None
    again: Tensor | None
    labels: Tensor  # (B,) of the pictures and of `true`
    wrong: Tensor | None  # (M,) of `false`: −1 where there is none


class Shape(NamedTuple):
    """What a model reads: pictures of `side` pixels and texts of `context` tokens; and what a config calls these."""

    side: int
    context: int
    context_key: str


class CaptionedTask:
    """Pictures of one name, of whichever source, belong to all captions of that name; scenes belong to captions word
    for word as their own. `swapped` adds false captions, `twice` a second caption of each picture."""

    def __init__(
        self,
        model: Any,
        sources: Mapping[str, NamedSource | SceneSource],
        words: Tokenizer,
        frame: Frame,
        shape: Shape,
        *,
        swapped: bool = False,
        twice: bool = False,
    ):
        self.model, self.words, self.frame, self.shape = model, words, frame, shape
        self.swapped, self.twice = swapped, twice
        self.captions: dict[str, Captions] = {name: captions(source) for name, source in sources.items()}
        self._numbers: dict[str, int] = {}  # of concepts, for all sources alike
        self._ready: dict[tuple[torch.device, str], tuple[TokenTable, Tensor]] = {}
        for name, told in self.captions.items():
            self._read(name, told)

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    @property
    def _shared(self) -> bool:
        """Whether ranks hold parts of one batch. Judged, each has all of it."""
        return self.model.training and dist.is_initialized() and dist.get_world_size() > 1

    @torch.compiler.disable  # sources keep tables by device
    @torch.no_grad()
    def _made(self, batch: Batch) -> Made:
        vary = self.model.training
        found: dict[str, list[Tensor]] = {field: [] for field in Made._fields}
        for name, index in batch.items():
            told = self.captions[name]
            pair = told.pair(index, vary=vary, swapped=self.swapped)
            found["pixels"].append(views(pair.pixels, (told.views if vary else PLAIN).with_(side=self.shape.side)))
            found["true"].append(self._ids(name, pair.true))
            concepts = self._on(index.device, name)[1]
            found["labels"].append(mark(found["true"][-1]) if told.concepts is None else concepts[index])
            if self.twice:
                found["again"].append(self._ids(name, told.again(index, vary=vary)))
            if pair.false is not None:
                found["false"].append(self._ids(name, pair.false))
                found["wrong"].append(torch.where(pair.false.any(1), mark(found["false"][-1]), -1))
        return Made(**{field: torch.cat(parts) if parts else None for field, parts in found.items()})  # type: ignore

    def _ids(self, name: str, rows: Tensor) -> Tensor:
        """(B, P) pieces → (B, L), written as `evals.contrastive` writes the same text"""
        table, L = self._on(rows.device, name)[0], self.shape.context
        first = len(table.length) - 2  # the last two are what stands before and behind a text
        ends = (rows.new_full((len(rows), 1), row) for row in (first, first + 1))
        ids, length = table.write(torch.cat([next(ends), rows, next(ends)], 1), L, self.frame.fill, check=False)
        if self.frame.back:  # a text that is cut keeps its end
            ids[:, -1] = torch.where(length > L, self.frame.back[-1], ids[:, -1])
        return ids

    def _on(self, device: torch.device, name: str) -> tuple[TokenTable, Tensor]:
        """A source's tokens, and its concepts as numbers that all sources share."""
        key = device, name
        if key not in self._ready:
            tokens, numbers = self._ready[torch.device("cpu"), name]
            self._ready[key] = tokens.to(device), numbers.to(device)
        return self._ready[key]

    def _read(self, name: str, told: Captions) -> None:
        frame, context = self.frame, self.shape.context
        tokens = told.pieces.tokenized(self.words, frame.front, frame.back)
        shown = [self._numbers.setdefault(concept, len(self._numbers)) for concept in told.concepts or ()]
        self._ready[torch.device("cpu"), name] = tokens, torch.tensor(shown)
        more = told.longest(tokens) + len(frame.front) + len(frame.back) - context
        if more > 0:
            raise ConfigError(
                f"captions of {name!r} are {more} tokens longer than what the model reads",
                f"set {self.shape.context_key} to {context + more} or more",
            )


def mark(ids: Tensor) -> Tensor:
    """(B, L) → (B,) a label from _TEXT on, the same for the same text and, but for a chance of 2⁻⁶², for no other"""
    odd = torch.arange(ids.shape[1], device=ids.device) * -0x61C8864680B583EB | 1
    mixed = (ids + 1) * odd
    mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47  # a sum alone would take swapped words for the same
    return (mixed.sum(1) & (_TEXT - 1)) + _TEXT
