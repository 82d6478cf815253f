"""The script that compares packed rows with padded ones: the same samples, the same losses, and it comes to its end."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("packed")


def test_lengths_are_those_of_the_table(script):
    found = script.talks(4000, 1984)
    table = {script.Talk(round(p / n), max(1, round(t / p))) for n, p, t, _ in script.CAULDRON.values()}
    assert all(talk in table or talk.turns * (script.QUESTION + talk.answer) <= 1984 for talk in found)
    # Shares are of answer tokens: LNarratives has 4.56 of the mixture, 42 tokens an answer, one a picture.
    total = sum(talk.turns * talk.answer for talk in found)
    narratives = sum(talk.answer for talk in found if talk == script.Talk(1, 42))
    kept = sum(row[3] for row in script.CAULDRON.values())
    assert narratives / total == pytest.approx(4.56 / kept, rel=0.25)
    assert all(talk.turns * (script.QUESTION + talk.answer) <= 200 for talk in script.talks(500, 200))


def test_both_sides_learn_from_the_same(script):
    size = script.tiny()
    torch.manual_seed(0)
    model = script.VLM(size.config)
    for padded, packed in zip(*(script.steps(size, "cpu", packed) for packed in (False, True)), strict=True):
        assert padded.batch.lengths == packed.batch.lengths and padded.tokens == packed.tokens
        assert len(padded.batch.ids) == size.samples > len(packed.batch.ids)
        torch.testing.assert_close(script.loss_of(model, padded), script.loss_of(model, packed), rtol=1e-4, atol=1e-5)


def test_the_full_model_is_what_it_says(script):
    size = script.full()
    with torch.device("meta"):
        model = script.VLM(size.config)
    assert sum(p.numel() for p in model.decoder.parameters()) == 134_515_008  # SmolLM2-135M
    assert size.config.tokens(size.config.policy.cut(256, 256)) == 64


def test_the_whole_script(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["packed.py", "--tiny", "--out", str(tmp_path / "out.json")])
    script.main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["packed"]["full"] > figures["padded"]["full"] and figures["speedup"] > 0
    assert figures["packed"]["first_loss"] == pytest.approx(figures["padded"]["first_loss"], rel=1e-4)
    assert "speedup" in capsys.readouterr().out
