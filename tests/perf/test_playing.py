"""perf/playing.py measures a tiny world model."""

import importlib
from pathlib import Path

import worlds

PERF = Path(__file__).parents[2] / "perf"


def test_tiny_world_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    script = importlib.import_module("playing")
    monkeypatch.setattr(script, "FRAMES", 2)
    figures = script.measure_frames(worlds.genie().eval())
    assert list(figures) == ["1 passes", "2 passes", "3 passes"]
    assert all(row["fps"] > 0 and row["floor_ms"] > 0 for row in figures.values())
