"""Training log: all writers assert_events_equal_lines, and a failing writer does not stop training."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from training.test_trainer import stage, trainer
from vitrail.errors import ConfigError
from vitrail.training import checkpoint, train_logger
from vitrail.training.loggers import metric_logger
from vitrail.training.train_logger import TrainLogger


@pytest.fixture(autouse=True)
def _sends_nothing(monkeypatch):
    """Disable wandb, also on machines with an account."""
    monkeypatch.setenv("WANDB_MODE", "disabled")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_events(folder: Path, name: str = "s") -> dict[str, dict[int, float]]:
    """Read TensorBoard events: scalar → step → value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / name), size_guidance={"scalars": 0}).Reload()
    found = {key: events.Scalars(key) for key in events.Tags()["scalars"]}
    assert all(len({e.step for e in row}) == len(row) for row in found.values())  # every step once
    return {key: {e.step: e.value for e in row} for key, row in found.items()}


def read_lines(folder: Path) -> dict[str, dict[int, float]]:
    """Read log.jsonl: key → step → value."""
    found: dict[str, dict[int, float]] = {}
    for row in rows(folder):
        for key, value in row.items():
            if key != "step":
                found.setdefault(key, {})[row["step"]] = value
    return found


def assert_events_equal_lines(folder: Path) -> None:
    lines, events = read_lines(folder), read_events(folder)
    assert events.keys() == lines.keys()
    for key, values in lines.items():
        assert events[key] == pytest.approx(values, rel=1e-6), key


needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


@needs_tensorboard
def test_event_files_equal_the_json_lines(tmp_path):
    trainer(tmp_path, stage(validate=("a",), validate_every=6, ema_decay=0.9)).train()
    assert_events_equal_lines(tmp_path)
    assert {"loss", "loss/text", "lr", "validation/a/text", "validation/ema/a/text"} < read_lines(tmp_path).keys()


@needs_tensorboard
def test_resumed_log_has_each_step_once(tmp_path):
    """A process killed after step 8 leaves rows after the checkpoint of step 6, which are written again."""
    child = os.fork()
    if not child:
        run = trainer(tmp_path)
        plain = run._train_step

        def one_step(*given):
            if run.step == 8:
                while 6 not in checkpoint.list_steps(tmp_path / "checkpoints"):  # saves are asynchronous
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given)

        run._train_step = one_step
        run.train()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    before = rows(tmp_path)
    time.sleep(1.1)  # event files are ordered by their start second
    trainer(tmp_path).train()
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 13))
    assert rows(tmp_path)[:6] == before[:6]
    assert_events_equal_lines(tmp_path)


class Broken:
    """Logger that fails at a given call."""

    def __init__(self, at: str):
        self.at = at
        self("make")

    def __call__(self, what: str) -> None:
        if what == self.at:
            raise TypeError("Descriptors cannot be created directly")

    def write_row(self, step, values):
        self("write_row")

    def flush(self):
        self("flush")

    def close(self):
        self("close")


@pytest.mark.parametrize("at", ["make", "write_row", "flush", "close"])
def test_failing_logger_is_disabled_with_one_warning(tmp_path, monkeypatch, at):
    monkeypatch.setattr(train_logger, "select_loggers", lambda names: {"broken": lambda *_: Broken(at)})
    with pytest.warns(UserWarning, match="broken is disabled") as warned:
        trainer(tmp_path).train()
    assert len([w for w in warned if "is disabled" in str(w.message)]) == 1
    assert len(rows(tmp_path)) == 12


@needs_tensorboard
def test_tensorboard_import_error_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="tensorboard is disabled"):
        trainer(tmp_path).train()
    assert len(rows(tmp_path)) == 12


def test_missing_loggers_give_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(tmp_path).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "log.jsonl"]


def test_other_ranks_write_nothing(tmp_path):
    quiet = TrainLogger(tmp_path, "s", 0, 3, is_main_rank=False)
    quiet.write_row(1, {"loss": 1.0})
    quiet.flush()
    quiet.close()
    assert not list(tmp_path.iterdir())


# ---- Weights & Biases -------------------------------------------------------------------------------------------

WANDB = """
import socket, sys
def guarded(plain, host_of):
    def call(*given, **more):
        host = host_of(given)
        if host not in ("127.0.0.1", "localhost", "::1", None) and not str(host).startswith("/"):
            print("REACHED", host, flush=True)
            raise OSError("no network here")
        return plain(*given, **more)
    return call
def host_of_address(given):
    return given[1][0] if isinstance(given[1], tuple) else given[1]
socket.getaddrinfo = guarded(socket.getaddrinfo, lambda given: given[0])
socket.socket.connect = guarded(socket.socket.connect, host_of_address)
from pathlib import Path
from training.test_trainer import stage, trainer
run = trainer(Path(sys.argv[1]), stage(steps=int(sys.argv[2])))
run.train()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_without_account_runs_offline(tmp_path):
    """Without key, config and stdin, wandb must neither prompt nor use the network."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    for steps in ("6", "12"):
        done = subprocess.run(
            [sys.executable, "-c", WANDB, str(tmp_path / "run"), steps],
            env={**environment, "HOME": str(home), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert "is disabled" not in done.stderr, done.stderr
        assert "REACHED" not in done.stdout
    assert len(rows(tmp_path / "run")) == 12
    runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({re.sub(".*-", "", path.name) for path in runs}) == 1  # one run, resumed
    assert all(list(path.glob("*.wandb")) for path in runs)


def test_loggers_are_chosen_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no logger 'tensorbord'"):
        metric_logger.select_loggers(["tensorbord"])
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb needs the package wandb"):
        metric_logger.select_loggers(["wandb"])
    assert metric_logger.select_loggers() == metric_logger.select_loggers([]) == {}
