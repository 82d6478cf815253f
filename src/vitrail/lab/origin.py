"""Where figures come from: the command, the commit, the hardware and the day."""

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.lab.claims_page import ORIGIN
from vitrail.show.page import Html, code, html

ROOT = Path(__file__).resolve().parents[3]


def origin(command: str, device: str = "cpu") -> dict[str, Any]:
    """Of what is computed now; a commit is known where the package is run from its repository."""
    about = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "vitrail": __version__,
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU",
        "torch": torch.__version__,
    }
    return {key: value for key, value in about.items() if value}


def commit() -> str:
    """The one that is run, with "-dirty" where sources differ from it; COMMIT says it where the history is not."""
    if said := os.environ.get("COMMIT"):
        return said
    if not (ROOT / ".git").exists():
        return ""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return ""
        return done.stdout.strip()

    found = git("rev-parse", "--short", "HEAD")
    return found + "-dirty" * bool(found and git("status", "--porcelain", "--", "src"))


def caption(text: str, about: Mapping[str, Any], file: Path | None = None) -> Html:
    """What a figure or a table shows, and below it where that comes from, as far as it is known."""
    known = [html(f"{word}{about[key]}") for key, word in ORIGIN.items() if key in about]
    asked = [code(str(about["command"]))] if "command" in about else []
    read = [html(f"read from {file}" if file else "computed for this page")]
    noted = f" Note: {html(str(about['note']))}." if "note" in about else ""
    return Html(f'{html(text)} <span class="origin">{", ".join([*asked, *known, *read])}.{noted}</span>')
