"""Child process for work on untrusted files, with limits of time and memory.

A chat template or a tokenizer can contain a program that never ends, allocates all memory, or crashes the library that
runs it. Such work runs in a child process, which is stopped at the limits. The process starts on first use and serves
all later calls.

The limits apply to all readers of untrusted files. Environment variables change them.
"""

import atexit
import importlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from vitrail.errors import ConfigError

try:
    import resource
except ImportError:  # Windows: a time limit alone
    resource = None

SECONDS_VARIABLE, BYTES_VARIABLE = "VITRAIL_FILE_SECONDS", "VITRAIL_FILE_BYTES"
START_SECONDS = 120  # to start the process, which imports libraries
MAX_WAIT_FACTOR = 5
"""On a busy machine, the process waits for the CPU. It is stopped after this multiple of its time."""
_SIZE = struct.Struct("<Q")  # length of a message


class FileLimits(NamedTuple):
    """Limits of reading one untrusted file."""

    seconds: float = 10.0
    bytes: int = 10**9  # of memory


def get_file_limits() -> FileLimits:
    """Return the limits of reading one untrusted file: the defaults, or those of the environment variables."""
    default = FileLimits()
    return FileLimits(
        _read_number(SECONDS_VARIABLE, default.seconds, 0.1), int(_read_number(BYTES_VARIABLE, default.bytes, 10**8))
    )


def _read_number(variable: str, default: float, minimum: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not minimum <= number < 1e18:
        raise ConfigError(f"the environment variable {variable} is {text!r}", f"give a number of at least {minimum:,}")
    return number


class LimitExceededError(Exception):
    """Work that exceeded a limit or crashed its process. The message completes a sentence: "… takes more than 10 s"."""


class LimitedProcess:
    """Child process that calls one function, MODULE:FUNCTION, with plain data, which it also returns."""

    def __init__(self, function: str):
        self.function = function
        self._forget_process()
        _processes.add(self)

    def _forget_process(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._limits: FileLimits | None = None

    def call(self, request: Any, share: float = 1.0) -> Any:
        """Return the function's result. Raises LimitExceededError if a limit, or this share of the time, stops it."""
        limits = get_file_limits()
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._limits != limits:
                self._stop()
                self._process, self._limits = self._start(limits), limits
            reply = _exchange(self._process, pickle.dumps(request), share * limits.seconds)
            if isinstance(reply, LimitExceededError):
                self._stop()
                raise reply
        outcome, content = json.loads(reply)
        if outcome == "memory":
            self._stop()
            raise LimitExceededError(f"needs more than {limits.bytes / 1e6:,.0f} MB of memory")
        if outcome == "error":
            raise LimitExceededError(f"fails: {content}")
        return content

    def _start(self, limits: FileLimits) -> subprocess.Popen:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import vitrail.limited_process as p; p.serve({self.function!r})"
        )
        environment = os.environ | {SECONDS_VARIABLE: str(limits.seconds), BYTES_VARIABLE: str(limits.bytes)}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        if isinstance(_exchange(process, None, START_SECONDS), LimitExceededError):
            raise RuntimeError(f"the process of {self.function} does not start")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _exchange(process: subprocess.Popen, request: bytes | None, seconds: float) -> bytes | LimitExceededError:
    """Send a request, if there is one, and return the reply. The limit is one of CPU time, where that is known."""
    expired, answered = threading.Event(), threading.Event()
    start, used = time.monotonic(), _read_cpu_seconds(process.pid)

    def watch() -> None:
        wait = seconds
        while not answered.wait(wait):
            waited = time.monotonic() - start
            wait = seconds - (waited if used is None else (_read_cpu_seconds(process.pid) or 0.0) - used)
            if wait <= 0 or waited >= MAX_WAIT_FACTOR * seconds:
                expired.set()
                process.kill()
                return
            wait = max(wait, 0.05)

    threading.Thread(target=watch, daemon=True).start()
    try:
        if request is not None:
            _write_message(process.stdin, request)
        return _read_message(process.stdout)
    except (OSError, EOFError):
        code = process.wait()
        if expired.is_set():
            return LimitExceededError(f"takes more than {seconds:g} s")
        return LimitExceededError(f"crashes its process (exit code {code}), for lack of memory or by a defect")
    finally:
        answered.set()


def _read_cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that a process has used, or None if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _write_message(stream: IO[bytes] | None, data: bytes) -> None:
    assert stream is not None
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _read_message(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    lead = stream.read(_SIZE.size)
    if len(lead) < _SIZE.size:
        raise EOFError
    (size,) = _SIZE.unpack(lead)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


_processes: "weakref.WeakSet[LimitedProcess]" = weakref.WeakSet()
atexit.register(lambda: [process._stop() for process in _processes])
# A forked process must not use the pipes of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [process._forget_process() for process in _processes])


# ---- in the child process -------------------------------------------------------------------------------------------


def serve(function: str) -> None:
    """Answer requests from standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent, which may have to finish a step
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply
    module, _, name = function.partition(":")
    act = getattr(importlib.import_module(module), name)
    if resource is not None:
        limit = get_file_limits().bytes + _read_address_space()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write_message(replies, b"")
    while True:
        try:
            request = _read_message(requests)
        except EOFError:
            return
        _write_message(replies, json.dumps(_act(act, request)).encode())


def _read_address_space() -> int:
    """Return the bytes of address space that the libraries of this process take."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return 0


def _act(act: Callable[[Any], Any], request: bytes) -> tuple[str, Any]:
    try:
        return "result", act(pickle.loads(request))
    except MemoryError:
        return "memory", None
    except BaseException as error:  # the panic of a Rust library is no Exception
        return "error", f"{type(error).__name__}: {error}"[:1000]
