"""`vitrail claims`: design claims re-tested in miniature."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import ConfigError, DataError, TrainError

app = App(
    name="claims",
    help="Re-test design claims of the papers in miniature: effect, interval and verdict.",
    help_epilogue="Example: vitrail claims list",
)
RESULTS, PAGE = Path("results"), Path("docs/claims.md")


@app.command(name="list", help_epilogue="Example: vitrail claims list")
def list_claims(*, results: Path = RESULTS) -> None:
    """List the claims: what each says, and its verdict where results are kept.

    Parameters
    ----------
    results
        Folder of kept results.
    """
    from vitrail.lab.claims import judge
    from vitrail.lab.claims_page import found

    for claim, kept in found(results):
        print(claim.name)
        print(f"    {claim.says} ({claim.source}: {claim.published})")
        print(f"    {'not run yet' if kept is None else judge(claim, kept.values)}")


@app.command(help_epilogue="Example: vitrail claims run vlm-mlp vlm-naive-crop --jobs 4 --keep")
def run(
    *names: str,
    out: Path | None = None,
    jobs: int = 1,
    device: str | None = None,
    train: bool = True,
    rehearse: Annotated[bool, Parameter(negative="")] = False,
    keep: Annotated[bool, Parameter(negative="")] = False,
    results: Path = RESULTS,
) -> None:
    """Run what some claims need, or what is left of it, and say whether they hold.

    Parameters
    ----------
    names
        Claims that `vitrail claims list` shows; without any, all that have a sweep and no results yet.
    out
        Folder for the runs of their sweep; claims of one sweep share it. out/SWEEP unless said.
    jobs
        Runs side by side, each in a process of its own: those of all their sweeps, and what they start from.
    device
        cpu or cuda; a GPU is used where there is one.
    train
        Train what the sweeps start from first, where it is not there; or say how, and stop.
    rehearse
        Only see whether the sweeps would run: every variant for one step of two samples, and all tests of it. Nothing
        is kept.
    keep
        Put the sweeps' tables, with where they come from, among the results, and write docs/claims.md anew.
    results
        Folder of kept results.
    """
    from vitrail import sweep as sweeps
    from vitrail.cli.sweep import rehearse_sweeps, run_sweeps, show_table
    from vitrail.lab.claims import RULE, SEEDS, claim, judge
    from vitrail.lab.claims_page import found
    from vitrail.lab.kept import read_kept

    chosen = [claim(name) for name in names]
    chosen = chosen or [one for one, kept in found(results) if kept is None and one.sweep is not None]
    for one in chosen:
        if one.sweep is None:
            raise ConfigError(f"the claim {one.name!r} has no sweep of its own", f"do {', '.join(one.commands)}")
    if not chosen:
        print(f"every claim that has a sweep has its results in {results}")
        return
    outs = {one.sweep: out or Path("out") / one.sweep for one in chosen if one.sweep is not None}
    if out is not None and len(outs) > 1:
        raise ConfigError(f"one folder for the sweeps {', '.join(outs)}", "leave --out away, or name claims of one")
    if rehearse:
        rehearse_sweeps(outs, device=device)
        return
    for name in outs:
        if (seeds := len(sweeps.read(name).seeds)) < SEEDS:
            print(
                f"the sweep {name!r} has {seeds} seed{'s' if seeds > 1 else ''}, and fewer than {SEEDS} cannot "
                f"decide: give it seeds = {list(range(SEEDS))} in {sweeps.folder() / name}.toml\n"
            )
    failed = run_sweeps(outs, jobs=jobs, device=device, train=train)
    for name, folder in outs.items():
        of_it = [one for one in chosen if one.sweep == name]
        show_table(name, folder, tuple(one.score for one in of_it))
        values = read_kept(folder / "table.json").values
        for one in of_it:
            print(f"\n{one.says}: claimed {one.range}")
            try:
                print(judge(one, values))
            except DataError as error:  # of a sweep that is not whole; the others are told all the same
                print(error.problem)
    print(f"\n{RULE}")
    if keep:
        for name, folder in outs.items():
            sweep = sweeps.read(name)
            if all(sweeps.is_done(sweep, run) for run in sweeps.runs(sweep, folder)):
                file = next(one.files[0] for one in chosen if one.sweep == name)
                about = {"command": f"vitrail sweep {name} --out {folder} --jobs {jobs}"}
                _keep(folder / "table.json", results / f"{file}.json", about | sweeps.origins(sweep, folder))
        report(results=results)
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "mend them and start the command again")


def _keep(table: Path, to: Path, origin: dict[str, str]) -> None:
    kept = {"origin": origin, "table": json.loads(table.read_text(encoding="utf-8"))}
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{to} cannot be written: {error.strerror}", "give another folder with --results") from None
    print(to)


@app.command(help_epilogue="Example: vitrail claims report")
def report(*, results: Path = RESULTS, out: Path = PAGE) -> None:
    """Write the page of all claims from the results that are kept.

    Parameters
    ----------
    results
        Folder of kept results.
    out
        The page to write.
    """
    from vitrail.lab.claims_page import page

    if not results.is_dir():
        raise ConfigError(f"{results} is no folder", "give the folder of results with --results")
    if not any(results.glob("*.json")):
        raise ConfigError(f"{results} holds no results", "give the folder of results with --results")
    text = page(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    print(out)
