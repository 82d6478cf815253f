"""The script that times small worlds, with a tiny one: it comes to its end."""

import importlib
from pathlib import Path

import worlds

PERF = Path(__file__).parents[2] / "perf"


def test_it_times_a_tiny_world(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    script = importlib.import_module("playing")
    monkeypatch.setattr(script, "FRAMES", 2)
    found = script.measured(worlds.genie().eval())
    assert list(found) == ["1 passes", "2 passes", "3 passes"]
    assert all(row["fps"] > 0 and row["floor_ms"] > 0 for row in found.values())
