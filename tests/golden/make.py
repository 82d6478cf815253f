"""Write golden.json anew: `python tests/golden/make.py [NAME …]`, with src and tests on the path.

Only an intended change of behaviour is a reason to do so.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from golden.measurements import FETCHED, FILE, MEASUREMENTS, environment, missing_data


def main(*names: str) -> None:
    torch.set_num_threads(1)
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found["environment"] = environment()
    for name in names or MEASUREMENTS:
        if name in FETCHED and (missing := missing_data(*FETCHED[name])):
            raise SystemExit(f"fetch the data first: vitrail data get {' '.join(missing)}")
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            found[name] = MEASUREMENTS[name](Path(folder))
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s\n")
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
