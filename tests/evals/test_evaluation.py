"""`vitrail.evaluate`: names, options, loaded pipelines, and the typed result."""

import json

import numpy as np
import pytest
from PIL import Image

import vitrail
from evals.test_suites_models import own
from vitrail import evals
from vitrail.config import list_options
from vitrail.errors import ConfigError
from vitrail.evals.evaluation import EvaluationResult, find_suite
from vitrail.evals.scores import Proportion, Score
from vitrail.evals.suites.benchmark_suites import BenchmarkSuite
from vitrail.evals.suites.embedding_suites import AROScenesSuite
from vitrail.registry import BENCHMARKS, SUITES, TEXT_BENCHMARKS


@pytest.fixture
def classes(tmp_path):
    """Ten images of each of two colours."""
    for c, name in enumerate(("red", "green")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for n in range(10):
            noise = np.random.default_rng([c, n]).integers(0, 60, (20, 24, 3))
            noise[..., c] += 180
            Image.fromarray(noise.astype(np.uint8)).save(tmp_path / "data" / name / f"{n}.png")
    return tmp_path / "data"


def test_pipeline_and_folder_have_equal_scores(tmp_path, classes):
    own(tmp_path / "clip")
    from_folder = vitrail.evaluate(tmp_path / "clip", "zeroshot", data=classes, device="cpu", limit=12)
    pipeline = vitrail.load(tmp_path / "clip", device="cpu")
    from_pipeline = vitrail.evaluate(pipeline, "zeroshot", data=str(classes), limit=12)
    assert from_folder.scores == from_pipeline.scores and from_folder.settings == from_pipeline.settings
    assert (from_folder.suite, from_folder.model) == ("zeroshot", str(tmp_path / "clip"))
    assert (from_pipeline.model, from_pipeline.device) == ("EmbeddingPipeline", "cpu")
    score = from_folder["by prompt, top-1"]
    assert (score.unit, score.higher_is_better, score.count) == ("fraction", True, 12)
    assert score.interval[0] <= score.value <= score.interval[1] and score.baselines["chance"] == 0.5
    with pytest.raises(ConfigError, match="the suite needs UnifiedPipeline, and the model is EmbeddingPipeline"):
        vitrail.evaluate(pipeline, "drawing", true_images="")


def test_result_is_saved_and_printed(tmp_path):
    scores = [
        Score.from_proportion("accuracy", Proportion(3, 4), chance=0.5),
        Score("FD", 12.5, (11.0, 14.0), 40, unit="distance", higher_is_better=False),
    ]
    result = EvaluationResult(scores, {"data": tmp_path, "limit": None}, suite="some", model="mini")
    result.save(tmp_path / "new" / "scores.json")
    found = json.loads((tmp_path / "new" / "scores.json").read_text())
    assert found == {**result.to_dict(), "data": str(tmp_path)} | {"scores": [score.as_dict for score in scores]}
    assert found["scores"][1]["unit"] == "distance" and found["scores"][1]["higher_is_better"] is False
    first, second = str(result).splitlines()
    assert first.startswith("accuracy  75.0%") and first.endswith("chance 50.0%") and "12.5 [11.0, 14.0]" in second
    with pytest.raises(ConfigError, match=r"some has no score 'acuracy'.*\n.*did you mean 'accuracy'"):
        result["acuracy"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        result.save(tmp_path / "file" / "scores.json")


def test_every_name_has_a_suite_with_described_options():
    assert set(evals.list_suites()) == {*SUITES, *BENCHMARKS, *TEXT_BENCHMARKS}
    for name in evals.list_suites():
        for has_data in (False, True):
            options = list_options(find_suite(name, has_data=has_data))
            assert all(option.description for option in options), name
    assert find_suite("aro") is AROScenesSuite and issubclass(find_suite("aro", has_data=True), BenchmarkSuite)
    with pytest.raises(ConfigError, match="did you mean 'zeroshot'"):
        find_suite("zeroshoot")


def test_options_of_a_benchmark_are_its_own():
    applies = {name: find_suite(name, has_data=True).has_option for name in BENCHMARKS}
    assert {name for name, has in applies.items() if has("mode")} == {"pope"}
    assert {name for name, has in applies.items() if has("boxes")} == {"refcoco"}
    assert {name for name, has in applies.items() if has("clip_model")} == {"captions"}
    assert {name for name, has in applies.items() if has("fps")} == {"charades", "qvhighlights", "activitynet"}
    assert {name for name, has in applies.items() if has("circular")} == {"mmbench", "mmmu", "realworldqa"}


def test_invalid_options_are_named(tmp_path):
    for options, output in (
        ({"limt": 3}, "no key 'limt'"),
        ({"limit": "many"}, "limit: expected a whole number or nothing"),
        ({"split": "dev"}, 'split: "dev" is not a valid value'),
    ):
        with pytest.raises(ConfigError, match=output):
            vitrail.evaluate(tmp_path, "zeroshot", **options)
    with pytest.raises(ConfigError, match="data is missing"):
        vitrail.evaluate(tmp_path, "pope")
