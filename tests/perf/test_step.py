"""The script that times steps of a recipe's stage: every way takes the same steps, and it comes to its end."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from vitrail import recipe
from vitrail.train import trainer

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("step")


def test_kernels_are_told_apart(script):
    names = {
        "nvjet_tst_128x256": 3.0,
        "fmha_cutlassB_bf16": 2.0,
        "triton_poi_fused_add": 1.0,
        "triton_tem_attention": 4.0,
    }
    assert script.grouped(names) == {"attention": 6.0, "products": 3.0, "others": 1.0}


def test_one_stage_is_left_and_what_it_reads(script):
    mini = recipe.read("mini", {"model.parts.codec": {"start": "mini", "part": "codec"}})
    found = script.short(mini, "sharpen")
    assert [stage.name for stage in found.stages] == ["sharpen"] and "unseen" not in found.sources
    assert set(found.sources) == set(found.stages[0].mixture.weights)
    assert found.stages[0].batch == 512 and found.stages[0].steps == script.WARM + script.TIMED + script.PROFILED


def test_the_whole_script(script, monkeypatch, tmp_path):
    changes = ["stages.0.batch=2", "stages.0.accumulate=1", "stages.0.workers=0"]
    stage = recipe.read("smoke").stages[0].name
    monkeypatch.setattr(sys, "argv", ["step.py", "smoke", stage, *changes, "--out", str(tmp_path / "out.json")])
    before = trainer.sound_gradients, script.attend.SHORT, recipe.Trainer
    script.main()
    assert (trainer.sound_gradients, script.attend.SHORT, recipe.Trainer) == before
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert set(found) == {"torch", "cudnn", "flex"} and len({way["loss"] for way in found.values()}) == 1
    assert all(0 < way["least"] <= way["ms"] and way["fraction"] > 0 for way in found.values())
