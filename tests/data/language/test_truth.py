"""Every answer of every kind equals that of the oracle, which reads the question and the scene."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.language.oracle import confusable
from vitrail.data.language import (
    HALLUCINATION_KINDS,
    QA_DRAFTERS,
    QA_KINDS,
    generate_conversations,
    generate_preference_pairs,
    generate_prompts_for_scenes,
    generate_questions,
    generate_swap_pairs,
    matches_spec,
)
from vitrail.data.language.templates import CAPTION_KINDS, DRAWING_PROMPT_KINDS, QUESTION_KINDS, SWAP_KINDS
from vitrail.data.language.templates import EXTRA_TEMPLATES as FURTHER

SEEDS = st.integers(0, 2**31)
MANY = 24


def result(pieces, rows, valid):
    """The valid sentences, by their place"""
    return {b: text for b, text in enumerate(pieces.to_texts(rows)) if valid[b]}


@pytest.mark.parametrize("kind", QUESTION_KINDS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=8)
def test_answers_are_the_oracles(kind, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    output = generate_questions(words, batch, seed, kind, held_out=held_out)
    answers = words.pieces.to_texts(output.answer)
    for b, question in result(words.pieces, output.question, output.valid).items():
        assert answers[b] == oracle.answer(kind, question, oracle.objects(batch, b)), question


@pytest.mark.parametrize("kind", [kind for kind in FURTHER if kind in QUESTION_KINDS])
@given(seed=SEEDS)
@settings(max_examples=8)
def test_answers_in_many_wordings_are_the_oracles(kind, seed, many_words, scenes, oracle):
    batch, words = scenes(seed, many=2 * MANY), many_words
    output = generate_questions(words, batch, seed, kind)
    answers = words.pieces.to_texts(output.answer)
    for b, question in result(words.pieces, output.question, output.valid).items():
        assert answers[b] == oracle.answer(kind, question, oracle.objects(batch, b)), question


@pytest.mark.parametrize("kind", CAPTION_KINDS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_captions_are_true_and_tell_all(kind, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    output = generate_questions(words, batch, seed, kind, held_out=held_out)
    for b, text in result(words.pieces, output.answer, output.valid).items():
        assert oracle.caption_is_true(text, oracle.objects(batch, b), int(batch.background[b]), kind), text
    assert (output.valid == (batch.num_objects > 0)).all()


@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_preferred_captions_are_true_and_the_others_have_one_thing_invented(seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    pair = generate_preference_pairs(words, batch, seed, held_out=held_out)
    false = words.pieces.to_texts(pair.false_caption)
    for b, text in result(words.pieces, pair.true_caption, pair.valid).items():
        objects = oracle.objects(batch, b)
        assert oracle.caption_is_true(text, objects, 0)
        assert not oracle.caption_is_true(false[b], objects, 0), false[b]
        right, wrong = (oracle.listed(_list_of(t)) for t in (text, false[b]))
        ((m, c, n), (m2, c2, n2)) = next((g, h) for g, h in zip(right, wrong, strict=True) if g != h)
        assert sum(g != h for g, h in zip(right, wrong, strict=True)) == 1
        if c != c2:  # nor may something that keeps its own colour happen to have it
            assert all(o.colour not in ("", c2) for o in objects if confusable(o.output, n))
        assert [n != n2, c != c2, m != m2] == [
            HALLUCINATION_KINDS[pair.kind[b]] == sort for sort in HALLUCINATION_KINDS
        ]


def _list_of(caption):
    frames = CAPTION_KINDS["caption_short"].answers + CAPTION_KINDS["caption_short"].answers_test
    (start,) = [f.removesuffix("{list}.") for f in frames if caption.startswith(f.removesuffix("{list}."))]
    return caption.removeprefix(start).removesuffix(".")


@pytest.mark.parametrize("sort", SWAP_KINDS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=10)
def test_swaps_have_the_same_words_and_one_of_them_is_true(sort, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=4 * MANY)
    pair = generate_swap_pairs(words, batch, seed, sort, held_out=held_out)
    false = words.pieces.to_texts(pair.false_caption)
    for b, text in result(words.pieces, pair.true_caption, pair.valid).items():
        objects = oracle.objects(batch, b)
        assert Counter(text.split()) == Counter(false[b].split())
        assert oracle.swap_is_true(sort, text, objects), text
        assert not oracle.swap_is_true(sort, false[b], objects), false[b]


@pytest.mark.parametrize("kind", DRAWING_PROMPT_KINDS)
@given(seed=SEEDS, held_out=st.booleans(), whole=st.booleans())
@settings(max_examples=10)
def test_prompts_fit_their_scenes_and_specs_judge_as_the_words_do(kind, seed, held_out, whole, words, scenes, oracle):
    batch, others = scenes(seed, many=4 * MANY), scenes(seed + 1, many=4 * MANY)
    moved = replace(batch, box=torch.where(batch.is_filled[..., None], others.box, 0))
    drawn = generate_prompts_for_scenes(words, batch, seed, kind, name_all=whole, held_out=held_out)
    judged = [(judge, matches_spec(words, drawn.spec, judge)) for judge in (moved, others)]
    right = matches_spec(words, drawn.spec, batch)
    for b, text in result(words.pieces, drawn.text, drawn.valid).items():
        objects = oracle.objects(batch, b)
        assert oracle.prompt_is_true(kind, text, objects), text
        assert right[b]
        for judge, found in judged:
            assert found[b] == oracle.prompt_is_true(kind, text, oracle.objects(judge, b)), text
        if whole:
            assert drawn.spec.count[b].sum() == len(objects)


@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_conversations_are_true_and_never_ask_twice(seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    output = generate_conversations(words, batch, seed, held_out=held_out)
    questions, answers = words.pieces.to_texts(output.question), words.pieces.to_texts(output.answer)
    for b in range(MANY):
        turns = [t for t in range(4 * b, 4 * b + 4) if output.valid[t]]
        assert len(turns) in (0, 2, 3, 4)
        assert turns == list(range(4 * b, 4 * b + len(turns)))
        assert len({questions[t] for t in turns}) == len(turns)
        objects, it = oracle.objects(batch, b), None
        for t in turns:
            kind = QA_KINDS[output.kind[t]]
            if kind in ("colour", "position"):
                texts = QUESTION_KINDS[kind].train + QUESTION_KINDS[kind].test
                it = oracle.the(objects, oracle.parse_text(texts, questions[t])["x"])
            assert answers[t] == oracle.answer(kind, questions[t], objects, it if kind.startswith("it_") else None)


def test_every_kind_is_checked_by_something(words, scenes):
    batch = scenes(5, many=3000)
    assert set(QA_DRAFTERS) == set(QUESTION_KINDS) | set(CAPTION_KINDS)
    shares = {kind: generate_questions(words, batch, 0, kind).valid.double().mean().item() for kind in QA_DRAFTERS}
    assert all(share > 0.02 for share in shares.values()), shares
    assert all(generate_swap_pairs(words, batch, 0, sort).valid.sum() > 20 for sort in SWAP_KINDS)
    assert all(generate_prompts_for_scenes(words, batch, 0, kind).valid.sum() > 20 for kind in DRAWING_PROMPT_KINDS)
    assert generate_preference_pairs(words, batch, 0).kind.bincount().min() > 100
