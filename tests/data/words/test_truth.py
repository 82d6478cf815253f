"""Every answer of every kind is what a plain reader of the string finds in the scene."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.words.oracle import confusable
from vitrail.data.words import DRAFTS, INVENTED, KINDS, ask, converse, matches, preference, prompt, swap
from vitrail.data.words.templates import CAPTIONS, DRAWINGS, QUESTIONS, SWAPS
from vitrail.data.words.templates import MANY as FURTHER

SEEDS = st.integers(0, 2**31)
MANY = 24


def told(pieces, rows, valid):
    """The valid sentences, by their place"""
    return {b: text for b, text in enumerate(pieces.read(rows)) if valid[b]}


@pytest.mark.parametrize("kind", QUESTIONS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=8)
def test_answers_are_the_oracles(kind, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    said = ask(words, batch, seed, kind, held_out=held_out)
    answers = words.pieces.read(said.answer)
    for b, question in told(words.pieces, said.question, said.valid).items():
        assert answers[b] == oracle.answer(kind, question, oracle.objects(batch, b)), question


@pytest.mark.parametrize("kind", [kind for kind in FURTHER if kind in QUESTIONS])
@given(seed=SEEDS)
@settings(max_examples=8)
def test_answers_in_many_wordings_are_the_oracles(kind, seed, many_words, scenes, oracle):
    batch, words = scenes(seed, many=2 * MANY), many_words
    said = ask(words, batch, seed, kind)
    answers = words.pieces.read(said.answer)
    for b, question in told(words.pieces, said.question, said.valid).items():
        assert answers[b] == oracle.answer(kind, question, oracle.objects(batch, b)), question


@pytest.mark.parametrize("kind", CAPTIONS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_captions_are_true_and_tell_all(kind, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    said = ask(words, batch, seed, kind, held_out=held_out)
    for b, text in told(words.pieces, said.answer, said.valid).items():
        assert oracle.caption_is_true(text, oracle.objects(batch, b), int(batch.background[b]), kind), text
    assert (said.valid == (batch.count > 0)).all()


@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_preferred_captions_are_true_and_the_others_have_one_thing_invented(seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    pair = preference(words, batch, seed, held_out=held_out)
    false = words.pieces.read(pair.false)
    for b, text in told(words.pieces, pair.true, pair.valid).items():
        objects = oracle.objects(batch, b)
        assert oracle.caption_is_true(text, objects, 0)
        assert not oracle.caption_is_true(false[b], objects, 0), false[b]
        right, wrong = (oracle.listed(_list_of(t)) for t in (text, false[b]))
        ((m, c, n), (m2, c2, n2)) = next((g, h) for g, h in zip(right, wrong, strict=True) if g != h)
        assert sum(g != h for g, h in zip(right, wrong, strict=True)) == 1
        if c != c2:  # nor may something that keeps its own colour happen to have it
            assert all(o.colour not in ("", c2) for o in objects if confusable(o.said, n))
        assert [n != n2, c != c2, m != m2] == [INVENTED[pair.sort[b]] == sort for sort in INVENTED]


def _list_of(caption):
    frames = CAPTIONS["caption_short"].answers + CAPTIONS["caption_short"].answers_test
    (start,) = [f.removesuffix("{list}.") for f in frames if caption.startswith(f.removesuffix("{list}."))]
    return caption.removeprefix(start).removesuffix(".")


@pytest.mark.parametrize("sort", SWAPS)
@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=10)
def test_swaps_have_the_same_words_and_one_of_them_is_true(sort, seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=4 * MANY)
    pair = swap(words, batch, seed, sort, held_out=held_out)
    false = words.pieces.read(pair.false)
    for b, text in told(words.pieces, pair.true, pair.valid).items():
        objects = oracle.objects(batch, b)
        assert Counter(text.split()) == Counter(false[b].split())
        assert oracle.swap_is_true(sort, text, objects), text
        assert not oracle.swap_is_true(sort, false[b], objects), false[b]


@pytest.mark.parametrize("kind", DRAWINGS)
@given(seed=SEEDS, held_out=st.booleans(), whole=st.booleans())
@settings(max_examples=10)
def test_prompts_fit_their_scenes_and_specs_judge_as_the_words_do(kind, seed, held_out, whole, words, scenes, oracle):
    batch, others = scenes(seed, many=4 * MANY), scenes(seed + 1, many=4 * MANY)
    moved = replace(batch, box=torch.where(batch.filled[..., None], others.box, 0))
    drawn = prompt(words, batch, seed, kind, whole=whole, held_out=held_out)
    judged = [(judge, matches(words, drawn.spec, judge)) for judge in (moved, others)]
    right = matches(words, drawn.spec, batch)
    for b, text in told(words.pieces, drawn.text, drawn.valid).items():
        objects = oracle.objects(batch, b)
        assert oracle.prompt_is_true(kind, text, objects), text
        assert right[b]
        for judge, found in judged:
            assert found[b] == oracle.prompt_is_true(kind, text, oracle.objects(judge, b)), text
        if whole:
            assert drawn.spec.number[b].sum() == len(objects)


@given(seed=SEEDS, held_out=st.booleans())
@settings(max_examples=12)
def test_conversations_are_true_and_never_ask_twice(seed, held_out, words, scenes, oracle):
    batch = scenes(seed, many=MANY)
    said = converse(words, batch, seed, held_out=held_out)
    questions, answers = words.pieces.read(said.question), words.pieces.read(said.answer)
    for b in range(MANY):
        turns = [t for t in range(4 * b, 4 * b + 4) if said.valid[t]]
        assert len(turns) in (0, 2, 3, 4)
        assert turns == list(range(4 * b, 4 * b + len(turns)))
        assert len({questions[t] for t in turns}) == len(turns)
        objects, it = oracle.objects(batch, b), None
        for t in turns:
            kind = KINDS[said.kind[t]]
            if kind in ("colour", "position"):
                texts = QUESTIONS[kind].train + QUESTIONS[kind].test
                it = oracle.the(objects, oracle.reading(texts, questions[t])["x"])
            assert answers[t] == oracle.answer(kind, questions[t], objects, it if kind.startswith("it_") else None)


def test_every_kind_is_checked_by_something(words, scenes):
    batch = scenes(5, many=3000)
    assert set(DRAFTS) == set(QUESTIONS) | set(CAPTIONS)
    shares = {kind: ask(words, batch, 0, kind).valid.double().mean().item() for kind in DRAFTS}
    assert all(share > 0.02 for share in shares.values()), shares
    assert all(swap(words, batch, 0, sort).valid.sum() > 20 for sort in SWAPS)
    assert all(prompt(words, batch, 0, kind).valid.sum() > 20 for kind in DRAWINGS)
    assert preference(words, batch, 0).sort.bincount().min() > 100
