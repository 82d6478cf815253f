"""perf/finetune.py: both sides have equal losses, and the script runs."""

import importlib
import json
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("finetune")


def test_released_sizes(script, tmp_path):
    preparation = script.Preparation(script.CASES["llava-1.5-7b lora"], script.FULL_SIZE._replace(steps=1), tmp_path)
    plan = preparation.make_plan(script.CASES["llava-1.5-7b qlora"])
    count = script.count_parameters(plan.model) - script.count_parameters(plan.model, trainable=True)
    assert count == 7_063_427_072  # of llava-hf/llava-1.5-7b-hf


@pytest.mark.slow
def test_script_runs_and_both_sides_agree(script, monkeypatch, tmp_path, capsys):
    cases = ["llava-1.5-7b lora", "llava-1.5-7b qlora", "qwen3-vl-2b full"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--tiny", "--out", str(tmp_path / "out.json"), "--only", *cases])
    script.main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert list(figures) == cases
    for name in ("llava-1.5-7b lora", "qwen3-vl-2b full"):
        case = figures[name]
        for side in ("padded", "grouped"):
            assert case["ours"]["first_loss"] == pytest.approx(case[side]["first_loss"], rel=1e-5)
        assert case["speedup"] > 0
    full = figures["qwen3-vl-2b full"]
    assert full["ours"]["last_loss"] == pytest.approx(full["grouped"]["last_loss"], rel=1e-3)
    assert figures["llava-1.5-7b qlora"]["ours"]["last_loss"] < figures["llava-1.5-7b qlora"]["ours"]["first_loss"]
    assert "times the tokens per second" in capsys.readouterr().out
