"""Scene benchmarks of perfect models and of baselines."""

import pytest
import torch

from evals.test_drawing_judge import shapes
from vitrail.data.language import SceneLanguage, balance_answers, generate_prompts, generate_questions, matches_spec
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.suites import scene_benchmarks
from vitrail.evals.suites.scene_benchmarks import (
    evaluate_answers,
    evaluate_drawing_ceiling,
    evaluate_drawings,
    normalize_answer,
)

KINDS = ("existence_random", "counting", "colour", "unanswerable_colour")


@pytest.fixture(scope="module")
def scenes():
    config = SceneSourceConfig(atlas="-", preset="colours", image_size=24, seed=5, scene={"combinations": "all"})
    source = SceneSource(config, shapes())
    return source, balance_answers(
        SceneLanguage.build(source.atlas.table), source.sample_scenes(torch.arange(2**20)[-2000:])
    )


class Oracle:
    """Answers every question about these scenes correctly."""

    def __init__(self, source, words, held_out=False):
        self.known = {}
        index = torch.arange(2000)
        for kind in KINDS:
            output = generate_questions(words, source.sample_scenes(index), 5, kind, held_out=held_out)
            pixels = source.render_indices(index).pixels
            for b in output.valid.nonzero()[:, 0].tolist():
                question, answer = (words.pieces.to_texts(x[b : b + 1])[0] for x in (output.question, output.answer))
                self.known[question, pixels[b].sum().item()] = answer

    def __call__(self, pixels, questions):
        assert pixels.dtype == torch.uint8 and len(pixels) == len(questions)
        return [self.known[q, p.sum().item()].upper() + "!" for q, p in zip(questions, pixels, strict=True)]


@pytest.mark.parametrize("held_out", [False, True])
def test_perfect_answers_score_one(scenes, held_out, monkeypatch):
    monkeypatch.setattr(scene_benchmarks, "BASELINE_SCENES", 200)
    scores = evaluate_answers(Oracle(*scenes, held_out), *scenes, KINDS, 70, held_out=held_out)
    assert [score.name for score in scores[:-2]] == [*KINDS]
    assert all(score.value == 1 and score.count == 70 for score in scores[:-2])
    assert all(0 < score.baselines["majority"] <= score.baselines["blind"] + 0.2 for score in scores[:-2])
    none, some = scores[-2:]  # of questions without and with an answer
    assert (none.value, some.value) == (1, 0) and none.count + some.count == 280 and 20 < none.count < 50


def test_always_rejecting_answers(scenes, monkeypatch):
    monkeypatch.setattr(scene_benchmarks, "BASELINE_SCENES", 50)
    scores = evaluate_answers(lambda _, asked: ["There is no such thing."] * len(asked), *scenes, KINDS[:2], 40)
    assert [score.value for score in scores] == [0, 0, 1]
    only = evaluate_answers(lambda _, asked: ["No"] * len(asked), *scenes, KINDS[:1], 300)
    assert abs(only[0].value - 0.5) < 0.1
    hard = evaluate_answers(lambda _, asked: ["There is no such thing."] * len(asked), *scenes, KINDS[3:], 40)
    assert [score.value for score in hard[1:]] == [1, 1] and sum(score.count for score in hard[1:]) == 40
    never = evaluate_answers(lambda _, asked: ["red"] * len(asked), *scenes, KINDS[3:], 40)
    assert [score.value for score in never[1:]] == [0, 0]


def test_unsupported_question_kinds_raise(scenes, monkeypatch):
    monkeypatch.setattr(scene_benchmarks, "MAX_EMPTY_BATCHES", 1)
    with pytest.raises(ConfigError, match="rarely support"):
        evaluate_answers(lambda _, asked: asked, *scenes, ["reading"], 1)
    with pytest.raises(ConfigError, match="at least 1"):
        evaluate_answers(lambda _, asked: asked, *scenes, KINDS, 0)


def test_answers_are_normalised():
    assert normalize_answer("  Yes, Two  DOGS. ") == "yes two dogs"


class Judge:
    """Detects the scenes from which images were rendered."""

    def __init__(self, source, words):
        self.language, self.made = words, source.render_indices(torch.arange(2000))
        self.known_concepts = tuple(words.concept.unique().tolist())
        self.rows = {picture.numpy().tobytes(): row for row, picture in enumerate(self.made.pixels)}

    def detect_scenes(self, pixels):
        return self.made.scenes[torch.tensor([self.rows[picture.numpy().tobytes()] for picture in pixels])]

    def judge_images(self, spec, pixels):
        return matches_spec(self.language, spec, self.detect_scenes(pixels))


def test_drawing_scores_per_kind(scenes):
    """Draws the first scene that matches a prompt; for every second prompt a scene that does not."""
    judge, words, seen = Judge(*scenes), scenes[1], []
    asked = {kind: generate_prompts(words, kind, 6, 3) for kind in DRAWING_PROMPT_KINDS}
    every = judge.made.scenes

    def fits(spec):
        return matches_spec(words, spec[torch.zeros(len(every.sprite), dtype=torch.long)], every)

    able = {kind: [bool(fits(one.spec[i : i + 1]).any()) for i in range(6)] for kind, one in asked.items()}

    def drawer(texts, first):
        seen.append((first, len(texts)))
        kind, at = list(DRAWING_PROMPT_KINDS)[first // 6], first % 6
        rows = []
        for i in range(at, at + len(texts)):
            right = fits(asked[kind].spec[i : i + 1])
            rows.append(int((right if i % 2 else ~right).int().argmax()))
        return judge.made.pixels[rows]

    scores = evaluate_drawings(drawer, judge, 6, seed=3, batch_size=4)
    assert [score.name for score in scores] == [*DRAWING_PROMPT_KINDS, "all"] and scores[-1].count == 36
    hits = {kind: sum(one for i, one in enumerate(able[kind]) if i % 2) for kind in DRAWING_PROMPT_KINDS}
    assert {score.name: round(score.value * 6) for score in scores[:-1]} == hits and sum(hits.values()) > 6
    assert seen[:3] == [(0, 4), (4, 2), (6, 4)]
    assert 0 <= scores[-1].baselines["other prompts"] < scores[-1].value


def test_drawing_ceiling_depends_on_the_codec():
    scene = {"repeat_probability": 0.5, "tint_probability": 0.7, "combinations": "all"}
    source = SceneSource(SceneSourceConfig(atlas="-", preset="plain", image_size=24, seed=5, scene=scene), shapes())
    judge = Judge(source, SceneLanguage.build(source.atlas.table))
    whole, mixed = (
        evaluate_drawing_ceiling(through, judge, source, 10, batch_size=8)
        for through in (lambda x: x, lambda x: x.roll(1, 0))
    )
    assert whole.value == 1 and whole.count == 60 and mixed.value < 0.6
