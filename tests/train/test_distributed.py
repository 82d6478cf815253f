"""The same run on one, two and three processes: the same losses, whoever wrote the checkpoint, whoever dies when."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from train import ranks
from train.test_trainer import model, stage, trainer, weights
from vitrail import hub, recipe
from vitrail.errors import TrainError
from vitrail.train import checkpoint, distributed
from vitrail.train.lora import LoRAConfig

pytestmark = pytest.mark.slow

STEPS = 9
SETTINGS = {"steps": STEPS, "save_every": 3, "ema": 0.9, "batch": 6, "accumulate": 2, "judge": ("b",), "judge_every": 3}


def learn(folder: Path, stop: int = 0, more: dict | None = None) -> None:
    """Train, or break off after `stop` steps, by a signal to the last rank alone."""
    run = trainer(folder, stage(**SETTINGS | (more or {})))
    plain = run._one_step

    def one_step(*given):
        if run.step == stop - 1 < STEPS - 1 and distributed.rank() == distributed.size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    run._one_step = one_step
    if 0 < stop < STEPS:
        with pytest.raises(TrainError, match=f"SIGTERM after step {stop} of"):
            run.train()
    else:
        run.train()


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    judged = [row[key] for row in rows for key in ("judge/b/text", "judge/ema/b/text") if key in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len(judged) == 2 * (STEPS // 3)
    return [*(row["loss"] for row in rows), *judged]


def ended(folder: Path, more: dict | None = None) -> dict[str, torch.Tensor]:
    """The weights and averages of a run that is at its end, put together in this process."""
    run = trainer(folder, stage(**SETTINGS | (more or {})))
    made = weights(run.train())
    assert run.step == STEPS
    assert run.ema is not None
    return made | {f"ema {name}": value.clone() for name, value in run.ema.averages.items()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= 2e-3 * b[name].abs().max(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    learn(folder)
    return losses(folder), ended(folder)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_change_nothing(tmp_path, alone, count):
    ranks.run(count, learn, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path), alone[1])
    files = {path.name for path in checkpoint.path_of(tmp_path / "checkpoints", STEPS).iterdir()}
    assert {f"optim-{rank:05}-of-{count:05}.safetensors" for rank in range(count)} < files


@pytest.mark.parametrize("counts", [(3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, alone, counts):
    """Broken off after 4 and 7 steps; the signal reaches one rank, and all stop."""
    for count, stop in zip(counts, (4, 7, STEPS), strict=True):
        ranks.run(count, learn, tmp_path, stop)
        assert checkpoint.steps(tmp_path / "checkpoints")[-1] == stop
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path), alone[1])


def test_half_precision_and_its_masters_go_on(tmp_path):
    more = {"dtype": "bfloat16"}
    ranks.run(2, learn, tmp_path / "whole", 0, more)
    for count, stop in ((2, 4), (2, STEPS)):
        ranks.run(count, learn, tmp_path / "broken", stop, more)
    whole, broken = ended(tmp_path / "whole", more), ended(tmp_path / "broken", more)
    assert all(torch.equal(broken[name], value) for name, value in whole.items())


def learn_in_shards(folder: Path) -> None:
    """Nothing that is shared out is put together while it is saved or read."""
    plain = {"save": checkpoint.save, "load": checkpoint.load}

    def refuse(*_given, **_more):
        raise AssertionError("a whole tensor")

    def guarded(name):
        def call(*given, **more):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DTensor, "full_tensor", refuse)
                patch.setattr(DTensor, "redistribute", refuse)
                for gather in ("all_gather", "all_gather_into_tensor", "gather", "broadcast"):
                    patch.setattr(torch.distributed, gather, refuse)
                return plain[name](*given, **more)

        return call

    checkpoint.save, checkpoint.load = guarded("save"), guarded("load")
    learn(folder, 4)
    learn(folder)


def test_no_rank_holds_a_whole_tensor(tmp_path, alone):
    ranks.run(2, learn_in_shards, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)


# ---- killed -----------------------------------------------------------------------------------------------------


def die(*_given, **_more) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def learn_and_die(folder: Path, rank: int, where: str) -> None:
    """Rank `rank` is killed inside the save of step 6."""
    if distributed.rank() == rank:
        plain = getattr(checkpoint, where)

        def deadly(*given, **more):
            if "00000006" in str(given):
                die()
            return plain(*given, **more)

        setattr(checkpoint, where, deadly)
    learn(folder)


@pytest.mark.parametrize(
    ("rank", "where", "left"),
    [(0, "_begin", 3), (0, "_write", 3), (1, "_write", 3), (1, "_checksum", 3), (0, "_publish", 3), (0, "sweep", 6)],
)
def test_a_rank_killed_inside_a_save(tmp_path, alone, rank, where, left):
    saves = tmp_path / "checkpoints"
    if where == "sweep":  # which has no step in its arguments: after the rename, old ones are dropped
        codes = ranks.finish(ranks.spawn(2, learn_and_die_after_the_rename, tmp_path))
    else:
        codes = ranks.finish(ranks.spawn(2, learn_and_die, tmp_path, rank, where))
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] is not None
    assert checkpoint.steps(saves)[-1] == left
    ranks.run(2, learn, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    assert not list(saves.glob(".*"))


def learn_and_die_after_the_rename(folder: Path) -> None:
    plain = checkpoint.sweep

    def deadly(saves):
        if 6 in checkpoint.steps(saves):
            die()
        return plain(saves)

    if distributed.rank() == 0:
        checkpoint.sweep = deadly
    learn(folder)


def test_ranks_killed_at_random_instants(tmp_path, alone):
    """A save every step, so that many of the kills fall inside one."""
    draw, saves, killed, often = random.Random(0), tmp_path / "checkpoints", 0, {"save_every": 1}
    for _ in range(4):
        processes = ranks.spawn(3, learn, tmp_path, 0, often)
        before = checkpoint.steps(saves)[-1:]
        while processes[0].is_alive() and checkpoint.steps(saves)[-1:] == before:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        victim = draw.choice(processes)
        victim.kill()
        codes = ranks.finish(processes)
        killed += -signal.SIGKILL in codes
        assert None not in codes
        if checkpoint.steps(saves)[-1] == STEPS:
            break
    assert killed
    ranks.run(2, learn, tmp_path, 0, often)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path, often), alone[1])


def learn_from_nothing(folder: Path) -> None:
    """A step that is not a number is reported by every rank."""
    made = model()
    with torch.no_grad():
        made.norm.weight[0] = float("nan")
    with pytest.raises(TrainError, match="step 1 is not a number"):
        trainer(folder, stage(**SETTINGS), made).train()


def test_each_rank_reports_its_share_of_a_bad_step(tmp_path):
    ranks.run(2, learn_from_nothing, tmp_path)
    about = tmp_path / "bad-step-00000001"
    assert {path.relative_to(about).as_posix() for path in about.glob("*/*")} == {
        f"rank-{rank}/{name}" for rank in range(2) for name in ("samples.json", "batch.safetensors")
    }


# ---- recipes ----------------------------------------------------------------------------------------------------


def follow(out: Path, lora: bool) -> None:
    """Two stages of a recipe, the second sharing the weights out anew, and its result."""
    small = recipe.tiny(recipe.read("smoke"))
    first = small.stages[0].with_(steps=3, batch=3, train=("*.lora",) if lora else ("*",))
    more = {"lora": LoRAConfig(rank=2, alpha=4.0, targets=("*.qkv",))} if lora else {}
    recipe.train(small.with_(stages=(first, first.with_(name="again")), **more), out, device="cpu", quiet=True)


@pytest.mark.parametrize("lora", [False, True])
def test_a_recipe_ends_in_the_same_files(tmp_path, lora):
    for count in (1, 2):
        ranks.run(count, follow, tmp_path / str(count), lora)
    one, two = (hub.load(tmp_path / name / "final").state_dict() for name in ("1", "2"))
    close(two, one)


def test_torchrun_is_stopped_and_one_process_goes_on(tmp_path):
    """The command of the documentation, asked to stop after a few steps."""
    train = ["-m", "vitrail.cli", "train", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    train += ["stages.0.steps=24", "stages.0.judge_every=0"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    port = ["--master-port", str(ranks.free_port())]
    many = subprocess.Popen([sys.executable, *launch, *port, *train], env=environment, stderr=subprocess.DEVNULL)
    log, saves = tmp_path / "learn" / "log.jsonl", tmp_path / "learn" / "checkpoints"
    while many.poll() is None and not (log.exists() and log.read_text().count("\n") >= 4):
        time.sleep(0.01)
    many.terminate()
    assert many.wait(timeout=100)
    (step,) = checkpoint.steps(saves)
    assert 4 <= step < 24
    assert len(list(checkpoint.path_of(saves, step).glob("model-*-of-00002.safetensors"))) == 2
    subprocess.run([sys.executable, *train], env=environment, check=True, timeout=100, capture_output=True)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 25))
    assert (tmp_path / "final" / "vitrail.json").exists()
