"""Questions with four options, of which one is right, and questions that have no answer.

B scenes, R draws.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.data.words import questions
from vitrail.data.words.facts import Draws, Facts, at
from vitrail.data.words.frames import Thing
from vitrail.data.words.said import Draft, Slots

Kind = Callable[[Facts, Draws], Draft]


def among(kind: Kind, labels: str) -> Kind:
    """An open question of a closed set of answers, with three others of them as options."""
    value = {"colour": "c", "counting": "n", "position": "p"}[labels]

    def draft(facts: Facts, draws: Draws) -> Draft:
        real = kind(facts, draws)
        right = real.answer[value]
        assert isinstance(right, Tensor)
        asked = facts.words.keep[labels] > 0  # (labels,)
        asked = asked & (torch.arange(len(asked), device=asked.device) >= (labels == "colour"))  # 0 is no colour
        others = asked & (torch.arange(len(asked), device=asked.device) != right[:, None])
        wrong = draws.shuffled("wrong", others)[:, :3]
        return _lettered(draws, real.slots, right, wrong, real.valid & (others.sum(1) >= 3))

    return draft


def object_(facts: Facts, draws: Draws) -> Draft:
    """The wrong ones are all of the right one's category, or else all drawn as in the data: an odd one would tell."""
    slot, some = draws.one("present", facts.thing)
    near, fits_near = facts.absent(draws, "kin", slot)
    far, fits_far = facts.absent(draws, "popular")
    close = draws.coin("close") > 0
    drawn, fits = (torch.where(close[:, None], a, b) for a, b in ((near, far), (fits_near, fits_far)))
    letter, values, valid = _letters(draws, at(facts.concept, slot), drawn, fits, some)
    return Draft(
        {name: Thing(torch.zeros_like(slot), value) for name, value in values.items()}, letter, valid, {"l": letter}
    )


def reading(facts: Facts, draws: Draws) -> Draft:
    real = questions.reading(facts, draws)
    drawn, fits = facts.absent(draws, "word")
    letter, values, valid = _letters(draws, real.label, drawn, fits, real.valid)
    return Draft({**real.slots, **values}, letter, valid, {"l": letter})


def _letters(
    draws: Draws, right: Tensor, drawn: Tensor, fits: Tensor, valid: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The right value (B,) and the first three that fit of those drawn (B, R), at letters A to D"""
    wrong = drawn.gather(1, (~fits).int().argsort(dim=1, stable=True)[:, :3])
    letter = draws.pick("letter", of=4)
    places = torch.arange(4, device=letter.device)
    others = wrong.gather(1, (places - (places > letter[:, None]).long()).clamp(max=2))
    options = torch.where(places == letter[:, None], right[:, None], others)  # (B, 4)
    return letter, dict(zip("abcd", options.unbind(1), strict=True)), valid & (fits.sum(1) >= 3)


def _lettered(draws: Draws, slots: Slots, right: Tensor, wrong: Tensor, valid: Tensor) -> Draft:
    letter, values, valid = _letters(draws, right, wrong, torch.ones_like(wrong, dtype=torch.bool), valid)
    return Draft({**slots, **values}, letter, valid, {"l": letter})


def unanswerable(kind: Kind) -> Kind:
    """Half of them ask of something absent, and the answer says so; the other half are the same questions of something
    that is there. Label 0 is that it is not, and all others are one more than what they would be."""

    def draft(facts: Facts, draws: Draws) -> Draft:
        real = kind(facts, draws)
        drawn, fits = facts.absent(draws, "popular")
        missing = at(drawn, fits.int().argmax(1))
        there = draws.coin("there")
        x = real.slots["x"]
        assert isinstance(x, Thing)
        absent = Thing(torch.zeros_like(missing), missing)
        asked = Thing(*(torch.where(there > 0, a, b) for a, b in zip(x, absent, strict=True)))
        plain = real.valid & (x.colour == 0) & ~facts.words.is_word[x.concept]  # what is absent has neither, too
        label = there * (1 + real.label)
        return Draft({"x": asked}, label, plain & fits.any(1), {"x": absent, **real.answer}, says=there)

    return draft
