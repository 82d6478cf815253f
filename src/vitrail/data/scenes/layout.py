"""What is in a scene: sprites, colours and places as a function of (seed, index), a whole batch at once.

B scenes, O object slots, C concepts.
"""

import hashlib

import torch
from torch import Tensor

from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.chance import bits, distinct, pick
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.places import place
from vitrail.data.scenes.scene import COLOURS, GRID, Scenes, SpriteTable
from vitrail.data.scenes.sprites import rows_where
from vitrail.data.scenes.things import things
from vitrail.errors import ConfigError


def held_out(name: str) -> int:
    """The one colour (a row of COLOURS) that the concept of this name wears in the test part only."""
    return 1 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % (len(COLOURS) - 1)


def layout(
    config: SceneConfig, table: SpriteTable, seed: int, index: Tensor, device: torch.device | str | None = None
) -> Scenes:
    """Scenes of these indices. A loop over batches makes one `Layout` and calls that."""
    return Layout(config, table, index.device if device is None else device)(seed, index)


class Layout:
    """A config and a table made ready on a device; called with (seed, index) it gives scenes."""

    def __init__(self, config: SceneConfig, table: SpriteTable, device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        self.slots = config.slots or config.objects[1]
        differ = config.objects[1] if config.repeat < 1 else min(config.groups, config.objects[1])
        shown = things(table, config.vendors, config.names)
        self.things = _Choice(table, shown, "things", differ, self.device)
        self.words = self.frames = None
        if config.word:
            words = rows_where(table, ["word"], config.fonts or None)
            self.words = _Choice(table, words, "words", config.objects[1], self.device)
        if config.inside:
            self.frames = _Choice(table, rows_where(table, ["frame"]), "frames", 1, self.device)
        self.concept, self.aspect = table.concept.to(self.device), table.aspect.to(self.device)
        self.held_out = torch.tensor([held_out(name) for name in table.names], device=self.device)
        kinds = [backgrounds.NAMES.index(name) for name in config.backgrounds]
        self.backgrounds = torch.tensor(kinds, device=self.device)

    def __call__(self, seed: int, index: Tensor) -> Scenes:
        config, index = self.config, index.to(self.device)
        slot = torch.arange(self.slots, device=self.device).expand(len(index), -1)  # (B, O)
        low, high = config.objects
        count = low + pick(seed, index, "count", 1, of=high - low + 1)  # (B, 1)
        filled = slot < count

        # A frame, and in the next slot what lies inside it.
        paired = _chance(seed, index, "inside", 1, of=config.inside) & (count > 1)
        at = pick(seed, index, "frame slot", 1, of=(count - 1).clamp(min=1))
        frame, inside = paired & (slot == at), paired & (slot == at + 1)
        word = _chance(seed, index, "word", self.slots, of=config.word) & ~frame & ~inside

        # Slots of one group show one concept, and in half of the scenes look alike.
        groups = 1 + pick(seed, index, "groups", 1, of=count.clamp(max=config.groups))
        repeated = _chance(seed, index, "repeat", 1, of=config.repeat) & (slot >= groups)
        group = torch.where(repeated, pick(seed, index, "group", self.slots, of=groups), slot)
        alike = torch.where(_chance(seed, index, "alike", 1, of=0.5), group, slot)

        sprite = self.things(seed, index, "thing", group, alike)
        size = _sizes(seed, index, config.sizes, self.slots)
        for choice, here, sizes in ((self.words, word, config.word_sizes), (self.frames, frame, config.frame_sizes)):
            if choice is not None:
                sprite = torch.where(here, choice(seed, index, f"{sizes}", slot, slot), sprite)
                size = torch.where(here, _sizes(seed, index, sizes, self.slots), size)
        box = place(config, seed, index, torch.where(filled, size, 0), self.aspect[sprite], inside)
        return Scenes(
            index=index,
            sprite=torch.where(filled, sprite, -1),
            colour=torch.where(filled, self._colours(seed, index, sprite, alike), 0),
            box=box,
            inside=torch.where(inside, slot - 1, -1),
            background=self._backgrounds(seed, index),
        )

    def _colours(self, seed: int, index: Tensor, sprite: Tensor, alike: Tensor) -> Tensor:
        """(B, O) rows of COLOURS; 0 is none"""
        avoided = self.held_out[self.concept[sprite]]
        if self.config.combinations == "test":
            colour = avoided
        else:
            every = self.config.combinations == "all"
            colour = 1 + pick(seed, index, "colour", self.slots, of=len(COLOURS) - 2 + every).gather(1, alike)
            colour = colour if every else colour + (colour >= avoided)
        tinted = _chance(seed, index, "tint", self.slots, of=self.config.tint).gather(1, alike)
        return torch.where(tinted, colour, 0)

    def _backgrounds(self, seed: int, index: Tensor) -> Tensor:
        kind = self.backgrounds[pick(seed, index, "background kind", of=len(self.backgrounds))]
        which = bits(seed, index, "background")
        if self.config.grounds:
            which = which % self.config.grounds
        return which * len(backgrounds.KINDS) + kind


class _Choice:
    """The concepts of one kind that may appear, with their sprites."""

    def __init__(self, table: SpriteTable, rows: Tensor, what: str, differ: int, device: torch.device):
        concepts, concept = table.concept.cpu()[rows].unique(return_inverse=True)
        if len(concepts) < differ:
            raise ConfigError(
                f"{len(concepts)} {what} to choose from, and up to {differ} that differ in one scene",
                f"give an atlas with more {what}, ask for fewer objects, or let concepts repeat",
            )
        self.rows = rows[concept.argsort(stable=True)].to(device)  # the sprites of a concept stand together
        counts = concept.bincount()
        self.counts, self.start = counts.to(device), (counts.cumsum(0) - counts).to(device)

    def __call__(self, seed: int, index: Tensor, what: str, group: Tensor, alike: Tensor) -> Tensor:
        """(B, O) sprites: slots of one group have one concept, those that are alike one sprite"""
        slots, concepts = group.shape[1], len(self.counts)
        several = distinct(seed, index, f"{what} concept", min(slots, concepts), of=concepts)
        concept = several.gather(1, group.clamp(max=several.shape[1] - 1))
        which = bits(seed, index, f"{what} sprite", slots).gather(1, alike)
        return self.rows[self.start[concept] + (which * self.counts[concept] >> 32)]


def _sizes(seed: int, index: Tensor, shares: tuple[float, float], slots: int) -> Tensor:
    """(B, O) in 1/GRID"""
    least, most = (round(share * GRID) for share in shares)
    return least + pick(seed, index, "size", slots, of=most - least + 1)


def _chance(seed: int, index: Tensor, what: str, *shape: int, of: float) -> Tensor:
    """(B, …) true as often as the share `of` says"""
    return bits(seed, index, what, *shape) < round(of * (1 << 32))
