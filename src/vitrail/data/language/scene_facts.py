"""Facts of scenes that can be stated without ambiguity, in integers, identical on every device.

Shapes: B scenes, O object slots, N candidates, R random draws.
"""

from functools import cached_property

import torch
from torch import Tensor

from vitrail.data.language.compiled_templates import CompiledTemplates, ObjectPhrase
from vitrail.data.language.english import ABOVE, INSIDE
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.scenes import counter_rng
from vitrail.data.scenes.scene import GRID, SceneBatch
from vitrail.errors import ConfigError

NUM_DRAWS = 8  # draws of an absent concept; if all fail, the question is invalid


class LanguageRandom:
    """Random numbers for one kind of text: a function of (seed, index, label), independent of other kinds."""

    def __init__(self, seed: int, index: Tensor, label: str, held_out: bool = False):
        self.seed, self.index, self.label, self.held_out = seed, index, label, held_out

    def bits(self, label: str, *shape: int) -> Tensor:
        return counter_rng.random_bits(self.seed, self.index, f"words/{self.label}/{label}", *shape)

    def integers(self, label: str, *shape: int, high: int | Tensor) -> Tensor:
        """Return integers (B, …) in [0, high)."""
        return self.bits(label, *shape) * high >> 32

    def coin_flip(self, label: str) -> Tensor:
        """Return 0 or 1 (B,)."""
        return self.integers(label, high=2)

    def choose_template(self, label: str, templates: CompiledTemplates) -> Tensor:
        """Choose templates (B,): for training, or held-out ones if there are any."""
        if self.held_out and templates.num_test:
            return templates.num_train + self.integers(label, high=templates.num_test)
        return self.integers(label, high=templates.num_train)

    def choose_one(self, label: str, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Choose one of the candidates (B, N). Return its index (B,), and whether there is any."""
        return self.choose_weighted(label, mask.long())

    def choose_pair(self, label: str, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose one of the pairs (B, O, O). Return its indices i and j (B,), and whether there is any."""
        place, some = self.choose_one(label, mask.flatten(1))
        return place // mask.shape[2], place % mask.shape[2], some

    def choose_weighted(self, label: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a candidate by integer weights (B, N). Return its index (B,), and whether any weight is positive."""
        ends = weight.cumsum(1)
        ticket = self.integers(label, high=ends[:, -1])
        return (ends <= ticket[:, None]).sum(1).clamp_(max=weight.shape[1] - 1), ends[:, -1] > 0

    def shuffle(self, label: str, mask: Tensor) -> Tensor:
        """Return all N indices (B, N) in random order, candidates of the mask (B, N) first."""
        key = self.bits(label, mask.shape[1]) + (~mask).long() * (1 << 32)
        return key.argsort(dim=1, stable=True)


class SceneFacts:
    """Facts of a batch of scenes. Properties are computed on first use."""

    def __init__(self, language: SceneLanguage, scenes: SceneBatch):
        if scenes.sprite.shape[1] > language.max_objects:
            raise ConfigError(
                f"the scenes have {scenes.sprite.shape[1]} object slots, and the language supports "
                f"{language.max_objects}",
                f"use SceneLanguage.build(table, max_objects={scenes.sprite.shape[1]})",
            )
        self.language, self.scenes = language, scenes
        self.is_filled = scenes.is_filled
        self.concept = language.concept[scenes.sprite.clamp(min=0)]  # (B, O)
        self.colour = scenes.colour
        self.is_word = self.is_filled & language.is_word[self.concept]
        self.is_thing = self.is_filled & ~self.is_word  # things and frames
        self.is_frame = self.is_filled & language.is_frame[scenes.sprite.clamp(min=0)]

    # ── object references ─────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _both_filled(self) -> Tensor:
        return self.is_filled[:, :, None] & self.is_filled[:, None, :]  # (B, O, O)

    @cached_property
    def same_concept(self) -> Tensor:
        """Whether both objects have the same concept (B, O, O)."""
        return self._both_filled & (self.concept[:, :, None] == self.concept[:, None, :])

    @cached_property
    def same_name(self) -> Tensor:
        """Whether both objects have the same concept, or one name can describe both (B, O, O)."""
        return self._both_filled & self.language.is_same_name(self.concept[:, :, None], self.concept[:, None, :])

    @cached_property
    def concept_count(self) -> Tensor:
        """Number of objects with this concept (B, O)."""
        return self.same_concept.sum(2)

    @cached_property
    def is_countable(self) -> Tensor:
        """First thing of each concept that can be counted: no other concept's name can describe it (B, O)."""
        first = self.same_concept.int().argmax(2) == torch.arange(self.is_filled.shape[1], device=self.is_filled.device)
        return self.is_thing & first & (self.same_name.sum(2) == self.concept_count)

    @cached_property
    def has_unique_name(self) -> Tensor:
        """Whether the name alone identifies the object, as in “the dog” (B, O)."""
        return self.is_filled & (self.same_name.sum(2) == 1)

    @cached_property
    def is_describable(self) -> Tensor:
        """Whether the name, or colour and name, identify the object (B, O).

        A colour identifies only if all objects of the name are tinted, because an untinted apple may be red.
        """
        return self.has_unique_name | self._identified_by_colour(self.same_name)

    @cached_property
    def describable_pairs(self) -> Tensor:
        """Whether both objects are describable, including an object with itself (B, O, O)."""
        return self.is_describable[:, :, None] & self.is_describable[:, None, :]

    def _identified_by_colour(self, rivals: Tensor) -> Tensor:
        untinted = (rivals & (self.colour == 0)[:, None, :]).any(2)
        twins = (rivals & (self.colour[:, :, None] == self.colour[:, None, :])).sum(2)
        return self.is_filled & ~untinted & (twins == 1)

    def object_phrase(self, slot: Tensor) -> ObjectPhrase:
        """Return the phrase that identifies the object in a slot (B,)."""
        colour = torch.where(self.has_unique_name, 0, self.colour)
        return ObjectPhrase(gather_slot(colour, slot), gather_slot(self.concept, slot))

    @cached_property
    def is_readable_word(self) -> Tensor:
        """Whether a word is identified by “the word” or “the red word” (B, O)."""
        words = self.is_word[:, :, None] & self.is_word[:, None, :]
        return self.is_word & ((words.sum(2) == 1) | self._identified_by_colour(words))

    def sample_absent(self, rng: LanguageRandom, pool: str, slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sample concepts (B, R), and return whether each is absent from the scene and not a duplicate.

        pool  “random”: any thing; “popular”: things by frequency; “kin”: things of the category of the object in
              `slot`; “word”: words
        """
        pools = self.language.uniform_pools if pool == "random" else self.language.frequency_pools
        bits = rng.bits(f"absent/{pool}", NUM_DRAWS)
        first, num_tickets = (pools.thing_tickets, pools.word_tickets) if pool == "word" else (0, pools.thing_tickets)
        if pool == "kin":
            assert slot is not None
            near = gather_slot(self.concept, slot)[:, None]
            first, num_tickets = pools.category_start[near], pools.category_tickets[near]
        concepts = pools.concept_at(first + (bits * num_tickets >> 32))
        is_present = (
            self.language.is_same_name(concepts[:, :, None], self.concept[:, None, :]) & self.is_filled[:, None, :]
        ).any(2)
        earlier = torch.ones(NUM_DRAWS, NUM_DRAWS, dtype=torch.bool, device=concepts.device).tril(-1)
        is_duplicate = (self.language.is_same_name(concepts[:, :, None], concepts[:, None, :]) & earlier).any(2)
        return concepts, ~is_present & ~is_duplicate & (torch.zeros_like(bits) < num_tickets)

    # ── spatial relations ─────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def relation(self) -> Tensor:
        """Position of i relative to j (B, O, O): left, right, above or below; −1 if ambiguous.

        The distance of the centres must be at least 1/16 of the image, half the mean extent, and twice the distance
        along the other axis.
        """
        # (B, O, O, 2) in 1/(2·GRID)
        gap = self.scenes.doubled_centre[:, :, None] - self.scenes.doubled_centre[:, None, :]
        extent = self.scenes.box[..., 2:] - self.scenes.box[..., :2]
        extent = extent[:, :, None] + extent[:, None, :]
        is_far = (gap.abs() >= GRID // 8) & (2 * gap.abs() >= extent) & (gap.abs() >= 2 * gap.abs().flip(-1))
        side = (gap > 0).long()
        code = torch.where(is_far[..., 0], side[..., 0], torch.where(is_far[..., 1], ABOVE + side[..., 1], -1))
        nested = self.inside_frame | self.inside_frame.transpose(1, 2)
        are_separate = self._both_filled & ~torch.eye(gap.shape[1], dtype=torch.bool, device=gap.device) & ~nested
        return torch.where(are_separate, code, -1)

    @cached_property
    def inside_frame(self) -> Tensor:
        """Whether i is inside frame j (B, O, O)."""
        slots = torch.arange(self.is_filled.shape[1], device=self.is_filled.device)
        return self._both_filled & (self.scenes.frame_slot[:, :, None] == slots)

    @cached_property
    def is_disjoint(self) -> Tensor:
        """Whether the boxes do not intersect (B, O, O)."""
        low, high = self.scenes.box[..., :2], self.scenes.box[..., 2:]
        return self._both_filled & ((low[:, :, None] >= high[:, None]) | (low[:, None] >= high[:, :, None])).any(-1)

    @cached_property
    def unique_relation(self) -> Tensor:
        """Relation of i to j, including inside, if no other object has this relation to j; otherwise −1 (B, O, O)."""
        centre = self.scenes.doubled_centre
        # (B, O, O, 2) i is before j on an axis
        before = (centre[:, :, None] < centre[:, None]) & self._both_filled[..., None]
        sides = torch.stack([before, before.transpose(1, 2)], -1).flatten(-2)  # left, right, above, below
        alone = sides.sum(1, keepdim=True) == 1  # (B, 1, O, 4) only one object on this side of j
        alone = alone.expand_as(sides).gather(3, self.relation.clamp(min=0)[..., None])[..., 0]
        lone = torch.where(alone, self.relation, -1)
        slots = self.is_filled.shape[1]
        others = ~torch.eye(slots, dtype=torch.bool, device=centre.device) & self._both_filled & ~self.is_disjoint
        # No other object touches j.
        return torch.where(self.inside_frame & (others.sum(1, keepdim=True) == 1), INSIDE, lone)

    @cached_property
    def image_ninth(self) -> Tensor:
        """Ninth of the image that contains the centre, in raster order; −1 within 1/32 of a border (B, O)."""
        centre = self.scenes.doubled_centre * 3  # borders at 2·GRID and 4·GRID
        sure = ((centre - 2 * GRID).abs() >= 3 * GRID // 16) & ((centre - 4 * GRID).abs() >= 3 * GRID // 16)
        cell = (centre >= 2 * GRID).long() + (centre >= 4 * GRID)
        return torch.where(self.is_filled & sure.all(-1), cell[..., 1] * 3 + cell[..., 0], -1)

    @cached_property
    def is_bigger(self) -> Tensor:
        """Whether the box of i has at least 1.5 times the area of the box of j (B, O, O)."""
        side = self.scenes.box[..., 2:] - self.scenes.box[..., :2]
        area = side.prod(-1)
        return self._both_filled & (2 * area[:, :, None] >= 3 * area[:, None, :])


def gather_slot(values: Tensor, slot: Tensor) -> Tensor:
    """Select one slot per scene: (B, O, …)[b, slot[b]] → (B, …)."""
    return values.gather(1, slot.view(-1, *[1] * (values.ndim - 1)).expand(-1, 1, *values.shape[2:]))[:, 0]
