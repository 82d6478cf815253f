"""Two trainings into one folder: the first finishes as if alone, and the lock of a dead process is taken over."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vitrail import recipe
from vitrail.errors import TrainError
from vitrail.training import checkpoint, run_lock
from vitrail.training.lr_schedule import ConstantSchedule
from vitrail.training.run_lock import LOCK_FILE, check_run_lock, lock_run_folder

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["torch", "vitrail.recipe.recipe_training", "training.test_run_lock"])
STEPS, REFUSED = 8, 3


def make_recipe(folder: Path, seed: int) -> recipe.Recipe:
    text = folder / "a.txt"
    if not text.exists():
        text.write_text("one two three four five six seven eight nine ten\n" * 400)
    small = recipe.load_recipe("smoke", {"tokenizer.vocab_size": "280", "model.config.layers": "1", "seed": str(seed)})
    stage = small.stages[0].replace(
        steps=STEPS, batch_size=2, save_every=1, validate=(), validate_every=0, schedule=ConstantSchedule()
    )
    docs = small.sources["docs"].replace(package=None, files=(str(text),))
    return small.replace(sources={"docs": docs}, stages=(stage,))


def train(folder: Path, out: str, seed: int) -> None:
    try:
        recipe.train_recipe(make_recipe(folder, seed), folder / out, device="cpu", quiet=True, loggers=())
    except TrainError as error:
        assert "is in use by" in str(error) or "contains a run of another recipe" in str(error), error
        os._exit(REFUSED)


def start(folder: Path, out: str, seed: int):
    process = START.Process(target=train, args=(folder, out, seed))
    process.start()
    return process


def finish(process) -> int:
    process.join(600)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


def weights(folder: Path, out: str) -> dict[str, list]:
    return {key: value.tolist() for key, value in load_file(folder / out / "final/model.safetensors").items()}


def compete(folder: Path, out: str, draw: random.Random, whole: dict[int, dict], span: float) -> None:
    """Start two trainings into one folder, kill none or one, and check what remains."""
    seeds = (0, draw.choice((0, 1)))
    victim = draw.choice((None, 0, 1))
    first = start(folder, out, seeds[0])
    time.sleep(draw.uniform(0, span))
    second = start(folder, out, seeds[1])
    if victim is not None:
        time.sleep(draw.uniform(0, span))
        (first, second)[victim].kill()
    codes = [finish(first), finish(second)]
    assert set(codes) <= {0, REFUSED, -signal.SIGKILL}, codes
    done = [seed for seed, code in zip(seeds, codes, strict=True) if code == 0]
    if not done:  # one was killed, and the other was refused before that: the killed one starts again
        assert victim is not None and codes[victim] == -signal.SIGKILL, codes
        done = [seeds[victim]]
    assert len(set(done)) == 1
    if victim is not None:
        assert finish(start(folder, out, done[0])) == 0
    assert weights(folder, out) == whole[done[0]]
    rows = [json.loads(line)["step"] for line in (folder / out / "learn/log.jsonl").read_text().splitlines()]
    assert rows == list(range(1, STEPS + 1))
    assert not (folder / out / LOCK_FILE).exists() and not list((folder / out / "learn/checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tries", [int(os.environ.get("VITRAIL_TRIES", "50"))])
def test_two_trainings_into_one_folder(tmp_path, tries):
    draw, whole = random.Random(0), {}
    for seed in (0, 1):
        before = time.monotonic()
        assert finish(start(tmp_path, f"whole-{seed}", seed)) == 0
        span = time.monotonic() - before
        whole[seed] = weights(tmp_path, f"whole-{seed}")
    assert whole[0] != whole[1]
    for n in range(tries):
        compete(tmp_path, f"out-{n}", draw, whole, span)


@pytest.mark.parametrize("seed", [0, 1])
def test_refused_start_changes_nothing(tmp_path, monkeypatch, seed):
    """A second start, of the same or of another recipe, is refused while the first is between two steps."""
    alone = recipe.train_recipe(make_recipe(tmp_path, 0), tmp_path / "alone", device="cpu", quiet=True, loggers=())
    out, seen = tmp_path / "out", []
    plain = checkpoint._publish

    def publish(partial, final, state):
        before = sorted(path for path in out.rglob("*"))
        second = threading.Thread(target=start_second)
        second.start()
        second.join()
        assert sorted(path for path in out.rglob("*")) == before
        return plain(partial, final, state)

    def start_second():
        with pytest.raises(TrainError) as error:
            recipe.train_recipe(make_recipe(tmp_path, seed), out, device="cpu", quiet=True, loggers=())
        seen.append(str(error.value))

    monkeypatch.setattr(checkpoint, "_publish", publish)
    made = recipe.train_recipe(make_recipe(tmp_path, 0), out, device="cpu", quiet=True, loggers=())
    assert len(seen) == STEPS and "is in use by process" in seen[0]
    assert all(a.equal(b) for a, b in zip(alone.parameters(), made.parameters(), strict=True))


def test_start_of_another_recipe_changes_nothing(tmp_path):
    recipe.train_recipe(make_recipe(tmp_path, 0), tmp_path / "out", device="cpu", quiet=True, loggers=())
    (tmp_path / "out/learn/checkpoints/.partial-00000009").mkdir()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    other = make_recipe(tmp_path, 0)
    other = other.replace(tokenizer=other.tokenizer.replace(vocab_size=270))
    with pytest.raises(TrainError, match=r"another recipe: tokenizer\.vocab_size"):
        recipe.train_recipe(other, tmp_path / "out", device="cpu", quiet=True, loggers=())
    for path, changed in before.items():
        assert path.is_dir() or path.stat().st_mtime_ns == changed


def hold(folder: Path) -> None:
    with lock_run_folder(folder):
        time.sleep(600)


def test_lock_of_a_killed_process_is_taken_over(tmp_path, capsys):
    holder = START.Process(target=hold, args=(tmp_path,), daemon=True)
    holder.start()
    while not (tmp_path / LOCK_FILE).is_file() or not (tmp_path / LOCK_FILE).read_text():
        time.sleep(0.01)
    with pytest.raises(TrainError, match=f"in use by process {holder.pid} on "), lock_run_folder(tmp_path):
        pass
    holder.kill()
    holder.join()
    with lock_run_folder(tmp_path), lock_run_folder(tmp_path):  # the same thread may enter twice
        assert f"took over the lock of process {holder.pid} on " in capsys.readouterr().err
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("has_locks", [True, False])
def test_lock_of_another_machine_is_taken_over_without_heartbeats(tmp_path, monkeypatch, capsys, has_locks):
    if not has_locks:
        monkeypatch.setattr(run_lock, "_lock_record", lambda handle: False)
    owner = {"token": "t", "pid": 7, "host": "far", "machine": "m", "started": "then"}
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps(owner))
    with pytest.raises(TrainError, match=r"in use by process 7 on far, .*last heartbeat"), lock_run_folder(tmp_path):
        pass
    assert json.loads(file.read_text()) == owner
    os.utime(file, (time.time() - 61, time.time() - 61))
    with lock_run_folder(tmp_path):
        assert "took over the lock of process 7 on far" in capsys.readouterr().err
        check_run_lock(tmp_path / "learn")
        file.write_text(json.dumps(owner))  # this process was suspended, and another one took over
        with pytest.raises(TrainError, match="another process took over"):
            check_run_lock(tmp_path / "learn")
    assert json.loads(file.read_text()) == owner


def test_heartbeats_renew_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    with lock_run_folder(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        end = time.monotonic() + 300
        while not (tmp_path / LOCK_FILE).stat().st_mtime and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / LOCK_FILE).stat().st_mtime > 0
