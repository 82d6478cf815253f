"""The script that times steps of a recipe's stage: every way takes the same steps, and it comes to its end."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from vitrail import recipe
from vitrail.errors import ConfigError
from vitrail.train import trainer

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("step")


def event(name: str, spent: float, device: DeviceType = DeviceType.CUDA, said: bool = False) -> SimpleNamespace:
    return SimpleNamespace(key=name, self_device_time_total=spent, device_type=device, is_user_annotation=said)


def test_kernels_are_told_apart_and_counted_once(script, monkeypatch):
    monkeypatch.setattr(script, "PROFILED", 2)
    events = [
        event("nvjet_tst_128x256", 6000.0),
        event("aten::mm", 6000.0, DeviceType.CPU),  # launched it
        event("fmha_cutlassB_bf16", 4000.0),
        event("triton_tem_fused_flex_attention_backward", 8000.0),
        event("triton_poi_fused__scaled_dot_product_flash_attention_mm_0", 2000.0),
        event("Optimizer.step", 9000.0, said=True),
    ]
    spent = script.on_device(events)
    assert [ms for _, ms in spent] == [4.0, 3.0, 2.0, 1.0] and spent[1][0] == "nvjet_tst_128x256"
    assert script.grouped(spent) == {"attention": 6.0, "products": 3.0, "others": 1.0}


def test_ways_are_other_kernels_for_a_while(script):
    sound, short = trainer.sound_gradients, script.attend.SHORT
    for name, changed in (("torch", (False, False)), ("cudnn", (True, False)), ("flex", (False, True))):
        with script.way(name):
            assert (trainer.sound_gradients is not sound, script.attend.SHORT < short) == changed
        assert trainer.sound_gradients is sound and script.attend.SHORT == short


def test_what_cannot_be_is_refused(script, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="no stage 'lern'"):
        script.short(recipe.read("smoke"), "lern")
    monkeypatch.setattr(sys, "argv", ["step.py", "smoke", "learn", "stages.0.batch", "--out", "x.json"])
    with pytest.raises(SystemExit):
        script.main()
    assert "'stages.0.batch' is no KEY=VALUE" in capsys.readouterr().err


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
    usual = recipe.Trainer
    script.main()
    assert recipe.Trainer is usual
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert set(found) == {"torch", "cudnn", "flex"} and len({way["loss"] for way in found.values()}) == 1
    for way in found.values():
        assert 0 < way["least"] <= way["median"] and 0 < way["least"] <= way["ms"] and way["fraction"] > 0
        assert set(way["kernels"]) == {"attention", "products", "others"}
