"""`vitrail sweep`: train and evaluate the variants of a recipe."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError, TrainError, TrainingInterrupted, VitrailError


def run_sweep_command(
    sweep: str,
    /,
    *,
    out: Path | None = None,
    jobs: int = 1,
    show: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: str | None = None,
    train: bool = True,
    smoke_test: Annotated[bool, Parameter(negative="")] = False,
    share: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Train a recipe in several variants and seeds, evaluate every model, and print one table.

    The same command resumes an interrupted sweep.

    Parameters
    ----------
    sweep
        Name of a sweep (a file in recipes/sweeps) or a .toml file.
    out
        Folder for the runs and the table (table.json). Default: out/SWEEP.
    jobs
        Number of parallel processes.
    show
        Print only scores whose names contain one of these words. May be repeated.
    device
        cpu or cuda. Default: cuda if available.
    train
        Train the required checkpoints that are missing. Otherwise print the commands that train them, and stop.
    smoke_test
        Only check that the sweep runs: train every variant for one step of two samples and run its tests. Nothing is
        saved.
    """
    if smoke_test:
        smoke_test_sweeps([sweep], device=device)
        return
    out = out or Path("out") / Path(sweep).stem
    if share is None:
        failed = run_sweeps({sweep: out}, jobs=jobs, device=device, train=train)
        print_results_table(sweep, out, show)
    else:
        i, of = map(int, share.split("/"))
        failed = _run_serially(sweep, out, device, (i, of))
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "fix them and run the command again")


def run_sweeps(outs: Mapping[str, Path], *, jobs: int, device: str | None, train: bool) -> list[str]:
    """Run the remaining jobs of sweeps (name → folder), serially or in parallel. Returns the failures."""
    from vitrail import recipe as recipes
    from vitrail.recipe import sweep as sweeps
    from vitrail.recipe.process_queue import run_jobs

    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}", "give at least 1")
    all_sweeps = {name: sweeps.load_sweep(name) for name in outs}
    for name, out in outs.items():
        sweeps.check_checkpoints(all_sweeps[name], out, train=train)
    for name, out in outs.items():
        out.mkdir(parents=True, exist_ok=True)
        if (mark := out / "sweep").is_file() and mark.read_text() != all_sweeps[name].name:
            raise ConfigError(f"{out} contains the sweep {mark.read_text()!r}", "use a separate folder for each sweep")
        mark.write_text(all_sweeps[name].name)
    for command in dict.fromkeys(
        need.train_command for sweep in all_sweeps.values() for need in sweeps.list_missing_requirements(sweep)
    ):
        print(f"required: {command}", flush=True)
    if jobs > 1:
        ended = run_jobs(sweeps.build_job_queue(outs, device), jobs, ", ".join(one.name for one in all_sweeps.values()))
        return [f"{name}: {outcome}" for name, outcome in ended.items()]
    failed = []
    for name, out in outs.items():
        for need in sweeps.list_missing_requirements(all_sweeps[name]):
            recipes.train_recipe(need.load_recipe(), need.folder, device=device)
        failed += _run_serially(name, out, device)
    return failed


def smoke_test_sweeps(names: Iterable[str], *, device: str | None) -> None:
    """Train and test all variants of sweeps for one step, in temporary folders."""
    from tempfile import TemporaryDirectory

    from tqdm import tqdm

    from vitrail.recipe import sweep as sweeps

    failed = []
    for sweep in map(sweeps.load_sweep, names):
        with TemporaryDirectory(prefix="vitrail-") as folder:
            results = sweeps.smoke_test_sweep(sweep, partial(_run_eval, device=device), Path(folder), device=device)
            for run, problem in tqdm(results, desc=sweep.name, total=len(sweep.variants), unit="variant", disable=None):
                tqdm.write(f"{sweep.name}: {run.variant.name}: {problem or 'ok'}")
                failed += [f"{sweep.name}: {run.variant.name}"] if problem else []
    if failed:
        raise ConfigError(f"these variants fail: {', '.join(failed)}", "fix them before the sweep is trained")


def _run_serially(name: str, out: Path, device: str | None, share: tuple[int, int] = (0, 1)) -> list[str]:
    from tqdm import tqdm

    from vitrail.recipe import sweep as sweeps

    sweep, failed = sweeps.load_sweep(name), []
    sweeps.check_checkpoints(sweep, out, share)
    for run in tqdm(sweeps.list_runs(sweep, out, share), desc=sweep.name, unit="run", disable=None):
        try:
            sweeps.execute_run(sweep, run, partial(_run_eval, device=device), device=device)
        except VitrailError as error:  # continue with the other runs
            if isinstance(error, TrainingInterrupted):
                raise
            failed.append(f"{run.name}: {error.problem}")
    return failed


def print_results_table(name: str, out: Path, show: tuple[str, ...] = ()) -> None:
    """Write all scores so far to table.json, and print those whose names contain one of the words in `show`."""
    from vitrail.recipe import sweep as sweeps

    rows = sweeps.build_table(sweeps.load_sweep(name), out)
    (out / "table.json").write_text(json.dumps([row.to_dict() for row in rows], indent=1, ensure_ascii=False) + "\n")
    rows = [row for row in rows if not show or any(word in row.score for word in show)]
    wide, long, tests = (
        max((len(getattr(row, column)) for row in rows), default=0) for column in ("variant", "score", "test")
    )
    for row in rows:
        each = " ".join(f"{value:.4f}" for value in row.values.values())
        between = "" if row.interval is None else " [{:.4f}, {:.4f}]".format(*row.interval)
        print(f"{row.variant:{wide}}  {row.test:{tests}}  {row.score:{long}}  {row.mean:.4f}{between}  {each}")
    print(out / "table.json")


def _run_eval(model: Path, arguments: tuple[str, ...], file: Path, *, device: str | None) -> None:
    import contextlib
    import io

    from vitrail.cli.eval_command import app

    suite, *rest = arguments
    where = [] if device is None else ["--device", device]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app([suite, str(model), *rest, *where, "--out", str(file)], result_action="return_value")
    except SystemExit:
        raise ConfigError(
            f"`vitrail eval` rejects the arguments {' '.join(arguments)!r}", "see vitrail eval --help"
        ) from None
