"""Dataloader workers: no effect on results, signal handling, and crashes."""

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
import time

import pytest
import torch

from training.test_trainer import SOURCES, Halt, model, same, stage, trainer, weights
from vitrail.data.sampler import MixtureConfig
from vitrail.errors import TrainError
from vitrail.tasks.text_task import TextTask
from vitrail.training import checkpoint
from vitrail.training.optimizer import Optimizer
from vitrail.training.trainer import Trainer


def test_workers_have_no_effect(tmp_path):
    assert same(
        weights(trainer(tmp_path / "a").train()), weights(trainer(tmp_path / "b", stage(num_workers=2)).train())
    )


class Deadly(list):
    """Source that kills the worker that reads it."""

    def __getitem__(self, item):
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(item)


def test_dead_worker_raises_and_the_run_resumes(tmp_path):
    settings = stage(num_workers=1, mixture=MixtureConfig(weights={"a": 1.0}))
    whole = weights(trainer(tmp_path / "whole", settings.replace(num_workers=0)).train())
    lost = Trainer(settings, TextTask(model()), {"a": Deadly(SOURCES["a"])}, tmp_path / "lost", seed=3, quiet=True)
    with pytest.raises(TrainError, match="dataloader worker died in step 1"):
        lost.train()
    again = Trainer(settings, TextTask(model()), {"a": SOURCES["a"]}, tmp_path / "lost", seed=3, quiet=True)
    assert same(weights(again.train()), whole)


def test_workers_ignore_signals(tmp_path, monkeypatch):
    """A job scheduler signals the whole process group; the step is still finished and saved."""
    plain = Trainer._train_step

    def one_step(self, *given):
        if self.step == 4:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(TrainError, match="SIGTERM after step 5"):
        trainer(tmp_path, stage(num_workers=1)).train()
    assert checkpoint.list_steps(tmp_path / "checkpoints")[-1] == 5


class Ring:
    """Cyclic garbage of an earlier stage, which may hold CUDA tensors."""

    def __init__(self, grave):
        self.me, self.grave = self, grave

    def __del__(self):
        (self.grave / str(os.getpid())).touch()


class Sweeping(list):
    """Source that runs the garbage collector when it is read."""

    def __getitem__(self, item):
        gc.collect()
        return super().__getitem__(item)


def test_workers_do_not_free_garbage_of_the_parent(tmp_path):
    gc.disable()
    try:
        Ring(tmp_path)
        settings = stage(num_workers=1, mixture=MixtureConfig(weights={"a": 1.0}))
        source = {"a": Sweeping(SOURCES["a"])}
        Trainer(settings, TextTask(model()), source, tmp_path / "run", seed=3, quiet=True).train()
    finally:
        gc.enable()
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"run", str(os.getpid())}


def test_worker_that_dies_during_a_pass_raises(tmp_path, monkeypatch):
    plain = Optimizer.clip_grad_norm

    def clip(self, *given):
        children = multiprocessing.active_children()
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        time.sleep(0.2)
        return plain(self, *given)

    monkeypatch.setattr(Optimizer, "clip_grad_norm", clip)
    with pytest.raises(TrainError, match="dataloader worker died"):
        trainer(tmp_path, stage(num_workers=1, steps=200)).train()


SLOW = 7


class Slow(list):
    def __getitem__(self, item):
        time.sleep(600 if item == SLOW else 0)
        return super().__getitem__(item)


@pytest.mark.slow
def test_busy_worker_is_killed(tmp_path, monkeypatch):
    plain = Trainer._train_step
    started = []

    def one_step(self, *given):
        if self.step == 1:
            started.extend(multiprocessing.active_children())
            raise Halt
        return plain(self, *given)

    sources = {"a": Slow(SOURCES["a"]), "b": SOURCES["b"]}
    run = Trainer(stage(num_workers=1, steps=200), TextTask(model()), sources, tmp_path, seed=3, quiet=True)
    draws = [run.loader.order[i] for i in range(40)]
    # The slow item is one that the worker prefetches and no step has needed yet.
    globals()["SLOW"] = next(d.item for d in draws[8:] if d.source == "a" and d not in draws[:8])
    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(Halt):
        run.train()
    assert started and not any(process.is_alive() for process in started)


def kill_workers() -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
        child.join()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Pin memory thread exited unexpectedly"),
        ConnectionResetError("Connection reset by peer"),  # while its batch was received
        EOFError("Ran out of input"),
        FileNotFoundError("no shared memory"),
    ],
)
def test_death_that_shows_as_another_error_is_reported(tmp_path, monkeypatch, error):
    plain = Trainer._train_step

    def one_step(self, *given):
        if self.step == 2:
            with contextlib.suppress(RuntimeError):  # of torch's handler of SIGCHLD
                kill_workers()
            raise error
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(TrainError, match=r"dataloader worker died in step 3: .*exit code -9") as caught:
        trainer(tmp_path, stage(num_workers=1)).train()
    assert "stages.N.num_workers" in caught.value.remedy


def test_errors_of_the_trainer_pass(tmp_path, monkeypatch):
    def fail(self, *_given):
        raise ConnectionResetError("of something else")

    monkeypatch.setattr(Trainer, "_train_step", fail)
    with pytest.raises(ConnectionResetError):
        trainer(tmp_path, stage(num_workers=1)).train()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_worker_killed_at_any_time_raises_the_documented_message(tmp_path):
    """10 kills at random times: during a pass, a log row, a save or while a batch is received."""
    draw = random.Random(0)
    for n in range(10):
        run = trainer(tmp_path / str(n), stage(num_workers=2, steps=100_000, save_every=7))
        delay = draw.uniform(0.02, 0.3)

        def kill(delay=delay):
            while not (children := multiprocessing.active_children()):
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(draw.choice(children).pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(TrainError, match="a dataloader worker died in step"):
            run.train()
        thread.join()
