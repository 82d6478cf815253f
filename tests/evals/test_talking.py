"""Questions and drawings: who knows the truth is always right, who guesses is as good as the baseline says."""

import pytest
import torch

from evals.test_judge import shapes
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.words import Words, ask, balanced, matches, prompts
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.suites import talking
from vitrail.evals.suites.talking import answered, drawn, plain, redrawn

KINDS = ("existence_random", "counting", "colour", "unanswerable_colour")


@pytest.fixture(scope="module")
def scenes():
    config = ScenesConfig(atlas="-", preset="colours", side=24, seed=5, scene={"combinations": "all"})
    source = SceneSource(config, shapes())
    return source, balanced(Words.of(source.atlas.table), source.scenes(torch.arange(2**20)[-2000:]))


class Oracle:
    """Knows every question of every kind to these scenes."""

    def __init__(self, source, words, held_out=False):
        self.known = {}
        index = torch.arange(2000)
        for kind in KINDS:
            said = ask(words, source.scenes(index), 5, kind, held_out=held_out)
            pixels = source.draw(index).pixels
            for b in said.valid.nonzero()[:, 0].tolist():
                question, answer = (words.pieces.read(x[b : b + 1])[0] for x in (said.question, said.answer))
                self.known[question, pixels[b].sum().item()] = answer

    def __call__(self, pixels, questions):
        assert pixels.dtype == torch.uint8 and len(pixels) == len(questions)
        return [self.known[q, p.sum().item()].upper() + "!" for q, p in zip(questions, pixels, strict=True)]


@pytest.mark.parametrize("held_out", [False, True])
def test_who_knows_is_right(scenes, held_out, monkeypatch):
    monkeypatch.setattr(talking, "GUESSED", 200)
    scores = answered(Oracle(*scenes, held_out), *scenes, KINDS, 70, held_out=held_out)
    assert [score.name for score in scores[:-2]] == [*KINDS]
    assert all(score.value == 1 and score.of == 70 for score in scores[:-2])
    assert all(0 < score.beside["majority"] <= score.beside["blind"] + 0.2 for score in scores[:-2])
    none, some = scores[-2:]  # of what has no answer, and of what has one
    assert (none.value, some.value) == (1, 0) and none.of + some.of == 280 and 20 < none.of < 50


def test_who_always_refuses(scenes, monkeypatch):
    monkeypatch.setattr(talking, "GUESSED", 50)
    scores = answered(lambda _, asked: ["There is no such thing."] * len(asked), *scenes, KINDS[:2], 40)
    assert [score.value for score in scores] == [0, 0, 1]
    only = answered(lambda _, asked: ["No"] * len(asked), *scenes, KINDS[:1], 300)
    assert abs(only[0].value - 0.5) < 0.1
    hard = answered(lambda _, asked: ["There is no such thing."] * len(asked), *scenes, KINDS[3:], 40)
    assert [score.value for score in hard[1:]] == [1, 1] and sum(score.of for score in hard[1:]) == 40
    never = answered(lambda _, asked: ["red"] * len(asked), *scenes, KINDS[3:], 40)
    assert [score.value for score in never[1:]] == [0, 0]


def test_kinds_that_scenes_do_not_admit(scenes, monkeypatch):
    monkeypatch.setattr(talking, "PATIENCE", 1)
    with pytest.raises(ConfigError, match="hardly ever admit"):
        answered(lambda _, asked: asked, *scenes, ["reading"], 1)
    with pytest.raises(ConfigError, match="at least one"):
        answered(lambda _, asked: asked, *scenes, KINDS, 0)


def test_words_are_what_counts():
    assert plain("  Yes, Two  DOGS. ") == "yes two dogs"


class Judge:
    """Sees the scenes that pictures were made of."""

    def __init__(self, source, words):
        self.words, self.made = words, source.draw(torch.arange(2000))
        self.knows = tuple(words.concept.unique().tolist())
        self.rows = {picture.numpy().tobytes(): row for row, picture in enumerate(self.made.pixels)}

    def look(self, pixels):
        return self.made.scenes[torch.tensor([self.rows[picture.numpy().tobytes()] for picture in pixels])]

    def right(self, spec, pixels):
        return matches(self.words, spec, self.look(pixels))


def test_drawings_by_kind(scenes):
    """Drawn is the first scene that fulfils a prompt, and for every second prompt a scene that does not."""
    judge, words, seen = Judge(*scenes), scenes[1], []
    asked = {kind: prompts(words, kind, 6, 3) for kind in DRAWINGS}
    every = judge.made.scenes

    def fits(spec):
        return matches(words, spec[torch.zeros(len(every.count), dtype=torch.long)], every)

    able = {kind: [bool(fits(one.spec[i : i + 1]).any()) for i in range(6)] for kind, one in asked.items()}

    def drawer(texts, first):
        seen.append((first, len(texts)))
        kind, at = list(DRAWINGS)[first // 6], first % 6
        rows = []
        for i in range(at, at + len(texts)):
            right = fits(asked[kind].spec[i : i + 1])
            rows.append(int((right if i % 2 else ~right).int().argmax()))
        return judge.made.pixels[rows]

    scores = drawn(drawer, judge, 6, seed=3, batch=4)
    assert [score.name for score in scores] == [*DRAWINGS, "all"] and scores[-1].of == 36
    hits = {kind: sum(one for i, one in enumerate(able[kind]) if i % 2) for kind in DRAWINGS}
    assert {score.name: round(score.value * 6) for score in scores[:-1]} == hits and sum(hits.values()) > 6
    assert seen[:3] == [(0, 4), (4, 2), (6, 4)]
    assert 0 <= scores[-1].beside["others"] < scores[-1].value


def test_true_pictures_are_taken_as_far_as_the_codec_shows_them():
    scene = {"repeat": 0.5, "tint": 0.7, "combinations": "all"}
    source = SceneSource(ScenesConfig(atlas="-", preset="plain", side=24, seed=5, scene=scene), shapes())
    judge = Judge(source, Words.of(source.atlas.table))
    whole, mixed = (redrawn(through, judge, source, 10, batch=8) for through in (lambda x: x, lambda x: x.roll(1, 0)))
    assert whole.value == 1 and whole.of == 60 and mixed.value < 0.6
