"""Record the origin of results: command, commit, hardware and date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__

REPOSITORY = Path(__file__).resolve().parents[3]


def collect_origin(command: str, device: str = "cpu") -> dict[str, Any]:
    """Collect the origin of results computed now. The commit is known only inside the repository."""
    origin = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "vitrail": __version__,
        "commit": read_commit(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU",
        "torch": torch.__version__,
    }
    return {key: value for key, value in origin.items() if value}


def read_commit() -> str:
    """Return the short commit, with "-dirty" if sources differ. The environment variable COMMIT overrides it."""
    if override := os.environ.get("COMMIT"):
        return override
    if not (REPOSITORY / ".git").exists():
        return ""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return ""
        return done.stdout.strip()

    found = git("rev-parse", "--short", "HEAD")
    return found + "-dirty" * bool(found and git("status", "--porcelain", "--", "src"))
