"""Asynchronous saves: copy the state to host memory, and write it in a thread while training goes on."""

import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vitrail.training import checkpoint, distributed

LOST_RANK_SECONDS, JOIN_SECONDS = 10.0, 600.0  # how long a failed run waits for its last save, if a rank may have ended


class CheckpointWriter:
    """Save the checkpoints of a run. One save is in progress at a time, and an exit of the context waits for it.

    On a GPU the state is copied to pinned memory, which is reserved once, in the order of the training stream: the next
    step starts on the GPU when the copies are done, and the CPU does not wait. A save that fails sets `has_failed`; the
    next `wait` or `save` raises its error.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device
        self._exchange = distributed.make_thread_exchange()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def reserve(self, groups: Mapping[str, checkpoint.Tensors]) -> None:
        """Reserve the pinned memory of all later saves, which takes seconds for large models."""
        if self.device.type == "cuda":
            for group, shards in checkpoint.collect_shards(groups).items():
                for name, shard in shards.items():
                    if shard.values.is_cuda:
                        self._buffers[group, name] = _allocate_pinned(shard.values)

    def save(self, step: int, groups: Mapping[str, checkpoint.Tensors], state: dict[str, Any]) -> None:
        """Copy the state and start to write it. Waits for the previous save. All ranks must call it."""
        self.wait()
        shards = {
            group: {name: shard._replace(values=self._copy(group, name, shard.values)) for name, shard in held.items()}
            for group, held in checkpoint.collect_shards(groups).items()
        }
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._write, args=(step, shards, state, copied), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error."""
        self.settle()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in progress."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _copy(self, group: str, name: str, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return values.detach().clone()
        buffer = self._buffers.get((group, name))
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = _allocate_pinned(values)
            self._buffers[group, name] = buffer
        return buffer.copy_(values.detach(), non_blocking=True)

    def _write(
        self, step: int, shards: checkpoint.ShardGroups, state: dict[str, Any], copied: torch.Event | None
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            checkpoint.write_checkpoint(self.folder, step, shards, state, exchange=self._exchange)
        except BaseException as error:  # raised by `wait`, in the thread that trains
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
            else:
                limit = LOST_RANK_SECONDS if isinstance(error, RuntimeError) else JOIN_SECONDS
                self.settle(limit if distributed.get_world_size() > 1 else None)
                if self._error is not None:
                    sys.stderr.write(f"the last save failed too: {self._error}\n")
        finally:
            for buffer in self._buffers.values():
                _release_pinned(buffer)
            self._buffers.clear()


def _allocate_pinned(like: Tensor) -> Tensor:
    """Return host memory of the size of a tensor, pinned if the system allows it.

    `torch.empty(pin_memory=True)` would round the size up to a power of two.
    """
    buffer, runtime = torch.empty(like.shape, dtype=like.dtype), torch.cuda.cudart()
    assert runtime is not None
    if buffer.numel() and int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
        with contextlib.suppress(RuntimeError):  # the memory stays pageable; the next kernel would raise that error
            torch.zeros(1, device=like.device)
    return buffer


def _release_pinned(buffer: Tensor) -> None:
    runtime = torch.cuda.cudart()
    if buffer.is_pinned() and runtime is not None:
        runtime.cudaHostUnregister(buffer.data_ptr())
