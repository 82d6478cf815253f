"""DPG benchmark with perfect and with shifted images, and with model answers."""

import pytest
import torch

from evals.test_drawing_judge import shapes
from evals.test_scene_benchmarks import Judge
from vitrail.data.language import SceneLanguage
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.metrics.dpg_metrics import compute_dpg_score
from vitrail.evals.suites import dpg_benchmark as suite
from vitrail.evals.suites.dpg_benchmark import (
    ModelGraphAnswerer,
    build_dense_prompts,
    evaluate_dense_ceiling,
    evaluate_dense_drawings,
    make_judge_answerer,
    score_dense_answers,
)

N = 12


@pytest.fixture(scope="module")
def made():
    scene = {"objects": [3, 4], "repeat_probability": 0.5, "tint_probability": 0.7, "combinations": "all"}
    source = SceneSource(SceneSourceConfig(atlas="-", preset="relations", image_size=24, seed=5, scene=scene), shapes())
    words = SceneLanguage.build(source.atlas.table)
    return source, Judge(source, words), build_dense_prompts(words, source, N)


def test_perfect_drawings_score_one(made):
    source, judge, asked = made
    true, calls = source.render_scenes(asked.scenes), []

    def drawer(texts, first):
        calls.append((first, len(texts)))
        rows = [first % N + n for n in range(len(texts))]
        assert texts == [asked.graphs[row].prompt for row in rows]
        return true[rows]

    seen = []

    def watch(kind, pixels, text, right, *_):
        seen.append((kind, right))

    scores = evaluate_dense_drawings(
        drawer, make_judge_answerer(judge, asked), asked.graphs, drawings_per_prompt=2, batch_size=5, on_result=watch
    )
    assert calls == [(0, 5), (5, 5), (10, 2), (12, 5), (17, 5), (22, 2)]
    assert [score.value for score in scores] == [1.0] * len(scores) and scores[0].count == N
    assert all(score.interval[0] < 1 for score in scores), "twelve of twelve leave some doubt"
    assert 0 <= scores[0].baselines["other prompts"] < 0.5
    levels = [score.subset["level"] for score in scores[1:]]
    assert scores[0].name == "DPG score" and levels == sorted(levels) and {1, 2} == set(levels)
    assert seen == [("dense", True)] * 2 * N
    whole = evaluate_dense_ceiling(lambda x: x, make_judge_answerer(judge, asked), asked, source, batch_size=5)
    assert whole.value == 1 and whole.name == "true images through the codec"


def test_dense_scores_match_the_metrics(made):
    _, _, asked = made
    chance = torch.Generator().manual_seed(0)
    output = [
        [(torch.rand(len(graph.questions), generator=chance) < 0.7).tolist() for _ in range(3)]
        for graph in asked.graphs
    ]
    found, scores = compute_dpg_score(asked.graphs, output), score_dense_answers(asked.graphs, output)
    assert scores[0].value == pytest.approx(found.score, abs=1e-12)
    for level, shares in ((1, found.level1), (2, found.level2)):
        here = {score.name: score.value for score in scores if score.subset.get("level") == level}
        assert here == pytest.approx(shares, abs=1e-12) and len(here) == 4
    assert all(score.interval[0] <= score.value <= score.interval[1] for score in scores)


def test_model_answers_graph_questions(made):
    """Each question is asked about its image; answers other than yes count as no, and unparsed ones are counted."""
    _, _, asked = made
    pixels = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 4, 4)
    calls = []

    def answerer(shown, texts):
        calls.append(len(texts))
        numbers = [(4, 0, 2)[int(picture[0, 0, 0])] for picture in shown]
        own = [{one.text for one in asked.graphs[number].questions} for number in numbers]
        assert all(text in texts_of for text, texts_of in zip(texts, own, strict=True))
        return ["Yes." if number == 0 else "no" if number == 2 else "perhaps" for number in numbers]

    asker = ModelGraphAnswerer(answerer, asked.graphs, batch_size=4)
    sizes = [len(asked.graphs[number].questions) for number in (4, 0, 2)]
    assert asker(pixels, (4, 0, 2)) == [[False] * sizes[0], [True] * sizes[1], [False] * sizes[2]]
    assert max(calls) == 4 and sum(calls) == sum(sizes)
    assert asker.score.value == pytest.approx(sizes[0] / sum(sizes)) and asker.score.count == sum(sizes)


def test_single_prompt_has_no_baseline(made):
    source, judge, asked = made

    def drawer(texts, first):
        return source.render_scenes(asked.scenes)[:1]

    assert evaluate_dense_drawings(drawer, make_judge_answerer(judge, asked), asked.graphs[:1])[0].baselines == {}


def test_invalid_arguments_raise(made, monkeypatch):
    source, judge, asked = made
    with pytest.raises(ConfigError, match="at least 1"):
        build_dense_prompts(judge.language, source, 0)
    with pytest.raises(ConfigError, match="0 drawings per prompt"):
        evaluate_dense_drawings(
            lambda texts, first: None, make_judge_answerer(judge, asked), asked.graphs, drawings_per_prompt=0
        )
    lone = SceneSource(SceneSourceConfig(atlas="-", scene={"objects": [1, 1]}), shapes())
    monkeypatch.setattr(suite, "MAX_EMPTY_BATCHES", 1)
    with pytest.raises(ConfigError, match="rarely support a dense prompt"):
        build_dense_prompts(judge.language, lone, 1)
