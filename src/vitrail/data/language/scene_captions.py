"""Captions of all objects of a scene, and pairs of a true and a false caption.

Shapes: B scenes, O object slots, G groups of a list, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.language.compiled_templates import ObjectGroups, ObjectPhrase
from vitrail.data.language.english import INSIDE, MAX_COUNT
from vitrail.data.language.qa_batch import QADraft, render_qa
from vitrail.data.language.scene_facts import NUM_DRAWS, LanguageRandom, SceneFacts, gather_slot
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.language.templates import SWAP_KINDS
from vitrail.data.scenes.scene import COLOURS, SceneBatch

MAX_RELATIONS, MAX_PLACES = 3, 2  # maximum sentences of each sort in a long caption
HALLUCINATION_KINDS = ("object", "colour", "number")


def list_objects(facts: SceneFacts, rng: LanguageRandom) -> tuple[ObjectGroups, Tensor]:
    """List all objects of a scene in random order, grouped by concept, or by concept and colour.

    Also returns the first slot of each group (B, G).
    """
    return group_objects(facts, rng, facts.colour * rng.coin_flip("colours")[:, None])


def group_objects(facts: SceneFacts, rng: LanguageRandom, stated_colours: Tensor) -> tuple[ObjectGroups, Tensor]:
    """Group the objects by concept and stated colour (B, O), which is 0 if the caption omits it."""
    alike = facts.same_concept & (stated_colours[:, :, None] == stated_colours[:, None, :])
    slots = torch.arange(stated_colours.shape[1], device=stated_colours.device)
    first = facts.is_filled & (alike.int().argmax(2) == slots)
    order = rng.shuffle("order", first)
    wide = (0, facts.language.max_objects - stated_colours.shape[1])
    columns = (stated_colours, facts.concept, alike.sum(2) * first)
    return ObjectGroups(*(pad(column.gather(1, order), wide) for column in columns)), pad(order, wide)


def draft_short_caption(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    group, _ = list_objects(facts, rng)
    some = facts.is_filled.any(1)
    return QADraft({}, (group.count > 0).sum(1), some, {"list": group})


def draft_long_caption(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    draft = draft_short_caption(facts, rng)
    pairs = render_relations(facts, rng, choose_relations(facts, rng, facts.describable_pairs))
    return draft._replace(
        answer_suffix=torch.cat([*pairs, *_render_positions(facts, rng), *_render_background(facts, rng)], 1)
    )


class ObjectRelation(NamedTuple):
    """Relation of x to y, for one pair of slots per scene."""

    x: Tensor  # (B,)
    y: Tensor  # (B,)
    relation: Tensor  # (B,) row of the relations
    is_stated: Tensor  # (B,) whether the caption states it


def choose_relations(facts: SceneFacts, rng: LanguageRandom, pairs: Tensor) -> list[ObjectRelation]:
    """Choose one to three relations per scene, of different pairs among the allowed ones (B, O, O)."""
    slots = facts.is_filled.shape[1]
    once = torch.ones(slots, slots, dtype=torch.bool, device=facts.is_filled.device).triu(1)
    code = torch.where(facts.inside_frame, INSIDE, facts.relation)
    mask = (pairs & (code >= 0) & (once | facts.inside_frame)).flatten(1)
    order = rng.shuffle("pairs", mask)
    limit = torch.minimum(mask.sum(1), 1 + rng.integers("relations", high=MAX_RELATIONS))
    turn = rng.integers("turn", MAX_RELATIONS, high=2)
    found = []
    for n in range(min(MAX_RELATIONS, mask.shape[1])):
        pair = order[:, n]
        i, j, r = pair // slots, pair % slots, gather_slot(code.flatten(1), pair).clamp(min=0)
        is_reversed = (turn[:, n] > 0) & (r != INSIDE)
        found.append(
            ObjectRelation(torch.where(is_reversed, j, i), torch.where(is_reversed, i, j), r ^ is_reversed, limit > n)
        )
    return found


def render_relations(
    facts: SceneFacts, rng: LanguageRandom, object_relations: Sequence[ObjectRelation]
) -> list[Tensor]:
    """Render one sentence per relation."""
    frames = facts.language.sentence_templates["related"]
    rows = []
    for n, relation in enumerate(object_relations):
        slots = {"x": facts.object_phrase(relation.x), "y": facts.object_phrase(relation.y), "r": relation.relation}
        rows.append(frames.fill(rng.choose_template(f"related {n}", frames), **slots) * relation.is_stated[:, None])
    return rows


def _render_positions(facts: SceneFacts, draws: LanguageRandom) -> list[Tensor]:
    frames = facts.language.sentence_templates["placed"]
    mask = facts.is_describable & (facts.image_ninth >= 0)
    order = draws.shuffle("places", mask)
    limit = torch.minimum(mask.sum(1), draws.integers("placed", high=MAX_PLACES + 1))
    rows = []
    for n in range(min(MAX_PLACES, mask.shape[1])):
        slot = order[:, n]
        filled = frames.fill(
            draws.choose_template(f"placed {n}", frames),
            x=facts.object_phrase(slot),
            p=gather_slot(facts.image_ninth, slot).clamp(min=0),
        )
        rows.append(filled * (limit > n)[:, None])
    return rows


def _render_background(facts: SceneFacts, draws: LanguageRandom) -> list[Tensor]:
    frames = facts.language.sentence_templates.get("behind")
    if frames is None:
        return []
    return [
        frames.fill(draws.choose_template("behind", frames), b=facts.scenes.background % facts.language.num_backgrounds)
    ]


@dataclass(frozen=True, eq=False)
class CaptionPair:
    """A true and a false caption of each scene."""

    question: Tensor  # (B, P) caption request; empty for swaps
    true_caption: Tensor  # (B, P)
    false_caption: Tensor  # (B, P)
    kind: Tensor  # (B,) row of INVENTED or of SWAPS
    valid: Tensor  # (B,)


def generate_preference_pairs(
    language: SceneLanguage, scenes: SceneBatch, seed: int, *, held_out: bool = False
) -> CaptionPair:
    """Generate a true caption (chosen) and the same one with a wrong object, colour or number (rejected)."""
    facts, draws = SceneFacts(language, scenes), LanguageRandom(seed, scenes.index, "preference", held_out)
    group, slots = list_objects(facts, draws)
    n = group.count.shape[1]
    is_present = group.count > 0
    candidates, absent = facts.sample_absent(draws, "popular")
    hue = 1 + draws.integers("hue", NUM_DRAWS, high=len(COLOURS) - 1)
    # A colour is wrong for a group if no object of its name has it, and none of them is untinted.
    namesakes = facts.same_name.gather(
        1, slots.clamp(max=facts.is_filled.shape[1] - 1)[..., None].expand(-1, -1, facts.is_filled.shape[1])
    )
    has_hue = (facts.colour[:, None, None, :] == hue[:, None, :, None]) | (facts.colour == 0)[:, None, None, :]
    false_hue = ~(namesakes[:, :, None, :] & has_hue).any(3)  # (B, G, R)
    colourable = is_present & (group.colour > 0) & false_hue.any(2)
    allowed = torch.stack([is_present.any(1) & absent.any(1), colourable.any(1), is_present.any(1)], 1)
    sort, valid = draws.choose_one("sort", allowed)
    g, _ = draws.choose_one("group", torch.where((sort == 1)[:, None], colourable, is_present))
    is_changed = (torch.arange(n, device=g.device) == g[:, None]) & valid[:, None]
    new_hue = gather_slot(hue, gather_slot(false_hue, g).int().argmax(1))
    old = gather_slot(group.count, g)
    new = old + torch.where((draws.coin_flip("fewer") > 0) & (old > 1) | (old == MAX_COUNT), -1, 1)

    def changed(column: Tensor, kind: str, value: Tensor) -> Tensor:
        return torch.where(is_changed & (sort == HALLUCINATION_KINDS.index(kind))[:, None], value[:, None], column)

    false = ObjectGroups(
        changed(group.colour, "colour", new_hue),
        changed(group.concept, "object", gather_slot(candidates, absent.int().argmax(1))),
        changed(group.count, "number", new),
    )
    correct, false_caption = (
        render_qa(language, draws, "caption_short", QADraft({}, sort, valid, {"list": g})) for g in (group, false)
    )
    return CaptionPair(correct.question, correct.answer, false_caption.answer, sort, valid)


class _Swap(NamedTuple):
    true: dict[str, Tensor | ObjectPhrase]
    false: dict[str, Tensor | ObjectPhrase]
    valid: Tensor


def generate_swap_pairs(
    language: SceneLanguage, scenes: SceneBatch, seed: int, kind: str, *, held_out: bool = False
) -> CaptionPair:
    """Generate two captions with the same words, of which only one is true. `kind` is one of SWAP_KINDS."""
    facts, draws = SceneFacts(language, scenes), LanguageRandom(seed, scenes.index, f"swap/{kind}", held_out)
    true, false, valid = _SWAPS[kind](facts, draws)
    frames = language.sentence_templates[f"swap_{kind}"]
    template = draws.choose_template("template", frames)
    correct, false_caption = (frames.fill(template, **slots) * valid[:, None] for slots in (true, false))
    which = torch.full_like(template, list(SWAP_KINDS).index(kind))
    return CaptionPair(torch.zeros_like(correct), correct, false_caption, which, valid)


def _swap_colours(facts: SceneFacts, draws: LanguageRandom) -> _Swap:
    allowed = facts.has_unique_name & (facts.colour > 0)
    differ = facts.colour[:, :, None] != facts.colour[:, None, :]
    i, j, valid = draws.choose_pair("pair", allowed[:, :, None] & allowed[:, None, :] & differ)
    (a, b), (x, y) = ((gather_slot(facts.colour, s) for s in (i, j)), (gather_slot(facts.concept, s) for s in (i, j)))
    return _Swap(
        {"x": ObjectPhrase(a, x), "y": ObjectPhrase(b, y)}, {"x": ObjectPhrase(b, x), "y": ObjectPhrase(a, y)}, valid
    )


def _swap_relations(facts: SceneFacts, draws: LanguageRandom) -> _Swap:
    i, j, valid = draws.choose_pair("pair", facts.describable_pairs & (facts.relation >= 0))
    x = facts.object_phrase(i)
    y = facts.object_phrase(j)
    r = gather_slot(gather_slot(facts.relation, i), j).clamp(min=0)
    return _Swap({"x": x, "y": y, "r": r}, {"x": y, "y": x, "r": r}, valid)


def _swap_sizes(facts: SceneFacts, draws: LanguageRandom) -> _Swap:
    i, j, valid = draws.choose_pair("pair", facts.describable_pairs & facts.is_bigger)
    x, y = facts.object_phrase(i), facts.object_phrase(j)
    return _Swap({"x": x, "y": y}, {"x": y, "y": x}, valid)


def _swap_numbers(facts: SceneFacts, draws: LanguageRandom) -> _Swap:
    allowed = facts.is_countable & (facts.concept_count > 1)
    differ = facts.concept_count[:, :, None] != facts.concept_count[:, None, :]
    i, j, valid = draws.choose_pair("pair", allowed[:, :, None] & allowed[:, None, :] & differ)
    none = torch.zeros_like(i)
    x, y = (ObjectPhrase(none, gather_slot(facts.concept, s)) for s in (i, j))
    m, n = gather_slot(facts.concept_count, i), gather_slot(facts.concept_count, j)
    return _Swap({"x": x, "y": y, "m": m, "n": n}, {"x": x, "y": y, "m": n, "n": m}, valid)


_SWAPS = {"colour": _swap_colours, "relation": _swap_relations, "size": _swap_sizes, "number": _swap_numbers}
