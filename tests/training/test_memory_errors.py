"""Out-of-memory errors say what to lower, and by how much."""

import pytest
import torch

from training.test_trainer import stage, trainer, weights
from vitrail import hub
from vitrail.errors import ConfigError, TrainError
from vitrail.pipelines.base import load_model
from vitrail.training import memory_errors
from vitrail.training.memory_errors import MemoryUse, suggest_less_memory

GB = 10**9


@pytest.mark.parametrize(
    ("use", "state", "settings", "remedies"),
    [
        # Activations of 66 GB, and 53.6 GB are free: half the samples. 3 times too much: a third is no divisor of 8.
        (
            MemoryUse(80 * GB, 80 * GB, 6 * GB),
            20,
            {"batch_size": 8},
            ["gradient_accumulation_steps = 2", "of 4 instead"],
        ),
        (
            MemoryUse(80 * GB, 80 * GB, 100 * GB),
            20,
            {"batch_size": 8},
            ["gradient_accumulation_steps = 4", "of 2 instead"],
        ),
        (
            MemoryUse(80 * GB, 80 * GB, 10 * GB),
            20,
            {"batch_size": 8, "gradient_accumulation_steps": 2},
            ["gradient_accumulation_steps = 4 instead of 2", "micro-batches of 2 instead of 4"],
        ),
        (MemoryUse(80 * GB, 80 * GB, 10 * GB), 20, {"batch_size": 1}, ["gradient_checkpointing = true", "bfloat16"]),
        (
            MemoryUse(80 * GB, 80 * GB, 300 * GB),
            20,
            {"batch_size": 1, "gradient_checkpointing": True, "dtype": "bfloat16"},
            ["1/7 of their tokens", "14 ranks"],
        ),
        (MemoryUse(80 * GB, 79 * GB, 2 * GB), 200, {}, ["torchrun --nproc-per-node 7", "bfloat16"]),
    ],
)
def test_remedy_fits_the_memory(use, state, settings, remedies):
    text = suggest_less_memory(stage(**settings), use, state * GB, 2)
    assert all(remedy in text for remedy in remedies), text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
        RuntimeError("[enforce fail at DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        MemoryError(),
    ],
)
def test_step_without_memory(tmp_path, monkeypatch, error):
    """The run that follows the remedy resumes, and ends with nearly the same weights."""
    whole = weights(trainer(tmp_path / "whole").train())
    run = trainer(tmp_path / "run")
    plain = run.forward_fn

    def passed(batch):
        if run.step == 5 and len(batch["ids"]) == 4:
            raise error
        return plain(batch)

    run.forward_fn = passed
    with pytest.raises(TrainError, match="step 6 is out of memory: cpu has") as caught:
        run.train()
    assert "micro-batch has 4 samples" in caught.value.problem
    assert "gradient_accumulation_steps = 2 instead of 1: micro-batches of 2" in caught.value.remedy
    if "2.00 GiB" in str(error):
        assert "2.15 GB more were needed" in caught.value.problem
    again = weights(trainer(tmp_path / "run", stage(gradient_accumulation_steps=2)).train())
    assert all(torch.allclose(again[name], whole[name], atol=1e-5) for name in whole)


def test_other_errors_pass(tmp_path):
    run = trainer(tmp_path)
    run.forward_fn = lambda batch: torch.ones(2) @ torch.ones(3)
    with pytest.raises(RuntimeError, match="size"):
        run.train()
    assert not memory_errors.is_out_of_memory(RuntimeError("size mismatch"))


def test_model_that_does_not_fit_is_refused(monkeypatch):
    def load(*_given, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(hub, "load", load)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 * GB, 8 * GB))
    with pytest.raises(ConfigError, match=r"does not fit into cpu, of which 1\.0 of 8\.0 GB are free.*2\.00 GiB") as e:
        load_model("some/model", "cpu", None)
    assert "bfloat16" in e.value.remedy
