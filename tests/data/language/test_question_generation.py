"""Words as a function of (seed, index): whatever the batch, the device, and without waiting for one."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from data.language.question_outputs import everything
from vitrail.data import qa, scene_annotations
from vitrail.data.language import (
    QA_DRAFTERS,
    QA_KINDS,
    generate_conversations,
    generate_mixed_questions,
    generate_prompts,
    generate_questions,
    train_tokenizer,
)
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS, QUESTION_KINDS
from vitrail.errors import ConfigError


@given(seed=st.integers(0, 2**31), cut=st.integers(1, 30))
@settings(max_examples=4)
def test_any_way_of_cutting_a_batch_gives_the_same(seed, cut, words, scenes):
    batch = scenes(seed, many=40)
    whole = everything(words, batch, seed)
    parts = [everything(words, batch[rows], seed) for rows in (slice(0, cut), slice(cut, None))]
    assert all(torch.equal(w, torch.cat(p)) for w, p in zip(whole, zip(*parts, strict=True), strict=True))


def test_seeds_differ(words, scenes):
    batch = scenes(0, many=100)
    a, b = (generate_questions(words, batch, seed, "existence_random").question for seed in (0, 1))
    assert (a == b).all(1).double().mean() < 0.2


class Hurried(TorchDispatchMode):
    """Refuses what would wait for a GPU: looking at values, shapes that depend on them, and copies from the host."""

    WAITS = re.compile(
        r"_local_scalar_dense|nonzero|unique|masked_select|is_nonzero|^equal|lift_fresh|repeat_interleave"
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not self.WAITS.search(func.name().removeprefix("aten::")), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device(words, scenes):
    tokens, batch = words.pieces.tokenize(train_tokenizer(words, 1000)), scenes(0, many=16)
    with Hurried():
        everything(words, batch, 0)
        tokens.to_ids(generate_questions(words, batch, 0, "caption_long").answer, 200, check=False)
    with Hurried(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        tokens.to_ids(generate_questions(words, batch, 0, "caption_long").answer, 200)


@pytest.mark.slow  # the first use of the meta device is
def test_questions_are_generated_on_the_meta_device(words, scenes):
    """On the meta device, code that reads a value or leaves the device fails."""
    tokens = words.pieces.tokenize(train_tokenizer(words, 1000)).to("meta")
    batch = scenes(0, many=16).to("meta")
    for tensor in everything(words.to("meta"), batch, 0):
        assert tensor.device.type == "meta"
    ids, lengths = tokens.to_ids(
        generate_questions(words.to("meta"), batch, 0, "caption_long").answer, 200, check=False
    )
    assert (ids.shape, lengths.shape) == ((16, 200), (16,))


def test_several_are_of_different_kinds_and_valid_ones_come_first(words, scenes):
    batch, kinds = scenes(0, many=300), ["colour", "inside", "reading", "counting", "existence_random"]
    output = generate_mixed_questions(words, batch, 0, kinds, 3)
    single = {kind: generate_questions(words, batch, 0, kind) for kind in kinds}
    valid, kind = output.valid.view(-1, 3), output.kind.view(-1, 3)
    admitted = torch.stack([s.valid for s in single.values()], 1).sum(1)
    assert torch.equal(valid.sum(1), admitted.clamp(max=3))
    assert (valid[:, :-1] >= valid[:, 1:]).all()
    assert all(len(set(row)) == 3 for row in kind.tolist())
    texts = {k: words.pieces.to_texts(s.question) for k, s in single.items()}
    for row, text in enumerate(words.pieces.to_texts(output.question)):
        assert text == (texts[QA_KINDS[output.kind[row]]][row // 3] if output.valid[row] else "")
    assert set(kind[valid].unique().tolist()) == {QA_KINDS.index(k) for k in kinds}
    with pytest.raises(ConfigError, match="per_scene is 3"):
        generate_mixed_questions(words, batch, 0, kinds[:2], 3)


def test_what_is_not_valid_is_empty(words, scenes):
    batch = scenes(0, many=300)
    for kind in QA_DRAFTERS:
        output = generate_questions(words, batch, 0, kind)
        assert not output.question[~output.valid].any()
        assert not output.answer[~output.valid].any()
        assert output.question[output.valid].any(1).all()
        assert output.answer[output.valid].any(1).all()


def test_labels_and_answers_go_together(words, scenes, oracle):
    batch = scenes(0, many=3000)
    for kind in QA_DRAFTERS:
        if kind in ("grounding", "which") or kind.startswith("caption"):
            continue
        output = generate_questions(words, batch, 0, kind)
        pairs = zip(
            output.label[output.valid].tolist(), words.pieces.to_texts(output.answer[output.valid]), strict=True
        )
        pairs = {(label, "none" if text.startswith("There is no") else text) for label, text in pairs}
        assert len(pairs) == len({label for label, _ in pairs}) == len({text for _, text in pairs}), kind
    output = generate_questions(words, batch, 0, "which")[:200]
    for question, answer, label, valid in zip(
        *map(words.pieces.to_texts, (output.question, output.answer)),
        output.label.tolist(),
        output.valid.tolist(),
        strict=True,
    ):
        if valid:
            named = oracle.parse_text(QUESTION_KINDS["which"].train, question)["xy"[label]]
            assert answer == " ".join(filter(None, ("the", *named))), question


def test_either_thing_of_an_unanswerable_relation_is_absent(words, scenes, oracle):
    batch = scenes(0, many=2000)
    output = generate_questions(words, batch, 0, "unanswerable_relation")
    texts = QUESTION_KINDS["unanswerable_relation"]
    absent = {"x": 0, "y": 0}
    rows = output.valid.nonzero()[:, 0].tolist()
    questions, answers = map(words.pieces.to_texts, (output.question, output.answer))
    for row in rows:
        if output.label[row] == 0:
            read = oracle.parse_text(texts.train, questions[row])
            names = [name for name in "xy" if answers[row] == f"There is no {read[name][1]} in the picture."]
            assert len(names) == 1, (questions[row], answers[row])
            absent[names[0]] += 1
        else:
            assert answers[row] in ("No", "Yes")
    assert len(rows) > 300
    assert min(absent.values()) > len(rows) / 5
    assert "unanswerable_relation" not in {*qa.QUESTION_KINDS, *scene_annotations.QUESTION_KINDS}


def test_boxes_of_grounding(words, scenes):
    batch = scenes(0, many=300)
    output = generate_questions(words, batch, 0, "grounding")
    mine = output[output.valid]
    written = torch.tensor([eval(text) for text in words.pieces.to_texts(mine.answer)])
    assert ((written / 99 - mine.box / 4096).abs() <= 0.5 / 99 + 1e-6).all()
    assert (mine.box[:, None] == batch.box[output.valid]).all(2).any(1).all()
    assert (generate_questions(words, batch, 0, "colour").box == -1).all()


def test_conversations_speak_of_it(words, scenes):
    output = generate_conversations(words, scenes(1, many=2000), 0)
    many = output.valid.view(-1, 4).sum(1).bincount(minlength=5)
    assert many[1] == 0
    assert (many[2:] > 100).all()
    second = output.kind.view(-1, 4)[output.valid.view(-1, 4)[:, 1], 1]
    assert (second >= QA_KINDS.index("it_colour")).double().mean() > 0.5


@pytest.mark.parametrize("kind", DRAWING_PROMPT_KINDS)
def test_prompts_out_of_nothing(kind, words):
    drawn = generate_prompts(words, kind, 20, seed=3)
    texts = words.pieces.to_texts(drawn.text)
    spec = torch.cat([drawn.spec.concept, drawn.spec.colour, drawn.spec.count, drawn.spec.relation[:, None]], 1)
    assert len(set(map(tuple, spec.tolist()))) == 20
    assert texts == words.pieces.to_texts(generate_prompts(words, kind, 20, seed=3).text)
    assert texts[:8] == words.pieces.to_texts(generate_prompts(words, kind, 8, seed=3).text)
    assert texts != words.pieces.to_texts(generate_prompts(words, kind, 20, seed=4).text)
    assert not set(texts) & set(words.pieces.to_texts(generate_prompts(words, kind, 20, seed=3, held_out=True).text))
    some = drawn.spec.concept.unique().tolist()[:3]
    assert set(generate_prompts(words, kind, 2, concepts=some).spec.concept.flatten().tolist()) <= set(some)
    if kind == "single":
        with pytest.raises(ConfigError, match="concepts give"):
            generate_prompts(words, kind, 1000)
