"""Unequal samples → full rows, and back.

Every sample keeps its own positions (they restart) and is a segment of its own, so nothing in a row sees a neighbour:
`Batch.plan()` says so to every layer. Nothing is cut and nothing is dropped; a sample that does not fit is refused.

B rows, L tokens of a row, P places filled by features
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.nn import Plan, attention_plan
from vitrail.stream.build import FIELDS, Source, Stream
from vitrail.stream.parts import TABLES

PADDING = {"ids": 0, "kinds": -1, "positions": 0, "spans": 0, "loss": False, "source": -1, "row": -1}
IGNORED = -100  # what cross-entropy leaves out


@dataclass(frozen=True)
class Fill:
    """Where the features of one feed go: row `rows[p]` of all its blocks, one behind the other, to `places[p]`."""

    places: Tensor  # (P,) into the flattened (B·L)
    rows: Tensor  # (P,)
    blocks: tuple[tuple[int, str], ...]  # rows of each block and whose it is; a table has one


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed samples. `segments` holds each token's sample, −1 in padding; `targets` the id to foretell there."""

    ids: Tensor  # (B, L)
    kinds: Tensor  # (B, L), −1 in padding
    positions: Tensor  # (B, L, 3)
    segments: Tensor  # (B, L)
    spans: Tensor  # (B, L)
    loss: Tensor  # (B, L)
    source: Tensor  # (B, L)
    row: Tensor  # (B, L)
    targets: Tensor  # (B, L), −100 where nothing is learnt
    fills: dict[str, Fill]
    lengths: tuple[int, ...]  # of the samples, in the order they were given
    names: tuple[str, ...]
    sources: tuple[tuple[Source, ...], ...]
    silent: tuple[str, ...]  # samples on which nothing is learnt: allowed, and said

    @property
    def alone(self) -> "Batch":
        """This batch, if every row is one sample, as a cache needs it; refused otherwise."""
        if len(self.lengths) != len(self.ids):
            raise StreamError(
                f"{len(self.lengths)} samples in {len(self.ids)} rows of a cache, which holds one a row",
                "pack each sample into a row of its own",
            )
        return self

    def plan(self) -> Plan:
        """Who sees whom, for every layer. Made on the CPU: `batch.plan().to(device)`."""
        return attention_plan(self.segments, self.spans if bool(self.spans.any()) else None, causal=True)

    def to(self, device: torch.device | str) -> "Batch":
        names = (*FIELDS, "segments", "targets")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        fills = {
            feed: replace(fill, places=fill.places.to(device), rows=fill.rows.to(device))
            for feed, fill in self.fills.items()
        }
        return replace(self, fills=fills, **moved)

    @property
    def full(self) -> float:
        """The share of the rows that is not padding."""
        return sum(self.lengths) / self.ids.numel()

    def __str__(self) -> str:
        rows, width = self.ids.shape
        learnt = int((self.targets != IGNORED).sum())
        says = f"{len(self.lengths)} samples in {rows} × {width} tokens, {self.full:.0%} full, {learnt:,} learnt"
        return f"{says}; nothing on {', '.join(self.silent)}" if self.silent else says


def bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which samples share a row: longest first, each into the fullest row that still has room (best fit decreasing)."""
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = budget, len(rows)
            rows.append([])
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def pack(streams: Sequence[Stream], budget: int, *, trim: bool = False) -> Batch:
    """Rows of `budget` tokens, as few as best fit finds; with `trim` only as wide as the fullest of them."""
    if not streams:
        raise StreamError("no samples to pack", "give at least one")
    names = tuple(stream.name or f"sample {i}" for i, stream in enumerate(streams))
    lengths = tuple(len(stream) for stream in streams)
    for name, length in zip(names, lengths, strict=True):
        if length > budget:
            raise StreamError(
                f"{name} has {length:,} tokens, more than a row of {budget:,}",
                "raise the budget, use fewer visual tokens, or leave the sample out: none is cut short",
            )
    rows = bins(lengths, budget)
    width = max(sum(lengths[i] for i in row) for row in rows) if trim else budget
    held: dict[str, list[Tensor]] = {field: [] for field in (*FIELDS, "segments")}
    for row in rows:
        for field in FIELDS:
            held[field].append(_row([getattr(streams[i], field) for i in row], width, PADDING[field], field == "spans"))
        held["segments"].append(_row([torch.full((lengths[i],), i) for i in row], width, -1))
    table = {field: torch.stack(column) for field, column in held.items()}
    sources = tuple(stream.sources for stream in streams)
    return Batch(
        **table,
        targets=_targets(table["ids"], table["loss"], table["segments"]),
        fills=_fills(table["source"], table["row"], table["segments"], sources, names),
        lengths=lengths,
        names=tuple(stream.name for stream in streams),
        sources=sources,
        silent=tuple(name for name, stream in zip(names, streams, strict=True) if not stream.learnt),
    )


def rows(streams: Sequence[Stream]) -> Batch:
    """One sample a row, in their order, where `pack` would lay short ones side by side."""
    longest = max(map(len, streams), default=0)
    even = [stream if len(stream) == longest else _padded(stream, longest) for stream in streams]
    batch, lengths = pack(even, longest), tuple(map(len, streams))
    there = torch.arange(longest) < torch.tensor(lengths)[:, None]  # (B, L)
    return replace(batch, lengths=lengths, segments=torch.where(there, batch.segments, -1))


def split(batch: Batch, x: Tensor) -> tuple[Tensor, ...]:
    """(B, L, …) → one (length, …) a sample, in the order they were given; gradients go through."""
    segments = batch.segments.flatten()
    padding = segments.numel() - sum(batch.lengths)
    order = segments.argsort(stable=True)[padding:]  # padding is −1 and sorts first
    return x.flatten(0, 1)[order].split(batch.lengths)


def unpack(batch: Batch) -> list[Stream]:
    """The samples as they were before `pack`."""
    columns = zip(*(split(batch, getattr(batch, field)) for field in FIELDS), strict=True)
    streams = []
    for values, sources, name in zip(columns, batch.sources, batch.names, strict=True):
        stream = Stream(**dict(zip(FIELDS, values, strict=True)), sources=sources, name=name)
        inside = stream.spans > 0
        if inside.any():  # numbered from 1 again
            stream = replace(stream, spans=torch.where(inside, stream.spans - stream.spans[inside].min() + 1, 0))
        streams.append(stream)
    return streams


def _padded(stream: Stream, length: int) -> Stream:
    fields: dict[str, Any] = {}
    for field in FIELDS:
        values = getattr(stream, field)  # (L,), positions (L, 3)
        fields[field] = F.pad(values, (*(0, 0) * (values.ndim - 1), 0, length - len(values)), value=PADDING[field])
    return replace(stream, **fields)


def _row(pieces: list[Tensor], width: int, padding: int | bool, numbered: bool = False) -> Tensor:
    """Pieces end to end, padded to the width; `numbered` ones are made distinct, 0 aside."""
    if numbered:
        pieces, given = [], pieces
        taken = 0
        for piece in given:
            pieces.append(torch.where(piece > 0, piece + taken, 0))
            taken += int(piece.max())
    joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if len(joined) == width:
        return joined
    return torch.cat([joined, joined.new_full((width - len(joined), *joined.shape[1:]), padding)])


def _targets(ids: Tensor, loss: Tensor, segments: Tensor) -> Tensor:
    """Each token foretells the next one of its own sample, where that is to be learnt. The one shift there is."""
    learnt = loss[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    return F.pad(torch.where(learnt, ids[:, 1:], IGNORED), (0, 1), value=IGNORED)


def _fills(
    source: Tensor, row: Tensor, segments: Tensor, sources: Sequence[tuple[Source, ...]], names: Sequence[str]
) -> dict[str, Fill]:
    """Blocks are taken sample by sample, in the order given, whatever rows the samples came to lie in."""
    blocks: dict[str, list[tuple[int, str]]] = {}
    totals: dict[str, int] = {}
    offsets, feeds = [], []  # of every block: its first row among all of its feed, and the feed's number
    for name, own in zip(names, sources, strict=True):
        for feed, rows, part in own:
            blocks.setdefault(feed, []).append((rows, f"{name}, {part}"))
            offsets.append(0 if feed in TABLES else totals.get(feed, 0))
            totals[feed] = totals.get(feed, 0) + rows
            feeds.append(list(blocks).index(feed))
    if not offsets:
        return {}
    firsts = torch.tensor([0, *map(len, sources)]).cumsum(0)  # the first block of every sample
    places = (source >= 0).flatten().nonzero()[:, 0]
    block = firsts[segments.flatten()[places]] + source.flatten()[places]
    rows = torch.tensor(offsets)[block] + row.flatten()[places]
    feed_of = torch.tensor(feeds)[block]
    fills = {}
    for number, (feed, held) in enumerate(blocks.items()):
        mine = feed_of == number
        held = [max(held)] if feed in TABLES else held
        fills[feed] = Fill(places[mine], rows[mine], tuple(held))
    return fills
