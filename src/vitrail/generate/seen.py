"""Texts about pictures, from a vision-language model: a whole stream is read, pictures in place, then words follow.

B rows, L tokens of the longest stream, V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.generate import text
from vitrail.generate.text import MakeStepper, Piece, Written
from vitrail.models.vlm import VLM, Shown
from vitrail.stream import Batch, Stream, pack
from vitrail.stream.build import FIELDS
from vitrail.stream.pack import PADDING


class Seeing:
    """A stepper whose prompts are streams, a row each, with the pictures and videos that they wait for.

    Words that follow stand behind the furthest position of their row, which under M-RoPE is less than its tokens.
    """

    def __init__(self, model: VLM, streams: Sequence[Stream], pictures: Shown | None, videos: Shown | None):
        self.model, self.batch, self.shown = model, rows(streams), (pictures, videos)
        self.cache = model.decoder.cache(len(streams))
        device = model.decoder.embed.weight.device
        self.next = torch.stack([stream.positions.max() for stream in streams])[:, None].to(device) + 1  # (B, 1)

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        if counts.tolist() != list(self.batch.lengths):
            raise ConfigError(
                f"prompts of {counts.tolist()} tokens for streams of {list(self.batch.lengths)}",
                "guidance has no negative streams: leave it out",
            )
        hidden = self.model.hidden(self.batch, *self.shown, cache=self.cache)  # (B, L, W)
        return self.model.decoder.logits(hidden[torch.arange(len(counts), device=counts.device), counts - 1])

    def step(self, ids: Tensor) -> Tensor:
        logits = self.model.decoder(ids[:, None], positions=self.next, cache=self.cache)  # (B, 1, V)
        self.next = self.next + 1
        return logits[:, 0]


def rows(streams: Sequence[Stream]) -> Batch:
    """One sample a row, in their order, where `pack` would lay short ones side by side."""
    longest = max(map(len, streams), default=0)
    batch, lengths = pack([_padded(stream, longest) for stream in streams], longest), tuple(map(len, streams))
    there = torch.arange(longest) < torch.tensor(lengths)[:, None]  # (B, L)
    return replace(batch, lengths=lengths, segments=torch.where(there, batch.segments, -1))


def _padded(stream: Stream, length: int) -> Stream:
    fields: dict[str, Any] = {}
    for field in FIELDS:
        values = getattr(stream, field)  # (L,), positions (L, 3)
        fields[field] = F.pad(values, (*(0, 0) * (values.ndim - 1), 0, length - len(values)), value=PADDING[field])
    return replace(stream, **fields)


def write(
    model: VLM,
    streams: Sequence[Stream],
    pictures: Shown | None = None,
    videos: Shown | None = None,
    **how: Any,
) -> list[Written]:
    """Go on with each stream. `pictures` are those of all streams, in their order; `how` is what `text.generate` takes
    besides, negative prompts aside."""
    ids = [stream.ids.tolist() for stream in streams]
    return text.generate(model.decoder, ids, stepper=_maker(model, streams, pictures, videos), **how)


def stream(
    model: VLM,
    streams: Sequence[Stream],
    pictures: Shown | None = None,
    videos: Shown | None = None,
    **how: Any,
) -> Iterator[Piece]:
    """The same, token by token."""
    ids = [one.ids.tolist() for one in streams]
    return text.stream(model.decoder, ids, stepper=_maker(model, streams, pictures, videos), **how)


def _maker(model: VLM, streams: Sequence[Stream], pictures: Shown | None, videos: Shown | None) -> MakeStepper:
    return lambda _decoder, _rows, _capacity: Seeing(model, streams, pictures, videos)
