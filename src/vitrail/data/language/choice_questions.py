"""Drafts of multiple-choice questions with four options, and of questions without an answer.

Shapes: B scenes, R random draws.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.data.language import open_questions
from vitrail.data.language.compiled_templates import ObjectPhrase
from vitrail.data.language.qa_batch import QADraft, TemplateValues
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts, gather_slot

QADrafter = Callable[[SceneFacts, LanguageRandom], QADraft]


def make_choice_drafter(drafter: QADrafter, labels: str) -> QADrafter:
    """Make a multiple-choice drafter of an open question with a closed set of answers."""
    value = {"colour": "c", "counting": "n", "position": "p"}[labels]

    def draft(facts: SceneFacts, draws: LanguageRandom) -> QADraft:
        original = drafter(facts, draws)
        right = original.answer_values[value]
        assert isinstance(right, Tensor)
        is_answer = facts.language.keep_thresholds[labels] > 0  # (labels,)
        # Colour 0 is "none".
        is_answer = is_answer & (torch.arange(len(is_answer), device=is_answer.device) >= (labels == "colour"))
        others = is_answer & (torch.arange(len(is_answer), device=is_answer.device) != right[:, None])
        wrong = draws.shuffle("wrong", others)[:, :3]
        return _draft_letters(draws, original.question_values, right, wrong, original.valid & (others.sum(1) >= 3))

    return draft


def draft_object_choice(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    """Draft a choice of objects.

    The wrong options are all of the right one's category, or all sampled by frequency, so that none stands out.
    """
    slot, valid_slot = rng.choose_one("present", facts.is_thing)
    similar, fits_similar = facts.sample_absent(rng, "kin", slot)
    popular, fits_popular = facts.sample_absent(rng, "popular")
    use_similar = rng.coin_flip("close") > 0
    concepts, fits = (
        torch.where(use_similar[:, None], a, b) for a, b in ((similar, popular), (fits_similar, fits_popular))
    )
    letter, values, valid = _assign_letters(rng, gather_slot(facts.concept, slot), concepts, fits, valid_slot)
    return QADraft(
        {name: ObjectPhrase(torch.zeros_like(slot), value) for name, value in values.items()},
        letter,
        valid,
        {"l": letter},
    )


def draft_reading_choice(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    original = open_questions.draft_reading(facts, rng)
    concepts, fits = facts.sample_absent(rng, "word")
    letter, values, valid = _assign_letters(rng, original.label, concepts, fits, original.valid)
    return QADraft({**original.question_values, **values}, letter, valid, {"l": letter})


def _assign_letters(
    draws: LanguageRandom, right: Tensor, candidates: Tensor, fits: Tensor, valid: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Assign the right value (B,) and the first three fitting ones of (B, R) to the letters A to D."""
    wrong = candidates.gather(1, (~fits).int().argsort(dim=1, stable=True)[:, :3])
    letter = draws.integers("letter", high=4)
    places = torch.arange(4, device=letter.device)
    others = wrong.gather(1, (places - (places > letter[:, None]).long()).clamp(max=2))
    options = torch.where(places == letter[:, None], right[:, None], others)  # (B, 4)
    return letter, dict(zip("abcd", options.unbind(1), strict=True)), valid & (fits.sum(1) >= 3)


def _draft_letters(
    draws: LanguageRandom, slots: TemplateValues, right: Tensor, wrong: Tensor, valid: Tensor
) -> QADraft:
    letter, values, valid = _assign_letters(draws, right, wrong, torch.ones_like(wrong, dtype=torch.bool), valid)
    return QADraft({**slots, **values}, letter, valid, {"l": letter})


def make_unanswerable_drafter(drafter: QADrafter) -> QADrafter:
    """Make a drafter of which half of the questions are about absent objects.

    Label 0 means absent. The other labels are those of the original question plus 1.
    """

    def draft(facts: SceneFacts, draws: LanguageRandom) -> QADraft:
        original = drafter(facts, draws)
        absent, has_absent = _sample_absent_phrase(facts, draws)
        is_present = draws.coin_flip("there")
        x = original.question_values["x"]
        assert isinstance(x, ObjectPhrase)
        label = is_present * (1 + original.label)
        return QADraft(
            {"x": _choose_phrase(is_present, x, absent)},
            label,
            original.valid & _is_plain(facts, x) & has_absent,
            {"x": absent, **original.answer_values},
            answer_template=is_present,
        )

    return draft


def draft_unanswerable_relation(facts: SceneFacts, rng: LanguageRandom) -> QADraft:
    """Draft a relation of two things; in half of the questions, the first or the second thing is absent.

    Label 0 means absent, 1 no and 2 yes.
    """
    original = open_questions.draft_relation(facts, rng)
    absent, has_absent = _sample_absent_phrase(facts, rng)
    is_present, is_second = rng.coin_flip("there"), rng.coin_flip("second")
    x, y = original.question_values["x"], original.question_values["y"]
    assert isinstance(x, ObjectPhrase)
    assert isinstance(y, ObjectPhrase)
    label = is_present * (1 + original.label)
    return QADraft(
        {
            "x": _choose_phrase(is_present | is_second, x, absent),
            "y": _choose_phrase(is_present | 1 - is_second, y, absent),
            "r": original.question_values["r"],
        },
        label,
        original.valid & _is_plain(facts, x) & _is_plain(facts, y) & has_absent,
        {"z": absent},
        answer_template=label,
    )


def _sample_absent_phrase(facts: SceneFacts, draws: LanguageRandom) -> tuple[ObjectPhrase, Tensor]:
    """Sample the name of a thing that is not in the scene, and return whether there is one (B,)."""
    candidates, fits = facts.sample_absent(draws, "popular")
    absent = gather_slot(candidates, fits.int().argmax(1))
    return ObjectPhrase(torch.zeros_like(absent), absent), fits.any(1)


def _choose_phrase(first: Tensor, a: ObjectPhrase, b: ObjectPhrase) -> ObjectPhrase:
    """Return phrase `a` where `first` (B,) is positive, else `b`."""
    return ObjectPhrase(*(torch.where(first > 0, left, right) for left, right in zip(a, b, strict=True)))


def _is_plain(facts: SceneFacts, phrase: ObjectPhrase) -> Tensor:
    """Whether a phrase is a thing's name without a colour, as the phrases of absent things are (B,)."""
    return (phrase.colour == 0) & ~facts.language.is_word[phrase.concept]
