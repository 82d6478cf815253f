"""Prompts to draw, in GenEval's six kinds, each with what must then be seen: for a judge that has only boxes, concepts
and colours to go by.

B prompts, O object slots, K the two things that a prompt may name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from vitrail.data.order import permuted
from vitrail.data.scenes.scene import COLOURS, Scenes
from vitrail.data.words.facts import Draws, Facts, at
from vitrail.data.words.frames import Thing
from vitrail.data.words.templates import DRAWINGS
from vitrail.data.words.words import Words
from vitrail.errors import ConfigError, nearest

MOST_DRAWN = 4  # of one thing in a prompt that is not about a scene


@dataclass(frozen=True, eq=False)
class Spec:
    """What a picture must show. Numbers are least numbers, and exact where that is asked."""

    concept: Tensor  # (B, K)
    colour: Tensor  # (B, K) row of COLOURS, 0 for any
    number: Tensor  # (B, K) 0 where a second thing is not asked for
    exact: Tensor  # (B,)
    relation: Tensor  # (B,) how the first lies to the second: left, right, above, below; −1 for any

    def __getitem__(self, rows: slice | Tensor) -> "Spec":
        return Spec(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Prompt:
    text: Tensor  # (B, P) pieces
    spec: Spec
    valid: Tensor  # (B,)


def prompt(words: Words, scenes: Scenes, seed: int, kind: str, *, whole: bool = True, held_out: bool = False) -> Prompt:
    """A prompt that the scene is a right drawing of; with `whole` one that names all that is in it."""
    _known(kind)
    facts, draws = Facts(words, scenes), Draws(seed, scenes.index, f"draw/{kind}", held_out)
    plain = facts.plain & facts.thing
    tinted = plain & (facts.colour > 0)
    both = plain[:, :, None] & plain[:, None, :] & ~facts.same
    if kind in ("single", "counting", "colours"):
        mask = {"single": facts.clear, "counting": facts.clear & (facts.number > 1), "colours": tinted}[kind]
        i, valid = draws.one("thing", mask)
        j = i
    elif kind == "attribution":
        differ = facts.colour[:, :, None] != facts.colour[:, None, :]
        i, j, valid = draws.pair("things", both & tinted[:, :, None] & tinted[:, None, :] & differ)
    else:
        i, j, valid = draws.pair("things", both & (facts.relation >= 0) if kind == "position" else both)
    slots = torch.stack([i, j], 1)
    concept, colour = facts.concept.gather(1, slots), facts.colour.gather(1, slots)
    first = at(facts.number, i) if kind == "counting" else torch.ones_like(i)
    number = torch.stack([first, torch.full_like(j, kind in ("two", "position", "attribution"))], 1)
    if kind not in ("colours", "attribution"):
        colour = torch.zeros_like(colour)
    relation = at(at(facts.relation, i), j) if kind == "position" else torch.full_like(i, -1)
    if whole:
        valid = valid & (facts.filled.sum(1) == number.sum(1))
    spec = Spec(concept, colour, number, torch.full_like(valid, kind == "counting"), relation)
    return _written(words, draws, kind, spec, valid)


def prompts(
    words: Words, kind: str, n: int, seed: int = 0, *, held_out: bool = False, among: Sequence[int] | None = None
) -> Prompt:
    """n different prompts of a kind, out of nothing: the concepts in use, or those of them `among` some, all colours,
    two to four of a thing."""
    _known(kind)
    pool = words.even.concept[~words.is_word[words.even.concept]].tolist()
    pool = pool if among is None else [concept for concept in pool if concept in set(among)]
    hues, m = len(COLOURS) - 1, len(pool)
    sizes = {
        "single": (m,),
        "two": (m, m),
        "counting": (m, MOST_DRAWN - 1),
        "colours": (m, hues),
        "position": (m, m, 4),
        "attribution": (m, m, hues, hues),
    }[kind]
    total = torch.Size(sizes).numel()
    rows = []
    for item in count():
        if len(rows) == n:
            break
        if item == total:
            raise ConfigError(f"{m} concepts give {len(rows)} prompts of kind {kind!r}, not {n}", "ask for fewer")
        digits, rest = [], permuted(item, total, seed)
        for size in sizes:
            digits.append(rest % size)
            rest //= size
        concepts = [pool[d] for d in digits[: 1 if kind in ("single", "counting", "colours") else 2]]
        values = digits[len(concepts) :]
        if len(concepts) == 2 and bool(words.same(*torch.tensor(concepts, device=words.concept.device))):
            continue
        if kind == "attribution" and values[0] == values[1]:
            continue
        row = {"concept": (concepts * 2)[:2], "colour": [0, 0], "number": [1, len(concepts) - 1], "relation": -1}
        if kind == "counting":
            row["number"] = [values[0] + 2, 0]
        elif kind == "position":
            row["relation"] = values[0]
        elif kind in ("colours", "attribution"):
            row["colour"] = [v + 1 for v in (values * 2)[:2]]
        rows.append(row)
    device = words.concept.device
    columns = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
    spec = Spec(exact=torch.full((n,), kind == "counting", device=device), **columns)
    draws = Draws(seed, torch.arange(n, device=device), f"prompts/{kind}", held_out)
    return _written(words, draws, kind, spec, torch.ones(n, dtype=torch.bool, device=device))


def matches(words: Words, spec: Spec, scenes: Scenes) -> Tensor:
    """(B,) whether scenes (or what a detector found, written as scenes) show what was asked. Left, right, above and
    below are as GenEval has them: the offset of the centres, less a tenth of both extents, is more than half its length
    along the axis; any two things that fit will do."""
    concept = words.concept[scenes.sprite.clamp(min=0)]
    fits = scenes.filled[:, None] & (concept[:, None] == spec.concept[..., None])  # (B, K, O)
    fits = fits & ((spec.colour[..., None] == 0) | (spec.colour[..., None] == scenes.colour[:, None]))
    found = fits.sum(2)
    enough = (found >= spec.number).all(1) & (~spec.exact | (found[:, 0] == spec.number[:, 0]))
    gap = scenes.centre[:, :, None] - scenes.centre[:, None, :]  # (B, O, O, 2), doubled
    extent = scenes.box[..., 2:] - scenes.box[..., :2]
    free = (5 * gap.abs() - extent[:, :, None] - extent[:, None, :]).clamp(min=0)  # ten times the offset that counts
    along = 4 * free**2 > 25 * (gap**2).sum(-1, keepdim=True)
    before, after = along & (gap < 0), along & (gap > 0)
    holds = torch.stack([before[..., 0], after[..., 0], before[..., 1], after[..., 1]], 1)  # (B, 4, O, O)
    holds = at(holds, spec.relation.clamp(min=0)) & fits[:, 0, :, None] & fits[:, 1, None, :]
    return enough & ((spec.relation < 0) | holds.flatten(1).any(1))


def _written(words: Words, draws: Draws, kind: str, spec: Spec, valid: Tensor) -> Prompt:
    frames = words.loose[f"draw_{kind}"]
    x, y = (Thing(spec.colour[:, k], spec.concept[:, k]) for k in range(2))
    slots = {"x": x, "y": y, "n": spec.number[:, 0], "r": spec.relation.clamp(min=0)}
    return Prompt(frames.fill(draws.template("template", frames), **slots) * valid[:, None], spec, valid)


def _known(kind: str) -> None:
    if kind not in DRAWINGS:
        raise ConfigError(f"there is no kind of prompt {kind!r}", nearest(kind, DRAWINGS))
