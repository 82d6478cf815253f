"""The trainer on a GPU: half precision with masters, compiled, broken off and taken up again."""

import json

import pytest
import torch

from train.test_trainer import Halt, model, same, stage, trainer, weights
from vitrail.train.trainer import Trainer

pytestmark = pytest.mark.gpu

MORE = [{}, {"dtype": "bfloat16", "ema": 0.9}, {"dtype": "bfloat16", "compile": True, "accumulate": 2, "workers": 2}]


@pytest.mark.parametrize("more", MORE)
def test_a_run_broken_off_ends_the_same_bit_for_bit(tmp_path, more, monkeypatch):
    whole = weights(trainer(tmp_path / "whole", stage(**more), device="cuda").train())
    assert {w.device.type for w in whole.values()} == {"cuda"}
    plain = Trainer._one_step

    def one_step(self, *given):
        if self.step == 7:
            raise Halt
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", one_step)
    with pytest.raises(Halt):
        trainer(tmp_path / "stopped", stage(**more), device="cuda").train()
    monkeypatch.setattr(Trainer, "_one_step", plain)
    assert same(weights(trainer(tmp_path / "stopped", stage(**more), device="cuda").train()), whole)
    rows = [json.loads(line) for line in (tmp_path / "stopped" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(0 < row["mfu"] < 1 and row["memory_gb"] > 0 for row in rows)


def test_the_curve_is_that_of_the_cpu(tmp_path):
    made = {device: trainer(tmp_path / device, stage(), model(), device=device).train() for device in ("cpu", "cuda")}
    losses = {
        device: [json.loads(line)["loss"] for line in (tmp_path / device / "log.jsonl").read_text().splitlines()]
        for device in made
    }
    torch.testing.assert_close(torch.tensor(losses["cuda"]), torch.tensor(losses["cpu"]), rtol=1e-3, atol=1e-3)
