"""Questions that check a drawing follow the meaning of its prompt."""

import pytest
import torch

from vitrail.data.language import SceneLanguage, generate_prompts
from vitrail.data.language.english import PHRASE_FORMS, countable_noun
from vitrail.data.language.prompt_checks import PromptCheck, build_prompt_checks
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.plurals import pluralize
from vitrail.data.scenes.scene import GRID, SpriteTable
from vitrail.data.scenes.thing_names import HUNDRED_THINGS


@pytest.fixture(scope="module")
def hundred() -> SceneLanguage:
    n = len(HUNDRED_THINGS)
    ids, plurals = tuple(f"toy/{i}" for i in range(n)), tuple(map(pluralize, HUNDRED_THINGS))
    things, each = ("thing",) * n, torch.full((n, 2), GRID)
    return SceneLanguage.build(
        SpriteTable(ids, ("toy",) * n, ids, things, torch.arange(n), HUNDRED_THINGS, plurals, ids, each)
    )


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", DRAWING_PROMPT_KINDS)
def test_questions_follow_the_meaning_of_the_prompt(kind, held_out, hundred):
    """Prompts are written from a meaning, which the questions give back, in whatever words it was put."""
    drawn = generate_prompts(hundred, kind, 60, seed=3, held_out=held_out)
    for row, text in enumerate(hundred.pieces.to_texts(drawn.text)):
        spec = drawn.spec[row : row + 1]
        nouns = [
            countable_noun(HUNDRED_THINGS[concept], pluralize(HUNDRED_THINGS[concept]))
            for concept in spec.concept[0].tolist()
        ]
        wanted = []
        for (one, many), colour, number in zip(nouns, spec.colour[0].tolist(), spec.count[0].tolist(), strict=True):
            if number:
                wanted.append(PromptCheck(f"How many {many} are in the picture?", str(number)))
            if number and colour:
                wanted.append(PromptCheck(f"What colour is the {one}?", PHRASE_FORMS["colour"][colour]))
        asked = build_prompt_checks(text)
        lies = [check for check in asked if check.question.startswith("Is the ")]
        assert sorted(set(asked) - set(lies)) == sorted(wanted), text
        assert len(lies) == int(spec.relation[0] >= 0)
        for check in lies:
            output = [PHRASE_FORMS[form][int(spec.relation[0])] for form in ("relation", "side")]
            assert check.question in [f"Is the {nouns[0][0]} {how} the {nouns[1][0]}?" for how in output]
            assert check.answer == "Yes"


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("dogs and cats", [("Is there a dog?", "Yes"), ("Is there a cat?", "Yes")]),
        ("Paint 3 RED dogs", [("How many dogs", "3"), ("How many red dogs", "3")]),
        ("a red dog and a blue dog", [("How many red dogs", "1"), ("How many blue dogs", "1")]),
        ("an owl above two frogs", [("How many owls", "1"), ("How many frogs", "2")]),  # above which of them?
        ("ninety-nine balloons, or 99 balloons", [("Is there a balloon?", "Yes"), ("Is there a balloon?", "Yes")]),
        ("bread", [("How many pieces of bread", "1")]),
        ("something nice", []),
        ("a category", []),
    ],
)
def test_what_people_may_write(prompt, wanted):
    found = build_prompt_checks(prompt)
    assert len(found) == len(wanted)
    for check, (question, answer) in zip(found, wanted, strict=True):
        assert check.question.startswith(question) and check.answer == answer
