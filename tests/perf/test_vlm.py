"""The script that times vision-language models, with tiny ones: what it measures is right, and it comes to its end."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from vitrail.hub.decoders import spelt
from vitrail.models.presets import VLMS

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("vlm")


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_both_sides_are_one_model(script, family):
    it = script.pair(family, getattr(script, family)(True), script.TINY)
    assert script.difference(it)["ours"] < 1e-5
    assert {p.data_ptr() for p in it.ours.parameters()} & {p.data_ptr() for p in it.theirs.parameters()}
    with torch.no_grad():
        it.ours.connector.layers.linears[0].weight.mul_(-1.5)
        changed = script.difference(it)["ours"]  # on both sides, since it is one tensor
        it.ours.decoder.blocks[0].branches["mlp"].op.gate_up.weight.mul_(-1.5)  # which is a copy: fused from two
    assert changed < 1e-5 < script.difference(it)["ours"]


@pytest.mark.parametrize(("family", "preset"), [("qwen3_vl", "qwen3-vl-2b"), ("llava", "llava-1.5-7b")])
def test_the_sizes_are_the_published_ones(script, family, preset):
    read = script.FAMILIES[family].read(getattr(script, family)(False).to_dict())
    published = VLMS[preset]
    assert spelt(read.decoder).block == spelt(published.decoder).block
    assert (read.decoder.layers, read.decoder.tied) == (published.decoder.layers, published.decoder.tied)
    assert read.tower.block == published.tower.block and read.tower.layers == published.tower.layers


def test_a_wrong_model_is_not_timed(script, monkeypatch):
    monkeypatch.setattr(script, "difference", lambda it: {"ours": float("nan"), "transformers": 0.0})
    found = script.row("llava", script.llava(True), script.TINY, 1e9, {})
    assert "ours" not in found and "differ" in found["wrong"]


def test_what_was_measured_is_saved_as_it_comes(script, monkeypatch):
    timed = {"captured": {"first_ms": 2.0, "decode_ms": 1.0}}
    monkeypatch.setattr(script, "difference", lambda it: {"ours": 0.0, "transformers": 0.0})
    monkeypatch.setattr(script, "ours", lambda it, new: timed)
    ways, saved = {"first": {}, "second": {}, "third": {}}, []
    answers = iter([{"first_ms": 8.0, "decode_ms": 3.0}, {"forward_ms": 6.0}])
    monkeypatch.setattr(script, "_way", lambda it, new: next(answers))  # of the third there is none: it fails
    found = script.row("llava", script.llava(True), script.TINY, 1e9, ways, lambda now: saved.append(json.dumps(now)))
    saved = [json.loads(one) for one in saved]
    assert [list(one["transformers"]) for one in saved] == [[], ["first"], ["first", "second"], list(ways)]
    assert [one["first"].get("speedup") for one in saved] == [None, 4.0, 3.0, 3.0] and saved[-1] == found
    assert found["decode"]["speedup"] == 3.0 and "StopIteration" in found["transformers"]["third"]


def test_no_way_is_begun_when_time_is_up(script):
    size = script.TINY._replace(peers_s=0.0)
    assert list(script.theirs(None, size, {"sdpa": {}})) == [("sdpa", "no time was left")]


def test_what_was_stopped_has_not_failed(script):
    def compiles():
        try:
            time.sleep(5)
        except script.TooLongError as error:
            raise RuntimeError("the compiler failed") from error

    with pytest.raises(script.TooLongError, match="over"), script.limit(0.05):
        compiles()
    with pytest.raises(RuntimeError, match="by itself"), script.limit(5):
        raise RuntimeError("by itself")


@pytest.mark.slow
def test_the_whole_script(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["vlm.py", "--tiny", "--out", str(tmp_path / "out.json")])
    script.main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    for family in ("qwen3_vl", "llava"):
        assert figures[family]["first"]["speedup"] > 0 < figures[family]["decode"]["share_of_bandwidth"]
    assert set(figures["qwen3_vl"]["transformers"]) == set(script.WAYS)
