"""OpenMP settings, which `import vitrail` sets. OpenMP reads them when torch is imported."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

HAS_USER_THREAD_COUNT = "OMP_NUM_THREADS" in os.environ
CGROUP_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def configure_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the number of threads and let waiting threads sleep. Variables that the user has set do not change.

    By default, OpenMP threads wait actively. If another process uses a core, waiting threads occupy the cores that the
    delayed thread needs, which slows parallel loops out of proportion.
    """
    environment.setdefault("OMP_NUM_THREADS", str(count_available_cpus()))
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # GNU and LLVM OpenMP
    environment.setdefault("KMP_BLOCKTIME", "0")  # Intel OpenMP: milliseconds of active waiting


def count_available_cpus(quota_file: Path = CGROUP_QUOTA_FILE) -> int:
    """Return the number of CPUs for this process: its affinity, limited by the CPU quota of its cgroup."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or the quota is "max"
        return count
