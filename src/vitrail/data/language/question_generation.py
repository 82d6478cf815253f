"""Generate questions about scenes: one kind, several kinds, or conversations.

The result is a function of (seed, index). Generation makes no strings and does not synchronize with the device.

Shapes: B scenes, n questions per scene.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vitrail.data.language import choice_questions, open_questions, scene_captions
from vitrail.data.language.qa_batch import QADraft, SceneQABatch, TemplateValues, render_qa, select_qa
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts, gather_slot
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.language.text_pieces import TokenTable
from vitrail.data.scenes.scene import SceneBatch
from vitrail.errors import ConfigError, suggest_name

QA_DRAFTERS: dict[str, Callable[[SceneFacts, LanguageRandom], QADraft]] = {
    "existence_random": open_questions.make_existence_drafter("random"),
    "existence_popular": open_questions.make_existence_drafter("popular"),
    "existence_adversarial": open_questions.make_existence_drafter("kin"),
    "counting": open_questions.draft_counting,
    "colour": open_questions.draft_colour,
    "position": open_questions.draft_position,
    "relation": open_questions.draft_relation,
    "inside": open_questions.draft_inside,
    "what": open_questions.draft_what,
    "size": open_questions.draft_size,
    "which": open_questions.draft_which,
    "amount": open_questions.draft_amount,
    "reading": open_questions.draft_reading,
    "choice_object": choice_questions.draft_object_choice,
    "choice_colour": choice_questions.make_choice_drafter(open_questions.draft_colour, "colour"),
    "choice_count": choice_questions.make_choice_drafter(open_questions.draft_counting, "counting"),
    "choice_position": choice_questions.make_choice_drafter(open_questions.draft_position, "position"),
    "choice_reading": choice_questions.draft_reading_choice,
    "unanswerable_colour": choice_questions.make_unanswerable_drafter(open_questions.draft_colour),
    "unanswerable_position": choice_questions.make_unanswerable_drafter(open_questions.draft_position),
    "grounding": open_questions.draft_grounding,
    "caption_short": scene_captions.draft_short_caption,
    "caption_long": scene_captions.draft_long_caption,
    "unanswerable_relation": choice_questions.draft_unanswerable_relation,
}

#: kinds of questions in conversations; no two of them can ask the same question
CONVERSATION_KINDS = ("existence_random", "counting", "relation", "what", "size", "amount", "reading")
MAX_TURNS = 4


def generate_questions(
    language: SceneLanguage, scenes: SceneBatch, seed: int, kind: str, *, held_out: bool = False
) -> SceneQABatch:
    """Generate one question of one kind per scene. Captions are answers to caption requests."""
    return _generate_kind(SceneFacts(language, scenes), seed, kind, held_out)


def generate_mixed_questions(
    language: SceneLanguage,
    scenes: SceneBatch,
    seed: int,
    kinds: Sequence[str],
    per_scene: int,
    *,
    held_out: bool = False,
) -> SceneQABatch:
    """Generate questions of different kinds per scene, sampled from its valid kinds: (B·n), scene by scene."""
    if not 1 <= per_scene <= len(kinds):
        raise ConfigError(f"per_scene is {per_scene}, with {len(kinds)} kinds", "give at least as many kinds")
    facts = SceneFacts(language, scenes)
    parts = [_generate_kind(facts, seed, kind, held_out) for kind in kinds]
    return select_qa(parts, LanguageRandom(seed, scenes.index, "several").bits("kinds", len(kinds)), per_scene)


def generate_conversations(
    language: SceneLanguage, scenes: SceneBatch, seed: int, *, held_out: bool = False
) -> SceneQABatch:
    """Generate conversations of two to four questions per scene: (B·4), scene by scene. Missing turns are invalid.

    If possible, the first two questions are about the colour and the position of one object, in either order. The
    second one refers to it as “it”. A conversation never repeats a question.
    """
    facts, draws = SceneFacts(language, scenes), LanguageRandom(seed, scenes.index, "turns")
    slot, some = draws.choose_one("topic", facts.has_unique_name & (facts.colour > 0) & (facts.image_ninth >= 0))
    x = facts.object_phrase(slot)
    c = gather_slot(facts.colour, slot)
    p = gather_slot(facts.image_ninth, slot).clamp(min=0)
    place_first = draws.coin_flip("first") > 0
    named: TemplateValues = {"x": x}
    drafts = {
        "colour": QADraft(named, c, some & ~place_first, {"c": c}),
        "it_position": QADraft({}, p, some & ~place_first, {"p": p}),
        "position": QADraft(named, p, some & place_first, {"p": p}),
        "it_colour": QADraft({}, c, some & place_first, {"c": c}),
    }
    parts = [
        render_qa(language, LanguageRandom(seed, scenes.index, f"turns/{kind}", held_out), kind, draft)
        for kind, draft in drafts.items()
    ]
    parts += [_generate_kind(facts, seed, kind, held_out, "turns/") for kind in CONVERSATION_KINDS]
    order = draws.bits("order", len(parts))
    order[:, 0:4:2].fill_(-2)  # first question about the topic, then its follow-up
    order[:, 1:4:2].fill_(-1)
    turns = select_qa(parts, order, MAX_TURNS)
    valid = turns.valid.view(-1, MAX_TURNS)
    many = 2 + draws.integers("turns", high=MAX_TURNS - 1)
    valid = valid & (torch.arange(MAX_TURNS, device=valid.device) < many[:, None]) & (valid.sum(1, keepdim=True) > 1)
    valid = valid.flatten()
    return replace(turns, question=turns.question * valid[:, None], answer=turns.answer * valid[:, None], valid=valid)


def max_question_tokens(language: SceneLanguage, token_table: TokenTable, kinds: Sequence[str]) -> tuple[int, int]:
    """Return upper bounds of the tokens of questions and answers of these kinds.

    With these lengths, `TokenTable.to_ids` needs no check.
    """
    for kind in kinds:
        _check_kind(kind)
    most = {
        "related": scene_captions.MAX_RELATIONS,
        "placed": scene_captions.MAX_PLACES,
        "behind": 1,
    }  # sentences of a long caption
    caption_extra = sum(
        n * language.sentence_templates[name].max_tokens(token_table)
        for name, n in most.items()
        if name in language.sentence_templates
    )
    sorts = [(language.qa_templates[kind], caption_extra * (kind == "caption_long")) for kind in kinds]
    return (
        max(sort.question.max_tokens(token_table) for sort, _ in sorts),
        max(sort.answer.max_tokens(token_table) + more for sort, more in sorts),
    )


def _generate_kind(facts: SceneFacts, seed: int, kind: str, held_out: bool, prefix: str = "") -> SceneQABatch:
    draws = LanguageRandom(seed, facts.scenes.index, prefix + _check_kind(kind), held_out)
    return render_qa(facts.language, draws, kind, QA_DRAFTERS[kind](facts, draws))


def _check_kind(kind: str) -> str:
    if kind not in QA_DRAFTERS:
        raise ConfigError(f"unknown question kind {kind!r}", suggest_name(kind, QA_DRAFTERS))
    return kind
