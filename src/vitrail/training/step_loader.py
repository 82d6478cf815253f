"""Load the batches of one rank, step by step, in the order of the mixture."""

import contextlib
import gc
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import wait as wait_for_processes
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vitrail.data.sampler import MixtureSampler, SampleReference
from vitrail.errors import TrainError, VitrailError
from vitrail.training import distributed
from vitrail.training.stage_config import StageConfig
from vitrail.training.task import Batch, RandomizedSource, SampleSource, Task


class MixtureDataset(Dataset):
    """Dataset that reads samples in the order of the mixture."""

    def __init__(self, order: MixtureSampler, sources: Mapping[str, SampleSource]):
        self.order, self.sources = order, sources
        self.randomized = {name for name, source in sources.items() if isinstance(source, RandomizedSource)}

    def __getitem__(self, index: int) -> Any:
        draw: SampleReference = self.order[index]
        source = self.sources[draw.source]
        if draw.source in self.randomized:
            return source.sample(draw.item, (self.order.seed, index))  # type: ignore[attr-defined]
        return source[draw.item]


class _StepBatchSampler:
    """Batch sampler: yields the sample indices of every micro-batch of the remaining steps."""

    def __init__(self, loader: "StepLoader", start: int):
        self.loader, self.start = loader, start

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.loader.stage.steps):
            yield from self.loader.list_read_indices(step)


def _init_worker(_worker: int) -> None:
    """Make a dataloader worker ignore signals: the trainer finishes the step, saves, and stops the workers.

    `gc.freeze` keeps the worker from freeing the parent's garbage, such as CUDA tensors, which would crash a forked
    process.
    """
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class StepLoader:
    """Dataloader of one stage. `iterate_batches` starts at any step, so a resumed run reads the same samples."""

    def __init__(
        self, stage: StageConfig, task: Task, sources: Mapping[str, SampleSource], seed: int, pin_memory: bool
    ):
        self.stage, self.task, self.sources, self.pin_memory = stage, task, sources, pin_memory
        self.order = MixtureSampler(stage.mixture, {name: len(s) for name, s in sources.items()}, seed)
        self._dead_workers: list[str] = []

    def list_own_indices(self, step: int) -> list[list[int]]:
        """Return this rank's sample indices in each micro-batch of a step; empty if ranks outnumber samples."""
        size = self.stage.batch_size // self.stage.gradient_accumulation_steps
        first, rank, ranks = step * self.stage.batch_size, distributed.get_rank(), distributed.get_world_size()
        return [
            list(range(first + m * size + rank, first + (m + 1) * size, ranks))
            for m in range(self.stage.gradient_accumulation_steps)
        ]

    def list_read_indices(self, step: int) -> list[list[int]]:
        """Return the indices this rank loads: its own, or one of the first rank, because every rank needs a batch."""
        size = self.stage.batch_size // self.stage.gradient_accumulation_steps
        return [ids or [step * self.stage.batch_size + m * size] for m, ids in enumerate(self.list_own_indices(step))]

    def iterate_batches(self, start: int) -> Generator[list[Batch], None, None]:
        """Yield the micro-batches of each step from `start` to the end of the stage."""
        loader = DataLoader(
            MixtureDataset(self.order, self.sources),
            batch_sampler=_StepBatchSampler(self, start),  # pyrefly: ignore
            worker_init_fn=_init_worker,
            collate_fn=self.task.collate,
            num_workers=self.stage.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # its own generator: loading must not change the global random state
        )
        stream: Any = iter(loader)
        try:
            for _ in range(start, self.stage.steps):
                yield [next(stream) for _ in range(self.stage.gradient_accumulation_steps)]
        except Exception:
            if workers := getattr(stream, "_workers", ()):  # the exit code of a worker comes after its pipes break
                ended = wait_for_processes([worker.sentinel for worker in workers], timeout=1.0)
                for worker in workers:
                    worker.join(1.0 if worker.sentinel in ended else 0.0)
            raise
        finally:
            if workers := getattr(stream, "_workers", ()):
                self._dead_workers = [f"process {w.pid}, exit code {w.exitcode}" for w in workers if w.exitcode]
                stream._shutdown_workers()
                for worker in workers:
                    worker.kill()  # a busy worker ignores the shutdown signal, see `_init_worker`
                    worker.join()

    @contextlib.contextmanager
    def report_dead_workers(self, get_step: Callable[[], int]) -> Iterator[None]:
        """Raise a clear error when a dataloader worker dies.

        `get_step` returns the number of finished steps. A death shows as an error of the dataloader, of a pipe or of
        shared memory, or in whatever the trainer was doing. Every error therefore checks whether a worker has ended.
        """
        self._dead_workers = []
        try:
            yield
        except VitrailError:
            raise
        except Exception as error:
            if not self._dead_workers and "DataLoader worker" not in str(error):
                raise
            raise TrainError(
                f"a dataloader worker died in step {get_step() + 1}: {'; '.join(self._dead_workers) or error}",
                "free memory or use fewer workers (stages.N.num_workers), and start the command again",
            ) from error
