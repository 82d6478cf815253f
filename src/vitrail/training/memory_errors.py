"""Errors of a device that is out of memory: what to lower, and by how much."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vitrail.errors import TrainError
from vitrail.training.stage_config import StageConfig

USABLE = 0.92  # share of the memory that tensors can use; the rest is for kernels and fragments
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}


class MemoryUse(NamedTuple):
    """Bytes of a device when an allocation failed."""

    capacity: int
    allocated: int
    requested: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the CPU or a GPU has too little memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def measure_memory_use(error: BaseException, device: torch.device) -> MemoryUse:
    """Measure the memory of a device after an error."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?([KMGT]?i?B|bytes)", str(error))
    requested = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if device.type == "cuda":
        capacity = torch.cuda.mem_get_info(device)[1]
        return MemoryUse(capacity, torch.cuda.memory_allocated(device), requested)
    import os

    page = os.sysconf("SC_PAGE_SIZE")
    return MemoryUse(os.sysconf("SC_PHYS_PAGES") * page, _read_resident_bytes(page), requested)


def _read_resident_bytes(page: int) -> int:
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * page
    return 0


@contextlib.contextmanager
def report_out_of_memory(
    stage: StageConfig, device: torch.device, step: int, count_state_bytes: Callable[[], int], ranks: int
) -> Iterator[None]:
    """Turn an out-of-memory error of a step into a `TrainError` that says what to lower, and by how much.

    `count_state_bytes` returns the bytes of weights, gradients and optimizer state on this rank.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        use, state_bytes = measure_memory_use(error, device), count_state_bytes()
        size = stage.batch_size // stage.gradient_accumulation_steps
        more = f", {use.requested / 1e9:.2f} GB more were needed" if use.requested else ""
        raise TrainError(
            f"step {step} is out of memory: {device} has {use.capacity / 1e9:.1f} GB, {use.allocated / 1e9:.2f} GB "
            f"were in use{more}; weights, gradients and optimizer state take {state_bytes / 1e9:.2f} GB, and a "
            f"micro-batch has {size} samples on {ranks} ranks",
            suggest_less_memory(stage, use, state_bytes, ranks),
        ) from error


def suggest_less_memory(stage: StageConfig, use: MemoryUse, state_bytes: int, ranks: int) -> str:
    """Say which setting to lower, and to which value. All but the dtype leave the trained weights the same."""
    free = USABLE * use.capacity - state_bytes
    if free <= 0:
        needed = math.ceil(ranks * state_bytes / (USABLE * use.capacity)) + 1
        halved = ' set dtype = "bfloat16",' if stage.dtype == "float32" else ""
        return f"train on {needed} ranks or more (torchrun --nproc-per-node {needed}),{halved} or freeze parts"
    activations = max(use.allocated + use.requested - state_bytes, 0)
    factor = max(2, math.ceil(activations / free))
    size = stage.batch_size // stage.gradient_accumulation_steps
    options = [n for n in range(1, size) if size % n == 0 and size // n >= factor]
    remedies = []
    if size > 1:
        small = options[-1] if options else 1
        count = stage.batch_size // small
        remedies.append(
            f"set stages.N.gradient_accumulation_steps = {count} instead of {stage.gradient_accumulation_steps}: "
            f"micro-batches of {small} instead of {size} samples"
        )
    if not options and not stage.gradient_checkpointing:
        remedies.append("set stages.N.gradient_checkpointing = true")
    if not options and stage.dtype == "float32":
        remedies.append('set stages.N.dtype = "bfloat16"')
    if not remedies:
        remedies.append(f"shorten the samples to 1/{factor} of their tokens, or train on {ranks * factor} ranks")
    return " and ".join(remedies)
