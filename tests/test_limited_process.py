"""Work in a child process is stopped at its limits, and the next call gets a new process."""

import ctypes
import multiprocessing
import os
import sys
import time

import pytest

from vitrail.errors import ConfigError
from vitrail.limited_process import LimitedProcess, LimitExceededError, get_file_limits

MODULE = "test_limited_process"


def act(request):
    """What the child does, by the name of the request."""
    kind, value = request
    if kind == "sleep":
        time.sleep(value)
    elif kind == "compute":
        while True:
            pass
    elif kind == "allocate":
        return len(bytearray(value))
    elif kind == "crash":
        ctypes.string_at(0)
    elif kind == "raise":
        raise ValueError(value)
    elif kind == "print":
        sys.stdout.write(value)
        sys.stdout.flush()
        os.write(1, b"noise")
    elif kind == "pid":
        return os.getpid()
    return value


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setenv("VITRAIL_FILE_SECONDS", "200")  # for a busy machine; calls that must time out get a share
    return LimitedProcess(f"{MODULE}:act")


def test_calls_share_a_process(process):
    assert process.call(("pid", 0)) == process.call(("pid", 0)) != os.getpid()
    assert process.call(("return", {"a": [1, "é\ud800", None, 1.5]})) == {"a": [1, "é\ud800", None, 1.5]}
    assert process.call(("print", "noise")) == "noise"


@pytest.mark.parametrize(
    ("request_", "share", "message"),
    [
        (("sleep", 900), 0.001, r"takes more than 0\.2 s"),
        (("allocate", 3 * 10**9), 1.0, "needs more than 1,000 MB of memory"),
        (("crash", 0), 1.0, "crashes its process"),
        (("raise", "wrong"), 1.0, "fails: ValueError: wrong"),
    ],
)
def test_limits(process, request_, share, message):
    for _ in range(2):
        with pytest.raises(LimitExceededError, match=message):
            process.call(request_, share)
        assert process.call(("return", 3)) == 3


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs the CPU time of a process")  # noqa: PTH112
def test_time_is_that_of_the_cpu(process):
    """A process that waits, as on a busy machine, has five times its limit; one that computes has not."""
    assert process.call(("sleep", 0.6), 0.001) == 0.6
    with pytest.raises(LimitExceededError, match=r"0\.2 s"):
        process.call(("compute", None), 0.001)


def test_limits_are_settings(process, monkeypatch):
    assert process.call(("allocate", 300_000_000)) == 300_000_000
    monkeypatch.setenv("VITRAIL_FILE_BYTES", "2e8")
    assert get_file_limits() == (200, 2 * 10**8)
    with pytest.raises(LimitExceededError, match="200 MB"):
        process.call(("allocate", 300_000_000))
    with pytest.raises(LimitExceededError, match=r"0\.2 s"):
        process.call(("sleep", 900), 0.001)


@pytest.mark.parametrize("text", ["", "ten", "0", "-1", "nan", "inf"])
def test_invalid_settings(monkeypatch, text):
    monkeypatch.setenv("VITRAIL_FILE_SECONDS", text)
    with pytest.raises(ConfigError, match="VITRAIL_FILE_SECONDS"):
        get_file_limits()


def test_killed_process_is_replaced(process):
    old = process.call(("pid", 0))
    os.kill(old, 9)
    process._process.wait()
    assert process.call(("pid", 0)) != old


def _call_in_fork(process, queue):
    queue.put(process.call(("pid", 0)))


def test_forked_process_starts_its_own(process):
    own, context = process.call(("pid", 0)), multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    forked = context.Process(target=_call_in_fork, args=(process, queue))
    forked.start()
    assert queue.get() != own
    forked.join()
    assert process.call(("pid", 0)) == own
