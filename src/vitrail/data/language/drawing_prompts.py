"""Drawing prompts of GenEval's six kinds, each with a specification that a detector can check.

The specification uses only boxes, concepts and colours.

Shapes: B prompts, O object slots, K = 2 things in a prompt.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.language.compiled_templates import ObjectPhrase
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts, gather_slot
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.sampler import permute_index
from vitrail.data.scenes.scene import COLOURS, SceneBatch, TensorBatch
from vitrail.errors import ConfigError, suggest_name

MAX_DRAWN = 4  # maximum count of one thing in a prompt without a scene


@dataclass(frozen=True, eq=False)
class DrawingSpec(TensorBatch):
    """Required content of an image. Counts are minimum counts, or exact counts if `is_exact`."""

    concept: Tensor  # (B, K)
    colour: Tensor  # (B, K) row of COLOURS, 0 for any
    count: Tensor  # (B, K) 0 if the prompt has no second thing
    is_exact: Tensor  # (B,)
    relation: Tensor  # (B,) position of the first relative to the second: left, right, above, below; −1 for any


@dataclass(frozen=True, eq=False)
class DrawingPromptBatch:
    """Drawing prompts with their specifications."""

    text: Tensor  # (B, P) pieces
    spec: DrawingSpec
    valid: Tensor  # (B,)


def generate_prompts_for_scenes(
    language: SceneLanguage, scenes: SceneBatch, seed: int, kind: str, *, name_all: bool = True, held_out: bool = False
) -> DrawingPromptBatch:
    """Generate a prompt that each scene satisfies. With `name_all`, the prompt names all objects of the scene."""
    _check_kind(kind)
    facts, draws = SceneFacts(language, scenes), LanguageRandom(seed, scenes.index, f"draw/{kind}", held_out)
    plain = facts.has_unique_name & facts.is_thing
    tinted = plain & (facts.colour > 0)
    both = plain[:, :, None] & plain[:, None, :] & ~facts.same_concept
    if kind in ("single", "counting", "colours"):
        mask = {
            "single": facts.is_countable,
            "counting": facts.is_countable & (facts.concept_count > 1),
            "colours": tinted,
        }[kind]
        i, valid = draws.choose_one("thing", mask)
        j = i
    elif kind == "attribution":
        differ = facts.colour[:, :, None] != facts.colour[:, None, :]
        i, j, valid = draws.choose_pair("things", both & tinted[:, :, None] & tinted[:, None, :] & differ)
    else:
        i, j, valid = draws.choose_pair("things", both & (facts.relation >= 0) if kind == "position" else both)
    slots = torch.stack([i, j], 1)
    concept, colour = facts.concept.gather(1, slots), facts.colour.gather(1, slots)
    first = gather_slot(facts.concept_count, i) if kind == "counting" else torch.ones_like(i)
    number = torch.stack([first, torch.full_like(j, kind in ("two", "position", "attribution"))], 1)
    if kind not in ("colours", "attribution"):
        colour = torch.zeros_like(colour)
    relation = gather_slot(gather_slot(facts.relation, i), j) if kind == "position" else torch.full_like(i, -1)
    if name_all:
        valid = valid & (facts.is_filled.sum(1) == number.sum(1))
    spec = DrawingSpec(concept, colour, number, torch.full_like(valid, kind == "counting"), relation)
    return _render_prompts(language, draws, kind, spec, valid)


def generate_prompts(
    language: SceneLanguage,
    kind: str,
    count: int,
    seed: int = 0,
    *,
    held_out: bool = False,
    concepts: Sequence[int] | None = None,
) -> DrawingPromptBatch:
    """Generate `count` different prompts of a kind without scenes: all colours, and two to four of a thing.

    `concepts` restricts the concepts in use.
    """
    _check_kind(kind)
    pool = language.uniform_pools.concept[~language.is_word[language.uniform_pools.concept]].tolist()
    pool = pool if concepts is None else [concept for concept in pool if concept in set(concepts)]
    hues, m = len(COLOURS) - 1, len(pool)
    sizes = {
        "single": (m,),
        "two": (m, m),
        "counting": (m, MAX_DRAWN - 1),
        "colours": (m, hues),
        "position": (m, m, 4),
        "attribution": (m, m, hues, hues),
    }[kind]
    total = torch.Size(sizes).numel()
    rows = []
    for item in itertools.count():
        if len(rows) == count:
            break
        if item == total:
            raise ConfigError(
                f"{m} concepts give only {len(rows)} prompts of kind {kind!r}, not {count}", "request fewer prompts"
            )
        digits, rest = [], permute_index(item, total, seed)
        for size in sizes:
            digits.append(rest % size)
            rest //= size
        chosen = [pool[d] for d in digits[: 1 if kind in ("single", "counting", "colours") else 2]]
        values = digits[len(chosen) :]
        if len(chosen) == 2 and bool(language.is_same_name(*torch.tensor(chosen, device=language.concept.device))):
            continue
        if kind == "attribution" and values[0] == values[1]:
            continue
        row = {"concept": (chosen * 2)[:2], "colour": [0, 0], "count": [1, len(chosen) - 1], "relation": -1}
        if kind == "counting":
            row["count"] = [values[0] + 2, 0]
        elif kind == "position":
            row["relation"] = values[0]
        elif kind in ("colours", "attribution"):
            row["colour"] = [v + 1 for v in (values * 2)[:2]]
        rows.append(row)
    device = language.concept.device
    columns = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
    spec = DrawingSpec(is_exact=torch.full((count,), kind == "counting", device=device), **columns)
    draws = LanguageRandom(seed, torch.arange(count, device=device), f"prompts/{kind}", held_out)
    return _render_prompts(language, draws, kind, spec, torch.ones(count, dtype=torch.bool, device=device))


def matches_spec(language: SceneLanguage, spec: DrawingSpec, scenes: SceneBatch) -> Tensor:
    """Return whether scenes, or detections in the form of scenes, satisfy the specifications (B,).

    Relations follow GenEval: the offset of the centres, minus a tenth of both extents, exceeds half its length along
    the axis. Any two matching objects can satisfy a relation.
    """
    concept = language.concept[scenes.sprite.clamp(min=0)]
    fits = scenes.is_filled[:, None] & (concept[:, None] == spec.concept[..., None])  # (B, K, O)
    fits = fits & ((spec.colour[..., None] == 0) | (spec.colour[..., None] == scenes.colour[:, None]))
    found = fits.sum(2)
    enough = (found >= spec.count).all(1) & (~spec.is_exact | (found[:, 0] == spec.count[:, 0]))
    gap = scenes.doubled_centre[:, :, None] - scenes.doubled_centre[:, None, :]  # (B, O, O, 2), doubled
    extent = scenes.box[..., 2:] - scenes.box[..., :2]
    free = (5 * gap.abs() - extent[:, :, None] - extent[:, None, :]).clamp(min=0)  # ten times the effective offset
    along = 4 * free**2 > 25 * (gap**2).sum(-1, keepdim=True)
    before, after = along & (gap < 0), along & (gap > 0)
    holds = torch.stack([before[..., 0], after[..., 0], before[..., 1], after[..., 1]], 1)  # (B, 4, O, O)
    holds = gather_slot(holds, spec.relation.clamp(min=0)) & fits[:, 0, :, None] & fits[:, 1, None, :]
    return enough & ((spec.relation < 0) | holds.flatten(1).any(1))


def _render_prompts(
    language: SceneLanguage, draws: LanguageRandom, kind: str, spec: DrawingSpec, valid: Tensor
) -> DrawingPromptBatch:
    frames = language.sentence_templates[f"draw_{kind}"]
    x, y = (ObjectPhrase(spec.colour[:, k], spec.concept[:, k]) for k in range(2))
    slots = {"x": x, "y": y, "n": spec.count[:, 0], "r": spec.relation.clamp(min=0)}
    return DrawingPromptBatch(
        frames.fill(draws.choose_template("template", frames), **slots) * valid[:, None], spec, valid
    )


def _check_kind(kind: str) -> None:
    if kind not in DRAWING_PROMPT_KINDS:
        raise ConfigError(f"unknown prompt kind {kind!r}", suggest_name(kind, DRAWING_PROMPT_KINDS))
