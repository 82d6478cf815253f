"""perf/serve.py measures tiny models, and the engine's logits equal those of the model."""

import json
import runpy
import sys
from pathlib import Path

PERF = Path(__file__).parents[2] / "perf"


def test_tiny_models_are_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PERF))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--tiny", "--out", str(tmp_path / "results.json")])
    runpy.run_path(str(PERF / "serve.py"), run_name="__main__")
    figures = json.loads((tmp_path / "results.json").read_text())["figures"]
    for part in ("mixed", "rows"):
        assert figures[part]["check"]["relative_difference"] < 1e-4 and figures[part]["tokens_per_s"] > 0
    assert figures["one_row"]["engine_tokens_per_s"] > 0
