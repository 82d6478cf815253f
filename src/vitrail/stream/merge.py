"""The token-count contract, and the merge that relies on it.

B rows, L tokens of a row, N rows of a block of features, W width
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.stream.pack import Batch, Fill
from vitrail.stream.parts import TABLES

# What is offered to one feed: a block for each source, in the samples' order, or all of them end to end.
Offer: TypeAlias = Tensor | Sequence[Tensor]
Count: TypeAlias = int | Sequence[int]


def check(batch: Batch, offered: Mapping[str, Count | Offer]) -> None:
    """Refuse features that do not fit the places reserved for them, by the name of the sample and the part.

    Numbers of rows are enough (`{"image": [576, 1152]}`), so this runs before any forward pass; tensors may stand for
    their rows. A learned table may have more rows than are used.
    """
    unknown = [feed for feed in offered if feed not in batch.fills and feed not in TABLES and _total(offered[feed])]
    if unknown:
        raise StreamError(
            f"features for {unknown[0]!r}, but no place is reserved for any",
            f"places wait for: {', '.join(batch.fills) or 'nothing'}",
        )
    for feed, fill in batch.fills.items():
        if feed not in offered:
            raise StreamError(
                f"{fill.blocks[0][1]}: expected {_rows(fill.blocks[0][0])} of {feed!r} features, got none",
                f"give {feed!r} among the features",
            )
        _check_feed(feed, fill, offered[feed])


def _check_feed(feed: str, fill: Fill, offer: Count | Offer) -> None:
    expected, got = [rows for rows, _ in fill.blocks], _total(offer)
    if feed in TABLES:
        if got < expected[0]:
            raise StreamError(
                f"{fill.blocks[0][1]}: expected at least {_rows(expected[0])} in the table {feed!r}, got {got:,}",
                "enlarge the table, or ask for fewer",
            )
        return
    if isinstance(offer, (int, Tensor)):  # end to end: only the sum can be told
        if got != sum(expected):
            whose = "; ".join(f"{name}: {rows:,}" for rows, name in fill.blocks[:4])
            raise StreamError(
                f"expected {_rows(sum(expected))} of {feed!r} features for {len(expected)} blocks, got {got:,}",
                f"reserved are {whose}{'; …' * (len(expected) > 4)}: give a list of blocks to learn which is wrong",
            )
        return
    for block, (rows, name) in zip(map(_total, offer), fill.blocks, strict=False):
        if block != rows:
            raise StreamError(
                f"{name}: expected {_rows(rows)} of {feed!r} features, got {block:,}",
                "the grid that reserved the places and what the encoder and connector make of it must agree",
            )
    if len(offer) < len(fill.blocks):
        rows, name = fill.blocks[len(offer)]
        raise StreamError(
            f"{name}: expected {_rows(rows)} of {feed!r} features, got none",
            f"{len(fill.blocks)} blocks are expected, {len(offer)} were given",
        )
    if len(offer) > len(fill.blocks):
        raise StreamError(
            f"{len(offer)} blocks of {feed!r} features for {len(fill.blocks)} that are expected",
            f"the last expected is for {fill.blocks[-1][1]}",
        )


def merge(embeds: Tensor, features: Mapping[str, Offer], batch: Batch) -> Tensor:
    """embeds (B, L, W) with every feature (N, W) in its place; gradients reach both, exactly."""
    check(batch, features)
    if not batch.fills:
        return embeds
    values = []
    for feed, fill in batch.fills.items():
        offer = features[feed]
        block = offer if isinstance(offer, Tensor) else torch.cat(list(offer))  # (ΣN, W)
        if block.ndim != 2 or block.shape[1] != embeds.shape[-1]:
            raise StreamError(
                f"{feed!r} features {tuple(block.shape)} do not fit embeddings {embeds.shape[-1]} wide",
                "a connector brings them to the decoder's width",
            )
        values.append(block[fill.rows.to(block.device)].to(embeds.dtype))
    places = torch.cat([fill.places for fill in batch.fills.values()]).to(embeds.device)
    return embeds.flatten(0, 1).index_copy(0, places, torch.cat(values)).view_as(embeds)


def _total(offer: Count | Offer) -> int:
    match offer:
        case int():
            return offer
        case Tensor():
            return offer.shape[0]
        case _:
            return sum(_total(one) for one in offer)


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
