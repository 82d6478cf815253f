"""Sample scenes: sprites, colours and boxes as a function of (seed, index), for a whole batch at once.

Shapes: B scenes, O object slots, C concepts.
"""

import hashlib

import torch
from torch import Tensor

from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.atlas import find_sprites
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.counter_rng import random_bits, random_distinct, random_integers
from vitrail.data.scenes.placement import place_objects
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch, SpriteTable
from vitrail.data.scenes.thing_names import find_things
from vitrail.errors import ConfigError


def find_held_out_colour(name: str) -> int:
    """Return the colour (row of COLOURS) that this concept has only in the test split."""
    return 1 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % (len(COLOURS) - 1)


def sample_scenes(
    config: SceneConfig, table: SpriteTable, seed: int, index: Tensor, device: torch.device | str | None = None
) -> SceneBatch:
    """Sample the scenes of these indices. Loops over batches should create a `SceneSampler` once and call it."""
    return SceneSampler(config, table, index.device if device is None else device)(seed, index)


class SceneSampler:
    """Samples scenes for a config and a sprite table on a device. Call it with (seed, index)."""

    def __init__(self, config: SceneConfig, table: SpriteTable, device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        self.num_slots = config.slots or config.objects[1]
        num_different = (
            config.objects[1] if config.repeat_probability < 1 else min(config.max_groups, config.objects[1])
        )
        thing_rows = find_things(table, config.vendors, config.things)
        self.thing_sampler = _ConceptSampler(table, thing_rows, "things", num_different, self.device)
        self.word_sampler = None
        self.frame_sampler = None
        if config.word_probability:
            words = find_sprites(table, ["word"], config.fonts or None)
            self.word_sampler = _ConceptSampler(table, words, "words", config.objects[1], self.device)
        if config.inside_probability:
            self.frame_sampler = _ConceptSampler(table, find_sprites(table, ["frame"]), "frames", 1, self.device)
        self.concept, self.aspect = table.concept.to(self.device), table.aspect.to(self.device)
        self.held_out_colours = torch.tensor([find_held_out_colour(name) for name in table.names], device=self.device)
        kinds = [backgrounds.BACKGROUND_NAMES.index(name) for name in config.backgrounds]
        self.background_kinds = torch.tensor(kinds, device=self.device)

    def __call__(self, seed: int, index: Tensor) -> SceneBatch:
        config, index = self.config, index.to(self.device)
        slot = torch.arange(self.num_slots, device=self.device).expand(len(index), -1)  # (B, O)
        low, high = config.objects
        count = low + random_integers(seed, index, "count", 1, high=high - low + 1)  # (B, 1)
        filled = slot < count

        # A frame, and in the next slot the object inside it.
        paired = _sample_bool(seed, index, "inside", 1, probability=config.inside_probability) & (count > 1)
        at = random_integers(seed, index, "frame slot", 1, high=(count - 1).clamp(min=1))
        frame, inside = paired & (slot == at), paired & (slot == at + 1)
        word = _sample_bool(seed, index, "word", self.num_slots, probability=config.word_probability) & ~frame & ~inside

        # Slots of one group show one concept. In half of the scenes they also share sprite and colour.
        groups = 1 + random_integers(seed, index, "groups", 1, high=count.clamp(max=config.max_groups))
        repeated = _sample_bool(seed, index, "repeat", 1, probability=config.repeat_probability) & (slot >= groups)
        group = torch.where(repeated, random_integers(seed, index, "group", self.num_slots, high=groups), slot)
        alike = torch.where(_sample_bool(seed, index, "alike", 1, probability=0.5), group, slot)

        sprite = self.thing_sampler(seed, index, "thing", group, alike)
        size = _sample_sizes(seed, index, config.sizes, self.num_slots)
        for choice, here, sizes in (
            (self.word_sampler, word, config.word_sizes),
            (self.frame_sampler, frame, config.frame_sizes),
        ):
            if choice is not None:
                sprite = torch.where(here, choice(seed, index, f"{sizes}", slot, slot), sprite)
                size = torch.where(here, _sample_sizes(seed, index, sizes, self.num_slots), size)
        box = place_objects(config, seed, index, torch.where(filled, size, 0), self.aspect[sprite], inside)
        return SceneBatch(
            index=index,
            sprite=torch.where(filled, sprite, -1),
            colour=torch.where(filled, self._sample_colours(seed, index, sprite, alike), 0),
            box=box,
            frame_slot=torch.where(inside, slot - 1, -1),
            background=self._sample_backgrounds(seed, index),
        )

    def _sample_colours(self, seed: int, index: Tensor, sprite: Tensor, alike: Tensor) -> Tensor:
        """Sample rows of COLOURS (B, O); 0 means no tint."""
        avoided = self.held_out_colours[self.concept[sprite]]
        if self.config.combinations == "test":
            colour = avoided
        else:
            every = self.config.combinations == "all"
            colour = 1 + random_integers(seed, index, "colour", self.num_slots, high=len(COLOURS) - 2 + every).gather(
                1, alike
            )
            colour = colour if every else colour + (colour >= avoided)
        tinted = _sample_bool(seed, index, "tint", self.num_slots, probability=self.config.tint_probability).gather(
            1, alike
        )
        return torch.where(tinted, colour, 0)

    def _sample_backgrounds(self, seed: int, index: Tensor) -> Tensor:
        kind = self.background_kinds[random_integers(seed, index, "background kind", high=len(self.background_kinds))]
        which = random_bits(seed, index, "background")
        if self.config.num_backgrounds:
            which = which % self.config.num_backgrounds
        return which * len(backgrounds.BACKGROUND_KINDS) + kind


class _ConceptSampler:
    """Samples concepts of one kind, and one of their sprites."""

    def __init__(self, table: SpriteTable, rows: Tensor, kind: str, num_different: int, device: torch.device):
        concepts, concept = table.concept.cpu()[rows].unique(return_inverse=True)
        if len(concepts) < num_different:
            raise ConfigError(
                f"the atlas has {len(concepts)} different {kind}, and a scene needs up to {num_different}",
                f"give an atlas with more {kind}, request fewer objects, or set repeat_probability",
            )
        self.rows = rows[concept.argsort(stable=True)].to(device)  # the sprites of a concept are adjacent
        counts = concept.bincount()
        self.counts, self.start = counts.to(device), (counts.cumsum(0) - counts).to(device)

    def __call__(self, seed: int, index: Tensor, label: str, group: Tensor, alike: Tensor) -> Tensor:
        """Sample sprites (B, O): slots of one group share the concept, slots of one `alike` value the sprite."""
        slots, concepts = group.shape[1], len(self.counts)
        concept_draws = random_distinct(seed, index, f"{label} concept", min(slots, concepts), high=concepts)
        concept = concept_draws.gather(1, group.clamp(max=concept_draws.shape[1] - 1))
        sprite_bits = random_bits(seed, index, f"{label} sprite", slots).gather(1, alike)
        return self.rows[self.start[concept] + (sprite_bits * self.counts[concept] >> 32)]


def _sample_sizes(seed: int, index: Tensor, shares: tuple[float, float], slots: int) -> Tensor:
    """Sample sizes (B, O) in 1/GRID."""
    low, high = (round(share * GRID) for share in shares)
    return low + random_integers(seed, index, "size", slots, high=high - low + 1)


def _sample_bool(seed: int, index: Tensor, label: str, *shape: int, probability: float) -> Tensor:
    """Sample booleans (B, …) with the given probability."""
    return random_bits(seed, index, label, *shape) < round(probability * (1 << 32))
