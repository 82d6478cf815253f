"""Asynchronous saves: training goes on during a save, and a kill or an error during one loses nothing."""

import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from training.test_trainer import Halt, same, stage, trainer, weights
from vitrail.errors import CheckpointError
from vitrail.training import checkpoint
from vitrail.training.checkpoint_writer import CheckpointWriter
from vitrail.training.tensor_file_writer import DTYPE_NAMES, write_tensor_file
from vitrail.training.trainer import Trainer

CPU = torch.device("cpu")


def test_tensor_files_equal_those_of_safetensors(tmp_path):
    tensors = {f"x.{i}": torch.randint(0, 2, (3, i)).to(dtype) for i, dtype in enumerate(DTYPE_NAMES)}
    tensors |= {"scalar": torch.tensor(7), "turned": torch.randn(4, 5).T, "große": torch.ones(2), "none": torch.ones(0)}
    for metadata in (None, {"places": "{}"}):
        written = write_tensor_file(tmp_path / "ours", tensors, metadata)
        save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert written.sha256 == checkpoint._compute_sha256(tmp_path / "ours")
        assert written.size == (tmp_path / "ours").stat().st_size


def test_save_stores_the_state_of_its_step(tmp_path, monkeypatch):
    """The tensors change while the thread waits."""
    change, plain = threading.Event(), checkpoint._write_files
    monkeypatch.setattr(checkpoint, "_write_files", lambda *given: change.wait(300) and plain(*given))
    state = {"w": torch.arange(6.0), "steps": torch.tensor(3)}
    with CheckpointWriter(tmp_path, CPU) as writer:
        writer.save(3, {"model": state}, {"step": 3})
        state["w"].add_(1)
        assert not checkpoint.list_steps(tmp_path)
        change.set()
    assert torch.equal(load_file(tmp_path / "step-00000003" / "model.safetensors")["w"], torch.arange(6.0))


def test_training_goes_on_during_a_save(tmp_path, monkeypatch):
    """The save of step 3 ends only after step 5, and the run ends with the same weights."""
    whole = weights(trainer(tmp_path / "whole").train())
    passed, plain, one_step = threading.Event(), checkpoint._publish, Trainer._train_step

    def publish(partial, final, state):
        assert state["step"] != 3 or passed.wait(300), "training waits for the save"
        return plain(partial, final, state)

    def step(self, *given):
        if self.step == 5:
            passed.set()
        return one_step(self, *given)

    monkeypatch.setattr(checkpoint, "_publish", publish)
    monkeypatch.setattr(Trainer, "_train_step", step)
    assert same(weights(trainer(tmp_path / "run").train()), whole)
    assert passed.is_set() and checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [9, 12]


def test_failed_save_ends_the_run_at_a_later_step(tmp_path, monkeypatch):
    def full(path, *_given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensor_file", full)
    run_ = trainer(tmp_path, stage(steps=200, save_every=3))
    with pytest.raises(CheckpointError, match="step 3 could not be saved"):
        run_.train()
    assert 3 <= run_.step <= 6
    assert not list((tmp_path / "checkpoints").iterdir())


def test_interrupted_run_waits_for_its_save(tmp_path, monkeypatch):
    plain, one_step = checkpoint._publish, Trainer._train_step
    monkeypatch.setattr(checkpoint, "_publish", lambda *given: time.sleep(0.3) or plain(*given))

    def step(self, *given):
        if self.step == 3:
            raise Halt
        return one_step(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", step)
    with pytest.raises(Halt):
        trainer(tmp_path).train()
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [3]


def train_and_die(folder, where):
    """Kill the process in the thread that saves step 6, while the trainer runs further steps."""
    plain = getattr(checkpoint, where)

    def deadly(*given, **more):
        if "00000006" in str(given):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given, **more)

    setattr(checkpoint, where, deadly)
    trainer(folder).train()


@pytest.mark.parametrize("where", ["_create_partial_folder", "write_tensor_file", "_publish"])
def test_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path, where):
    whole = weights(trainer(tmp_path / "whole").train())
    child = os.fork()
    if not child:
        train_and_die(tmp_path / "run", where)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [3]
    assert same(weights(trainer(tmp_path / "run").train()), whole)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
