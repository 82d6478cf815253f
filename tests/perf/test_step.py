"""perf/step.py: all attention backends take the same steps, and the script runs."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from vitrail import recipe
from vitrail.errors import ConfigError
from vitrail.recipe import recipe_training
from vitrail.training import trainer

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("step")


def make_event(
    name: str, time_us: float, device: DeviceType = DeviceType.CUDA, annotation: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(key=name, self_device_time_total=time_us, device_type=device, is_user_annotation=annotation)


def test_kernels_are_grouped_and_counted_once(script, monkeypatch):
    monkeypatch.setattr(script, "PROFILED", 2)
    events = [
        make_event("nvjet_tst_128x256", 6000.0),
        make_event("aten::mm", 6000.0, DeviceType.CPU),  # the launch
        make_event("fmha_cutlassB_bf16", 4000.0),
        make_event("triton_tem_fused_flex_attention_backward", 8000.0),
        make_event("triton_poi_fused__scaled_dot_product_flash_attention_mm_0", 2000.0),
        make_event("Optimizer.step", 9000.0, annotation=True),
    ]
    times = script.list_kernel_times(events)
    assert [ms for _, ms in times] == [4.0, 3.0, 2.0, 1.0] and times[1][0] == "nvjet_tst_128x256"
    assert script.group_kernel_times(times) == {"attention": 6.0, "products": 3.0, "others": 1.0}


def test_backends_are_restored(script):
    without_cudnn, max_keys = trainer.disable_cudnn_attention, script.attention_backends.MAX_DENSE_MASK_KEYS
    for name, changed in (("torch", (False, False)), ("cudnn", (True, False)), ("flex", (False, True))):
        with script.use_attention_backend(name):
            assert (
                trainer.disable_cudnn_attention is not without_cudnn,
                script.attention_backends.MAX_DENSE_MASK_KEYS < max_keys,
            ) == changed
        assert (
            trainer.disable_cudnn_attention is without_cudnn
            and script.attention_backends.MAX_DENSE_MASK_KEYS == max_keys
        )


def test_invalid_arguments_are_refused(script, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="no stage 'lern'"):
        script.select_stage(recipe.load_recipe("smoke"), "lern")
    monkeypatch.setattr(sys, "argv", ["step.py", "smoke", "learn", "stages.0.batch_size", "--out", "x.json"])
    with pytest.raises(SystemExit):
        script.main()
    assert "'stages.0.batch_size' is not KEY=VALUE" in capsys.readouterr().err


def test_one_stage_and_its_sources_are_selected(script):
    mini = recipe.load_recipe("mini", {"model.parts.codec": {"checkpoint": "mini", "part": "codec"}})
    found = script.select_stage(mini, "anneal")
    assert [stage.name for stage in found.stages] == ["anneal"] and "unseen" not in found.sources
    assert set(found.sources) == set(found.stages[0].mixture.weights)
    assert found.stages[0].batch_size == 512 and found.stages[0].steps == script.WARMUP + script.TIMED + script.PROFILED


def test_script_runs(script, monkeypatch, tmp_path):
    changes = ["stages.0.batch_size=2", "stages.0.gradient_accumulation_steps=1", "stages.0.num_workers=0"]
    stage = recipe.load_recipe("smoke").stages[0].name
    monkeypatch.setattr(sys, "argv", ["step.py", "smoke", stage, *changes, "--out", str(tmp_path / "out.json")])
    trainer_class = recipe_training.Trainer
    script.main()
    assert recipe_training.Trainer is trainer_class
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert set(found) == {"torch", "cudnn", "flex"} and len({row["loss"] for row in found.values()}) == 1
    for row in found.values():
        assert 0 < row["least"] <= row["median"] and 0 < row["least"] <= row["ms"] and row["fraction"] > 0
        assert set(row["kernels"]) == {"attention", "products", "others"}
