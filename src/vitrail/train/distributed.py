"""Many processes, one run: FSDP2 shards the weights, every rank reads its share of a step.

A checkpoint holds whole tensors, gathered and written by rank 0, so that a run can go on with any number of ranks.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vitrail.nn import Block
from vitrail.train.task import Batch, Task


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
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
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


def total(numbers: Mapping[str, float]) -> dict[str, float]:
    """Each number summed over the ranks, which all name the same ones."""
    if size() == 1:
        return dict(numbers)
    summed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(summed)
    return dict(zip(numbers, summed.tolist(), strict=True))


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, on every rank."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def shared_out(saved: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors as shards like our own."""

    def cut(name: str, value: Tensor) -> Any:
        own = like.get(name)
        if not isinstance(own, DTensor):
            return value
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)

    return {name: cut(name, value) for name, value in saved.items()}


def wait() -> None:
    if size() > 1:
        dist.barrier()
