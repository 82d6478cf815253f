"""Read mutated files in processes of their own, which are limited in time and memory."""

import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fuzz.target import FuzzFormat, Target

SECONDS, MEGABYTES = 10.0, 1000
"""Limits of one file: seconds of the processor, and memory above that of the idle process."""
GRACE = 6  # a process that runs this many times as long is killed; other processes may share the machine
HARD_MEGABYTES = 6000  # address space of a process: a bomb must not take the memory of the machine
OUTCOMES = ("read", "refused")


class Finding(NamedTuple):
    """A file that breaks the guarantee: its target, what happened, and its content."""

    target: str
    number: int
    outcome: str
    detail: str
    data: bytes


class Report(NamedTuple):
    outcomes: Counter[str]
    findings: list[Finding]
    seconds: float  # of the slowest file
    megabytes: float  # of the file that used most


def get_formats() -> dict[str, FuzzFormat]:
    from fuzz import checkpoint_formats, data_formats

    return checkpoint_formats.FORMATS | data_formats.FORMATS


def get_format(name: str) -> FuzzFormat:
    """Return a format, or one whose reader is broken, to test the fuzzer itself."""
    return FuzzFormat(_prepare_broken_reader) if name == "self-test" else get_formats()[name]


def _prepare_broken_reader(folder: Path) -> list[Target]:
    file = folder / "file"
    file.write_bytes(bytes(100))

    def read() -> None:
        data = file.read_bytes()
        if len(data) < 100:
            raise KeyError("short")
        if any(data):
            os.abort()

    return [Target("file", file, read)]


def fuzz_format(name: str, count: int, seed: int = 0, start: int = 0) -> Report:
    """Read `count` mutations of a format. Mutation n is a function of the seed and n."""
    return _run(name, [(n, None) for n in range(start, start + count)], seed)


def read_files(name: str, files: list[tuple[str, bytes]]) -> Report:
    """Read given contents: pairs of a target's name and bytes."""
    return _run(name, list(enumerate(files)), 0)


def _run(name: str, jobs: list, seed: int) -> Report:
    report, findings = Counter(), []
    slowest, largest = 0.0, 0.0
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="vitrail-fuzz-") as folder:
        done = 0
        while done < len(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(name, Path(folder) / str(done), jobs[done:], seed, theirs))
            process.start()
            theirs.close()
            number = target = None
            try:
                assert ours.poll(600) and ours.recv() == "ready", f"{name}: the valid files cannot be written"
                while done < len(jobs):
                    if not ours.poll(SECONDS * GRACE):
                        raise TimeoutError
                    message = ours.recv()
                    if len(message) == 2:
                        number, target = message
                        continue
                    outcome, detail, seconds, megabytes, data = message
                    report[outcome] += 1
                    slowest, largest = max(slowest, seconds), max(largest, megabytes)
                    if outcome not in OUTCOMES:
                        findings.append(Finding(target, number, outcome, detail, data))
                    done += 1
                    if done == len(jobs) or megabytes > MEGABYTES:  # a new process, with its memory
                        break
            except (EOFError, TimeoutError, ConnectionError) as error:
                if number is None:
                    raise AssertionError(f"{name}: the reader ended before the first file") from error
                outcome = "hangs" if isinstance(error, TimeoutError) else "crash"
                if outcome == "crash":
                    process.join(60)  # its own exit code
                process.kill()
                process.join()
                report[outcome] += 1
                data = (Path(folder) / "current").read_bytes()
                findings.append(Finding(target, number, outcome, f"exit code {process.exitcode}", data))
                done += 1
            finally:
                process.kill()
                process.join()
                ours.close()
                for old in Path(folder).glob("[0-9]*"):
                    shutil.rmtree(old, ignore_errors=True)
    return Report(report, findings, slowest, largest)


def _work(name: str, folder: Path, jobs: list, seed: int, pipe: Connection) -> None:
    from vitrail.errors import VitrailError

    format_ = get_format(name)
    folder.mkdir()
    targets = format_.prepare(folder)
    valid = {target.file: target.file.read_bytes() for target in targets}
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null), contextlib.redirect_stdout(null):  # noqa: PTH123
        for target in targets:
            with contextlib.suppress(VitrailError):
                target.read()  # imports what it needs, which is not part of the limits
        _limit_memory()
        pipe.send("ready")
        named = {target.name: target for target in targets}
        for number, given in jobs:
            if given is None:
                target = targets[number % len(targets)]
                data = format_.mutate(valid[target.file], random.Random(f"{seed}/{name}/{number}"))
            else:
                target, data = named[given[0]], given[1]
            pipe.send((number, target.name))
            (folder.parent / "current").write_bytes(data)
            target.file.unlink(missing_ok=True)
            target.file.write_bytes(data)
            pipe.send(_read(target, data))
            target.file.write_bytes(valid[target.file])
    pipe.close()


def _read(target: Target, data: bytes) -> tuple[str, str, float, float, bytes]:
    from vitrail.errors import VitrailError

    before, start = _reset_peak_megabytes(), _processor_seconds()
    outcome, detail = "read", ""
    try:
        target.read()
    except VitrailError as error:
        outcome = "refused" if error.problem else "empty message"
    except BaseException as error:  # includes panics, which are no Exception
        outcome = type(error).__name__
        detail = "".join(traceback.format_exception(error, limit=-6))
    seconds, megabytes = _processor_seconds() - start, max(0.0, _read_status("VmHWM") - before)
    if seconds > SECONDS:
        outcome, detail = "slow", f"{seconds:.1f} s; {outcome} {detail}"
    elif megabytes > MEGABYTES:
        outcome, detail = "memory", f"{megabytes:.0f} MB; {outcome} {detail}"
    return outcome, detail, seconds, megabytes, b"" if outcome in OUTCOMES else data


def _processor_seconds() -> float:
    """Return the time that this process and its ended children used, without that of other processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _limit_memory() -> None:
    used = int(_read_status("VmSize") * 1e6)
    resource.setrlimit(resource.RLIMIT_AS, (used + HARD_MEGABYTES * 10**6, resource.RLIM_INFINITY))


def _reset_peak_megabytes() -> float:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {key}; the fuzzer needs Linux")


def save_findings(name: str, findings: list[Finding], folder: Path) -> None:
    """Save the files, and beside each what happened."""
    for finding in findings:
        stem = folder / name / f"{finding.target}~{finding.outcome}-{finding.number}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.write_bytes(finding.data)
        stem.with_name(stem.name + ".txt").write_text(finding.detail)


def format_report(name: str, report: Report) -> str:
    outcomes = ", ".join(f"{outcome} {n:,}" for outcome, n in report.outcomes.most_common())
    count, bad = sum(report.outcomes.values()), len(report.findings)
    return (
        f"{name:16} {count:>7,} files: {bad} findings ({outcomes}); slowest {report.seconds:.1f} s, "
        f"most {report.megabytes:.0f} MB"
    )


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
