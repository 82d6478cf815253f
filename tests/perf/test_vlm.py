"""perf/vlm.py with tiny models: both sides are equal, limits hold, and the script runs."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from vitrail.hub.decoder_families import normalize_decoder_config
from vitrail.models.presets import VLM_PRESETS

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("vlm")


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_both_sides_share_weights(script, family):
    pair = script.build_pair(family, script.CONFIGS[family](True), script.TINY_SIZE)
    assert script.compare_logits(pair)["ours"] < 1e-5
    assert {p.data_ptr() for p in pair.ours.parameters()} & {p.data_ptr() for p in pair.reference.parameters()}
    with torch.no_grad():
        pair.ours.connector.layers.linears[0].weight.mul_(-1.5)
        changed = script.compare_logits(pair)["ours"]  # both sides use this tensor
        pair.ours.decoder.blocks[0].branches["mlp"].op.gate_up.weight.mul_(-1.5)  # a copy, fused from two tensors
    assert changed < 1e-5 < script.compare_logits(pair)["ours"]


@pytest.mark.parametrize(("family", "preset"), [("qwen3_vl", "qwen3-vl-2b"), ("llava", "llava-1.5-7b")])
def test_sizes_are_published(script, family, preset):
    config = script.FAMILIES[family].from_hf_config(script.CONFIGS[family](False).to_dict())
    published = VLM_PRESETS[preset]
    assert normalize_decoder_config(config.decoder).block == normalize_decoder_config(published.decoder).block
    assert (config.decoder.layers, config.decoder.tie_word_embeddings) == (
        published.decoder.layers,
        published.decoder.tie_word_embeddings,
    )
    assert config.tower.block == published.tower.block and config.tower.layers == published.tower.layers


def test_model_with_wrong_logits_is_not_timed(script, monkeypatch):
    monkeypatch.setattr(script, "compare_logits", lambda pair: {"ours": float("nan"), "transformers": 0.0})
    found = script.measure_model("llava", script.make_llava_config(True), script.TINY_SIZE, 1e9, {})
    assert "ours" not in found and "differ" in found["error"]


def test_figures_are_saved_after_each_measurement(script, monkeypatch):
    timed = {"captured": {"first_ms": 2.0, "decode_ms": 1.0}}
    monkeypatch.setattr(script, "compare_logits", lambda pair: {"ours": 0.0, "transformers": 0.0})
    monkeypatch.setattr(script, "measure_ours", lambda pair, num_tokens: timed)
    variants, saved = {"first": {}, "second": {}, "third": {}}, []
    answers = iter([{"first_ms": 8.0, "decode_ms": 3.0}, {"forward_ms": 6.0}])
    monkeypatch.setattr(script, "measure_variant", lambda pair, num_tokens: next(answers))  # the third fails
    found = script.measure_model(
        "llava",
        script.make_llava_config(True),
        script.TINY_SIZE,
        1e9,
        variants,
        lambda now: saved.append(json.dumps(now)),
    )
    saved = [json.loads(one) for one in saved]
    assert [list(one["transformers"]) for one in saved] == [[], ["first"], ["first", "second"], list(variants)]
    assert [one["first"].get("speedup") for one in saved] == [None, 4.0, 3.0, 3.0] and saved[-1] == found
    assert found["decode"]["speedup"] == 3.0 and "StopIteration" in found["transformers"]["third"]


def test_no_variant_starts_after_the_time_limit(script):
    size = script.TINY_SIZE._replace(total_s=0.0)
    assert list(script.measure_variants(None, size, {"sdpa": {}})) == [("sdpa", "no time was left")]


def test_time_limit_replaces_other_errors(script):
    timing = importlib.import_module("timing")

    def compile_slowly():
        try:
            time.sleep(5)
        except timing.TimeLimitError as error:
            raise RuntimeError("the compiler failed") from error

    with pytest.raises(timing.TimeLimitError, match="over"), timing.limit_time(0.05):
        compile_slowly()
    with pytest.raises(RuntimeError, match="by itself"), timing.limit_time(5):
        raise RuntimeError("by itself")


@pytest.mark.slow
def test_script_runs(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["vlm.py", "--tiny", "--out", str(tmp_path / "out.json")])
    script.main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    for family in ("qwen3_vl", "llava"):
        assert figures[family]["first"]["speedup"] > 0 < figures[family]["decode"]["share_of_bandwidth"]
    assert set(figures["qwen3_vl"]["transformers"]) == set(script.VARIANTS)
