"""Dense prompts are true of their scenes, and every question has the answer of the oracle."""

import re
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.language.oracle import NUMBERS, SIDES
from vitrail.data.language import templates
from vitrail.data.language.dense_prompts import COLOUR, COUNT, ENTITY, SPATIAL, generate_dense_prompts

MANY = 64
CAPTIONS = templates.CAPTION_KINDS["caption_short"]
HEADS = [re.escape(text).replace(r"\{list\}", "(.+)") for text in CAPTIONS.answers + CAPTIONS.answers_test]


def output(oracle, text, objects):
    """What a plain reader of the question answers, about any scene."""
    if found := re.fullmatch(r"Is there (.+)\?", text):
        colour, noun = oracle.phrase("a", found[1])
        return any(o.output == noun and colour in ("", o.colour) for o in objects)
    if found := re.fullmatch(r"Are there (\w+) (.+)\?", text):
        _, noun = oracle.phrase("plural", found[2])
        return sum(o.output == noun for o in objects) == NUMBERS.index(found[1])
    found = re.fullmatch(rf"Is the (.+?) ({'|'.join(SIDES)}) the (.+)\?", text)
    x, y = ([o for o in objects if o.output == found[n]] for n in (1, 3))
    return any(SIDES[found[2]] in oracle._geneval(a, b) for a in x for b in y)


@given(seed=st.integers(0, 2**31), held_out=st.booleans())
@settings(max_examples=12)
def test_prompts_are_true_and_every_statement_has_a_question(seed, held_out, words, scenes, oracle):
    asked = generate_dense_prompts(words, scenes(seed, many=MANY), seed, held_out=held_out)
    assert len(asked.graphs) == len(asked.specs) == len(asked.scenes)
    for b, graph in enumerate(asked.graphs):
        objects = oracle.objects(asked.scenes, b)
        head, *sentences = re.split(r"(?<=\.) ", graph.prompt)
        (listed,) = filter(None, (re.fullmatch(frame, head) for frame in HEADS))
        there = {}
        for noun in dict.fromkeys(o.output for o in objects):
            colour_names = {o.colour for o in objects if o.output == noun}
            there[noun] = oracle.count(objects, noun), colour_names.pop() if len(colour_names) == 1 else ""
        assert {noun: (many, colour) for many, colour, noun in oracle.listed(listed[1])} == there and len(there) > 1
        assert sentences and all(oracle.sentence(one, objects, 0) for one in sentences)
        kinds = Counter(one.category for one in graph.questions)
        assert kinds[ENTITY] == len(there) and kinds[SPATIAL] == len(sentences)
        assert kinds[COUNT] == sum(many > 1 for many, _ in there.values())
        assert kinds[COLOUR] == sum(colour != "" for _, colour in there.values()) and len(kinds) <= 4
        assert all(output(oracle, one.text, objects) for one in graph.questions), graph


@given(seed=st.integers(0, 2**31), turn=st.integers(0, MANY - 1))
@settings(max_examples=12)
def test_answers_match_the_oracle(seed, turn, words, scenes, oracle):
    """For its own scene and for others, the tensor answers equal those of a reader of the strings."""
    every = scenes(seed, many=MANY)
    asked = generate_dense_prompts(words, every, seed)
    numbers = list(range(len(asked.graphs)))[::-1]
    if not numbers:
        return
    assert all(map(all, asked.answer_questions(words, numbers, asked.scenes[torch.tensor(numbers)])))
    rows = torch.arange(MANY).roll(turn)[: len(numbers)]
    for number, row, found in zip(
        numbers, rows.tolist(), asked.answer_questions(words, numbers, every[rows]), strict=True
    ):
        objects = oracle.objects(every, row)
        assert found == [output(oracle, one.text, objects) for one in asked.graphs[number].questions]


def test_conditions_are_the_things_that_a_question_is_about(words, scenes):
    asked = generate_dense_prompts(words, scenes(3, many=400), 3)
    assert len(asked.graphs) > 20
    for graph in asked.graphs:
        things = {
            one.id: re.sub(r"^Is there an? |\?$", "", one.text) for one in graph.questions if one.category == ENTITY
        }
        for one in graph.questions:
            assert len(one.dependencies) == {ENTITY: 0, SPATIAL: 2}.get(one.category, 1)
            if one.category in (COLOUR, SPATIAL):
                assert all(things[number] in one.text for number in one.dependencies), one


def test_equal_seeds_give_equal_output(words, scenes):
    first, again = (generate_dense_prompts(words, scenes(5), 5).graphs for _ in range(2))
    assert first == again != generate_dense_prompts(words, scenes(5), 6).graphs
