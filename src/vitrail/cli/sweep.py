"""`vitrail sweep`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError, TrainError


def sweep(
    sweep: str,
    /,
    *,
    out: Path,
    jobs: int = 1,
    show: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: str | None = None,
    share: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Train a recipe in several variants and seeds, test every model alike, and show one table.

    The same command goes on after any interruption.

    Parameters
    ----------
    sweep
        A sweep's name (a file in recipes/sweeps) or a .toml file.
    out
        Folder for the runs and the table (table.json).
    jobs
        Runs side by side, each in a process of its own.
    show
        Only scores whose names hold one of these words; may be repeated.
    device
        cpu or cuda; a GPU is used where there is one.
    """
    from tqdm import tqdm

    from vitrail import sweep as sweeps

    chosen = sweeps.read(sweep)
    if jobs < 1:
        raise ConfigError(f"{jobs} jobs", "give at least 1")
    out.mkdir(parents=True, exist_ok=True)
    if share is None and jobs > 1:
        _side_by_side(sweep, out, jobs, device)
    else:
        i, of = map(int, (share or "0/1").split("/"))
        for run in tqdm(sweeps.runs(chosen, out, (i, of)), desc=chosen.name, unit="run", disable=None):
            sweeps.do(chosen, run, _test, device=device)
    if share is not None:
        return
    rows = sweeps.table(chosen, out)
    (out / "table.json").write_text(json.dumps([row.plain() for row in rows], indent=1, ensure_ascii=False) + "\n")
    rows = [row for row in rows if not show or any(word in row.score for word in show)]
    wide = max((len(row.variant) for row in rows), default=0)
    long = max((len(row.score) for row in rows), default=0)
    for row in rows:
        low, high = row.interval or (row.mean, row.mean)
        each = " ".join(f"{value:.4f}" for value in row.values.values())
        print(f"{row.variant:{wide}}  {row.score:{long}}  {row.mean:.4f} [{low:.4f}, {high:.4f}]  {each}")
    print(out / "table.json")


def _test(model: Path, words: tuple[str, ...], file: Path) -> None:
    import contextlib
    import io

    from vitrail.cli.eval import app

    suite, *rest = words
    with contextlib.redirect_stdout(io.StringIO()):
        app([suite, str(model), *rest, "--out", str(file)], result_action="return_value")


def _side_by_side(sweep: str, out: Path, jobs: int, device: str | None) -> None:
    """Processes of the same command, each with its share; what they say is in files beside the runs."""
    more = [] if device is None else ["--device", device]
    base = [sys.executable, "-m", "vitrail.cli", "sweep", sweep, "--out", str(out), *more]
    logs = [out / f"job-{i}.log" for i in range(jobs)]
    started = []
    try:
        for i, log in enumerate(logs):
            with log.open("w") as file:
                words = [*base, "--share", f"{i}/{jobs}"]
                started.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT))
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()
    for code, log in zip(codes, logs, strict=True):
        if code:
            last = "\n".join(log.read_text().splitlines()[-5:])
            raise TrainError(
                f"a job of the sweep failed; {log} ends with:\n{last}", "mend it and start the command again"
            )
