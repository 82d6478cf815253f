"""Many processes, one run: FSDP2 shards the weights, every rank reads its share of a step.

The ranks wait for each other wherever weights are gathered or gradients summed, so all of them must run the same parts
of the model in the same order. What may differ between them (which parts a batch needs, whether to stop, whether a file
could be written) is agreed on first, with the functions below.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from vitrail.errors import TrainError
from vitrail.nn import Block
from vitrail.train.task import Batch, PartedTask, Task

T = TypeVar("T")


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the processes that torchrun started; alone, nothing is done."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # gloo beside nccl: what is agreed on are numbers on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Whole(nn.Module):
    """A task as one module, so that whatever of the model its loss touches is gathered before and freed after."""

    def __init__(self, task: Task):
        super().__init__()
        self.model = task.model
        self._task = [task]  # in a list: the task is no part of the module

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._task[0](batch)


def shard(whole: Whole, device: torch.device) -> None:
    """Share the weights out over the ranks, block by block."""
    if size() > 1:
        mesh = init_device_mesh(device.type, (size(),))
        for module in whole.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        fully_shard(whole, mesh=mesh)


def let_go(whole: Whole) -> None:
    """Back to shards after a pass that no backward pass follows: the outermost weights are kept whole for one."""
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def filled(task: Task, micro: list[Batch]) -> list[Batch]:
    """The micro-batches of this rank, made to run every part of the model that those of another run."""
    if size() == 1 or not isinstance(task, PartedTask):
        return micro
    runs = [task.parts(batch) for batch in micro]
    ranks = total({f"{m} {part}": run for m, parts in enumerate(runs) for part, run in parts.items()})
    needed = [{part: ranks[f"{m} {part}"] > 0 for part in parts} for m, parts in enumerate(runs)]
    return [_fill(task, batch, parts) for batch, parts in zip(micro, needed, strict=True)]


def _fill(task: PartedTask, batch: Batch, needed: dict[str, bool]) -> Batch:
    full = batch
    for part, need in needed.items():
        if need and not task.parts(full)[part]:
            full = task.fill(full, part)
    if task.parts(full) != needed or task.counts(full) != task.counts(batch):
        raise TrainError(
            f"{type(task).__name__}.fill gives a batch that runs {task.parts(full)} and counts {task.counts(full)}, "
            f"where {needed} and {task.counts(batch)} are needed",
            "let it add a blank sample without targets, for no part but the one it is asked for",
        )
    return full


def total(numbers: Mapping[str, float]) -> dict[str, float]:
    """Each number summed over the ranks, which all name the same ones."""
    if size() == 1:
        return dict(numbers)
    summed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(summed)
    return dict(zip(numbers, summed.tolist(), strict=True))


def most(number: int) -> int:
    """The largest that any rank has."""
    if size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def gather(mine: T) -> list[T]:
    """What every rank has, on every rank."""
    if size() == 1:
        return [mine]
    told: list[T] = [mine] * size()
    dist.all_gather_object(told, mine)
    return told


@torch.no_grad()
def put_together(sharded: nn.Module, into: nn.Module | None, masters: Mapping[str, Tensor]) -> None:
    """Copy shared-out weights into a whole model, a tensor at a time, masters in place of what was rounded from them; a
    rank that wants none helps the others."""
    targets = {} if into is None else into.state_dict()
    for name, tensor in (sharded.state_dict() | dict(masters)).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if into is not None:
            targets[name].copy_(whole)


def wait() -> None:
    if size() > 1:
        dist.barrier()
