"""`vitrail eval MODEL dpg`, on a small model that knows nothing."""

import pytest

from cli.test_eval_unified import run as run
from data.formats.test_dpg import ONE, TWO, table
from vitrail.errors import ConfigError, DataError


def test_own_prompts_by_the_judge(run, tmp_path):
    page = tmp_path / "found.html"
    words = ("--count", 3, "--drawings", 2, "--steps", 1, "--batch", 2, "--concepts", 8, "--page", page)
    found, shown = run("dpg", "--judge", tmp_path / "judge", *words)
    first, *_, last = found["scores"]
    assert (first["name"], first["of"], last["name"]) == ("DPG score", 3, "true pictures through the codec")
    assert "others" in first["beside"] and {1, 2} == {s["part"]["level"] for s in found["scores"] if "part" in s}
    assert (found["count"], found["drawings"], found["asks"]) == (3, 2, None) and found["questions"] >= 9
    assert shown.startswith("such as: ") and "<h3>dense prompts</h3>" in page.read_text()


def test_own_prompts_asked_of_a_model(run, tmp_path):
    words = ("--judge", tmp_path / "judge", "--count", 2, "--steps", 1, "--unseen", "--no-true")
    found, _ = run("dpg", *words, "--asks", tmp_path / "model")
    names = [score["name"] for score in found["scores"]]
    assert names[0] == "DPG score" and names[-1] == "neither yes nor no" and "true pictures" not in " ".join(names)
    assert found["judge"] is None and found["scores"][-1]["of"] == 2 * found["questions"]  # of other prompts too


def test_the_benchmarks_own_prompts(run, tmp_path):
    (tmp_path / "dpg.csv").write_text(table(ONE, TWO, TWO.replace("a,", "b,", 1).replace("2,1", "1,0")))
    nobody = ("--judge", "none", "--atlas", "none")  # neither is needed
    words = ("--data", tmp_path / "dpg.csv", "--asks", tmp_path / "model", *nobody, "--steps", 1)
    found, shown = run("dpg", *words)
    assert found["count"] == 2 and found["questions"] == 3 and "such as: a boat, and a pier" in shown
    assert run("dpg", *words, "--count", 1)[0]["count"] == 1


def test_what_cannot_be_is_refused(run, tmp_path):
    (tmp_path / "dpg.csv").write_text(table(TWO))
    data = ("--data", tmp_path / "dpg.csv")
    with pytest.raises(ConfigError, match="the judge cannot answer"):
        run("dpg", *data)
    with pytest.raises(ConfigError, match="worded as they are"):
        run("dpg", *data, "--asks", "x", "--unseen")
    with pytest.raises(DataError, match="line 2: the question depends on 1"):
        run("dpg", *data, "--asks", "x")
    with pytest.raises(ConfigError, match="0 prompts"):
        run("dpg", "--count", 0)
