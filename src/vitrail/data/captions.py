"""Pictures with captions, from named pictures and from scenes alike, made on the device where their numbers lie.

B samples, H, W pixels, P pieces of a caption
"""

from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.views import ViewsConfig
from vitrail.data.words import Words, ask, swap
from vitrail.data.words.ask import longest
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.nn.replay import Replayed

SWAPS = ("colour", "relation", "number", "size")


class Captioned(NamedTuple):
    """`false` says nearly the same as `true` and is not so; without one its row is empty."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    true: Tensor  # (B, P) rows of pieces
    false: Tensor | None = None  # (B, P)


class Captions(Protocol):
    """What a source of captioned pictures gives."""

    @property
    def pieces(self) -> Pieces: ...

    @property
    def views(self) -> ViewsConfig: ...

    @property
    def concepts(self) -> list[str] | None:
        """What each picture shows, or None where every picture is one of its kind."""
        ...

    def pair(self, index: Tensor, *, vary: bool = True, swapped: bool = False) -> Captioned:
        """Pictures, each with a caption; `vary` draws it, `swapped` adds false ones where the source knows any."""
        ...

    def again(self, index: Tensor, *, vary: bool = True) -> Tensor:
        """(B, P) another caption of the same pictures"""
        ...

    def longest(self, tokens: TokenTable) -> int:
        """Tokens that must fit a text tower."""
        ...


class NamedCaptions:
    """A picture's captions are made of its names."""

    def __init__(self, source: NamedSource):
        self.source, self.pieces, self.views, self.concepts = (
            source,
            source.pieces,
            source.config.views,
            source.concepts,
        )

    def pair(self, index: Tensor, *, vary: bool = True, swapped: bool = False) -> Captioned:
        return Captioned(self.source.pixels(index), self.source.texts(index, vary=vary))

    def again(self, index: Tensor, *, vary: bool = True) -> Tensor:
        return self.source.texts(index, vary=vary)

    def longest(self, tokens: TokenTable) -> int:
        """The longest name: keywords and other languages may be cut."""
        return self.source.longest(tokens)


class SceneCaptions:
    """A scene's caption says what is in it; a swapped pair says who has which colour, place, number or size."""

    concepts = None

    def __init__(self, source: SceneSource):
        self.source, self.views = source, source.config.views
        self._words = {torch.device("cpu"): self.words}
        self._replayed: dict[tuple[str, bool, bool], Replayed[Any]] = {}

    @cached_property
    def words(self) -> Words:
        most = self.source.config.asked().objects[1]
        return Words.of(self.source.atlas.table, objects=most, sprites=self.source.rows)

    @property
    def pieces(self) -> Pieces:
        return self.words.pieces

    def pair(self, index: Tensor, *, vary: bool = True, swapped: bool = False) -> Captioned:
        make = partial(self._pair, vary=vary, swapped=swapped)
        return self._replayed.setdefault(("pair", vary, swapped), Replayed(make))(index)

    def again(self, index: Tensor, *, vary: bool = True) -> Tensor:
        return self._replayed.setdefault(("again", vary, False), Replayed(partial(self._again, vary=vary)))(index)

    def _pair(self, index: Tensor, *, vary: bool, swapped: bool) -> Captioned:
        drawn, seed, words = self.source.draw(index), self.source.config.seed, self._on(index.device)
        true = ask(words, drawn.scenes, seed, "caption_short", held_out=not vary).answer
        if not swapped:
            return Captioned(drawn.pixels, true)
        pairs = [swap(words, drawn.scenes, seed, sort, held_out=not vary) for sort in SWAPS]
        able = torch.stack([pair.valid for pair in pairs], 1)  # (B, sorts)
        which = (torch.rand(able.shape, device=index.device) * able).argmax(1)  # one of those that can be had
        wide = max(true.shape[1], *(pair.true.shape[1] for pair in pairs))
        told, untold = (
            torch.stack([pad(getattr(pair, side), (0, wide - getattr(pair, side).shape[1])) for pair in pairs], 1)
            for side in ("true", "false")
        )  # (B, sorts, P)
        rows = torch.arange(len(index), device=index.device)
        some = able.any(1, keepdim=True)
        true = torch.where(some, told[rows, which], pad(true, (0, wide - true.shape[1])))
        return Captioned(drawn.pixels, true, torch.where(some, untold[rows, which], 0))

    def _again(self, index: Tensor, *, vary: bool) -> Tensor:
        words, config = self._on(index.device), self.source.config
        return ask(words, self.source.scenes(index), config.seed + 1, "caption_short", held_out=not vary).answer

    def longest(self, tokens: TokenTable) -> int:
        swaps = (self.words.loose[f"swap_{sort}"].longest(tokens) for sort in SWAPS)
        return max(longest(self.words, tokens, ["caption_short"])[1], *swaps)

    def _on(self, device: torch.device) -> Words:
        if device not in self._words:
            self._words[device] = self.words.to(device)
        return self._words[device]


def captions(source: NamedSource | SceneSource) -> Captions:
    return NamedCaptions(source) if isinstance(source, NamedSource) else SceneCaptions(source)
