"""Pack samples of unequal length into rows, and unpack them.

Every sample keeps its own positions and is a separate segment, so samples in one row do not attend to each other; see
`PackedBatch.attention_plan()`. Samples are never truncated or dropped. A sample that is too long raises an error.

Shapes: B rows, L tokens per row, P placeholder tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.nn import AttentionPlan, attention_plan
from vitrail.stream.stream_builder import STREAM_FIELDS, FeatureSource, Stream
from vitrail.stream.stream_parts import TABLE_FEEDS

PADDING_VALUES = {"ids": 0, "kinds": -1, "positions": 0, "spans": 0, "loss_mask": False, "source": -1, "row": -1}
IGNORE_INDEX = -100  # target that cross-entropy ignores


@dataclass(frozen=True)
class FeaturePlacement:
    """Placement of the features of one feed: row `rows[p]` of its concatenated blocks goes to `token_indices[p]`."""

    token_indices: Tensor  # (P,) into the flattened (B·L)
    rows: Tensor  # (P,)
    blocks: tuple[tuple[int, str], ...]  # number of rows and label of each block; a table has one block


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Packed samples. `segments` is the sample index of each token; `targets` is the id of the next token."""

    ids: Tensor  # (B, L)
    kinds: Tensor  # (B, L), −1 in padding
    positions: Tensor  # (B, L, 3)
    segments: Tensor  # (B, L), −1 in padding
    spans: Tensor  # (B, L)
    loss_mask: Tensor  # (B, L)
    source: Tensor  # (B, L)
    row: Tensor  # (B, L)
    targets: Tensor  # (B, L), −100 at tokens without a target
    feature_placements: dict[str, FeaturePlacement]
    lengths: tuple[int, ...]  # of the samples, in the order they were given
    names: tuple[str, ...]
    sources: tuple[tuple[FeatureSource, ...], ...]
    samples_without_targets: tuple[str, ...]  # names of samples without targets, which are allowed but reported

    @property
    def one_sample_per_row(self) -> "PackedBatch":
        """This batch, if every row has exactly one sample, as a KV cache requires. Otherwise raises an error."""
        if len(self.lengths) != len(self.ids):
            raise StreamError(
                f"{len(self.lengths)} samples in {len(self.ids)} rows, but a KV cache needs one sample per row",
                "use pad_streams, which gives each sample its own row",
            )
        return self

    def attention_plan(self) -> AttentionPlan:
        """Return the attention plan of all layers, on the CPU: call `batch.attention_plan().to(device)`."""
        return attention_plan(self.segments, self.spans if bool(self.spans.any()) else None, causal=True)

    def to(self, device: torch.device | str) -> "PackedBatch":
        names = (*STREAM_FIELDS, "segments", "targets")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        placements = {
            feed: replace(fill, token_indices=fill.token_indices.to(device), rows=fill.rows.to(device))
            for feed, fill in self.feature_placements.items()
        }
        return replace(self, feature_placements=placements, **moved)

    @property
    def fill_ratio(self) -> float:
        """Fraction of tokens that are not padding."""
        return sum(self.lengths) / self.ids.numel()

    def __str__(self) -> str:
        rows, width = self.ids.shape
        targets = int((self.targets != IGNORE_INDEX).sum())
        text = (
            f"{len(self.lengths)} samples in {rows} × {width} tokens, {self.fill_ratio:.0%} filled, {targets:,} targets"
        )
        return (
            f"{text}; no targets in {', '.join(self.samples_without_targets)}" if self.samples_without_targets else text
        )


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Assign samples to rows by best fit decreasing: longest first, each into the fullest row with enough capacity."""
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = row_length, len(rows)
            rows.append([])
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def pack_streams(streams: Sequence[Stream], row_length: int, *, trim: bool = False) -> PackedBatch:
    """Pack streams into as few rows of `row_length` tokens as possible.

    With `trim`, the rows are only as long as the fullest one.
    """
    if not streams:
        raise StreamError("no samples to pack", "give at least one")
    names = tuple(stream.name or f"sample {i}" for i, stream in enumerate(streams))
    lengths = tuple(len(stream) for stream in streams)
    for name, length in zip(names, lengths, strict=True):
        if length > row_length:
            raise StreamError(
                f"{name} has {length:,} tokens, more than a row of {row_length:,}",
                "raise row_length, use fewer visual tokens, or remove the sample",
            )
    rows = assign_rows(lengths, row_length)
    width = max(sum(lengths[i] for i in row) for row in rows) if trim else row_length
    columns_of: dict[str, list[Tensor]] = {field: [] for field in (*STREAM_FIELDS, "segments")}
    for row in rows:
        for field in STREAM_FIELDS:
            columns_of[field].append(
                _join_row([getattr(streams[i], field) for i in row], width, PADDING_VALUES[field], field == "spans")
            )
        columns_of["segments"].append(_join_row([torch.full((lengths[i],), i) for i in row], width, -1))
    table = {field: torch.stack(column) for field, column in columns_of.items()}
    sources = tuple(stream.sources for stream in streams)
    return PackedBatch(
        **table,
        targets=_build_targets(table["ids"], table["loss_mask"], table["segments"]),
        feature_placements=_build_placements(table["source"], table["row"], table["segments"], sources, names),
        lengths=lengths,
        names=tuple(stream.name for stream in streams),
        sources=sources,
        samples_without_targets=tuple(
            name for name, stream in zip(names, streams, strict=True) if not stream.num_target_tokens
        ),
    )


def pad_streams(streams: Sequence[Stream]) -> PackedBatch:
    """Pad streams to equal length, one sample per row, in their order."""
    longest = max(map(len, streams), default=0)
    even = [stream if len(stream) == longest else _pad_stream(stream, longest) for stream in streams]
    batch, lengths = pack_streams(even, longest), tuple(map(len, streams))
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]  # (B, L)
    return replace(batch, lengths=lengths, segments=torch.where(is_token, batch.segments, -1))


def split_by_sample(batch: PackedBatch, values: Tensor) -> tuple[Tensor, ...]:
    """Split (B, L, …) into one tensor (length, …) per sample, in the original order. Gradients pass through."""
    segments = batch.segments.flatten()
    padding = segments.numel() - sum(batch.lengths)
    order = segments.argsort(stable=True)[padding:]  # padding is −1 and sorts first
    return values.flatten(0, 1)[order].split(batch.lengths)


def unpack_streams(batch: PackedBatch) -> list[Stream]:
    """Invert `pack_streams`: return the samples in their original order."""
    columns = zip(*(split_by_sample(batch, getattr(batch, field)) for field in STREAM_FIELDS), strict=True)
    streams = []
    for values, sources, name in zip(columns, batch.sources, batch.names, strict=True):
        stream = Stream(**dict(zip(STREAM_FIELDS, values, strict=True)), sources=sources, name=name)
        inside = stream.spans > 0
        if inside.any():  # number the spans from 1 again
            stream = replace(stream, spans=torch.where(inside, stream.spans - stream.spans[inside].min() + 1, 0))
        streams.append(stream)
    return streams


def _pad_stream(stream: Stream, length: int) -> Stream:
    fields: dict[str, Any] = {}
    for field in STREAM_FIELDS:
        values = getattr(stream, field)  # (L,), positions (L, 3)
        fields[field] = F.pad(
            values, (*(0, 0) * (values.ndim - 1), 0, length - len(values)), value=PADDING_VALUES[field]
        )
    return replace(stream, **fields)


def _join_row(pieces: list[Tensor], width: int, padding: int | bool, has_numbers: bool = False) -> Tensor:
    """Concatenate pieces and pad them to the width. With `has_numbers`, pieces get distinct numbers, except 0."""
    if has_numbers:
        offset, shifted = 0, []
        for piece in pieces:
            shifted.append(torch.where(piece > 0, piece + offset, 0))
            offset += int(piece.max())
        pieces = shifted
    joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if len(joined) == width:
        return joined
    return torch.cat([joined, joined.new_full((width - len(joined), *joined.shape[1:]), padding)])


def _build_targets(ids: Tensor, loss: Tensor, segments: Tensor) -> Tensor:
    """Return the next token of the same sample where the loss mask is set. The code shifts targets only here."""
    learnt = loss[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    return F.pad(torch.where(learnt, ids[:, 1:], IGNORE_INDEX), (0, 1), value=IGNORE_INDEX)


def _build_placements(
    source: Tensor, row: Tensor, segments: Tensor, sources: Sequence[tuple[FeatureSource, ...]], names: Sequence[str]
) -> dict[str, FeaturePlacement]:
    """Compute feature placements. Blocks follow the order of the samples, independent of their rows."""
    blocks: dict[str, list[tuple[int, str]]] = {}
    totals: dict[str, int] = {}
    offsets, feeds = [], []  # of every block: its first row within its feed, and the index of the feed
    for name, own in zip(names, sources, strict=True):
        for feed, rows, part in own:
            blocks.setdefault(feed, []).append((rows, f"{name}, {part}"))
            offsets.append(0 if feed in TABLE_FEEDS else totals.get(feed, 0))
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
    for number, (feed, feed_blocks) in enumerate(blocks.items()):
        in_feed = feed_of == number
        feed_blocks = [max(feed_blocks)] if feed in TABLE_FEEDS else feed_blocks
        fills[feed] = FeaturePlacement(places[in_feed], rows[in_feed], tuple(feed_blocks))
    return fills
