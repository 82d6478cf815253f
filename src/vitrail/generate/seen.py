"""Texts about pictures, from a vision-language model: a whole stream is read, pictures in place, then words follow.

B rows, L tokens of the longest stream, V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.generate import text
from vitrail.generate.captured import Captured, Compiled, capturable
from vitrail.generate.prefill import Looked, glance, prefilled
from vitrail.generate.text import MakeStepper, Piece, Written
from vitrail.models.looking import LookingVLM, Views
from vitrail.models.vlm import VLM, Shown
from vitrail.stream import Batch, Stream
from vitrail.stream.pack import rows


class Seeing:
    """A stepper whose prompts are streams, a row each, with the pictures and videos that they wait for.

    Words that follow stand behind the furthest position of their row, which under M-RoPE is less than its tokens. With
    a capacity, and on a GPU, steps are captured, and so are prompts of a kind that comes again.
    """

    def __init__(
        self,
        model: VLM | LookingVLM,
        streams: Sequence[Stream],
        pictures: Shown | Views | None,
        videos: Shown | None,
        capacity: int | None = None,
        *,
        compiled: bool = False,
        looked: Looked | None = None,
    ):
        device, count = model.decoder.embed.weight.device, len(streams)
        self.model, self.streams, self.looked = model, streams, looked
        self.shown: Any = (pictures,) if isinstance(model, LookingVLM) else (pictures, videos)
        behind = [int(stream.positions.max()) + 1 for stream in streams]
        shift = [place - len(stream) for place, stream in zip(behind, streams, strict=True)]
        self.captured: Captured | None = None
        drops = isinstance(model, VLM) and model.voco is not None  # after which positions are ahead of slots
        behind_all = not drops and max(shift, default=0) <= 0
        if capacity is not None and behind_all and capturable(model.decoder, count, capacity):
            self.captured = (Compiled if compiled else Captured).of(model.decoder, count, capacity, shift)
        self.cache = model.decoder.cache(count) if self.captured is None else self.captured.cache
        self.next = torch.tensor(behind, device="cpu" if self.captured else device)[:, None]  # (B, 1), of plain steps

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        if len(counts) != len(self.streams):
            raise ConfigError(
                f"{len(counts)} prompts for {len(self.streams)} streams",
                "guidance has no negative streams: leave it out",
            )
        if self.captured is not None and isinstance(self.model, VLM):
            logits = prefilled(self.model, self.streams, self.shown, self.captured, self.looked)
            if logits is not None:
                return logits
        batch = _placed(rows(self.streams), self.model.decoder.embed.weight.device)
        hidden = self.model.hidden(batch, *self.shown, cache=self.cache)  # (B, L, W)
        return self.model.decoder.logits(hidden[torch.arange(len(counts), device=counts.device), counts - 1])

    def step(self, ids: Tensor) -> Tensor:
        if self.captured is not None:
            return self.captured.step(ids)
        logits = self.model.decoder(ids[:, None], positions=self.next, cache=self.cache)  # (B, 1, V)
        self.next = self.next + 1
        return logits[:, 0]


def _placed(batch: Batch, device: torch.device) -> Batch:
    """The features' places where the features will be; what else a batch holds is read on the host."""
    fills = {
        feed: replace(fill, places=fill.places.to(device), rows=fill.rows.to(device))
        for feed, fill in batch.fills.items()
    }
    return replace(batch, fills=fills)


def write(
    model: VLM | LookingVLM,
    streams: Sequence[Stream],
    pictures: Shown | Views | None = None,
    videos: Shown | None = None,
    *,
    compiled: bool = False,
    **how: Any,
) -> list[Written]:
    """Go on with each stream. `pictures` are those of all streams, in their order; `how` is what `text.generate` takes
    besides, negative prompts aside. `compiled`: what is captured on a GPU is compiled first, which takes tens of
    seconds and pays where prompts of a kind come many times."""
    stepper = _maker(model, streams, pictures, videos, compiled)  # which begins to look
    return text.generate(model.decoder, [one.ids.tolist() for one in streams], stepper=stepper, **how)


def stream(
    model: VLM | LookingVLM,
    streams: Sequence[Stream],
    pictures: Shown | Views | None = None,
    videos: Shown | None = None,
    *,
    compiled: bool = False,
    **how: Any,
) -> Iterator[Piece]:
    """The same, token by token."""
    stepper = _maker(model, streams, pictures, videos, compiled)
    return text.stream(model.decoder, [one.ids.tolist() for one in streams], stepper=stepper, **how)


def _maker(
    model: VLM | LookingVLM,
    streams: Sequence[Stream],
    pictures: Shown | Views | None,
    videos: Shown | None,
    compiled: bool,
) -> MakeStepper:
    shown: Any = (pictures, videos)
    looked = glance(model, shown) if isinstance(model, VLM) else None
    more: dict[str, Any] = {"compiled": compiled, "looked": looked}
    return lambda _decoder, _rows, capacity: Seeing(model, streams, pictures, videos, capacity, **more)
