"""`vitrail claims`: design claims re-tested in miniature."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import ConfigError

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


@app.command(help_epilogue="Example: vitrail claims run vlm-mlp --jobs 4 --keep")
def run(
    name: str,
    /,
    *,
    out: Path | None = None,
    jobs: int = 1,
    device: str | None = None,
    train: bool = True,
    keep: Annotated[bool, Parameter(negative="")] = False,
    results: Path = RESULTS,
) -> None:
    """Run what a claim needs, or what is left of it, and say whether it holds.

    Parameters
    ----------
    name
        A claim that `vitrail claims list` shows.
    out
        Folder for the runs of its sweep; claims of one sweep share it. out/SWEEP unless said.
    jobs
        Runs side by side, each in a process of its own.
    device
        cpu or cuda; a GPU is used where there is one.
    train
        Train what the sweep starts from first, where it is not there; or say how, and stop.
    keep
        Put the sweep's table, with where it comes from, among the results, and write docs/claims.md anew.
    results
        Folder of kept results.
    """
    from vitrail import sweep as sweeps
    from vitrail.cli.sweep import sweep
    from vitrail.lab.claims import RULE, SEEDS, claim, judge
    from vitrail.lab.kept import read_kept

    chosen = claim(name)
    if chosen.sweep is None:
        raise ConfigError(f"the claim {name!r} has no sweep of its own", f"do {', '.join(chosen.commands)}; see docs")
    out = out or Path("out") / chosen.sweep
    if (seeds := len(sweeps.read(chosen.sweep).seeds)) < SEEDS:
        print(
            f"the sweep {chosen.sweep!r} has {seeds} seed{'s' if seeds > 1 else ''}, and fewer than {SEEDS} cannot "
            f"decide: give it seeds = {list(range(SEEDS))} in {sweeps.folder() / chosen.sweep}.toml\n"
        )
    sweep(chosen.sweep, out=out, jobs=jobs, show=(chosen.score,), device=device, train=train)
    print(f"\n{chosen.says}: claimed {chosen.range}")
    print(judge(chosen, read_kept(out / "table.json").values))
    print(f"\n{RULE}")
    if keep:
        command = f"vitrail sweep {chosen.sweep} --out {out} --jobs {jobs}"
        about = {"command": command, **sweeps.origins(sweeps.read(chosen.sweep), out)}
        _keep(out / "table.json", results / f"{chosen.files[0]}.json", about)
        report(results=results)


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
