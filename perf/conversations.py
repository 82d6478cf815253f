"""From a JSON of a million conversations to the first sample: ours against `json.load` and Hugging Face datasets.

    python perf/conversations.py --out perf/results/DATE-conversations.json

Each side runs in a process of its own, in alternation, and its time does not include imports. `first` has no index and
no cache, `again` has both. `worker` is the memory that a forked data worker does not share after 2,000 random reads.
Ours also checks 2,000 samples and their image files. Only the ratios are meaningful. They are of
CPU time, which other processes change little.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import make_parser, write_record

NUM_IMAGES, NUM_READS = 1000, 2000
SENTENCE = "a red cube stands on the green table next to two small blue balls and a lamp"
MEASURED = ("vitrail.data.formats.json_rows", "vitrail.data.conversations", "vitrail.data.formats.data_files")
SIDES = ("ours, first", "ours, again", "json.load", "datasets, first", "datasets, again")


def write_conversations(folder: Path, count: int) -> Path:
    """Write LLaVA's format with two turns of about LLaVA's length, and small image files that the samples share."""
    from PIL import Image

    (folder / "images").mkdir()
    for n in range(NUM_IMAGES):
        Image.new("RGB", (8, 8)).save(folder / f"images/{n:06}.png")
    path = folder / "talks.json"
    with path.open("w") as file:
        for n in range(count):
            answer = (SENTENCE + " ") * (3 + n % 5)
            turns = [
                {"from": "human", "value": f"<image>\nWhat is in picture {n}?"},
                {"from": "gpt", "value": answer},
            ]
            row = {"id": f"{n:09}", "image": f"images/{n % NUM_IMAGES:06}.png", "conversations": turns}
            file.write(("[" if n == 0 else ",\n") + json.dumps(row))
        file.write("]")
    return path


# ---- sides, each in its own process ----------------------------------------------------------------------------------


def open_ours(path: Path) -> Callable[[], Sequence[Any]]:
    from vitrail.data.conversations import ConversationsConfig, ConversationSource

    return lambda: ConversationSource(ConversationsConfig(path=str(path)))  # type: ignore[return-value]


def open_list(path: Path) -> Callable[[], Sequence[Any]]:
    return lambda: json.loads(path.read_bytes())


def open_hugging_face(path: Path) -> Callable[[], Sequence[Any]]:
    import datasets

    datasets.disable_progress_bars()
    return lambda: datasets.load_dataset("json", data_files=str(path), split="train")  # type: ignore[return-value]


OPENERS = {"ours": open_ours, "json.load": open_list, "datasets": open_hugging_face}


def measure_side(side: str, path: Path) -> dict[str, float]:
    """Open the data and read the first sample; then read random samples in a forked worker."""
    open_data = OPENERS[side.partition(",")[0]](path)
    start, processor_start = time.perf_counter(), time.process_time()
    data = open_data()
    first = data[0]
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    assert first and len(data) > 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return {"seconds": seconds, "CPU seconds": processor_seconds, "peak MB": peak, "worker MB": measure_worker(data)}


def measure_worker(data: Sequence[Any]) -> float:
    """Return the megabytes that a forked worker does not share with its parent."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        for n in range(NUM_READS):
            data[n * 7919 % len(data)]
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        os.write(writer, str(kilobytes / 1000).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reader, 64))


def run_side(side: str, path: Path, cache: Path) -> dict[str, float]:
    """Run a side in a process, without its caches if it is the first time."""
    if side.endswith("first"):
        shutil.rmtree(cache, ignore_errors=True)
    environment = os.environ | {
        "VITRAIL_HOME": str(cache / "ours"),
        "HF_HOME": str(cache / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--side", side, "--data", str(path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__, require_out=False)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help="measure one side, and print it")
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure_side(arguments.side, arguments.data)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_conversations(Path(folder), arguments.samples)
        megabytes = path.stat().st_size / 1e6
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                runs[side].append(run_side(side, path, Path(folder) / "cache"))
    table = {
        side: {key: round(statistics.median(run[key] for run in some), 3) for key in some[0]}
        for side, some in runs.items()
    }
    ratios = {
        f"{peer} / {ours}": round(table[peer]["CPU seconds"] / table[ours]["CPU seconds"], 2)
        for ours in SIDES[:2]
        for peer in SIDES[2:]
        if not (ours.endswith("first") and peer.endswith("again"))
    }
    for side, row in table.items():
        print(f"{side:18}" + "".join(f"{value:12,.2f} {key}" for key, value in row.items()))
    for name, ratio in ratios.items():
        print(f"{name:36}{ratio:8.2f} ×")
    figures = {"samples": arguments.samples, "MB": round(megabytes), "sides": table, "ratios of CPU seconds": ratios}
    write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
