"""Check feature counts against the placeholders of a batch, and merge the features into the embeddings.

Shapes: B rows, L tokens per row, N rows of a feature block, W width.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.stream.packing import FeaturePlacement, PackedBatch
from vitrail.stream.stream_parts import TABLE_FEEDS

# Features of one feed: a block for each source, in the samples' order, or one concatenated tensor.
Features: TypeAlias = Tensor | Sequence[Tensor]
RowCount: TypeAlias = int | Sequence[int]


def check_features(batch: PackedBatch, features: Mapping[str, RowCount | Features]) -> None:
    """Check that the features match the placeholders. Errors name the sample and the part.

    The values may be tensors or only row counts (`{"image": [576, 1152]}`), so the check can run before any forward
    pass. A learned table may have more rows than are used.
    """
    unknown = [
        feed
        for feed in features
        if feed not in batch.feature_placements and feed not in TABLE_FEEDS and _count_rows(features[feed])
    ]
    if unknown:
        raise StreamError(
            f"features for {unknown[0]!r} are given, but the batch has no such placeholders",
            f"placeholders: {', '.join(batch.feature_placements) or 'none'}",
        )
    for feed, fill in batch.feature_placements.items():
        if feed not in features:
            raise StreamError(
                f"{fill.blocks[0][1]}: expected {_format_rows(fill.blocks[0][0])} of {feed!r} features, got none",
                f"add {feed!r} to the features",
            )
        _check_feed(feed, fill, features[feed])


def _check_feed(feed: str, fill: FeaturePlacement, offer: RowCount | Features) -> None:
    expected, num_rows = [rows for rows, _ in fill.blocks], _count_rows(offer)
    if feed in TABLE_FEEDS:
        if num_rows < expected[0]:
            raise StreamError(
                f"{fill.blocks[0][1]}: expected at least {_format_rows(expected[0])} in table {feed!r}, "
                f"got {num_rows:,}",
                "enlarge the table, or use fewer rows",
            )
        return
    if isinstance(offer, (int, Tensor)):  # concatenated: only the sum can be checked
        if num_rows != sum(expected):
            block_list = "; ".join(f"{name}: {rows:,}" for rows, name in fill.blocks[:4])
            raise StreamError(
                f"expected {_format_rows(sum(expected))} of {feed!r} features for {len(expected)} blocks, "
                f"got {num_rows:,}",
                f"expected blocks: {block_list}{'; …' * (len(expected) > 4)}; pass a list to find the wrong block",
            )
        return
    for block, (rows, name) in zip(map(_count_rows, offer), fill.blocks, strict=False):
        if block != rows:
            raise StreamError(
                f"{name}: expected {_format_rows(rows)} of {feed!r} features, got {block:,}",
                "make the part's grid agree with the output of the encoder and connector",
            )
    if len(offer) < len(fill.blocks):
        rows, name = fill.blocks[len(offer)]
        raise StreamError(
            f"{name}: expected {_format_rows(rows)} of {feed!r} features, got none",
            f"give {len(fill.blocks)} blocks instead of {len(offer)}",
        )
    if len(offer) > len(fill.blocks):
        raise StreamError(
            f"{len(offer)} blocks of {feed!r} features are given, expected {len(fill.blocks)}",
            f"the last expected block is for {fill.blocks[-1][1]}",
        )


def merge_features(
    embeds: Tensor, features: Mapping[str, Features], batch: PackedBatch, *, add: bool = False
) -> Tensor:
    """Replace the placeholder embeddings in (B, L, W) by the features (N, W), or `add` the features to them.

    Gradients flow to both.
    """
    check_features(batch, features)
    if not batch.feature_placements:
        return embeds
    values = []
    for feed, fill in batch.feature_placements.items():
        offer = features[feed]
        block = offer if isinstance(offer, Tensor) else torch.cat(list(offer))  # (ΣN, W)
        if block.ndim != 2 or block.shape[1] != embeds.shape[-1]:
            raise StreamError(
                f"{feed!r} features have shape {tuple(block.shape)}, and the embeddings have width {embeds.shape[-1]}",
                "use a connector that projects to the decoder's width",
            )
        values.append(block[fill.rows.to(block.device)].to(embeds.dtype))
    places = torch.cat([fill.token_indices for fill in batch.feature_placements.values()]).to(embeds.device)
    flat = embeds.flatten(0, 1)
    merge = flat.index_add if add else flat.index_copy
    return merge(0, places, torch.cat(values)).view_as(embeds)


def _count_rows(offer: RowCount | Features) -> int:
    match offer:
        case int():
            return offer
        case Tensor():
            return offer.shape[0]
        case _:
            return sum(_count_rows(one) for one in offer)


def _format_rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
