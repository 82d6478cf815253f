"""Commands side by side, each in a process of its own, as soon as those that it comes after have ended."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

LINES = 5  # of a log's end that are told where its command failed
OURS = (sys.executable, "-m", "vitrail.cli")


class Job(NamedTuple):
    name: str
    words: tuple[str, ...]
    log: Path  # what it says
    after: tuple[str, ...] = ()  # the jobs before it in the queue whose results it needs


def side_by_side(queue: Sequence[Job], at_once: int, says: str) -> dict[str, str]:
    """Run all, at most `at_once` together, the first ones first; none waits for one that it does not need. → of those
    that failed, name → how."""
    waiting, ended, failed = list(queue), set[str](), dict[str, str]()
    running: dict[str, tuple[Job, subprocess.Popen]] = {}
    for n, job in enumerate(queue):
        assert set(job.after) <= {before.name for before in queue[:n]}, job
    try:
        with _signals() as got, tqdm(total=len(queue), desc=says, unit="run", disable=None) as progress:
            while waiting or running:
                if got:
                    raise KeyboardInterrupt if got[0] == signal.SIGINT else SystemExit(128 + got[0])
                for job in list(waiting):
                    if lost := [name for name in job.after if name in failed]:
                        waiting.remove(job)
                        failed[job.name] = f"not run, since {lost[0]} failed"
                    elif len(running) < at_once and ended.issuperset(job.after):
                        waiting.remove(job)
                        running[job.name] = job, _start(job)
                for job, process in list(running.values()):
                    if process.poll() is None:
                        continue
                    del running[job.name]
                    ended.add(job.name)
                    if process.returncode:
                        failed[job.name] = f"{job.log} ends with:\n{_end(job.log)}"
                progress.update(len(ended | failed.keys()) - progress.n)
                time.sleep(0.05)
    finally:  # they save what they have, where one is stopped by a person
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failed


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Those that ask for an end, to be obeyed between two steps: amid one, a process might be begun that nobody knows.
    SIGTERM too, or the processes would go on alone, in the way of whoever begins them again."""
    got: list[int] = []
    try:
        before = {n: signal.signal(n, lambda number, _: got.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, where no signal arrives
        before = {}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w", encoding="utf-8") as said:
        return subprocess.Popen(job.words, stdout=said, stderr=subprocess.STDOUT)


def _end(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:])
