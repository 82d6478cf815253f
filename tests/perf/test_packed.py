"""perf/packed.py: all variants have the same samples and losses, and the script runs."""

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


def test_lengths_equal_the_table(script):
    conversations = script.sample_conversations(4000, 1984)
    table = {script.Conversation(round(p / n), max(1, round(t / p))) for n, p, t, _ in script.CAULDRON.values()}
    assert all(
        conversation in table or conversation.turns * (script.QUESTION_LENGTH + conversation.answer) <= 1984
        for conversation in conversations
    )
    # Shares are of answer tokens: LNarratives has 4.56 % of the mixture, with one answer of 42 tokens per image.
    total = sum(conversation.turns * conversation.answer for conversation in conversations)
    narratives = sum(
        conversation.answer for conversation in conversations if conversation == script.Conversation(1, 42)
    )
    kept = sum(row[3] for row in script.CAULDRON.values())
    assert narratives / total == pytest.approx(4.56 / kept, rel=0.25)
    assert all(
        conversation.turns * (script.QUESTION_LENGTH + conversation.answer) <= 200
        for conversation in script.sample_conversations(500, 200)
    )


def test_variants_have_equal_samples_and_losses(script):
    size = script.make_tiny_size()
    torch.manual_seed(0)
    model = script.VLM(size.config)
    variants = (script.make_steps(size, "cpu", name) for name in ("padded", "grouped", "packed"))
    for steps in zip(*variants, strict=True):
        assert len({(*sorted(step.lengths), step.num_targets) for step in steps}) == 1
        padded, grouped, packed = steps
        assert [len(part.batch.ids) for part in padded.micro_batches] == [size.rows] * 2 and len(
            packed.micro_batches
        ) == 1
        assert grouped.lengths == sorted(padded.lengths) and padded.num_positions >= grouped.num_positions
        losses = [sum(script.compute_loss(model, part) for part in step.micro_batches) for step in steps]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(losses[2], losses[0], rtol=1e-4, atol=1e-4)


def test_full_model_has_published_sizes(script):
    size = script.make_full_size()
    with torch.device("meta"):
        model = script.VLM(size.config)
    assert sum(p.numel() for p in model.decoder.parameters()) == 134_515_008  # SmolLM2-135M
    assert size.config.count_tokens(size.config.policy.layout(256, 256)) == 64


def test_script_runs(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["packed.py", "--tiny", "--out", str(tmp_path / "out.json")])
    script.main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    full = [figures[side]["full"] for side in ("padded", "grouped", "packed")]
    assert 0 < full[0] <= full[1] < full[2] <= 1
    for side in ("padded", "grouped"):
        assert figures["packed"]["first_loss"] == pytest.approx(figures[side]["first_loss"], rel=1e-4)
        assert figures[f"speedup_over_{side}"] > 0
    assert "packed over grouped" in capsys.readouterr().out
