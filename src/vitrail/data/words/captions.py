"""Captions that tell all objects, pairs of captions of which one is false, and how they differ.

B scenes, O object slots, G groups of a list, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.scenes.scene import COLOURS, Scenes
from vitrail.data.words.english import INSIDE, MOST
from vitrail.data.words.facts import TRIES, Draws, Facts, at
from vitrail.data.words.frames import Group, Thing
from vitrail.data.words.said import Draft, said
from vitrail.data.words.templates import SWAPS
from vitrail.data.words.words import Words

RELATIONS, PLACES = 3, 2  # sentences of either sort that a long caption has at most
INVENTED = ("object", "colour", "number")


def listed(facts: Facts, draws: Draws) -> tuple[Group, Tensor]:
    """All that a scene holds, in a random order: by concept, or by concept and colour. Also the slot of the first of
    each group (B, G)."""
    return grouped(facts, draws, facts.colour * draws.coin("colours")[:, None])


def grouped(facts: Facts, draws: Draws, told: Tensor) -> tuple[Group, Tensor]:
    """The same with the colours that are told (B, O), 0 where none is."""
    alike = facts.same & (told[:, :, None] == told[:, None, :])
    slots = torch.arange(told.shape[1], device=told.device)
    first = facts.filled & (alike.int().argmax(2) == slots)
    order = draws.shuffled("order", first)
    wide = (0, facts.words.objects - told.shape[1])
    columns = (told, facts.concept, alike.sum(2) * first)
    return Group(*(pad(column.gather(1, order), wide) for column in columns)), pad(order, wide)


def short(facts: Facts, draws: Draws) -> Draft:
    group, _ = listed(facts, draws)
    some = facts.filled.any(1)
    return Draft({}, (group.number > 0).sum(1), some, {"list": group})


def long(facts: Facts, draws: Draws) -> Draft:
    draft = short(facts, draws)
    pairs = related(facts, draws, relations(facts, draws, facts.pairs))
    return draft._replace(more=torch.cat([*pairs, *_placed(facts, draws), *_behind(facts, draws)], 1))


class Relation(NamedTuple):
    """How x lies to y, of one pair of slots a scene."""

    x: Tensor  # (B,)
    y: Tensor  # (B,)
    r: Tensor  # (B,) row of the relations
    there: Tensor  # (B,) whether it is told


def relations(facts: Facts, draws: Draws, pairs: Tensor) -> list[Relation]:
    """One to three relations a scene, each of another pair of those (B, O, O) that may be told."""
    slots = facts.filled.shape[1]
    once = torch.ones(slots, slots, dtype=torch.bool, device=facts.filled.device).triu(1)
    code = torch.where(facts.within, INSIDE, facts.relation)
    mask = (pairs & (code >= 0) & (once | facts.within)).flatten(1)
    order = draws.shuffled("pairs", mask)
    many = torch.minimum(mask.sum(1), 1 + draws.pick("relations", of=RELATIONS))
    turn = draws.pick("turn", RELATIONS, of=2)
    found = []
    for n in range(min(RELATIONS, mask.shape[1])):
        pair = order[:, n]
        i, j, r = pair // slots, pair % slots, at(code.flatten(1), pair).clamp(min=0)
        turned = (turn[:, n] > 0) & (r != INSIDE)
        found.append(Relation(torch.where(turned, j, i), torch.where(turned, i, j), r ^ turned, many > n))
    return found


def related(facts: Facts, draws: Draws, told: Sequence[Relation]) -> list[Tensor]:
    """A sentence on each."""
    frames = facts.words.loose["related"]
    rows = []
    for n, one in enumerate(told):
        slots = {"x": facts.thing_at(one.x), "y": facts.thing_at(one.y), "r": one.r}
        rows.append(frames.fill(draws.template(f"related {n}", frames), **slots) * one.there[:, None])
    return rows


def _placed(facts: Facts, draws: Draws) -> list[Tensor]:
    frames = facts.words.loose["placed"]
    mask = facts.named & (facts.third >= 0)
    order = draws.shuffled("places", mask)
    many = torch.minimum(mask.sum(1), draws.pick("placed", of=PLACES + 1))
    rows = []
    for n in range(min(PLACES, mask.shape[1])):
        slot = order[:, n]
        filled = frames.fill(
            draws.template(f"placed {n}", frames), x=facts.thing_at(slot), p=at(facts.third, slot).clamp(min=0)
        )
        rows.append(filled * (many > n)[:, None])
    return rows


def _behind(facts: Facts, draws: Draws) -> list[Tensor]:
    frames = facts.words.loose.get("behind")
    if frames is None:
        return []
    return [frames.fill(draws.template("behind", frames), b=facts.scenes.background % facts.words.backgrounds)]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two sentences about a scene, one true and one false."""

    question: Tensor  # (B, P) what was asked; empty for swaps
    true: Tensor  # (B, P)
    false: Tensor  # (B, P)
    sort: Tensor  # (B,) row of INVENTED or of SWAPS
    valid: Tensor  # (B,)


def preference(words: Words, scenes: Scenes, seed: int, *, held_out: bool = False) -> Pair:
    """A true caption to prefer, and the same with one thing invented: an object, a colour or a number."""
    facts, draws = Facts(words, scenes), Draws(seed, scenes.index, "preference", held_out)
    group, slots = listed(facts, draws)
    n = group.number.shape[1]
    there = group.number > 0
    drawn, absent = facts.absent(draws, "popular")
    hue = 1 + draws.pick("hue", TRIES, of=len(COLOURS) - 1)
    # A colour is false of a group if nothing of its name has it, and nothing of its name is untinted.
    namesakes = facts.alike.gather(
        1, slots.clamp(max=facts.filled.shape[1] - 1)[..., None].expand(-1, -1, facts.filled.shape[1])
    )
    taken = (facts.colour[:, None, None, :] == hue[:, None, :, None]) | (facts.colour == 0)[:, None, None, :]
    false_hue = ~(namesakes[:, :, None, :] & taken).any(3)  # (B, G, R)
    hued = there & (group.colour > 0) & false_hue.any(2)
    able = torch.stack([there.any(1) & absent.any(1), hued.any(1), there.any(1)], 1)
    sort, valid = draws.one("sort", able)
    g, _ = draws.one("group", torch.where((sort == 1)[:, None], hued, there))
    here = (torch.arange(n, device=g.device) == g[:, None]) & valid[:, None]
    new_hue = at(hue, at(false_hue, g).int().argmax(1))
    old = at(group.number, g)
    new = old + torch.where((draws.coin("fewer") > 0) & (old > 1) | (old == MOST), -1, 1)

    def changed(column: Tensor, kind: str, value: Tensor) -> Tensor:
        return torch.where(here & (sort == INVENTED.index(kind))[:, None], value[:, None], column)

    false = Group(
        changed(group.colour, "colour", new_hue),
        changed(group.concept, "object", at(drawn, absent.int().argmax(1))),
        changed(group.number, "number", new),
    )
    told, untold = (said(words, draws, "caption_short", Draft({}, sort, valid, {"list": g})) for g in (group, false))
    return Pair(told.question, told.answer, untold.answer, sort, valid)


class _Swap(NamedTuple):
    true: dict[str, Tensor | Thing]
    false: dict[str, Tensor | Thing]
    valid: Tensor


def swap(words: Words, scenes: Scenes, seed: int, sort: str, *, held_out: bool = False) -> Pair:
    """Two captions of the same words, of which only one is true; `sort` is one of SWAPS."""
    facts, draws = Facts(words, scenes), Draws(seed, scenes.index, f"swap/{sort}", held_out)
    true, false, valid = _SWAPS[sort](facts, draws)
    frames = words.loose[f"swap_{sort}"]
    template = draws.template("template", frames)
    told, untold = (frames.fill(template, **slots) * valid[:, None] for slots in (true, false))
    which = torch.full_like(template, list(SWAPS).index(sort))
    return Pair(torch.zeros_like(told), told, untold, which, valid)


def _swap_colours(facts: Facts, draws: Draws) -> _Swap:
    able = facts.plain & (facts.colour > 0)
    differ = facts.colour[:, :, None] != facts.colour[:, None, :]
    i, j, valid = draws.pair("pair", able[:, :, None] & able[:, None, :] & differ)
    (a, b), (x, y) = ((at(facts.colour, s) for s in (i, j)), (at(facts.concept, s) for s in (i, j)))
    return _Swap({"x": Thing(a, x), "y": Thing(b, y)}, {"x": Thing(b, x), "y": Thing(a, y)}, valid)


def _swap_places(facts: Facts, draws: Draws) -> _Swap:
    i, j, valid = draws.pair("pair", facts.pairs & (facts.relation >= 0))
    x, y, r = facts.thing_at(i), facts.thing_at(j), at(at(facts.relation, i), j).clamp(min=0)
    return _Swap({"x": x, "y": y, "r": r}, {"x": y, "y": x, "r": r}, valid)


def _swap_sizes(facts: Facts, draws: Draws) -> _Swap:
    i, j, valid = draws.pair("pair", facts.pairs & facts.bigger)
    x, y = facts.thing_at(i), facts.thing_at(j)
    return _Swap({"x": x, "y": y}, {"x": y, "y": x}, valid)


def _swap_numbers(facts: Facts, draws: Draws) -> _Swap:
    able = facts.clear & (facts.number > 1)
    differ = facts.number[:, :, None] != facts.number[:, None, :]
    i, j, valid = draws.pair("pair", able[:, :, None] & able[:, None, :] & differ)
    none = torch.zeros_like(i)
    x, y = (Thing(none, at(facts.concept, s)) for s in (i, j))
    m, n = at(facts.number, i), at(facts.number, j)
    return _Swap({"x": x, "y": y, "m": m, "n": n}, {"x": x, "y": y, "m": n, "n": m}, valid)


_SWAPS = {"colour": _swap_colours, "relation": _swap_places, "size": _swap_sizes, "number": _swap_numbers}
