"""Lock of a run folder: one process writes to it, and the lock of a dead process is taken over.

`OUT/.lock` names its owner. On one machine the record lock of the kernel ends with the owner, however it ends.
Another machine that shares the folder may not see that lock. The owner therefore renews the modification time of the
file, and a file that was not renewed for `STALE_SECONDS` belongs to a dead process. Ages are measured on the clock of
the file system, so the clocks of the machines may differ.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitrail.errors import TrainError

try:
    import fcntl
except ImportError:  # Windows: heartbeats alone
    fcntl = None

LOCK_FILE = ".lock"
HEARTBEAT_SECONDS, STALE_SECONDS = 5.0, 60.0
_held: dict[Path, "RunLock"] = {}  # locks of this process: the kernel does not lock a process against itself


class RunLock:
    """Lock that this process holds on a run folder."""

    def __init__(self, folder: Path):
        self.path, self.thread = folder / LOCK_FILE, threading.get_ident()
        self.owner = {
            "token": secrets.token_hex(8),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": get_machine_id(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self.handle = self._acquire(folder)
        self._released = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def _acquire(self, folder: Path) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                is_exclusive = _lock_record(handle)
                if _is_same_file(handle, self.path):  # else its owner removed it in the meantime
                    self._check_owner(handle, folder, is_exclusive)
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(self.owner).encode(), 0)
                    os.fsync(handle)
                    return handle
            except BlockingIOError:
                raise _folder_in_use(folder, _read_owner(handle)) from None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _check_owner(self, handle: int, folder: Path, is_exclusive: bool) -> None:
        """Refuse a lock whose owner, on another machine, is alive; report that a dead owner's lock is taken over."""
        owner = _read_owner(handle)
        if not owner:
            return
        name = _describe_owner(owner)
        if not is_exclusive or owner.get("machine") != self.owner["machine"]:
            age = _get_file_system_time(folder) - os.fstat(handle).st_mtime
            if age < STALE_SECONDS:
                raise TrainError(
                    f"{folder} is in use by {name}; its last heartbeat is {max(age, 0):.0f} s old",
                    f"use another --out; if that process is dead, start again in {STALE_SECONDS - age:.0f} s",
                )
        sys.stderr.write(f"{folder}: took over the lock of {name}, which ended without releasing it\n")

    def _send_heartbeats(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a failing file system: the lock may go stale, which `check` reports
                if self.is_valid():
                    os.utime(self.handle)

    def is_valid(self) -> bool:
        """Return whether the lock file still names this process."""
        return _is_same_file(self.handle, self.path) and _read_owner(self.handle) == self.owner

    def release(self) -> None:
        self._released.set()
        if self.is_valid():
            self.path.unlink(missing_ok=True)
        os.close(self.handle)


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Raises TrainError if another process, or thread, holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder.resolve()
    if (held := _held.get(key)) is not None:
        if held.thread != threading.get_ident():
            raise _folder_in_use(folder, held.owner)
        yield  # the caller already holds it
        return
    lock = RunLock(folder)
    _held[key] = lock
    try:
        yield
    finally:
        del _held[key]
        lock.release()


def check_run_lock(folder: Path) -> None:
    """Raise if another process took over the lock on a run folder, or on a parent of it, that this process held."""
    for parent in (folder.resolve(), *folder.resolve().parents):
        lock = _held.get(parent)
        if lock is not None and not lock.is_valid():
            raise TrainError(
                f"another process took over {parent}, because this one sent no heartbeat for {STALE_SECONDS:.0f} s",
                "nothing was written; let the other process finish, or stop it and start this command again",
            )


def get_machine_id() -> str:
    """Return what identifies the running kernel: processes with the same id see each other's record locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _lock_record(handle: int) -> bool:
    """Lock an open file against other processes. Returns False if the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the two codes by which a held lock is reported
        raise BlockingIOError from None
    except OSError:
        return False
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _read_owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe_owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}, started {owner.get('started')}"


def _folder_in_use(folder: Path, owner: dict[str, Any]) -> TrainError:
    name = _describe_owner(owner) if owner else "another process"
    return TrainError(f"{folder} is in use by {name}", "wait for it, stop it, or use another --out")


def _get_file_system_time(folder: Path) -> float:
    probe = folder / f"{LOCK_FILE}-{secrets.token_hex(8)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
