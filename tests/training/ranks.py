"""Rank processes for tests: forked from a server that has torch loaded, and connected with gloo."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from vitrail.training import distributed

TIMEOUT = 600.0  # seconds until processes count as hanging; a busy machine is slow
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["torch", "torch.distributed.fsdp"])


_stores: dict[int, TCPStore] = {}  # process id of rank 0 → the store of its group


def open_store() -> TCPStore:
    """Open a store on a free port. This process holds the port, so no other one can take it meanwhile."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def spawn(ranks: int, act: Callable[..., None], *given: Any) -> list[BaseProcess]:
    """Start act(*given) on several ranks. `act` must be importable."""
    store = open_store()
    processes = [START.Process(target=_run, args=(rank, ranks, store.port, act, given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    _stores[processes[0].pid or 0] = store
    return processes


def finish(processes: list[BaseProcess], timeout: float = TIMEOUT) -> list[int | None]:
    """Return the exit codes; None for a process that hangs, which is then killed."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    _stores.pop(processes[0].pid or 0, None)
    return codes


def run(ranks: int, act: Callable[..., None], *given: Any, timeout: float = TIMEOUT) -> None:
    """Run act(*given) on every rank and check that all succeed."""
    assert finish(spawn(ranks, act, *given), timeout) == [0] * ranks


def _run(rank: int, ranks: int, port: int, act: Callable[..., None], given: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun does: another process has the store
    torch.set_num_threads(1)
    try:
        with distributed.init_process_group("cpu"):
            act(*given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # exit without waiting for the other ranks
