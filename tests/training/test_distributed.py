"""Distributed training: one, two and three ranks give equal results, also after resumes and crashes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from training import ranks
from training.test_trainer import model, stage, trainer, weights
from vitrail import hub, recipe
from vitrail.errors import TrainError
from vitrail.training import checkpoint, distributed
from vitrail.training.lora import LoRAConfig
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.slow

STEPS = 9
SETTINGS = {
    "steps": STEPS,
    "save_every": 3,
    "ema_decay": 0.9,
    "batch_size": 6,
    "gradient_accumulation_steps": 2,
    "validate": ("b",),
    "validate_every": 3,
}


def train_run(folder: Path, stop: int = 0, more: dict | None = None) -> None:
    """Train. If `stop` is given, stop after that step by a signal to the last rank."""
    run = trainer(folder, stage(**SETTINGS | (more or {})))
    plain = run._train_step

    def one_step(*given):
        if run.step == stop - 1 < STEPS - 1 and distributed.get_rank() == distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    run._train_step = one_step
    if 0 < stop < STEPS:
        with pytest.raises(TrainError, match=f"SIGTERM after step {stop} of"):
            run.train()
    else:
        run.train()


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    judged = [row[key] for row in rows for key in ("validation/b/text", "validation/ema/b/text") if key in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len(judged) == 2 * (STEPS // 3)
    return [*(row["loss"] for row in rows), *judged]


def ended(folder: Path, more: dict | None = None) -> dict[str, torch.Tensor]:
    """Return the weights and EMA of a finished run."""
    run = trainer(folder, stage(**SETTINGS | (more or {})))
    made = weights(run.train())
    assert run.step == STEPS
    assert run.ema is not None
    return made | {f"ema {name}": value.clone() for name, value in run.ema.averages.items()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 2e-3) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * b[name].abs().max(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    train_run(folder)
    return losses(folder), ended(folder)


@pytest.mark.parametrize("count", [2, 3])
def test_number_of_ranks_has_no_effect(tmp_path, alone, count):
    ranks.run(count, train_run, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path), alone[1])
    files = {path.name for path in checkpoint.get_checkpoint_path(tmp_path / "checkpoints", STEPS).iterdir()}
    assert {f"optim-{rank:05}-of-{count:05}.safetensors" for rank in range(count)} < files


@pytest.mark.parametrize("counts", [(3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_resume_with_another_number_of_ranks(tmp_path, alone, counts):
    """Stop after 4 and 7 steps by a signal to one rank."""
    for count, stop in zip(counts, (4, 7, STEPS), strict=True):
        ranks.run(count, train_run, tmp_path, stop)
        assert checkpoint.list_steps(tmp_path / "checkpoints")[-1] == stop
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path), alone[1])


def test_bfloat16_and_master_weights_resume(tmp_path):
    more = {"dtype": "bfloat16"}
    ranks.run(2, train_run, tmp_path / "whole", 0, more)
    for count, stop in ((2, 4), (2, STEPS)):
        ranks.run(count, train_run, tmp_path / "broken", stop, more)
    whole, broken = ended(tmp_path / "whole", more), ended(tmp_path / "broken", more)
    assert all(torch.equal(broken[name], value) for name, value in whole.items())


def learn_without_gathering(folder: Path) -> None:
    """Save and load without gathering any sharded tensor."""
    plain = {"save": checkpoint.collect_shards, "load": checkpoint.load_checkpoint}

    def refuse(*_given, **_more):
        raise AssertionError("a tensor was gathered")

    def guarded(name):
        def call(*given, **more):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DTensor, "full_tensor", refuse)
                patch.setattr(DTensor, "redistribute", refuse)
                for gather in ("all_gather", "all_gather_into_tensor", "gather", "broadcast"):
                    patch.setattr(torch.distributed, gather, refuse)
                return plain[name](*given, **more)

        return call

    checkpoint.collect_shards, checkpoint.load_checkpoint = guarded("save"), guarded("load")
    train_run(folder, 4)
    train_run(folder)


def test_no_tensor_is_gathered_for_checkpoints(tmp_path, alone):
    ranks.run(2, learn_without_gathering, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)


# ---- crashes ----------------------------------------------------------------------------------------------------


def die(*_given, **_more) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def learn_and_die(folder: Path, rank: int, where: str) -> None:
    """Kill one rank during the save of step 6."""
    if distributed.get_rank() == rank:
        plain = getattr(checkpoint, where)

        def deadly(*given, **more):
            if "00000006" in str(given):
                die()
            return plain(*given, **more)

        setattr(checkpoint, where, deadly)
    train_run(folder)


@pytest.mark.parametrize(
    ("rank", "where", "left"),
    [
        (0, "_create_partial_folder", 3),
        (0, "_write_files", 3),
        (1, "_write_files", 3),
        (1, "write_tensor_file", 3),
        (0, "_publish", 3),
        (0, "remove_partial_checkpoints", 6),
    ],
)
def test_rank_killed_during_a_save(tmp_path, alone, rank, where, left):
    saves = tmp_path / "checkpoints"
    if (
        where == "remove_partial_checkpoints"
    ):  # it has no step argument; it runs after the rename and deletes old checkpoints
        codes = ranks.finish(ranks.spawn(2, learn_and_die_after_the_rename, tmp_path))
    else:
        codes = ranks.finish(ranks.spawn(2, learn_and_die, tmp_path, rank, where))
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] is not None
    assert checkpoint.list_steps(saves)[-1] == left
    ranks.run(2, train_run, tmp_path)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    assert not list(saves.glob(".*"))


def learn_and_die_after_the_rename(folder: Path) -> None:
    plain = checkpoint.remove_partial_checkpoints

    def deadly(saves):
        if 6 in checkpoint.list_steps(saves):
            die()
        return plain(saves)

    if distributed.get_rank() == 0:
        checkpoint.remove_partial_checkpoints = deadly
    train_run(folder)


def train_and_die(folder: Path, victim: int, delay: float, settings: dict) -> None:
    """Kill one rank a while after its second step; the others wait for it."""
    if distributed.get_rank() == victim:
        plain, steps = Trainer._train_step, []

        def one_step(*given):
            steps.append(1)
            if len(steps) == 2:
                threading.Timer(delay, die).start()
            if len(steps) == 4:
                time.sleep(ranks.TIMEOUT)
            return plain(*given)

        Trainer._train_step = one_step
    train_run(folder, 0, settings)


def test_ranks_killed_at_random_times(tmp_path, alone):
    """Save every step, so that many kills happen during a save."""
    draw, often = random.Random(0), {"save_every": 1}
    for _ in range(2):
        victim = draw.randrange(3)
        codes = ranks.finish(ranks.spawn(3, train_and_die, tmp_path, victim, draw.uniform(0, 0.1), often))
        assert codes[victim] == -signal.SIGKILL and None not in codes and 0 not in codes
    ranks.run(2, train_run, tmp_path, 0, often)
    assert losses(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    close(ended(tmp_path, often), alone[1])


def learn_from_nan(folder: Path) -> None:
    """Every rank reports a NaN loss."""
    made = model()
    with torch.no_grad():
        made.norm.weight[0] = float("nan")
    with pytest.raises(TrainError, match="infinite loss in step 1"):
        trainer(folder, stage(**SETTINGS), made).train()


def test_each_rank_reports_its_bad_batch(tmp_path):
    ranks.run(2, learn_from_nan, tmp_path)
    folder = tmp_path / "bad-step-00000001"
    assert {path.relative_to(folder).as_posix() for path in folder.glob("*/*")} == {
        f"rank-{rank}/{name}" for rank in range(2) for name in ("samples.json", "batch.safetensors")
    }


# ---- recipes ----------------------------------------------------------------------------------------------------


def train_recipe(out: Path, kind: str) -> None:
    """Train two stages of a recipe; the second shards the weights again."""
    small = recipe.shrink_recipe(recipe.load_recipe("smoke"))
    trainable = ("*.lora",) if kind == "LoRA" else ("*",)
    first = small.stages[0].replace(steps=3, batch_size=3, trainable=trainable, ema_decay=0.9)
    first = first.replace(dtype="bfloat16") if kind == "bfloat16" else first
    more = {"lora": LoRAConfig(rank=2, alpha=4.0, target_modules=("*.qkv",))} if kind == "LoRA" else {}
    recipe.train_recipe(
        small.replace(stages=(first, first.replace(name="again")), **more), out, device="cpu", quiet=True
    )


@pytest.mark.parametrize("kind", ["full", "LoRA", "bfloat16"])
def test_recipe_gives_equal_files(tmp_path, kind):
    """One and two ranks give equal losses and weights. The weights of two ranks are built in shards."""
    for count in (1, 2):
        ranks.run(count, train_recipe, tmp_path / str(count), kind)
    for name in ("learn", "again"):
        one, two = ((tmp_path / count / name / "log.jsonl").read_text().splitlines() for count in ("1", "2"))
        tolerance = 1e-2 if kind == "bfloat16" else 1e-5
        assert [json.loads(x)["loss"] for x in two] == pytest.approx([json.loads(x)["loss"] for x in one], tolerance)
    one, two = (hub.load(tmp_path / name / "final").state_dict() for name in ("1", "2"))
    close(two, one, 0.2 if kind == "bfloat16" else 2e-3)


WAIT_FOR_SIGNAL = """
import os, time
if "LOCAL_RANK" in os.environ:
    from vitrail.training.trainer import Trainer
    plain = Trainer._train_step
    def one_step(self, *given):
        while self.step == 12 and not self._signals.received:
            time.sleep(0.01)
        return plain(self, *given)
    Trainer._train_step = one_step
"""


def test_torchrun_run_resumes_on_one_process(tmp_path):
    """Run the documented torchrun command and stop it after a few steps."""
    train = ["-m", "vitrail", "train", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    train += ["stages.0.steps=24", "stages.0.validate=[]", "stages.0.validate_every=0"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(WAIT_FOR_SIGNAL)
    path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    waiting = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "start"), path])}
    many = subprocess.Popen([sys.executable, *launch, *train], env=waiting, stderr=subprocess.DEVNULL)
    log, saves = tmp_path / "learn" / "log.jsonl", tmp_path / "learn" / "checkpoints"
    while many.poll() is None and not (log.exists() and log.read_text().count("\n") >= 4):
        time.sleep(0.01)
    many.terminate()
    assert many.wait(timeout=ranks.TIMEOUT)
    (step,) = checkpoint.list_steps(saves)
    assert 4 <= step <= 13
    assert len(list(checkpoint.get_checkpoint_path(saves, step).glob("model-*-of-00002.safetensors"))) == 2
    subprocess.run([sys.executable, *train], env=environment, check=True, timeout=ranks.TIMEOUT, capture_output=True)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 25))
    assert (tmp_path / "final" / "vitrail.json").exists()
