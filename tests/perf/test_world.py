"""perf/world.py: the shapes are the published ones, and the script runs with a tiny model."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from vitrail.lab.system_specs import build_genie_dynamics
from vitrail.models.genie_model import Genie

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("world")


def count(part: torch.nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def test_shapes_are_published(script):
    with torch.device("meta"):
        large, small = (Genie(script.SHAPES[name].build_config()) for name in ("11b", "1b"))
        ledger = count(build_genie_dynamics(2048))
    assert count(large.dynamics) == pytest.approx(ledger, rel=0.001) == pytest.approx(10.1e9, rel=0.01)
    assert count(small.dynamics) == pytest.approx(1e9, rel=0.03)
    assert count(large.codec) == pytest.approx(200e6, rel=0.1)
    assert large.config.codec.grid == (23, 40) and large.config.dynamics.transformer.context_frames == 16


def test_model_with_wrong_cache_is_not_timed(script, monkeypatch):
    assert script.compare_cached_logits(script.build_model(script.TINY_SHAPE), script.TINY_SHAPE) < 1e-5
    monkeypatch.setattr(script, "compare_cached_logits", lambda model, shape: float("nan"))
    found = script.measure_model(script.TINY_SHAPE, 1e9)
    assert "frames" not in found and "differ" in found["error"]


def test_figures_are_saved_after_each_measurement(script, monkeypatch):
    monkeypatch.setattr(script, "METHODS", {"cached": None, "other": None})
    monkeypatch.setattr(script, "time_frame", lambda method, model, shape, steps: 10.0 * steps)
    saved = []
    found = script.measure_model(script.TINY_SHAPE, 1e9, save=lambda now: saved.append(json.loads(json.dumps(now))))
    assert len(saved) == 4 and saved[-1] == found
    assert "other" not in saved[1]["frames"]["2 steps"] and saved[1]["frames"]["2 steps"]["cached"]["fps"] == 50


def test_no_method_starts_after_the_time_limit(script):
    found = script.measure_model(script.TINY_SHAPE, 1e9, seconds=0)
    assert found["frames"]["2 steps"]["cached"] == "no time was left" and found["floor"]["pass_ms"] > 0


def test_script_runs(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["world.py", "--tiny", "--out", str(tmp_path / "out.json")])
    monkeypatch.setattr(script, "measure_bandwidth", lambda: 1e9)
    script.main()
    found = json.loads((tmp_path / "out.json").read_text())["figures"]["tiny"]
    assert set(found["frames"]) == {"3 steps", "2 steps"}
    for steps, frame in found["frames"].items():
        least = found["floor"][f"{steps}_ms"]
        assert frame["cached"]["share_of_floor"] == pytest.approx(least / frame["cached"]["frame_ms"])
        assert frame["cached"]["speedup_on_recomputing"] > 0
