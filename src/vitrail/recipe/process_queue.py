"""Queue of commands that run in parallel processes and wait for the jobs they depend on."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

LOG_TAIL_LINES = 5  # lines of a failed job's log that the error quotes
CLI_COMMAND = (sys.executable, "-m", "vitrail")


class ProcessJob(NamedTuple):
    """One command line to run."""

    name: str
    command: tuple[str, ...]
    log_file: Path  # receives stdout and stderr
    depends_on: tuple[str, ...] = ()  # names of earlier jobs in the queue whose results it needs


def run_jobs(jobs: Sequence[ProcessJob], max_parallel: int, description: str) -> dict[str, str]:
    """Run all jobs in queue order, at most `max_parallel` at a time.

    A job starts when all jobs in `depends_on` have ended. Returns the failed jobs: name → reason.
    """
    waiting, ended, failed = list(jobs), set[str](), dict[str, str]()
    running: dict[str, tuple[ProcessJob, subprocess.Popen]] = {}
    for n, job in enumerate(jobs):
        assert set(job.depends_on) <= {earlier.name for earlier in jobs[:n]}, job
    try:
        with (
            _collect_signals() as signals,
            tqdm(total=len(jobs), desc=description, unit="run", disable=None) as progress,
        ):
            while waiting or running:
                if signals:
                    raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
                for job in list(waiting):
                    if missing := [name for name in job.depends_on if name in failed]:
                        waiting.remove(job)
                        failed[job.name] = f"not started: {missing[0]} failed"
                    elif len(running) < max_parallel and ended.issuperset(job.depends_on):
                        waiting.remove(job)
                        running[job.name] = job, _start_process(job)
                for job, process in list(running.values()):
                    if process.poll() is None:
                        continue
                    del running[job.name]
                    ended.add(job.name)
                    if process.returncode:
                        failed[job.name] = f"end of {job.log_file}:\n{_read_log_tail(job.log_file)}"
                progress.update(len(ended | failed.keys()) - progress.n)
                time.sleep(0.05)
    finally:  # SIGTERM lets interrupted training runs save a checkpoint
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failed


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, for the loop to handle between two iterations.

    A signal in the middle of an iteration could leave a process that was started but not recorded.
    """
    signals: list[int] = []
    try:
        handlers = {
            n: signal.signal(n, lambda number, _: signals.append(number)) for n in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread: no signals arrive here
        handlers = {}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start_process(job: ProcessJob) -> subprocess.Popen:
    job.log_file.parent.mkdir(parents=True, exist_ok=True)
    with job.log_file.open("w", encoding="utf-8") as output:
        return subprocess.Popen(job.command, stdout=output, stderr=subprocess.STDOUT)


def _read_log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
