"""What a question asks and what its answer is, one function a kind, a batch of scenes at a time. What a scene does not
admit is not valid, never invented.

Where the answer is yes or no it is drawn first, and a scene counts only if it admits both, so that the question alone
says nothing.

B scenes, O object slots, N candidates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.data.scenes.scene import GRID
from vitrail.data.words.facts import Draws, Facts, at
from vitrail.data.words.frames import Thing
from vitrail.data.words.said import Draft, Slots
from vitrail.data.words.words import Words


def _yes(slots: Slots, yes: Tensor, valid: Tensor) -> Draft:
    return Draft(slots, yes, valid, says=yes)


def existence(pool: str) -> Callable[[Facts, Draws], Draft]:
    def draft(facts: Facts, draws: Draws) -> Draft:
        slot, some = draws.one("present", facts.thing)
        drawn, fits = facts.absent(draws, pool, slot)
        first = fits.int().argmax(1)
        yes = draws.coin("yes")
        concept = torch.where(yes > 0, at(facts.concept, slot), at(drawn, first))
        return _yes({"x": Thing(torch.zeros_like(concept), concept)}, yes, some & fits.any(1))

    return draft


def counting(facts: Facts, draws: Draws) -> Draft:
    labels, mask, concepts = counts(facts, draws)
    which, label, valid = chosen(facts.words, draws, "counting", labels, mask)
    concept = at(concepts, which)
    return Draft({"x": Thing(torch.zeros_like(concept), concept)}, label, valid, {"n": label})


def counts(facts: Facts, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """What may be counted: labels, mask and concepts (B, O + 1); the last one is something absent."""
    drawn, fits = facts.absent(draws, "popular")
    first = fits.int().argmax(1)
    labels = torch.cat([facts.number, torch.zeros_like(first)[:, None]], 1)
    mask = torch.cat([facts.clear, fits.any(1, keepdim=True)], 1)
    return labels, mask, torch.cat([facts.concept, at(drawn, first)[:, None]], 1)


def colour(facts: Facts, draws: Draws) -> Draft:
    slot, label, valid = chosen(facts.words, draws, "colour", facts.colour, facts.plain & (facts.colour > 0))
    return Draft({"x": facts.thing_at(slot)}, label, valid, {"c": label})


def position(facts: Facts, draws: Draws) -> Draft:
    slot, label, valid = chosen(facts.words, draws, "position", facts.third, facts.named & (facts.third >= 0))
    return Draft({"x": facts.thing_at(slot)}, label, valid, {"p": label})


def chosen(words: Words, draws: Draws, kind: str, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One of the candidates (B, N), weighed so that the answers come out even (see `balance`): its place, its label and
    whether it is to be asked."""
    place, some = draws.weighed("chosen", words.weight[kind][labels.clamp(min=0)] * mask)
    label = at(labels, place).clamp(min=0)
    return place, label, some & (draws.bits("kept") < words.keep[kind][label])


def relation(facts: Facts, draws: Draws) -> Draft:
    i, j, valid = draws.pair("pair", facts.pairs & (facts.relation >= 0))
    yes = draws.coin("yes")
    r = at(at(facts.relation, i), j).clamp(min=0) ^ (1 - yes)  # left and right, above and below differ in the last bit
    return _yes({"x": facts.thing_at(i), "y": facts.thing_at(j), "r": r}, yes, valid)


def inside(facts: Facts, draws: Draws) -> Draft:
    pairs = facts.pairs & ~facts.frame[:, :, None] & facts.frame[:, None, :]
    i, j, some = draws.pair("in", pairs & facts.within)
    k, l, others = draws.pair("out", pairs & facts.disjoint)
    yes = draws.coin("yes")
    i, j = torch.where(yes > 0, i, k), torch.where(yes > 0, j, l)
    return _yes({"x": facts.thing_at(i), "y": facts.thing_at(j)}, yes, some & others)


def what(facts: Facts, draws: Draws) -> Draft:
    i, j, valid = draws.pair("pair", facts.named[:, None, :] & (facts.lone >= 0))
    label = at(facts.concept, i)
    r = at(at(facts.lone, i), j).clamp(min=0)
    return Draft({"y": facts.thing_at(j), "r": r}, label, valid, {"x": Thing(torch.zeros_like(label), label)})


def _compared(draws: Draws, i: Tensor, j: Tensor, valid: Tensor, word: str, thing: Callable[[Tensor], Thing]) -> Draft:
    """Is i more than j in some way? Asked with either word and in either order, so that the coin decides."""
    yes, less = draws.coin("yes"), draws.coin("word")
    turned = yes == less
    x, y = torch.where(turned, j, i), torch.where(turned, i, j)
    return _yes({"x": thing(x), "y": thing(y), word: less}, yes, valid)


def size(facts: Facts, draws: Draws) -> Draft:
    pair = draws.pair("pair", facts.pairs & facts.bigger)
    return _compared(draws, *pair, "s", facts.thing_at)


def amount(facts: Facts, draws: Draws) -> Draft:
    more = facts.number[:, :, None] > facts.number[:, None, :]
    pair = draws.pair("pair", facts.clear[:, :, None] & facts.clear[:, None, :] & more)

    def thing(slot: Tensor) -> Thing:
        return Thing(torch.zeros_like(slot), at(facts.concept, slot))

    return _compared(draws, *pair, "q", thing)


def which(facts: Facts, draws: Draws) -> Draft:
    i, j, valid = draws.pair("pair", facts.pairs & facts.bigger)
    less, label = draws.coin("word"), draws.coin("order")
    right, wrong = torch.where(less > 0, j, i), torch.where(less > 0, i, j)
    x, y = torch.where(label > 0, wrong, right), torch.where(label > 0, right, wrong)
    slots: Slots = {"x": facts.thing_at(x), "y": facts.thing_at(y), "s": less}
    return Draft(slots, label, valid, {"z": facts.thing_at(right)})


def reading(facts: Facts, draws: Draws) -> Draft:
    slot, valid = draws.one("word", facts.readable)
    label = at(facts.concept, slot)
    return Draft({"x": _the_word(facts, slot)}, label, valid, {"w": label})


def _the_word(facts: Facts, slot: Tensor) -> Thing:
    alone = facts.word.sum(1) == 1
    said = torch.where(alone, 0, at(facts.colour, slot))
    return Thing(said, torch.full_like(slot, facts.words.concepts))


def grounding(facts: Facts, draws: Draws) -> Draft:
    slot, valid = draws.one("thing", facts.named)
    box = at(facts.scenes.box, slot)
    written = (box * (facts.words.grid - 1) + GRID // 2) // GRID  # to the nearest
    sides: Slots = dict(zip(("left", "top", "right", "bottom"), written.unbind(1), strict=True))
    return Draft({"x": facts.thing_at(slot)}, at(facts.concept, slot), valid, sides, box=box)
