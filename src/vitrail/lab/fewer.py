"""A model that reads and draws, asked with fewer of a picture's tokens than it learned with, and not trained again.

What is left stands where it stood: each token keeps its learned row and its rotation, a mean of several those of their
mean, and words begin where they always do. The mark before a picture stays, and is not counted.

B pictures, N patches (h × w), D width of what is read, W of the decoder, n tokens that are left, L words, Q questions
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.connectors.reduce import Looks
from vitrail.errors import ConfigError
from vitrail.lab.exact import Sheet, right
from vitrail.lab.reduced import REDUCTIONS, Kept, received
from vitrail.models.unified import Laid, Piece, Unified
from vitrail.processing.grid import Grid
from vitrail.processing.text import Tokenizer


class Patches(NamedTuple):
    """Pictures as a model reads them."""

    features: Tensor  # (B, N, D)
    looks: Looks  # how much all patches look at each, in the codec's last block


@torch.no_grad()
def patches(model: Unified, pixels: Tensor) -> Patches:
    """uint8 (B, 3, H, W)"""
    tower = model.codec.tower
    if tower is None or tower.rotary is not None or tower.config.prefix:
        raise ConfigError(
            "no looks of patches at each other can be read off this codec",
            "use one whose encoder is a ViT without rotary positions, CLS or registers, and reads −1 … 1",
        )
    x = model.codec.pixels(pixels)
    looks = received(tower.blocks[-1], tower.tokens(x, layer=len(tower.blocks) - 1))  # pyrefly: ignore
    return Patches(model.look(x)[0].flatten(1, 2), looks)


def fewer(model: Unified, seen: Patches, way: str, keep: int) -> Kept:
    """What a reduction leaves of pictures, or all of them."""
    grid = Grid(h=model.grid[0], w=model.grid[1])
    if way not in REDUCTIONS:
        raise ConfigError(f"no reduction is called {way!r}", f"known: {', '.join(REDUCTIONS)}")
    if not 1 <= keep <= grid.patches:
        raise ConfigError(f"{keep} of {grid.patches} patches", "keep one at least, and no more than there are")
    return REDUCTIONS[way](seen.features, seen.looks, grid, keep)


def lay_fewer(model: Unified, kept: Kept, words: Piece) -> Laid:
    """What is left of pictures, and words behind each, in one row, as `Unified.lay` lays the whole."""
    h, w = model.grid
    B, n, N = kept.places.shape
    whole = model.lay(model.shown(kept.tokens.new_zeros(B, h, w, kept.tokens.shape[-1])), words)  # what stands where
    stood = whole.positions[:, 1 : 1 + N].float()
    where = kept.places.float() @ (stood if stood.ndim == 3 else stood[..., None])  # (B, n, 1 or 3)
    tokens = model.read(kept.tokens) + kept.places @ model.place(h, w)  # (B, n, W)

    def fewer(row: Tensor, some: Tensor) -> Tensor:
        return torch.cat([row[:, :1], some, row[:, 1 + N :]], 1)

    def plain(row: Tensor | None) -> Tensor | None:  # all of a picture are alike
        return None if row is None else fewer(row, row[:, 1 : 1 + n])

    spans, segments = plain(whole.plan.spans), plain(whole.plan.segments)
    plan = replace(whole.plan, spans=spans, key_spans=spans, segments=segments, key_segments=segments, lead=1 + n)
    positions = fewer(whole.positions.float(), where.view(B, n, *stood.shape[2:]))
    return Laid(fewer(whole.x, tokens), positions, plan, (1 + n, 1 + n + words.x.shape[1]))


@torch.no_grad()
def answered(model: Unified, sheet: Sheet, words: Tokenizer, asked: Sequence[tuple[str, int]]) -> list[Tensor]:
    """Which questions of a sheet (Q,) are answered right, for each way and number of tokens that is asked with."""
    seen, L, found = patches(model, sheet.pixels), sheet.ids.shape[1], []
    for way, keep in asked:
        laid = lay_fewer(model, fewer(model, seen, way, keep), model.words(sheet.ids))
        found.append(right(model.decoder, model.hidden(laid)[:, -L:], sheet.targets, words.size))
    return found
