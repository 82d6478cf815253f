"""Data workers: they change nothing, do nothing that is the run's, and their death is said."""

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch

from train.test_trainer import SOURCES, Halt, model, same, stage, trainer, weights
from vitrail.data.order import Mixture
from vitrail.errors import TrainError
from vitrail.tasks.text import TextTask
from vitrail.train import checkpoint
from vitrail.train.optim import Optimizer
from vitrail.train.trainer import Trainer


def test_workers_change_nothing(tmp_path):
    assert same(weights(trainer(tmp_path / "a").train()), weights(trainer(tmp_path / "b", stage(workers=2)).train()))


class Deadly(list):
    """A source that kills the worker that reads it."""

    def __getitem__(self, item):
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(item)


def test_a_lost_worker_is_said_and_nothing_is_lost(tmp_path):
    settings = stage(workers=1, mixture=Mixture(weights={"a": 1.0}))
    whole = weights(trainer(tmp_path / "whole", settings.with_(workers=0)).train())
    lost = Trainer(settings, TextTask(model()), {"a": Deadly(SOURCES["a"])}, tmp_path / "lost", seed=3, quiet=True)
    with pytest.raises(TrainError, match="data worker died in step 1"):
        lost.train()
    again = Trainer(settings, TextTask(model()), {"a": SOURCES["a"]}, tmp_path / "lost", seed=3, quiet=True)
    assert same(weights(again.train()), whole)


def test_workers_leave_signals_to_the_run(tmp_path, monkeypatch):
    """A scheduler signals the whole group; the step still ends and is saved."""
    plain = Trainer._one_step

    def one_step(self, *given):
        if self.step == 4:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", one_step)
    with pytest.raises(TrainError, match="SIGTERM after step 5"):
        trainer(tmp_path, stage(workers=1)).train()
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 5


class Ring:
    """Garbage that waits for a collector: a stage before left it, and its tensors lie on a GPU."""

    def __init__(self, grave):
        self.me, self.grave = self, grave

    def __del__(self):
        (self.grave / str(os.getpid())).touch()


class Sweeping(list):
    """A source whose reader collects garbage."""

    def __getitem__(self, item):
        gc.collect()
        return super().__getitem__(item)


def test_workers_do_not_collect_what_the_run_left(tmp_path):
    gc.disable()
    try:
        Ring(tmp_path)
        settings = stage(workers=1, mixture=Mixture(weights={"a": 1.0}))
        source = {"a": Sweeping(SOURCES["a"])}
        Trainer(settings, TextTask(model()), source, tmp_path / "run", seed=3, quiet=True).train()
    finally:
        gc.enable()
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"run", str(os.getpid())}


def test_a_worker_that_dies_while_the_model_computes_is_said_plainly(tmp_path, monkeypatch):
    plain = Optimizer.clip

    def clip(self, *given):
        children = multiprocessing.active_children()
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        time.sleep(0.2)
        return plain(self, *given)

    monkeypatch.setattr(Optimizer, "clip", clip)
    with pytest.raises(TrainError, match="data worker died"):
        trainer(tmp_path, stage(workers=1, steps=200)).train()


SLOW = 7


class Slow(list):
    def __getitem__(self, item):
        time.sleep(60 if item == SLOW else 0)
        return super().__getitem__(item)


@pytest.mark.slow
def test_a_worker_that_is_busy_does_not_outlive_the_run(tmp_path, monkeypatch):
    plain = Trainer._one_step
    started = []

    def one_step(self, *given):
        if self.step == 1:
            started.extend(multiprocessing.active_children())
            raise Halt
        return plain(self, *given)

    sources = {"a": Slow(SOURCES["a"]), "b": SOURCES["b"]}
    run = Trainer(stage(workers=1, steps=200), TextTask(model()), sources, tmp_path, seed=3, quiet=True)
    draws = [run.order[i] for i in range(40)]
    # The item that takes a minute is one the worker reads ahead, and no step so far has needed.
    globals()["SLOW"] = next(d.item for d in draws[8:] if d.source == "a" and d not in draws[:8])
    monkeypatch.setattr(Trainer, "_one_step", one_step)
    with pytest.raises(Halt):
        run.train()
    assert started and not any(process.is_alive() for process in started)
