"""`vitrail sweep`."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError, Stopped, TrainError, VitrailError


def sweep(
    sweep: str,
    /,
    *,
    out: Path | None = None,
    jobs: int = 1,
    show: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: str | None = None,
    train: bool = True,
    rehearse: Annotated[bool, Parameter(negative="")] = False,
    share: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Train a recipe in several variants and seeds, test every model alike, and show one table.

    The same command goes on after any interruption.

    Parameters
    ----------
    sweep
        A sweep's name (a file in recipes/sweeps) or a .toml file.
    out
        Folder for the runs and the table (table.json); out/SWEEP unless said.
    jobs
        Runs side by side, each in a process of its own.
    show
        Only scores whose names hold one of these words; may be repeated.
    device
        cpu or cuda; a GPU is used where there is one.
    train
        Train what the variants start from first, where it is not there; or say how, and stop.
    rehearse
        Only see whether it would run: every variant for one step of two samples, and all tests of it. Nothing is kept.
    """
    if rehearse:
        rehearse_sweeps([sweep], device=device)
        return
    out = out or Path("out") / Path(sweep).stem
    if share is None:
        failed = run_sweeps({sweep: out}, jobs=jobs, device=device, train=train)
        show_table(sweep, out, show)
    else:
        i, of = map(int, share.split("/"))
        failed = _in_turn(sweep, out, device, (i, of))
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "mend them and start the command again")


def run_sweeps(outs: Mapping[str, Path], *, jobs: int, device: str | None, train: bool) -> list[str]:
    """What is left of some sweeps, name → folder, one run after the other or many side by side. → what failed"""
    from vitrail import recipe as recipes
    from vitrail import sweep as sweeps
    from vitrail.jobs import side_by_side

    if jobs < 1:
        raise ConfigError(f"{jobs} jobs", "give at least 1")
    chosen = {name: sweeps.read(name) for name in outs}
    for name, out in outs.items():
        sweeps.check_starts(chosen[name], out, train=train)
    for name, out in outs.items():
        out.mkdir(parents=True, exist_ok=True)
        if (mark := out / "sweep").is_file() and mark.read_text() != chosen[name].name:
            raise ConfigError(f"{out} holds the sweep {mark.read_text()!r}", "give each a folder of its own")
        mark.write_text(chosen[name].name)
    for command in dict.fromkeys(need.command for sweep in chosen.values() for need in sweeps.missing(sweep)):
        print(f"first: {command}", flush=True)
    if jobs > 1:
        ended = side_by_side(sweeps.queue(outs, device), jobs, ", ".join(one.name for one in chosen.values()))
        return [f"{name}: {how}" for name, how in ended.items()]
    failed = []
    for name, out in outs.items():
        for need in sweeps.missing(chosen[name]):
            recipes.train(need.read_recipe(), need.folder, device=device)
        failed += _in_turn(name, out, device)
    return failed


def rehearse_sweeps(names: Iterable[str], *, device: str | None) -> None:
    """See whether all variants of some sweeps can be trained and tested, in folders that are swept away."""
    from tempfile import TemporaryDirectory

    from tqdm import tqdm

    from vitrail import sweep as sweeps

    failed = []
    for chosen in map(sweeps.read, names):
        with TemporaryDirectory(prefix="vitrail-") as folder:
            tried = sweeps.rehearse(chosen, partial(_test, device=device), Path(folder), device=device)
            for run, wrong in tqdm(tried, desc=chosen.name, total=len(chosen.variants), unit="variant", disable=None):
                tqdm.write(f"{chosen.name}: {run.variant.name}: {wrong or 'is trained and tested'}")
                failed += [f"{chosen.name}: {run.variant.name}"] if wrong else []
    if failed:
        raise ConfigError(f"would fail: {', '.join(failed)}", "mend them before they are trained")


def _in_turn(name: str, out: Path, device: str | None, share: tuple[int, int] = (0, 1)) -> list[str]:
    from tqdm import tqdm

    from vitrail import sweep as sweeps

    chosen, failed = sweeps.read(name), []
    sweeps.check_starts(chosen, out, share)
    for run in tqdm(sweeps.runs(chosen, out, share), desc=chosen.name, unit="run", disable=None):
        try:
            sweeps.do(chosen, run, partial(_test, device=device), device=device)
        except VitrailError as error:  # the others need not wait for it
            if isinstance(error, Stopped):
                raise
            failed.append(f"{run.name}: {error.problem}")
    return failed


def show_table(name: str, out: Path, show: tuple[str, ...] = ()) -> None:
    """What is known so far: all of it in table.json, and on the screen the scores with one of some words in them."""
    from vitrail import sweep as sweeps

    rows = sweeps.table(sweeps.read(name), out)
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
