"""Accuracy without the image is the intended one, measured on thousands of questions."""

import pytest
import torch

from vitrail.data.language import (
    QA_DRAFTERS,
    BlindBaseline,
    SceneLanguage,
    balance_answers,
    format_baselines,
    generate_questions,
    measure_baselines,
)
from vitrail.data.language.qa_batch import concat_qa
from vitrail.data.language.templates import CAPTION_KINDS

MANY = 15_000
EVEN = {"counting": 1 / 4, "colour": 1 / 10, "position": 1 / 9, "reading": 1 / 5}  # toys have five words
EVEN |= dict.fromkeys(("relation", "inside", "size", "which", "amount"), 1 / 2)
EVEN |= {kind: 1 / 4 for kind in QA_DRAFTERS if kind.startswith("choice")}
EVEN |= {kind: 1 / 2 for kind in QA_DRAFTERS if kind.startswith(("existence", "unanswerable"))}


@pytest.fixture(scope="module")
def measured(even_toy):
    """Of scenes in which all concepts are equally common."""
    toy, scenes = even_toy
    words = balance_answers(SceneLanguage.build(toy), scenes(100, many=8192))
    batch = scenes(7, many=MANY)
    kinds = [kind for kind in QA_DRAFTERS if kind not in CAPTION_KINDS]
    return {
        b.kind: b for b in measure_baselines(concat_qa([generate_questions(words, batch, 0, kind) for kind in kinds]))
    }


@pytest.mark.parametrize("kind", EVEN)
def test_answers_are_even(kind, measured):
    found, expected = measured[kind], EVEN[kind]
    chance = (expected * (1 - expected) / found.num_questions) ** 0.5
    assert 2 * found.num_questions > 10_000 or not kind.startswith(("existence", "choice_object", "colour", "position"))
    # The fit to a sample of scenes may be off by a little; the question must not help.
    assert abs(found.majority - expected) < 4 * chance + 0.01, found
    assert found.blind < expected + 4 * chance + 0.015, found


def test_open_answers_cannot_be_guessed(measured):
    assert set(measured) - set(EVEN) == {"what", "grounding"}
    assert measured["what"].blind < 0.08  # 27 things and words
    assert measured["grounding"].blind < 0.05


def test_popularity_shows_in_random_questions_only(words, scenes):
    """Concepts with more sprites appear more often: a blind guess by name helps unless absent ones are as popular."""
    even, batch = balance_answers(words, scenes(100, many=8192)), scenes(7, many=12_000)
    random, popular = (
        measure_baselines(generate_questions(even, batch, 0, f"existence_{pool}"))[0] for pool in ("random", "popular")
    )
    assert random.blind > 0.55
    assert popular.blind < 0.53


def test_a_leak_is_found(words, scenes):
    """Counts as they come are mostly 1 and 0, and four options then give the answer away."""
    batch = scenes(7, many=6000)
    for kind in ("counting", "choice_count"):
        (found,) = measure_baselines(generate_questions(words, batch, 0, kind))
        assert found.blind > 0.4
    assert measure_baselines(generate_questions(words, batch, 0, "counting"))[0].majority > 0.3


def test_all_labels_stay_where_scenes_have_them(words, scenes):
    even = balance_answers(words, scenes(100, many=4096))
    for kind, labels in (("colour", range(1, 11)), ("position", range(9))):
        assert (even.keep_thresholds[kind][list(labels)] > 0).all()
    assert even.keep_thresholds["counting"][:4].min() > 0
    assert not even.keep_thresholds["counting"][9:].any()


def test_empty_scenes_have_only_counting_questions(words, scenes):
    batch = scenes(0, many=50)
    empty = type(batch)(**{**vars(batch), "sprite": torch.full_like(batch.sprite, -1)})
    assert not any(
        generate_questions(words, empty, 0, kind).valid.any()
        for kind in QA_DRAFTERS
        if kind not in ("counting", "choice_count")
    )
    even = balance_answers(words, empty)
    assert not generate_questions(even, empty, 0, "colour").valid.any()


def test_the_table_is_printed():
    text = format_baselines([BlindBaseline("existence_random", 5000, 2, 0.5, 0.512)])
    assert text.splitlines()[1].split() == ["existence_random", "5,000", "2", "50.0%", "51.2%", "1.4%"]
