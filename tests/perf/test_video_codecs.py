"""perf/video_codecs.py: the ways to convolve agree, and the script compares equal codecs."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from vitrail.codecs.causal_layers import CausalConv

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("video_codecs")


@torch.no_grad()
def test_ways_to_convolve_agree(script):
    layer, x = CausalConv(20, 18), torch.randn(1, 3, 5, 4, 20)
    expected = layer(x)
    padded = torch.cat([torch.zeros(1, 2, 5, 4, 20), x], 1)
    planes = script.convolve_planes(padded.movedim(-1, 1), layer.weight, layer.bias).movedim(1, -1)
    torch.testing.assert_close(planes, expected, rtol=1e-4, atol=1e-5)
    for name in script.WAYS:
        with script.use_way(name):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_script_compares_equal_codecs(script, monkeypatch, tmp_path):
    pytest.importorskip("diffusers")
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["video_codecs.py", "--out", str(out), "--part", "compare", "--part", "long"])
    script.main()
    figures = json.loads(out.read_text())["figures"]
    for name in script.CLASSES:
        assert max(figures[f"{name} agree"].values()) < 1e-4
        assert figures[f"{name} encode"]["speedup"] > 0 and figures[f"{name} decode chunks"]["ms"] > 0
    assert figures["long"]["frames"] == 65
