"""Time of a training step of a recipe's stage, and of its kernels, with different attention backends.

    python perf/step.py mini anneal --out results.json 'model.parts.codec={checkpoint="mini", part="codec"}'

    torch   as in training: torch's attention without cuDNN, with a dense mask if the plan needs one
    cudnn   with cuDNN's attention, whose gradients are sometimes NaN
    flex    block-sparse attention for short rows too

Changes to the recipe have the form of `vitrail train`. Each backend builds, compiles and warms up the model again, with
the same samples. `ms` is the mean of TIMED steps, synchronized before the first and after the last. `median` and
`least` are of single steps by the host's clock, which runs ahead of the device. `fraction` is the FLOP rate of a step
over that of a large matrix product on the same device in the same run. `kernels` and `largest` are milliseconds a step
from PROFILED further steps: sums of matrix products, attention and other kernels, and the LARGEST kernels by name.
"""

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import make_parser, write_record
from timing import CUDA, measure_matrix_rate, read_peak_gib, synchronize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vitrail import recipe as recipes
from vitrail.errors import ConfigError, suggest_name
from vitrail.nn import attention_backends
from vitrail.recipe import recipe_training
from vitrail.training import trainer
from vitrail.training.lr_schedule import ConstantSchedule

WARMUP, TIMED, PROFILED = (30, 30, 3) if CUDA else (1, 2, 1)
LARGEST = 24
BACKENDS = ["torch", "cudnn", "flex"]
MEASURED = (
    *(
        "vitrail.training.trainer",
        "vitrail.training.step_loader",
        "vitrail.training.prefetch",
        "vitrail.nn.attention_backends",
        "vitrail.nn.parallel_streams",
        "vitrail.nn.cuda_graphs",
    ),
    *("vitrail.nn.rotary_embedding", "vitrail.nn.kernels.materialize", "vitrail.data.qa", "vitrail.data.augmentation"),
)
FUSED_PREFIXES = ("triton_poi", "triton_red", "triton_per")  # their names contain those of neighbouring operations
KERNEL_GROUPS = {  # group → parts of kernel names
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "_mm"),
}


class StepTimer(trainer.Trainer):
    """Trainer that times and profiles steps, and saves nothing.

    It synchronizes only before the first and after the last timed step, so that samples of the next step are still
    generated in parallel.
    """

    seconds: list[float]
    total: float
    kernels: dict[str, float]
    largest: dict[str, float]

    def train(self) -> torch.nn.Module:
        self._peak_flops = measure_matrix_rate(self.device, getattr(torch, self.stage.dtype))  # for `mfu` in the log
        return super().train()

    def _save_checkpoint(self) -> None:
        pass

    def _train_step(self, batches: Any) -> dict[str, float]:
        if self.step == 0:
            StepTimer.seconds, StepTimer.kernels, StepTimer.largest = [], {}, {}
            self.profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])])
        if self.step == WARMUP + TIMED:
            self.profiler.__enter__()
        if self.step == WARMUP:
            synchronize()
            StepTimer.total = -time.perf_counter()
        start = time.perf_counter()
        metrics = super()._train_step(batches)
        if WARMUP <= self.step < WARMUP + TIMED:
            StepTimer.seconds.append(time.perf_counter() - start)
        if self.step == WARMUP + TIMED - 1:
            synchronize()
            StepTimer.total += time.perf_counter()
        if self.step == WARMUP + TIMED + PROFILED - 1:
            self.profiler.__exit__(None, None, None)
            times = list_kernel_times(self.profiler.key_averages())
            StepTimer.kernels, StepTimer.largest = group_kernel_times(times), dict(times[:LARGEST])
        return metrics


def list_kernel_times(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Return kernels and their milliseconds a step, longest first.

    Events of the host that launched a kernel have the same device time, and are left out.
    """
    times = [
        (event.key, event.self_device_time_total / 1e3 / PROFILED)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return sorted(times, key=lambda row: -row[1])


def group_kernel_times(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum the milliseconds of kernels by group."""
    sums = dict.fromkeys([*KERNEL_GROUPS, "others"], 0.0)
    for name, ms in times:
        sums[find_kernel_group(name.lower())] += ms
    return sums


def find_kernel_group(name: str) -> str:
    if name.startswith(FUSED_PREFIXES):
        return "others"
    return next((group for group, parts in KERNEL_GROUPS.items() if any(part in name for part in parts)), "others")


@contextlib.contextmanager
def use_attention_backend(name: str) -> Iterator[None]:
    """Make the trainer use another attention backend within the block."""
    without_cudnn, max_keys = trainer.disable_cudnn_attention, attention_backends.MAX_DENSE_MASK_KEYS
    if name == "cudnn":
        trainer.disable_cudnn_attention = contextlib.nullcontext
    if name == "flex":
        attention_backends.MAX_DENSE_MASK_KEYS = 64
    try:
        yield
    finally:
        trainer.disable_cudnn_attention, attention_backends.MAX_DENSE_MASK_KEYS = without_cudnn, max_keys
        torch.compiler.reset()


def measure_step(selected: recipes.Recipe, backend: str) -> dict[str, Any]:
    """Train a recipe of one stage with an attention backend."""
    trainer_class, recipe_training.Trainer = recipe_training.Trainer, StepTimer
    try:
        with use_attention_backend(backend), tempfile.TemporaryDirectory() as folder:
            gc.collect()  # the model of the previous backend
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            recipes.train_recipe(selected, Path(folder), quiet=True)
            log = (Path(folder) / selected.stages[0].name / "log.jsonl").read_text().splitlines()
    finally:
        recipe_training.Trainer = trainer_class
    rows = [json.loads(line) for line in log]
    return {
        "ms": 1e3 * StepTimer.total / TIMED,
        "median": 1e3 * statistics.median(StepTimer.seconds),
        "least": 1e3 * min(StepTimer.seconds),
        "fraction": statistics.median(row["mfu"] for row in rows if WARMUP < row["step"] <= WARMUP + TIMED),
        "kernels": StepTimer.kernels,
        "largest": StepTimer.largest,
        "peak_gib": read_peak_gib() if CUDA else None,
        "loss": rows[-1]["loss"],
    }


def select_stage(loaded: recipes.Recipe, name: str) -> recipes.Recipe:
    """Return a recipe of one stage and its sources, with as many steps as are measured."""
    stages = {stage.name: stage for stage in loaded.stages}
    if name not in stages:
        raise ConfigError(f"recipe {loaded.name!r} has no stage {name!r}", suggest_name(name, stages))
    stage = stages[name]
    steps = WARMUP + TIMED + PROFILED
    stage = stage.replace(
        steps=steps, save_every=steps, validate=(), validate_every=0, validate_first=False, schedule=ConstantSchedule()
    )
    sources = {key: source for key, source in loaded.sources.items() if key in stage.mixture.weights}
    return loaded.replace(stages=(stage,), sources=sources)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("stage")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="attention backends")
    arguments = parser.parse_intermixed_args()
    if malformed := [change for change in arguments.changes if "=" not in change]:
        parser.error(f"{malformed[0]!r} is not KEY=VALUE")
    changes = dict(change.split("=", 1) for change in arguments.changes)
    selected = select_stage(recipes.load_recipe(arguments.recipe, changes), arguments.stage)
    figures = {}
    for backend in arguments.backends:
        figures[backend] = measure_step(selected, backend)
        print(backend, json.dumps(figures[backend]), flush=True)
        write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
