"""From scenes to words: one kind, several kinds, or a conversation. A function of (seed, index), without one string and
without waiting for the device.

B scenes, n questions a scene.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vitrail.data.scenes.scene import Scenes
from vitrail.data.words import captions, choices, questions
from vitrail.data.words.facts import Draws, Facts, at
from vitrail.data.words.pieces import TokenTable
from vitrail.data.words.said import Draft, Said, Slots, arranged, said
from vitrail.data.words.words import Words
from vitrail.errors import ConfigError, nearest

DRAFTS: dict[str, Callable[[Facts, Draws], Draft]] = {
    "existence_random": questions.existence("random"),
    "existence_popular": questions.existence("popular"),
    "existence_adversarial": questions.existence("kin"),
    "counting": questions.counting,
    "colour": questions.colour,
    "position": questions.position,
    "relation": questions.relation,
    "inside": questions.inside,
    "what": questions.what,
    "size": questions.size,
    "which": questions.which,
    "amount": questions.amount,
    "reading": questions.reading,
    "choice_object": choices.object_,
    "choice_colour": choices.among(questions.colour, "colour"),
    "choice_count": choices.among(questions.counting, "counting"),
    "choice_position": choices.among(questions.position, "position"),
    "choice_reading": choices.reading,
    "unanswerable_colour": choices.unanswerable(questions.colour),
    "unanswerable_position": choices.unanswerable(questions.position),
    "grounding": questions.grounding,
    "caption_short": captions.short,
    "caption_long": captions.long,
}

#: kinds that no conversation asks twice over, because no two of them can ask the same
TOPICS = ("existence_random", "counting", "relation", "what", "size", "amount", "reading")
TURNS = 4


def ask(words: Words, scenes: Scenes, seed: int, kind: str, *, held_out: bool = False) -> Said:
    """One question of one kind a scene (a caption is the answer to being asked for one)."""
    return _ask(Facts(words, scenes), seed, kind, held_out)


def ask_several(
    words: Words,
    scenes: Scenes,
    seed: int,
    kinds: Sequence[str],
    n: int,
    *,
    held_out: bool = False,
) -> Said:
    """n questions a scene, of different kinds, drawn from those that the scene admits: (B·n), scene by scene."""
    if not 1 <= n <= len(kinds):
        raise ConfigError(f"{n} questions of different kinds out of {len(kinds)}", "name as many kinds")
    facts = Facts(words, scenes)
    parts = [_ask(facts, seed, kind, held_out) for kind in kinds]
    return arranged(parts, Draws(seed, scenes.index, "several").bits("kinds", len(kinds)), n)


def converse(words: Words, scenes: Scenes, seed: int, *, held_out: bool = False) -> Said:
    """Two to four questions a scene, one after the other: (B·4), scene by scene, turns that are not there not valid.

    Where a scene admits it, the first two are about one thing: its colour and its place, or the other way round, and
    the second calls it “it”. No conversation asks the same twice."""
    facts, draws = Facts(words, scenes), Draws(seed, scenes.index, "turns")
    slot, some = draws.one("topic", facts.plain & (facts.colour > 0) & (facts.third >= 0))
    x, c, p = facts.thing_at(slot), at(facts.colour, slot), at(facts.third, slot).clamp(min=0)
    place_first = draws.coin("first") > 0
    named: Slots = {"x": x}
    drafts = {
        "colour": Draft(named, c, some & ~place_first, {"c": c}),
        "it_position": Draft({}, p, some & ~place_first, {"p": p}),
        "position": Draft(named, p, some & place_first, {"p": p}),
        "it_colour": Draft({}, c, some & place_first, {"c": c}),
    }
    parts = [
        said(words, Draws(seed, scenes.index, f"turns/{kind}", held_out), kind, draft) for kind, draft in drafts.items()
    ]
    parts += [_ask(facts, seed, kind, held_out, "turns/") for kind in TOPICS]
    order = draws.bits("order", len(parts))
    order[:, 0:4:2].fill_(-2)  # the topic's first question, then the one that follows
    order[:, 1:4:2].fill_(-1)
    turns = arranged(parts, order, TURNS)
    valid = turns.valid.view(-1, TURNS)
    many = 2 + draws.pick("turns", of=TURNS - 1)
    valid = valid & (torch.arange(TURNS, device=valid.device) < many[:, None]) & (valid.sum(1, keepdim=True) > 1)
    valid = valid.flatten()
    return replace(turns, question=turns.question * valid[:, None], answer=turns.answer * valid[:, None], valid=valid)


def longest(words: Words, tokens: TokenTable, kinds: Sequence[str]) -> tuple[int, int]:
    """Tokens that no question and no answer of these kinds exceeds: room enough for `TokenTable.write` unchecked."""
    for kind in kinds:
        _known(kind)
    most = {"related": captions.RELATIONS, "placed": captions.PLACES, "behind": 1}  # sentences of a long caption
    extra = sum(n * words.loose[name].longest(tokens) for name, n in most.items() if name in words.loose)
    sorts = [(words.sorts[kind], extra * (kind == "caption_long")) for kind in kinds]
    return (
        max(sort.question.longest(tokens) for sort, _ in sorts),
        max(sort.answer.longest(tokens) + more for sort, more in sorts),
    )


def _ask(facts: Facts, seed: int, kind: str, held_out: bool, apart: str = "") -> Said:
    draws = Draws(seed, facts.scenes.index, apart + _known(kind), held_out)
    return said(facts.words, draws, kind, DRAFTS[kind](facts, draws))


def _known(kind: str) -> str:
    if kind not in DRAFTS:
        raise ConfigError(f"there is no kind of question {kind!r}", nearest(kind, DRAFTS))
    return kind
