"""A step of a recipe's stage, as the trainer takes it: what it lasts, and what its kernels spend, by ways to attend.

    python perf/step.py mini sharpen --out results.json 'model.parts.codec={start="mini", part="codec"}'

    torch   as training does: torch's own kernels, with a dense mask where a plan needs one, without cuDNN's
    cudnn   with cuDNN's among them, whose gradients are not numbers at times
    flex    block-sparse attention for short rows too

Changes of the recipe are given as to `vitrail train`. Every way is built, compiled and warmed up anew, with the same
samples. `ms` is the mean of TIMED steps, with the device waited for before the first and behind the last; `median` and
`least` are of single steps by the host's clock, which runs ahead of the device. `fraction` is the share of a large
product's rate on the same device that the trainer's log calls `mfu`.
Kernels are those of PROFILED steps behind those that are timed: products, attention, and all others, among them what a
compiler made of many small operations; and the LARGEST of them by name, each with its ms of a step.
"""

import argparse
import contextlib
import gc
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import record
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vitrail import recipe as recipes
from vitrail.errors import ConfigError, nearest
from vitrail.train import trainer
from vitrail.train.schedule import Constant

CUDA = torch.cuda.is_available()
attend: Any = importlib.import_module("vitrail.nn.attend")  # the module, whose function has its name
WARM, TIMED, PROFILED = (30, 30, 3) if CUDA else (1, 2, 1)
LARGEST = 24
MEASURED = (
    *("vitrail.train.trainer", "vitrail.train.ahead", "vitrail.nn.attend", "vitrail.nn.beside", "vitrail.nn.replay"),
    *("vitrail.nn.rotary", "vitrail.nn.kernels.settled", "vitrail.data.talks", "vitrail.data.views"),
)
FUSED = ("triton_poi", "triton_red", "triton_per")  # named after what they stand beside, too
GROUPS = {  # of kernels, by what their names hold
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "_mm"),
}


class Timed(trainer.Trainer):
    """Steps as they follow one another, and nothing saved. The device is waited for before the first and behind the
    last that count, and in between no more than the trainer does: samples of the next step are made beside this one."""

    seconds: list[float]
    total: float
    kernels: dict[str, float]
    largest: dict[str, float]

    def _save(self, saves: Path) -> None:
        pass

    def _one_step(self, batches: Any, rate: float) -> dict[str, float]:
        if self.step == 0:
            Timed.seconds, Timed.kernels, Timed.largest = [], {}, {}
            self.profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])])
        if self.step == WARM + TIMED:
            self.profiler.__enter__()
        if self.step == WARM:
            _wait()
            Timed.total = -time.perf_counter()
        start = time.perf_counter()
        found = super()._one_step(batches, rate)
        if WARM <= self.step < WARM + TIMED:
            Timed.seconds.append(time.perf_counter() - start)
        if self.step == WARM + TIMED - 1:
            _wait()
            Timed.total += time.perf_counter()
        if self.step == WARM + TIMED + PROFILED - 1:
            self.profiler.__exit__(None, None, None)
            spent = on_device(self.profiler.key_averages())
            Timed.kernels, Timed.largest = grouped(spent), dict(spent[:LARGEST])
        return found


def on_device(events: Iterable[Any]) -> list[tuple[str, float]]:
    """What a profile averaged → kernels and their ms of a step, the longest first. What ran on the device counts, and
    not what launched it, to which the same time is given."""
    found = [
        (event.key, event.self_device_time_total / 1e3 / PROFILED)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return sorted(found, key=lambda one: -one[1])


def grouped(spent: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Kernels and their ms → ms by group"""
    found = dict.fromkeys([*GROUPS, "others"], 0.0)
    for name, ms in spent:
        found[_group(name.lower())] += ms
    return found


def _group(name: str) -> str:
    if name.startswith(FUSED):
        return "others"
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "others")


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """The trainer's kernels, for a while."""
    sound, short = trainer.sound_gradients, attend.SHORT
    if name == "cudnn":
        trainer.sound_gradients = contextlib.nullcontext
    if name == "flex":
        attend.SHORT = 64
    try:
        yield
    finally:
        trainer.sound_gradients, attend.SHORT = sound, short
        torch.compiler.reset()


def measure(chosen: recipes.Recipe, name: str) -> dict[str, Any]:
    usual, recipes.Trainer = recipes.Trainer, Timed
    try:
        with way(name), tempfile.TemporaryDirectory() as folder:
            gc.collect()  # the way before
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            recipes.train(chosen, Path(folder), quiet=True)
            log = (Path(folder) / chosen.stages[0].name / "log.jsonl").read_text().splitlines()
    finally:
        recipes.Trainer = usual
    rows = [json.loads(line) for line in log]
    return {
        "ms": 1e3 * Timed.total / TIMED,
        "median": 1e3 * statistics.median(Timed.seconds),
        "least": 1e3 * min(Timed.seconds),
        "fraction": statistics.median(row["mfu"] for row in rows if WARM < row["step"] <= WARM + TIMED),
        "kernels": Timed.kernels,
        "largest": Timed.largest,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
        "loss": rows[-1]["loss"],
    }


def short(chosen: recipes.Recipe, name: str) -> recipes.Recipe:
    """One stage of it, as long as it takes to be measured, and its sources."""
    stages = {stage.name: stage for stage in chosen.stages}
    if name not in stages:
        raise ConfigError(f"recipe {chosen.name!r} has no stage {name!r}", nearest(name, stages))
    stage = stages[name]
    steps = WARM + TIMED + PROFILED
    stage = stage.with_(steps=steps, save_every=steps, judge=(), judge_every=0, schedule=Constant())
    sources = {key: one for key, one in chosen.sources.items() if key in stage.mixture.weights}
    return chosen.with_(stages=(stage,), sources=sources)


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("stage")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=["torch", "cudnn", "flex"], default=["torch", "cudnn", "flex"])
    asked = parser.parse_intermixed_args()
    if wrong := [change for change in asked.changes if "=" not in change]:
        parser.error(f"{wrong[0]!r} is no KEY=VALUE")
    chosen = short(recipes.read(asked.recipe, dict(change.split("=", 1) for change in asked.changes)), asked.stage)
    found = {}
    for name in asked.ways:
        found[name] = measure(chosen, name)
        print(name, json.dumps(found[name]), flush=True)
        record(asked.out, found, *MEASURED)


if __name__ == "__main__":
    main()
