"""Dense prompts, drawn and asked about: who draws what is asked has all, who draws for others has little."""

import pytest
import torch

from evals.test_judge import shapes
from evals.test_talking import Judge
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.words import Words
from vitrail.errors import ConfigError
from vitrail.evals.metrics.dpg import dpg
from vitrail.evals.suites import dense as suite
from vitrail.evals.suites.dense import Asker, dense_prompts, densely, judged, redrawn_densely, scored

N = 12


@pytest.fixture(scope="module")
def made():
    scene = {"objects": [3, 4], "repeat": 0.5, "tint": 0.7, "combinations": "all"}
    source = SceneSource(ScenesConfig(atlas="-", preset="relations", side=24, seed=5, scene=scene), shapes())
    words = Words.of(source.atlas.table)
    return source, Judge(source, words), dense_prompts(words, source, N)


def test_who_draws_what_is_asked_has_all(made):
    source, judge, asked = made
    true, calls = source.render(asked.scenes), []

    def drawer(texts, first):
        calls.append((first, len(texts)))
        rows = [first % N + n for n in range(len(texts))]
        assert texts == [asked.graphs[row].prompt for row in rows]
        return true[rows]

    seen = []

    def watch(kind, pixels, text, right, *_):
        seen.append((kind, right))

    scores = densely(drawer, judged(judge, asked), asked.graphs, drawings=2, batch=5, watch=watch)
    assert calls == [(0, 5), (5, 5), (10, 2), (12, 5), (17, 5), (22, 2)]
    assert [score.value for score in scores] == [1.0] * len(scores) and scores[0].of == N
    assert all(score.interval[0] < 1 for score in scores), "twelve of twelve leave some doubt"
    assert 0 <= scores[0].beside["others"] < 0.5
    levels = [score.part["level"] for score in scores[1:]]
    assert scores[0].name == "DPG score" and levels == sorted(levels) and {1, 2} == set(levels)
    assert seen == [("dense", True)] * 2 * N
    whole = redrawn_densely(lambda x: x, judged(judge, asked), asked, source, batch=5)
    assert whole.value == 1 and whole.name == "true pictures through the codec"


def test_scores_are_the_metrics(made):
    _, _, asked = made
    chance = torch.Generator().manual_seed(0)
    said = [
        [(torch.rand(len(graph.questions), generator=chance) < 0.7).tolist() for _ in range(3)]
        for graph in asked.graphs
    ]
    found, scores = dpg(asked.graphs, said), scored(asked.graphs, said)
    assert scores[0].value == pytest.approx(found.score, abs=1e-12)
    for level, shares in ((1, found.level1), (2, found.level2)):
        here = {score.name: score.value for score in scores if score.part.get("level") == level}
        assert here == pytest.approx(shares, abs=1e-12) and len(here) == 4
    assert all(score.interval[0] <= score.value <= score.interval[1] for score in scores)


def test_a_model_that_is_asked(made):
    """Each question goes with its picture; what is not yes is no, and what is neither is counted."""
    _, _, asked = made
    pixels = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 4, 4)
    calls = []

    def answerer(shown, texts):
        calls.append(len(texts))
        numbers = [(4, 0, 2)[int(picture[0, 0, 0])] for picture in shown]
        own = [{one.text for one in asked.graphs[number].questions} for number in numbers]
        assert all(text in texts_of for text, texts_of in zip(texts, own, strict=True))
        return ["Yes." if number == 0 else "no" if number == 2 else "perhaps" for number in numbers]

    asker = Asker(answerer, asked.graphs, batch=4)
    sizes = [len(asked.graphs[number].questions) for number in (4, 0, 2)]
    assert asker(pixels, (4, 0, 2)) == [[False] * sizes[0], [True] * sizes[1], [False] * sizes[2]]
    assert max(calls) == 4 and sum(calls) == sum(sizes)
    assert asker.score.value == pytest.approx(sizes[0] / sum(sizes)) and asker.score.of == sum(sizes)


def test_of_one_prompt_there_are_no_others(made):
    source, judge, asked = made

    def drawer(texts, first):
        return source.render(asked.scenes)[:1]

    assert densely(drawer, judged(judge, asked), asked.graphs[:1])[0].beside == {}


def test_what_cannot_be_is_refused(made, monkeypatch):
    source, judge, asked = made
    with pytest.raises(ConfigError, match="at least one"):
        dense_prompts(judge.words, source, 0)
    with pytest.raises(ConfigError, match="0 drawings of each prompt"):
        densely(lambda texts, first: None, judged(judge, asked), asked.graphs, drawings=0)
    lone = SceneSource(ScenesConfig(atlas="-", scene={"objects": [1, 1]}), shapes())
    monkeypatch.setattr(suite, "PATIENCE", 1)
    with pytest.raises(ConfigError, match="hardly ever admit a dense prompt"):
        dense_prompts(judge.words, lone, 1)
