"""Trainer on a GPU: bfloat16 with master weights, compiled, interrupted and resumed."""

import json

import pytest
import torch

from training.test_trainer import Halt, model, same, stage, trainer, weights
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.gpu

STAGE_OPTIONS = [
    {},
    {"dtype": "bfloat16", "ema_decay": 0.9},
    {"dtype": "bfloat16", "compile": True, "gradient_accumulation_steps": 2, "num_workers": 2},
]


@pytest.mark.parametrize("options", STAGE_OPTIONS)
def test_interrupted_run_ends_with_equal_weights(tmp_path, options, monkeypatch):
    whole = weights(trainer(tmp_path / "whole", stage(**options), device="cuda").train())
    assert {w.device.type for w in whole.values()} == {"cuda"}
    train_step = Trainer._train_step

    def stop_at_step_7(self, *args):
        if self.step == 7:
            raise Halt
        return train_step(self, *args)

    monkeypatch.setattr(Trainer, "_train_step", stop_at_step_7)
    with pytest.raises(Halt):
        trainer(tmp_path / "stopped", stage(**options), device="cuda").train()
    monkeypatch.setattr(Trainer, "_train_step", train_step)
    assert same(weights(trainer(tmp_path / "stopped", stage(**options), device="cuda").train()), whole)
    rows = [json.loads(line) for line in (tmp_path / "stopped" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(0 < row["mfu"] < 1 and row["memory_gb"] > 0 for row in rows)


def test_losses_equal_those_on_a_cpu(tmp_path):
    models = {device: trainer(tmp_path / device, stage(), model(), device=device).train() for device in ("cpu", "cuda")}
    losses = {
        device: [json.loads(line)["loss"] for line in (tmp_path / device / "log.jsonl").read_text().splitlines()]
        for device in models
    }
    torch.testing.assert_close(torch.tensor(losses["cuda"]), torch.tensor(losses["cpu"]), rtol=1e-3, atol=1e-3)
