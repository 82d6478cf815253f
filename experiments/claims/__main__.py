"""`python -m experiments.claims`: design claims of papers, tested with small models."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.cli import main
from vitrail.errors import ConfigError, DataError, TrainError

app = App(
    name="python -m experiments.claims",
    help="Test design claims of papers with small models: effect, interval and verdict.",
    help_epilogue="Example: python -m experiments.claims list",
)
RESULTS_FOLDER, CLAIMS_PAGE = Path("results"), Path("docs/claims.md")


@app.command(name="list", help_epilogue="Example: python -m experiments.claims list")
def list_claims(*, results: Path = RESULTS_FOLDER) -> None:
    """List the claims with their verdicts, where results exist.

    Parameters
    ----------
    results
        Folder of the results.
    """
    from experiments.claims.claims import evaluate_claim
    from experiments.claims.claims_page import iter_claim_results

    for claim, kept in iter_claim_results(results):
        print(claim.name)
        print(f"    {claim.description} ({claim.source}: {claim.published})")
        print(f"    {'not run yet' if kept is None else evaluate_claim(claim, kept.values)}")


@app.command(
    name="run", help_epilogue="Example: python -m experiments.claims run vlm-mlp vlm-naive-crop --jobs 4 --save"
)
def run_claims(
    *names: str,
    out: Path | None = None,
    jobs: int = 1,
    device: str | None = None,
    train: bool = True,
    smoke_test: Annotated[bool, Parameter(negative="")] = False,
    save: Annotated[bool, Parameter(negative="")] = False,
    results: Path = RESULTS_FOLDER,
) -> None:
    """Run the sweeps of claims and print the verdicts. The same command resumes an interrupted run.

    Parameters
    ----------
    names
        Names of claims (see `python -m experiments.claims list`). Default: all that have a sweep and no results yet.
    out
        Folder for the runs of the sweep. Default: out/SWEEP. Claims of the same sweep share it.
    jobs
        Number of parallel processes.
    device
        cpu or cuda. Default: cuda if available.
    train
        Train the required checkpoints that are missing. Otherwise print the commands that train them, and stop.
    smoke_test
        Only check that the sweeps run: train every variant for one step of two samples and run its tests. Nothing is
        saved.
    save
        Save the tables of the sweeps with their origin to the results, and rewrite docs/claims.md.
    results
        Folder of the results.
    """
    from experiments.claims.claims import MIN_SEEDS, VERDICT_RULE, evaluate_claim, get_claim
    from experiments.claims.claims_page import iter_claim_results
    from experiments.results_files import read_results_file
    from vitrail.cli.sweep_command import print_results_table, run_sweeps, smoke_test_sweeps
    from vitrail.recipe import sweep as sweeps

    chosen = [get_claim(name) for name in names]
    chosen = chosen or [one for one, kept in iter_claim_results(results) if kept is None and one.sweep is not None]
    for one in chosen:
        if one.sweep is None:
            raise ConfigError(f"the claim {one.name!r} has no sweep", f"run {', '.join(one.commands)}")
    if not chosen:
        print(f"all claims with a sweep have results in {results}")
        return
    outs = {one.sweep: out or Path("out") / one.sweep for one in chosen if one.sweep is not None}
    if out is not None and len(outs) > 1:
        raise ConfigError(
            f"--out is one folder, but the claims belong to the sweeps {', '.join(outs)}",
            "remove --out, or name claims of one sweep",
        )
    if smoke_test:
        smoke_test_sweeps(outs, device=device)
        return
    for name in outs:
        if (seeds := len(sweeps.load_sweep(name).seeds)) < MIN_SEEDS:
            print(
                f"the sweep {name!r} has {seeds} seed{'s' if seeds > 1 else ''}, but a verdict needs {MIN_SEEDS}: "
                f"set seeds = {list(range(MIN_SEEDS))} in {sweeps.sweep_folder() / name}.toml\n"
            )
    failed = run_sweeps(outs, jobs=jobs, device=device, train=train)
    for name, folder in outs.items():
        of_it = [one for one in chosen if one.sweep == name]
        print_results_table(name, folder, tuple(one.score for one in of_it))
        values = read_results_file(folder / "table.json").values
        for one in of_it:
            print(f"\n{one.description}: claimed {one.claimed_range}")
            try:
                print(evaluate_claim(one, values))
            except DataError as error:  # an unfinished sweep does not prevent the verdicts of the others
                print(error.problem)
    print(f"\n{VERDICT_RULE}")
    if save:
        for name, folder in outs.items():
            sweep = sweeps.load_sweep(name)
            if all(sweeps.is_done(sweep, run) for run in sweeps.list_runs(sweep, folder)):
                file = next(one.result_files[0] for one in chosen if one.sweep == name)
                about = {"command": f"vitrail sweep {name} --out {folder} --jobs {jobs}"}
                _save_results(
                    folder / "table.json", results / f"{file}.json", about | sweeps.collect_origins(sweep, folder)
                )
        write_claims_page(results=results)
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "fix them and run the command again")


def _save_results(table: Path, file: Path, origin: dict[str, str]) -> None:
    kept = {"origin": origin, "table": json.loads(table.read_text(encoding="utf-8"))}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "give another folder with --results") from None
    print(file)


@app.command(name="report", help_epilogue="Example: python -m experiments.claims report")
def write_claims_page(*, results: Path = RESULTS_FOLDER, out: Path = CLAIMS_PAGE) -> None:
    """Write the page of all claims from the results.

    Parameters
    ----------
    results
        Folder of the results.
    out
        The page to write.
    """
    from experiments.claims.claims_page import render_claims_page

    if not results.is_dir():
        raise ConfigError(f"{results} is not a folder", "give the folder of the results with --results")
    if not any(results.glob("*.json")):
        raise ConfigError(f"{results} contains no results", "give the folder of the results with --results")
    text = render_claims_page(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    print(out)


if __name__ == "__main__":
    main(app)
