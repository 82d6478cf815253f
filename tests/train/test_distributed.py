"""The same run on one, two and three processes: the same losses, and one can go on with another's checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.train import checkpoint

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_trainer as t
from vitrail.train import distributed
with distributed.joined("cpu"):
    more = {"save_every": 3, "ema": 0.9, "batch": 6, "accumulate": 2, "judge": ("b",), "judge_every": 3}
    t.trainer(Path(sys.argv[2]), t.stage(steps=int(sys.argv[3]), **more)).train()
"""


def run(folder: Path, ranks: int, steps: int) -> list[float]:
    """The losses of a run that ends, or goes on, with so many ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(HERE), str(folder), str(steps)],
            env={**common, "MASTER_PORT": str(port), "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r)},
        )
        for r in range(ranks)
    ]
    assert [p.wait(timeout=100) for p in processes] == [0] * ranks
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    judged = [row[key] for row in rows for key in ("judge/b/text", "judge/ema/b/text") if key in row]
    assert len(judged) == 2 * (steps // 3)
    return [*(row["loss"] for row in rows), *judged]


def test_ranks_change_nothing(tmp_path):
    alone = run(tmp_path / "one", 1, 9)
    for ranks in (2, 3):
        assert run(tmp_path / str(ranks), ranks, 9) == pytest.approx(alone, rel=1e-4)
    whole = [checkpoint.load(checkpoint.path_of(tmp_path / name / "checkpoints", 9))[0] for name in ("one", "2", "3")]
    for other in whole[1:]:
        for name, value in whole[0]["model"].items():
            assert (other["model"][name] - value).abs().max() <= 2e-3 * value.abs().max()
        assert other["ema"].keys() == whole[0]["ema"].keys()


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    alone = run(tmp_path / "one", 1, 9)
    run(tmp_path / "moved", 2, 3)
    assert checkpoint.steps(tmp_path / "moved" / "checkpoints") == [3]
    assert run(tmp_path / "moved", 3, 9) == pytest.approx(alone, rel=1e-4)
