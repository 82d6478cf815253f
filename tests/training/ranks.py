"""Rank processes for tests: forked from a server that has torch loaded, and connected with gloo."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from vitrail.training import distributed

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["torch", "torch.distributed.fsdp"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawn(ranks: int, act: Callable[..., None], *given: Any) -> list[BaseProcess]:
    """Start act(*given) on several ranks. `act` must be importable."""
    port = free_port()
    processes = [START.Process(target=_run, args=(rank, ranks, port, act, given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess], timeout: float = 100) -> list[int | None]:
    """Return the exit codes; None for a process that hangs, which is then killed."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def run(ranks: int, act: Callable[..., None], *given: Any, timeout: float = 100) -> None:
    """Run act(*given) on every rank and check that all succeed."""
    assert finish(spawn(ranks, act, *given), timeout) == [0] * ranks


def _run(rank: int, ranks: int, port: int, act: Callable[..., None], given: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    try:
        with distributed.init_process_group("cpu"):
            act(*given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # exit without waiting for the other ranks
