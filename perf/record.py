"""Figures with their origin: what was measured, where, by which command, and the sources it measured.

python perf/record.py        # says which results measured code that has changed since
"""

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "perf" / "results"


def record(path: Path, figures: dict[str, Any], *measured: str) -> None:
    """Write the figures as JSON, beside their origin; `measured` are the modules whose speed it was."""
    cuda = torch.cuda.is_available()
    origin = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"perf/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]),
        "commit": _commit(),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "sources": {name: _hash(ROOT / name) for name in (f"src/{m.replace('.', '/')}.py" for m in measured)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"origin": origin, "figures": figures}, indent=1) + "\n")


def stale() -> list[str]:
    """A line for each result whose sources have changed."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        sources = json.loads(path.read_text())["origin"]["sources"]
        changed = [name for name, digest in sources.items() if _hash(ROOT / name) != digest]
        if changed:
            lines.append(f"{path.name}: measured before {', '.join(changed)} changed")
    return lines


def _commit() -> str:
    """The commit measured, "-dirty" where files differ; a machine without the history is told it by COMMIT."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "perf/*.py")  # new files too, which `describe --dirty` ignores
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "gone"


if __name__ == "__main__":
    count = len(list(RESULTS.glob("*.json")))
    print("\n".join(stale()) or f"all {count} results measured the code as it is")
