"""The script that compares packed rows with padded ones: the same samples and losses, and it comes to its end."""

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


def test_all_sides_learn_from_the_same(script):
    size = script.tiny()
    torch.manual_seed(0)
    model = script.VLM(size.config)
    for every in zip(*(script.steps(size, "cpu", side) for side in ("padded", "grouped", "packed")), strict=True):
        assert len({tuple(sorted(step.lengths)) for step in every}) == 1 and len(set(map(script.learnt, every))) == 1
        padded, grouped, packed = every
        assert [len(part.batch.ids) for part in padded.parts] == [size.rows] * 2 and len(packed.parts) == 1
        assert grouped.lengths == sorted(padded.lengths) and padded.places >= grouped.places
        found = [sum(script.losses_of(model, part) for part in step.parts) for step in every]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-4)


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
    full = [figures[side]["full"] for side in ("padded", "grouped", "packed")]
    assert 0 < full[0] <= full[1] < full[2] <= 1
    for side in ("padded", "grouped"):
        assert figures["packed"]["first_loss"] == pytest.approx(figures[side]["first_loss"], rel=1e-4)
        assert figures[f"speedup_over_{side}"] > 0
    assert "packed over grouped" in capsys.readouterr().out
