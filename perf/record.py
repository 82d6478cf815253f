"""Write figures with their origin: date, command, commit, device, and hashes of the measured sources.

python perf/record.py        # list the results whose measured sources have changed
"""

import argparse
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


def make_parser(description: str | None, require_out: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the option --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=require_out, help="JSON file for the figures")
    return parser


def write_record(path: Path | None, figures: dict[str, Any], modules: tuple[str, ...]) -> None:
    """Write figures and their origin as JSON. `modules` are the measured modules. Without a path, write nothing."""
    if path is None:
        return
    cuda = torch.cuda.is_available()
    origin = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"perf/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]),
        "commit": read_commit(),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "sources": {name: hash_file(ROOT / name) for name in (f"src/{m.replace('.', '/')}.py" for m in modules)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"origin": origin, "figures": figures}, indent=1) + "\n")


def list_stale_results() -> list[str]:
    """Return a line for each result whose measured sources have changed."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        sources = json.loads(path.read_text())["origin"]["sources"]
        changed = [name for name, digest in sources.items() if hash_file(ROOT / name) != digest]
        if changed:
            lines.append(f"{path.name}: {', '.join(changed)} changed since the measurement")
    return lines


def read_commit() -> str:
    """Return the short hash of the commit, with "-dirty" if files differ. COMMIT in the environment replaces it."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "perf/*.py")  # includes new files, unlike `describe --dirty`
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "gone"


if __name__ == "__main__":
    count = len(list(RESULTS.glob("*.json")))
    print("\n".join(list_stale_results()) or f"the measured sources of all {count} results are unchanged")
