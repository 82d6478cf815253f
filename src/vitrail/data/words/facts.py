"""What is true in a scene and can be said without doubt. Everything here is whole numbers, the same on every device.

B scenes, O object slots, N candidates, R tries.
"""

from functools import cached_property

import torch
from torch import Tensor

from vitrail.data.scenes import chance
from vitrail.data.scenes.scene import GRID, Scenes
from vitrail.data.words.english import ABOVE, INSIDE
from vitrail.data.words.frames import Frames, Thing
from vitrail.data.words.words import Words
from vitrail.errors import ConfigError

TRIES = 8  # draws for something absent; a scene where all fail is not asked


class Draws:
    """Random numbers of one kind of words: a function of (seed, index), apart from every other kind's."""

    def __init__(self, seed: int, index: Tensor, name: str, held_out: bool = False):
        self.seed, self.index, self.name, self.held_out = seed, index, name, held_out

    def bits(self, what: str, *shape: int) -> Tensor:
        return chance.bits(self.seed, self.index, f"words/{self.name}/{what}", *shape)

    def pick(self, what: str, *shape: int, of: int | Tensor) -> Tensor:
        """(B, …) integers in [0, of)"""
        return self.bits(what, *shape) * of >> 32

    def coin(self, what: str) -> Tensor:
        """(B,) 0 or 1"""
        return self.pick(what, of=2)

    def template(self, what: str, frames: Frames) -> Tensor:
        """(B,) templates: of those for training, or of those held out, where some are"""
        if self.held_out and frames.test:
            return frames.train + self.pick(what, of=frames.test)
        return self.pick(what, of=frames.train)

    def one(self, what: str, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N) candidates → one of them (B,), and whether there is any"""
        return self.weighed(what, mask.long())

    def pair(self, what: str, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, O, O) pairs → i and j of one of them (B,), and whether there is any"""
        place, some = self.one(what, mask.flatten(1))
        return place // mask.shape[2], place % mask.shape[2], some

    def weighed(self, what: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N) whole weights → a candidate drawn by weight (B,), and whether any weighs something"""
        ends = weight.cumsum(1)
        ticket = self.pick(what, of=ends[:, -1])
        return (ends <= ticket[:, None]).sum(1).clamp_(max=weight.shape[1] - 1), ends[:, -1] > 0

    def shuffled(self, what: str, mask: Tensor) -> Tensor:
        """(B, N) candidates → all N places (B, N) in a random order, the candidates first"""
        key = self.bits(what, mask.shape[1]) + (~mask).long() * (1 << 32)
        return key.argsort(dim=1, stable=True)


class Facts:
    """A batch of scenes as words see it. Fields are computed when first asked for."""

    def __init__(self, words: Words, scenes: Scenes):
        if scenes.sprite.shape[1] > words.objects:
            raise ConfigError(
                f"scenes with {scenes.sprite.shape[1]} object slots, words for {words.objects}",
                f"Words.of(table, objects={scenes.sprite.shape[1]})",
            )
        self.words, self.scenes = words, scenes
        self.filled = scenes.filled
        self.concept = words.concept[scenes.sprite.clamp(min=0)]  # (B, O)
        self.colour = scenes.colour
        self.word = self.filled & words.is_word[self.concept]
        self.thing = self.filled & ~self.word  # things and frames
        self.frame = self.filled & words.is_frame[scenes.sprite.clamp(min=0)]

    # ── which thing is meant ──────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _both(self) -> Tensor:
        return self.filled[:, :, None] & self.filled[:, None, :]  # (B, O, O)

    @cached_property
    def same(self) -> Tensor:
        """(B, O, O) of one concept"""
        return self._both & (self.concept[:, :, None] == self.concept[:, None, :])

    @cached_property
    def alike(self) -> Tensor:
        """(B, O, O) of one concept, or of concepts that one name may mean"""
        return self._both & self.words.same(self.concept[:, :, None], self.concept[:, None, :])

    @cached_property
    def number(self) -> Tensor:
        """(B, O) how many there are of this concept"""
        return self.same.sum(2)

    @cached_property
    def clear(self) -> Tensor:
        """(B, O) the first thing of its concept, where no other concept's name may mean it: fit to be counted"""
        first = self.same.int().argmax(2) == torch.arange(self.filled.shape[1], device=self.filled.device)
        return self.thing & first & (self.alike.sum(2) == self.number)

    @cached_property
    def plain(self) -> Tensor:
        """(B, O) the only one of its name: “the dog” is enough"""
        return self.filled & (self.alike.sum(2) == 1)

    @cached_property
    def named(self) -> Tensor:
        """(B, O) has a description that fits nothing else: its name, or its colour and name. Among things of one name
        the colour tells only if each of them is tinted, for an untinted apple may well be red."""
        return self.plain | self._told_by_colour(self.alike)

    @cached_property
    def pairs(self) -> Tensor:
        """(B, O, O) both have a description; also a thing with itself"""
        return self.named[:, :, None] & self.named[:, None, :]

    def _told_by_colour(self, rivals: Tensor) -> Tensor:
        untinted = (rivals & (self.colour == 0)[:, None, :]).any(2)
        twins = (rivals & (self.colour[:, :, None] == self.colour[:, None, :])).sum(2)
        return self.filled & ~untinted & (twins == 1)

    def thing_at(self, slot: Tensor) -> Thing:
        """The description of the object in a slot (B,)"""
        colour = torch.where(self.plain, 0, self.colour)
        return Thing(at(colour, slot), at(self.concept, slot))

    @cached_property
    def readable(self) -> Tensor:
        """(B, O) words that “the word”, or “the red word”, tells from the other words"""
        words = self.word[:, :, None] & self.word[:, None, :]
        return self.word & ((words.sum(2) == 1) | self._told_by_colour(words))

    def absent(self, draws: Draws, pool: str, slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Concepts (B, R) that may be drawn, and whether each is new there and absent: neither in the scene under any
        name, nor drawn before. `pool`: any thing (“random”), as often as in the data (“popular”), of the category of
        the object in `slot` (“kin”), or a written “word”."""
        pools = self.words.even if pool == "random" else self.words.popular
        bits = draws.bits(f"absent/{pool}", TRIES)
        first, many = (pools.things, pools.words) if pool == "word" else (0, pools.things)
        if pool == "kin":
            assert slot is not None
            near = at(self.concept, slot)[:, None]
            first, many = pools.first[near], pools.many[near]
        drawn = pools.at(first + (bits * many >> 32))
        there = (self.words.same(drawn[:, :, None], self.concept[:, None, :]) & self.filled[:, None, :]).any(2)
        earlier = torch.ones(TRIES, TRIES, dtype=torch.bool, device=drawn.device).tril(-1)
        again = (self.words.same(drawn[:, :, None], drawn[:, None, :]) & earlier).any(2)
        return drawn, ~there & ~again & (torch.zeros_like(bits) < many)

    # ── where things are ──────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def relation(self) -> Tensor:
        """(B, O, O) how i lies to j: left, right, above or below, and −1 where that is open to doubt. The centres must
        be apart by 1/16 of the picture and by half the mean extent, and twice as far as along the other axis."""
        gap = self.scenes.centre[:, :, None] - self.scenes.centre[:, None, :]  # (B, O, O, 2) in 1/(2·GRID)
        extent = self.scenes.box[..., 2:] - self.scenes.box[..., :2]
        extent = extent[:, :, None] + extent[:, None, :]
        far = (gap.abs() >= GRID // 8) & (2 * gap.abs() >= extent) & (gap.abs() >= 2 * gap.abs().flip(-1))
        side = (gap > 0).long()
        code = torch.where(far[..., 0], side[..., 0], torch.where(far[..., 1], ABOVE + side[..., 1], -1))
        nested = self.within | self.within.transpose(1, 2)
        apart = self._both & ~torch.eye(gap.shape[1], dtype=torch.bool, device=gap.device) & ~nested
        return torch.where(apart, code, -1)

    @cached_property
    def within(self) -> Tensor:
        """(B, O, O) i lies inside frame j"""
        slots = torch.arange(self.filled.shape[1], device=self.filled.device)
        return self._both & (self.scenes.inside[:, :, None] == slots)

    @cached_property
    def disjoint(self) -> Tensor:
        """(B, O, O) the boxes share no point"""
        low, high = self.scenes.box[..., :2], self.scenes.box[..., 2:]
        return self._both & ((low[:, :, None] >= high[:, None]) | (low[:, None] >= high[:, :, None])).any(-1)

    @cached_property
    def lone(self) -> Tensor:
        """(B, O, O) how i lies to j (with inside), where it is the only one that does; else −1"""
        centre = self.scenes.centre
        before = (centre[:, :, None] < centre[:, None]) & self._both[..., None]  # (B, O, O, 2) i before j on an axis
        sides = torch.stack([before, before.transpose(1, 2)], -1).flatten(-2)  # left, right, above, below
        alone = sides.sum(1, keepdim=True) == 1  # (B, 1, O, 4) the only one on this side of j
        alone = alone.expand_as(sides).gather(3, self.relation.clamp(min=0)[..., None])[..., 0]
        lone = torch.where(alone, self.relation, -1)
        slots = self.filled.shape[1]
        others = ~torch.eye(slots, dtype=torch.bool, device=centre.device) & self._both & ~self.disjoint
        return torch.where(self.within & (others.sum(1, keepdim=True) == 1), INSIDE, lone)  # nothing else touches j

    @cached_property
    def third(self) -> Tensor:
        """(B, O) which ninth of the picture the centre lies in, row by row; −1 within 1/32 of a line between two"""
        centre = self.scenes.centre * 3  # lines at 2·GRID and 4·GRID
        sure = ((centre - 2 * GRID).abs() >= 3 * GRID // 16) & ((centre - 4 * GRID).abs() >= 3 * GRID // 16)
        cell = (centre >= 2 * GRID).long() + (centre >= 4 * GRID)
        return torch.where(self.filled & sure.all(-1), cell[..., 1] * 3 + cell[..., 0], -1)

    @cached_property
    def bigger(self) -> Tensor:
        """(B, O, O) the box of i has at least half as much again of the area of j's"""
        side = self.scenes.box[..., 2:] - self.scenes.box[..., :2]
        area = side.prod(-1)
        return self._both & (2 * area[:, :, None] >= 3 * area[:, None, :])


def at(x: Tensor, slot: Tensor) -> Tensor:
    """(B, O, …)[b, slot[b]] → (B, …)"""
    return x.gather(1, slot.view(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:]))[:, 0]
