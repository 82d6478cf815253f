"""Drafts of open questions: one function per kind, for a batch of scenes.

A question that a scene does not support is invalid. For yes/no questions, the answer is sampled first, and only scenes
that support both answers are valid, so that the question alone carries no information.

Shapes: B scenes, O object slots, N candidates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.data.language.compiled_templates import ObjectPhrase
from vitrail.data.language.qa_batch import QADraft, TemplateValues
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts, gather_slot
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.scenes.scene import GRID


def _draft_yes_no(slots: TemplateValues, yes: Tensor, valid: Tensor) -> QADraft:
    return QADraft(slots, yes, valid, answer_template=yes)


def make_existence_drafter(pool: str) -> Callable[[SceneFacts, LanguageRandom], QADraft]:
    def draft(facts: SceneFacts, draws: LanguageRandom) -> QADraft:
        slot, some = draws.choose_one("present", facts.is_thing)
        candidates, fits = facts.sample_absent(draws, pool, slot)
        first = fits.int().argmax(1)
        yes = draws.coin_flip("yes")
        concept = torch.where(yes > 0, gather_slot(facts.concept, slot), gather_slot(candidates, first))
        return _draft_yes_no({"x": ObjectPhrase(torch.zeros_like(concept), concept)}, yes, some & fits.any(1))

    return draft


def draft_counting(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    labels, mask, concepts = list_countable(facts, rng)
    which, label, valid = choose_candidate(facts.language, rng, "counting", labels, mask)
    concept = gather_slot(concepts, which)
    return QADraft({"x": ObjectPhrase(torch.zeros_like(concept), concept)}, label, valid, {"n": label})


def list_countable(facts: SceneFacts, rng: LanguageRandom) -> tuple[Tensor, Tensor, Tensor]:
    """Return what can be counted: labels, mask and concepts (B, O + 1). The last one is an absent concept."""
    candidates, fits = facts.sample_absent(rng, "popular")
    first = fits.int().argmax(1)
    labels = torch.cat([facts.concept_count, torch.zeros_like(first)[:, None]], 1)
    mask = torch.cat([facts.is_countable, fits.any(1, keepdim=True)], 1)
    return labels, mask, torch.cat([facts.concept, gather_slot(candidates, first)[:, None]], 1)


def draft_colour(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    slot, label, valid = choose_candidate(
        facts.language, rng, "colour", facts.colour, facts.has_unique_name & (facts.colour > 0)
    )
    return QADraft({"x": facts.object_phrase(slot)}, label, valid, {"c": label})


def draft_position(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    slot, label, valid = choose_candidate(
        facts.language, rng, "position", facts.image_ninth, facts.is_describable & (facts.image_ninth >= 0)
    )
    return QADraft({"x": facts.object_phrase(slot)}, label, valid, {"p": label})


def choose_candidate(
    language: SceneLanguage, rng: LanguageRandom, kind: str, labels: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose one of the candidates (B, N) with weights that balance the answers (see `answer_balance`).

    Returns its index, its label, and whether the question is valid.
    """
    place, some = rng.choose_weighted("chosen", language.answer_weights[kind][labels.clamp(min=0)] * mask)
    label = gather_slot(labels, place).clamp(min=0)
    return place, label, some & (rng.bits("kept") < language.keep_thresholds[kind][label])


def draft_relation(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    i, j, valid = rng.choose_pair("pair", facts.describable_pairs & (facts.relation >= 0))
    yes = rng.coin_flip("yes")
    # Opposite relations differ in the last bit.
    r = gather_slot(gather_slot(facts.relation, i), j).clamp(min=0) ^ (1 - yes)
    return _draft_yes_no({"x": facts.object_phrase(i), "y": facts.object_phrase(j), "r": r}, yes, valid)


def draft_inside(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    pairs = facts.describable_pairs & ~facts.is_frame[:, :, None] & facts.is_frame[:, None, :]
    i, j, some = rng.choose_pair("in", pairs & facts.inside_frame)
    k, l, others = rng.choose_pair("out", pairs & facts.is_disjoint)
    yes = rng.coin_flip("yes")
    i, j = torch.where(yes > 0, i, k), torch.where(yes > 0, j, l)
    return _draft_yes_no({"x": facts.object_phrase(i), "y": facts.object_phrase(j)}, yes, some & others)


def draft_what(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    i, j, valid = rng.choose_pair("pair", facts.is_describable[:, None, :] & (facts.unique_relation >= 0))
    label = gather_slot(facts.concept, i)
    r = gather_slot(gather_slot(facts.unique_relation, i), j).clamp(min=0)
    return QADraft(
        {"y": facts.object_phrase(j), "r": r}, label, valid, {"x": ObjectPhrase(torch.zeros_like(label), label)}
    )


def _draft_comparison(
    draws: LanguageRandom, i: Tensor, j: Tensor, valid: Tensor, word: str, thing: Callable[[Tensor], ObjectPhrase]
) -> QADraft:
    """Draft a comparison of i and j, with random comparative and order, so that the answer is a fair coin."""
    yes, less = draws.coin_flip("yes"), draws.coin_flip("word")
    is_reversed = yes == less
    x, y = torch.where(is_reversed, j, i), torch.where(is_reversed, i, j)
    return _draft_yes_no({"x": thing(x), "y": thing(y), word: less}, yes, valid)


def draft_size(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    pair = rng.choose_pair("pair", facts.describable_pairs & facts.is_bigger)
    return _draft_comparison(rng, *pair, "s", facts.object_phrase)


def draft_amount(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    more = facts.concept_count[:, :, None] > facts.concept_count[:, None, :]
    pair = rng.choose_pair("pair", facts.is_countable[:, :, None] & facts.is_countable[:, None, :] & more)

    def thing(slot: Tensor) -> ObjectPhrase:
        return ObjectPhrase(torch.zeros_like(slot), gather_slot(facts.concept, slot))

    return _draft_comparison(rng, *pair, "q", thing)


def draft_which(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    i, j, valid = rng.choose_pair("pair", facts.describable_pairs & facts.is_bigger)
    less, label = rng.coin_flip("word"), rng.coin_flip("order")
    right, wrong = torch.where(less > 0, j, i), torch.where(less > 0, i, j)
    x, y = torch.where(label > 0, wrong, right), torch.where(label > 0, right, wrong)
    slots: TemplateValues = {"x": facts.object_phrase(x), "y": facts.object_phrase(y), "s": less}
    return QADraft(slots, label, valid, {"z": facts.object_phrase(right)})


def draft_reading(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    slot, valid = rng.choose_one("word", facts.is_readable_word)
    label = gather_slot(facts.concept, slot)
    return QADraft({"x": _word_phrase(facts, slot)}, label, valid, {"w": label})


def _word_phrase(facts: SceneFacts, slot: Tensor) -> ObjectPhrase:
    alone = facts.is_word.sum(1) == 1
    named_colour = torch.where(alone, 0, gather_slot(facts.colour, slot))
    return ObjectPhrase(named_colour, torch.full_like(slot, facts.language.num_concepts))


def draft_grounding(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    slot, valid = rng.choose_one("thing", facts.is_describable)
    box = gather_slot(facts.scenes.box, slot)
    written = (box * (facts.language.box_grid - 1) + GRID // 2) // GRID  # rounded to nearest
    sides: TemplateValues = dict(zip(("left", "top", "right", "bottom"), written.unbind(1), strict=True))
    return QADraft({"x": facts.object_phrase(slot)}, gather_slot(facts.concept, slot), valid, sides, box=box)
