"""`vitrail sweep`."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError, TrainError, VitrailError

if TYPE_CHECKING:
    from vitrail.sweep import Row


def sweep(
    sweep: str,
    /,
    *,
    out: Path,
    jobs: int = 1,
    show: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: str | None = None,
    train: bool = True,
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
    train
        Train what the variants start from first, where it is not there; or say how, and stop.
    """
    from tqdm import tqdm

    from vitrail import recipe as recipes
    from vitrail import sweep as sweeps

    chosen = sweeps.read(sweep)
    if jobs < 1:
        raise ConfigError(f"{jobs} jobs", "give at least 1")
    out.mkdir(parents=True, exist_ok=True)
    mark, failed = out / "sweep", []
    if mark.is_file() and mark.read_text() != chosen.name:
        raise ConfigError(f"{out} holds the sweep {mark.read_text()!r}", "give each a folder of its own")
    mark.write_text(chosen.name)
    if train and share is None:
        for need in sweeps.missing(chosen):
            print(f"first: {need.command}", flush=True)
            recipes.train(need.read_recipe(), need.folder, device=device)
    sweeps.check_starts(chosen, out)
    if share is None and jobs > 1:
        failed = _side_by_side(sweep, out, jobs, device)
    else:
        i, of = map(int, (share or "0/1").split("/"))
        for run in tqdm(sweeps.runs(chosen, out, (i, of)), desc=chosen.name, unit="run", disable=None):
            try:
                sweeps.do(chosen, run, partial(_test, device=device), device=device)
            except VitrailError as error:  # the others need not wait for it
                if error.problem.startswith("stopped by"):  # a signal, which is meant for all
                    raise
                failed.append(f"{run.name}: {error.problem}")
    if share is None:
        _show(sweeps.table(chosen, out), out, show)
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "mend them and start the command again")


def _show(rows: "list[Row]", out: Path, show: tuple[str, ...]) -> None:
    (out / "table.json").write_text(json.dumps([row.plain() for row in rows], indent=1, ensure_ascii=False) + "\n")
    rows = [row for row in rows if not show or any(word in row.score for word in show)]
    wide, long, tests = (
        max((len(getattr(row, column)) for row in rows), default=0) for column in ("variant", "score", "test")
    )
    for row in rows:
        each = " ".join(f"{value:.4f}" for value in row.values.values())
        between = "" if row.interval is None else " [{:.4f}, {:.4f}]".format(*row.interval)
        print(f"{row.variant:{wide}}  {row.test:{tests}}  {row.score:{long}}  {row.mean:.4f}{between}  {each}")
    print(out / "table.json")


def _test(model: Path, words: tuple[str, ...], file: Path, *, device: str | None) -> None:
    import contextlib
    import io

    from vitrail.cli.eval import app

    suite, *rest = words
    where = [] if device is None else ["--device", device]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app([suite, str(model), *rest, *where, "--out", str(file)], result_action="return_value")
    except SystemExit:
        raise ConfigError(
            f"`vitrail eval` does not understand {' '.join(words)!r}", "see vitrail eval --help"
        ) from None


def _side_by_side(sweep: str, out: Path, jobs: int, device: str | None) -> list[str]:
    """Processes of the same command, each with its share; what they say is in files beside the runs. → what failed"""
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
    ends = {log: "\n".join(log.read_text().splitlines()[-5:]) for code, log in zip(codes, logs, strict=True) if code}
    return [f"{log} ends with:\n{end}" for log, end in ends.items()]
