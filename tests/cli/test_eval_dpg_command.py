"""`vitrail eval MODEL dpg` on a small untrained model."""

import pytest

from cli.test_eval_scenes_commands import run as run
from data.formats.test_dpg_bench import ONE, TWO, table
from vitrail.errors import ConfigError, DataError


def test_scene_prompts_scored_by_the_judge(run, tmp_path):
    page = tmp_path / "found.html"
    words = ("--count", 3, "--drawings-per-prompt", 2, "--steps", 1, "--batch-size", 2, "--concepts", 8, "--page", page)
    found, shown = run("dpg", "--judge", tmp_path / "judge", *words)
    first, *_, last = found["scores"]
    assert (first["name"], first["count"], last["name"]) == ("DPG score", 3, "true images through the codec")
    assert "other prompts" in first["baselines"] and {1, 2} == {
        s["subset"]["level"] for s in found["scores"] if "subset" in s
    }
    assert (found["count"], found["drawings_per_prompt"], found["qa_model"]) == (3, 2, None) and found["questions"] >= 9
    assert shown.startswith("example: ") and "<h3>dense prompts</h3>" in page.read_text()


def test_scene_prompts_scored_by_a_model(run, tmp_path):
    words = ("--judge", tmp_path / "judge", "--count", 2, "--steps", 1, "--held-out", "--no-score-true-images")
    found, _ = run("dpg", *words, "--qa-model", tmp_path / "model")
    names = [score["name"] for score in found["scores"]]
    assert names[0] == "DPG score" and names[-1] == "neither yes nor no" and "true pictures" not in " ".join(names)
    assert found["judge"] is None and found["scores"][-1]["count"] == 2 * found["questions"]  # of other prompts too


def test_prompts_of_the_benchmark(run, tmp_path):
    (tmp_path / "dpg.csv").write_text(table(ONE, TWO, TWO.replace("a,", "b,", 1).replace("2,1", "1,0")))
    nobody = ("--judge", "none", "--atlas", "none")  # neither is needed
    words = ("--data", tmp_path / "dpg.csv", "--qa-model", tmp_path / "model", *nobody, "--steps", 1)
    found, shown = run("dpg", *words)
    assert found["count"] == 2 and found["questions"] == 3 and "example: a boat, and a pier" in shown
    assert run("dpg", *words, "--count", 1)[0]["count"] == 1


def test_invalid_options_are_refused(run, tmp_path):
    (tmp_path / "dpg.csv").write_text(table(TWO))
    data = ("--data", tmp_path / "dpg.csv")
    with pytest.raises(ConfigError, match="the judge cannot answer"):
        run("dpg", *data)
    with pytest.raises(ConfigError, match="does not apply to the prompts"):
        run("dpg", *data, "--qa-model", "x", "--held-out")
    with pytest.raises(DataError, match="line 2: the question depends on 1"):
        run("dpg", *data, "--qa-model", "x")
    with pytest.raises(ConfigError, match="--count is 0"):
        run("dpg", "--count", 0)
