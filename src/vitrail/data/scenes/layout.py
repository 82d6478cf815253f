"""What is in a scene: sprites, colours and places as a function of (seed, index), a whole batch at once.

B scenes, O object slots, C concepts.
"""

import hashlib

import torch
from torch import Tensor

from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.chance import below, bits, distinct, happens
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.places import place
from vitrail.data.scenes.scene import COLOURS, GRID, Scenes, SpriteTable
from vitrail.data.scenes.sprites import rows_where
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
        things = rows_where(table, ["thing"], config.vendors or None, config.names or None)
        self.things = _Choice(table, things, "things", differ, self.device)
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
        of_scene = bits(seed, index, "scene", 8, 1).unbind(1)  # (B, 1) each; few large draws are far faster than many
        of_slots = bits(seed, index, "slots", 8, self.slots).unbind(1)  # (B, O) each
        slot = torch.arange(self.slots, device=self.device).expand(len(index), -1)  # (B, O)
        low, high = config.objects
        count = low + below(high - low + 1, of_scene[0])  # (B, 1)
        filled = slot < count

        # A frame, and in the next slot what lies inside it.
        paired = happens(config.inside, of_scene[1]) & (count > 1)
        at = below((count - 1).clamp(min=1), of_scene[2])
        frame, inside = paired & (slot == at), paired & (slot == at + 1)
        word = happens(config.word, of_slots[0]) & ~frame & ~inside

        # Slots of one group show one concept, and in half of the scenes look alike.
        groups = 1 + below(count.clamp(max=config.groups), of_scene[3])
        repeated = happens(config.repeat, of_scene[4]) & (slot >= groups)
        group = torch.where(repeated, below(groups, of_slots[1]), slot)
        alike = torch.where(happens(0.5, of_scene[5]), group, slot)

        which = of_slots[2].gather(1, alike)
        sprite = self.things(seed, index, "thing", group, which)
        size = _sizes(config.sizes, of_slots[3])
        for kind, choice, here, sizes in (
            ("word", self.words, word, config.word_sizes),
            ("frame", self.frames, frame, config.frame_sizes),
        ):
            if choice is not None:
                sprite = torch.where(here, choice(seed, index, kind, slot, of_slots[2]), sprite)
                size = torch.where(here, _sizes(sizes, of_slots[3]), size)
        tinted = happens(config.tint, of_slots[4].gather(1, alike)) & filled
        kind = self.backgrounds[below(len(self.backgrounds), of_scene[6][:, 0])]
        return Scenes(
            index=index,
            sprite=torch.where(filled, sprite, -1),
            colour=torch.where(tinted, self._colours(sprite, of_slots[5].gather(1, alike)), 0),
            box=place(config, seed, index, torch.where(filled, size, 0), self.aspect[sprite], inside),
            inside=torch.where(inside, slot - 1, -1),
            background=of_scene[7][:, 0] * len(backgrounds.KINDS) + kind,
        )

    def _colours(self, sprite: Tensor, drawn: Tensor) -> Tensor:
        """(B, O) rows of COLOURS"""
        avoided = self.held_out[self.concept[sprite]]
        if self.config.combinations == "test":
            return avoided
        if self.config.combinations == "all":
            return 1 + below(len(COLOURS) - 1, drawn)
        colour = 1 + below(len(COLOURS) - 2, drawn)
        return colour + (colour >= avoided)


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

    def __call__(self, seed: int, index: Tensor, kind: str, group: Tensor, drawn: Tensor) -> Tensor:
        """(B, O) sprites: slots of one group have one concept, and one sprite where the same was drawn"""
        concepts = len(self.counts)
        several = distinct(concepts, bits(seed, index, kind, min(group.shape[1], concepts)))
        concept = several.gather(1, group.clamp(max=several.shape[1] - 1))
        return self.rows[self.start[concept] + below(self.counts[concept], drawn)]


def _sizes(shares: tuple[float, float], drawn: Tensor) -> Tensor:
    """(B, O) in 1/GRID"""
    least, most = (round(share * GRID) for share in shares)
    return least + below(most - least + 1, drawn)
