"""Advisory locks on open files, which end with the process. Without `fcntl` (Windows) there are no locks."""

from typing import IO

try:
    import fcntl
except ImportError:
    fcntl = None


def lock_file(file: IO, *, wait: bool = True) -> None:
    """Lock an open file. With `wait=False`, raise BlockingIOError if another process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
