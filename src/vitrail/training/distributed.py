"""Distributed training: FSDP2 shards the weights, and each rank loads its part of every step.

Ranks synchronize wherever weights are gathered or gradients are reduced, so all ranks must run the same parts of the
model in the same order. Decisions that may differ between ranks (parts a batch uses, whether to stop, whether a file
was written) are exchanged first with the functions below.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vitrail.errors import TrainError
from vitrail.nn import Block
from vitrail.training.rank_monitor import enable_flight_recorder
from vitrail.training.task import Batch, OptionalPartsTask, Task
from vitrail.training.tensor_shards import replace_parameters

T = TypeVar("T")
PREPARATION_TIMEOUT = timedelta(hours=2)  # rank 0 may fetch data and train a tokenizer meanwhile
GatherFn = Callable[[Any], list[Any]]  # object of this rank → objects of all ranks


def get_world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def init_process_group(device: str) -> Iterator[None]:
    """Join the processes that torchrun started. Without torchrun, do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        enable_flight_recorder()
    # gloo in addition to nccl, because the exchanged values are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PREPARATION_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


class TaskModule(nn.Module):
    """Task as one module, so that FSDP gathers all weights the loss uses before the pass and frees them after it."""

    def __init__(self, task: Task):
        super().__init__()
        self.model = task.model
        self._task = [task]  # in a list, so that the task is not registered as a submodule

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._task[0](batch)


def shard_module(module: TaskModule, device: torch.device) -> None:
    """Shard the weights over the ranks with FSDP2, block by block, and move them to the device.

    Parameters that were built in shards never become whole: FSDP2 shards empty parameters, and gets the shards.
    """
    if get_world_size() == 1:
        return
    shards = {name: p.to_local().detach() for name, p in module.named_parameters() if isinstance(p, DTensor)}
    _replace_named_parameters(module, shards, lambda p, _: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    mesh = init_device_mesh(device.type, (get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # half-precision sums would lose small gradients
    for child in module.modules():
        if isinstance(child, Block):
            fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    _replace_named_parameters(module, shards, lambda p, shard: _fill_shard(p, shard.to(device)))


def _replace_named_parameters(
    module: nn.Module, values: Mapping[str, Tensor], make: Callable[[Any, Tensor], Tensor]
) -> None:
    """Replace parameters by `make(parameter, value)`, also where they are shared."""
    new = {
        id(p): nn.Parameter(make(p, values[name]), p.requires_grad)
        for name, p in module.named_parameters()
        if name in values
    }
    replace_parameters(module, lambda p: new.get(id(p), p))


def _fill_shard(parameter: DTensor, shard: Tensor) -> DTensor:
    """Return a parameter that FSDP2 sharded, with the values of its shard."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def reshard(module: TaskModule) -> None:
    """Free gathered weights after a pass without a backward pass; FSDP2 keeps the root module's weights gathered."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def fill_micro_batches(task: Task, micro_batches: list[Batch]) -> list[Batch]:
    """Return this rank's micro-batches, filled so that they use every part of the model that another rank uses."""
    if get_world_size() == 1 or not isinstance(task, OptionalPartsTask):
        return micro_batches
    runs = [task.used_parts(batch) for batch in micro_batches]
    ranks = sum_over_ranks({f"{m} {part}": run for m, parts in enumerate(runs) for part, run in parts.items()})
    needed = [{part: ranks[f"{m} {part}"] > 0 for part in parts} for m, parts in enumerate(runs)]
    return [_fill_batch(task, batch, parts) for batch, parts in zip(micro_batches, needed, strict=True)]


def _fill_batch(task: OptionalPartsTask, batch: Batch, needed_parts: dict[str, bool]) -> Batch:
    full = batch
    for part, need in needed_parts.items():
        if need and not task.used_parts(full)[part]:
            full = task.fill_part(full, part)
    if task.used_parts(full) != needed_parts or task.count_loss_terms(full) != task.count_loss_terms(batch):
        raise TrainError(
            f"{type(task).__name__}.fill_part returns a batch with parts {task.used_parts(full)} and counts "
            f"{task.count_loss_terms(full)}; needed are parts {needed_parts} and counts {task.count_loss_terms(batch)}",
            "add a blank sample without targets, and for the requested part only",
        )
    return full


def sum_over_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sum each number over the ranks. All ranks must pass the same keys."""
    if get_world_size() == 1:
        return dict(numbers)
    summed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(summed)
    return dict(zip(numbers, summed.tolist(), strict=True))


def max_over_ranks(number: int) -> int:
    """Return the maximum over the ranks."""
    if get_world_size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def gather_objects(own_object: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank."""
    if get_world_size() == 1:
        return [own_object]
    gathered: list[T] = [own_object] * get_world_size()
    dist.all_gather_object(gathered, own_object, group)
    return gathered


def make_thread_exchange() -> GatherFn:
    """Return a `gather_objects` for another thread, over connections of its own. All ranks must call this."""
    if get_world_size() == 1:
        return gather_objects
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return functools.partial(gather_objects, group=group)


def run_on_main_rank(act: Callable[[], T]) -> T | None:
    """Run `act` on rank 0 and return its result there. If it fails, every rank raises."""
    result, error = None, None
    if get_rank() == 0:
        try:
            result = act()
        except Exception as caught:
            if get_world_size() == 1:
                raise
            error = caught
    if (first := gather_objects(error)[0]) is not None:
        raise error or first
    return result


@torch.no_grad()
def gather_weights(module: nn.Module, target: nn.Module | None, master_weights: Mapping[str, Tensor]) -> None:
    """Gather sharded weights into a whole model, one tensor at a time.

    Master weights replace their half-precision copies. All ranks must call it; pass `target=None` on ranks that need no
    copy.
    """
    targets = {} if target is None else target.state_dict()
    for name, tensor in (module.state_dict() | dict(master_weights)).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if target is not None:
            targets[name].copy_(whole)


@torch.no_grad()
def copy_shards(module: nn.Module, target: nn.Module, master_weights: Mapping[str, Tensor]) -> None:
    """Copy the shards of a module into another one that was built in shards. Master weights replace their copies."""
    targets = target.state_dict()
    for name, tensor in (module.state_dict() | dict(master_weights)).items():
        local, place = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, targets[name]))
        place.copy_(local)


def barrier() -> None:
    """Wait until all ranks reach this point."""
    if get_world_size() > 1:
        dist.barrier()
