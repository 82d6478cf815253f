"""Detection of stopped ranks: which rank holds up the others, in which step, and where.

Each rank notes its progress in memory. A thread of each process publishes it once in a while in the store of
torch.distributed, so a step costs nothing. A rank that waits for longer than the limit reads the progress of all ranks.
The rank whose notes stop has ended or is stopped; otherwise the rank with the least progress holds up the others.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch.distributed as dist

from vitrail.errors import ConfigError, TrainError

SECONDS_VARIABLE, DEFAULT_SECONDS = "VITRAIL_RANK_SECONDS", 600.0
SILENT_SECONDS = 5.0  # how long a rank that runs may publish nothing, on a busy machine
EXIT_GRACE_SECONDS = 60.0  # for the flight recorder to write its files, after the report
LOST_PEER = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "gloo", "nccl")
PHASES = ("loading data", "exchanging batch counts", "forward and backward pass", "update", "validation and saving")


class RankProgress(msgspec.Struct):
    """What a rank last published about itself."""

    count: int  # of publications: it grows while the process runs
    step: int
    phase: int
    seconds: float  # since the phase began
    process: str


class StoppedRank(NamedTuple):
    rank: int
    description: str


def get_rank_seconds() -> float:
    """Return how long a rank may hold up the others."""
    text = os.environ.get(SECONDS_VARIABLE, "")
    try:
        seconds = float(text or DEFAULT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 7 * 24 * 3600:
        raise ConfigError(f"{SECONDS_VARIABLE} is {text!r}", "give seconds between 1 and 604800")
    return seconds


def enable_flight_recorder(folder: Path | None = None) -> None:
    """Make NCCL record its last collectives, and write them to files when one times out."""
    folder = folder or Path(os.environ.get("TMPDIR", "/tmp"))
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # torch renamed it
        os.environ.setdefault(name, "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "vitrail-flight-recorder-rank-"))


class RankMonitor:
    """Notes the progress of this rank, and finds the rank that holds up the others."""

    def __init__(self, usual_timeout: timedelta):
        self.seconds, self._usual_timeout = get_rank_seconds(), usual_timeout
        self.interval = min(1.0, self.seconds / 5)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._place, self._since, self._count = (0, 0), time.monotonic(), 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def enter(self, step: int, phase: str) -> None:
        """Note that this rank begins a phase of a step."""
        self._place, self._since = (step, PHASES.index(phase)), time.monotonic()

    def find_stopped_rank(self) -> StoppedRank:
        """Return the rank that holds up the others. Takes a few seconds."""
        before, end = self._read_all(), time.monotonic() + SILENT_SECONDS
        while True:
            self._stopped.wait(self.interval)
            after = self._read_all()
            if after[self.rank] is None:
                return StoppedRank(0, "rank 0 ended: its store does not answer")
            pairs = enumerate(zip(before, after, strict=True))
            silent = [r for r, (old, new) in pairs if r != self.rank and (not new or (old and old.count == new.count))]
            if not silent or time.monotonic() > end:
                break
        if silent:  # every step has collectives, so it is in the step of this rank
            progress = after[silent[0]] or before[silent[0]]
            what = f"rank {silent[0]} ended, or is stopped, in step {self._place[0] + 1}"
            return StoppedRank(silent[0], f"{what}; it was last seen{_format_place(progress)}")
        known = {rank: progress for rank, progress in enumerate(after) if progress is not None}
        last = min(known, key=lambda rank: (known[rank].step, known[rank].phase, -known[rank].seconds))
        return StoppedRank(last, f"rank {last} holds up the others{_format_place(known[last])}")

    def __enter__(self) -> Self:
        self._thread.start()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.seconds))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        self._thread.join()
        dist.distributed_c10d._set_pg_timeout(self._usual_timeout)

    def _run(self) -> None:
        reported = False
        while not self._stopped.is_set():
            with contextlib.suppress(RuntimeError):  # the store ends with its process
                self._publish()
            waited = time.monotonic() - self._since
            if waited > self.seconds and not reported:
                reported = True
                self._report(waited)
            if waited > self.seconds + EXIT_GRACE_SECONDS + 5 * self.interval:
                os._exit(1)  # a pass that waits in a GPU cannot raise an error
            self._stopped.wait(self.interval)

    def _publish(self) -> None:
        self._count += 1
        step, phase = self._place
        process = f"process {os.getpid()} on {socket.gethostname()}"
        progress = RankProgress(self._count, step, phase, time.monotonic() - self._since, process)
        self._store.set(f"vitrail/progress/{self.rank}", msgspec.json.encode(progress))

    def _read_all(self) -> list[RankProgress | None]:
        found: list[RankProgress | None] = []
        for rank in range(self.ranks):
            key, value = f"vitrail/progress/{rank}", None
            with contextlib.suppress(RuntimeError, msgspec.DecodeError):
                if self._store.check([key]):
                    value = msgspec.json.decode(self._store.get(key), type=RankProgress)
            found.append(value)
        return found

    def _report(self, waited: float) -> None:
        step, phase = self._place
        own = f"rank {self.rank} is in step {step + 1} ({PHASES[phase]}) for {waited:.0f} s"
        found = self.find_stopped_rank()
        sys.stderr.write(f"{own}; {found.description}\n")
        if found.rank == self.rank:
            with contextlib.suppress(ValueError, OSError):  # stderr may be no file
                faulthandler.dump_traceback(sys.stderr, all_threads=True)


@contextlib.contextmanager
def report_stopped_ranks(monitor: RankMonitor | None) -> Iterator[None]:
    """Turn the error of a collective that lost a rank into a `TrainError` that names the rank and its step."""
    try:
        yield
    except RuntimeError as error:
        if monitor is None or not any(word in str(error).lower() for word in LOST_PEER):
            raise
        found = monitor.find_stopped_rank()
        raise TrainError(
            f"{found.description}: {str(error).splitlines()[0]:.200}",
            f"read the output of that rank; start the same command again to resume. {SECONDS_VARIABLE} "
            f"({monitor.seconds:g}) is how long the others wait",
        ) from error


def _format_place(progress: RankProgress | None) -> str:
    if progress is None:
        return " before its first step"
    return f" in step {progress.step + 1}, {PHASES[progress.phase]} ({progress.process})"
