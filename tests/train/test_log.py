"""What a run says is the same wherever it is read, and nothing that only draws can end it."""

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

from train.test_trainer import stage, trainer
from vitrail.train import log
from vitrail.train.log import Log


@pytest.fixture(autouse=True)
def _sends_nothing(monkeypatch):
    """Not even where the person who runs the tests has an account."""
    monkeypatch.setenv("WANDB_MODE", "disabled")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def drawn(folder: Path, name: str = "s") -> dict[str, dict[int, float]]:
    """scalar → step → value, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / name), size_guidance={"scalars": 0}).Reload()
    found = {key: events.Scalars(key) for key in events.Tags()["scalars"]}
    assert all(len({e.step for e in row}) == len(row) for row in found.values())  # nothing is shown twice
    return {key: {e.step: e.value for e in row} for key, row in found.items()}


def told(folder: Path) -> dict[str, dict[int, float]]:
    """The same from the JSON lines."""
    found: dict[str, dict[int, float]] = {}
    for row in rows(folder):
        for key, value in row.items():
            if key != "step":
                found.setdefault(key, {})[row["step"]] = value
    return found


def agree(folder: Path) -> None:
    lines, events = told(folder), drawn(folder)
    assert events.keys() == lines.keys()
    for key, values in lines.items():
        assert events[key] == pytest.approx(values, rel=1e-6), key


needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


@needs_tensorboard
def test_event_files_hold_what_the_lines_hold(tmp_path):
    trainer(tmp_path, stage(judge=("a",), judge_every=6, ema=0.9)).train()
    agree(tmp_path)
    assert {"loss", "loss/text", "rate", "judge/a/text", "judge/ema/a/text"} < told(tmp_path).keys()


@needs_tensorboard
def test_a_resumed_curve_is_one_curve(tmp_path):
    """A process that is killed after step 8, past the checkpoint of step 6, leaves rows that are told again."""
    child = os.fork()
    if not child:
        run = trainer(tmp_path)
        plain = run._one_step

        def one_step(*given):
            if run.step == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given)

        run._one_step = one_step
        run.train()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    before = rows(tmp_path)
    time.sleep(1.1)  # event files are ordered by the second they were begun in
    trainer(tmp_path).train()
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 13))
    assert rows(tmp_path)[:6] == before[:6]
    agree(tmp_path)


class Broken:
    """A board that fails at a certain call."""

    def __init__(self, at: str):
        self.at = at
        self("make")

    def __call__(self, what: str) -> None:
        if what == self.at:
            raise TypeError("Descriptors cannot be created directly")

    def row(self, step, values):
        self("row")

    def flush(self):
        self("flush")

    def close(self):
        self("close")


@pytest.mark.parametrize("at", ["make", "row", "flush", "close"])
def test_a_broken_board_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, at):
    monkeypatch.setattr(log, "BOARDS", {"numpy": lambda *_: Broken(at)})  # a package that is installed
    with pytest.warns(UserWarning, match="numpy is installed and fails") as said:
        trainer(tmp_path).train()
    assert len([w for w in said if "installed and fails" in str(w.message)]) == 1
    assert len(rows(tmp_path)) == 12


@needs_tensorboard
def test_a_tensorboard_that_does_not_import(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="tensorboard is installed and fails"):
        trainer(tmp_path).train()
    assert len(rows(tmp_path)) == 12


def test_what_is_not_installed_is_not_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(tmp_path).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "log.jsonl"]


def test_a_rank_that_does_not_speak_writes_nothing(tmp_path):
    quiet = Log(tmp_path, "s", 0, 3, speaks=False)
    quiet.row(1, {"loss": 1.0})
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
from train.test_trainer import stage, trainer
run = trainer(Path(sys.argv[1]), stage(steps=int(sys.argv[2])))
run.train()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_without_an_account_files_are_written_and_nobody_is_asked(tmp_path):
    """No key, no configuration, nothing to read answers from: it must neither ask nor reach out."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    for steps in ("6", "12"):
        done = subprocess.run(
            [sys.executable, "-c", WANDB, str(tmp_path / "run"), steps],
            env={**kept, "HOME": str(home), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert "installed and fails" not in done.stderr, done.stderr
        assert "REACHED" not in done.stdout
    assert len(rows(tmp_path / "run")) == 12
    runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({re.sub(".*-", "", path.name) for path in runs}) == 1  # one run, gone on with
    assert all(list(path.glob("*.wandb")) for path in runs)
