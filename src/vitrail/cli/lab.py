"""`vitrail lab`: all that the lab knows, on one page."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import ConfigError

app = App(
    name="lab",
    help="Write all that the lab knows on one page, and list figures of the texts with ours beside them.",
    help_epilogue="Example: vitrail lab report -o report.html",
)


@app.command(help_epilogue="Example: vitrail lab report -o report.html")
def report(
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
    results: Path = Path("results"),
    speed: Path = Path("perf/results"),
    section: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
) -> None:
    """Write one page, whole in itself, of all that the lab knows: the law of tokens, what systems cost and bottlenecks
    keep, claims, rates, sweeps, trainings and speed; each figure with its command, commit, hardware and date.

    It is computed at once or read from files of results. What they do not hold is left out, and the page says so.

    Parameters
    ----------
    out
        The page to write.
    results
        Folder of kept results.
    speed
        Folder of dated results of speed.
    section
        Only this one: law, plan, experiment, divergence, ledger, figures, bounds, information, claims, rates, sweeps,
        trainings or speed. May be repeated.
    """
    from vitrail.cli.steps import steps
    from vitrail.cli.written import check_written
    from vitrail.lab.report import LEAD, PARTS
    from vitrail.lab.report import report as make
    from vitrail.show.page import page

    check_written(out, "--out")
    with steps(len(section or PARTS)) as step:
        text = page("What the lab knows", LEAD, make(results, speed, section, step), long=True)
    try:
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    print(out)


@app.command(help_epilogue="Example: vitrail lab figures --broken")
def figures(*, broken: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List the figures that texts tell, as printed, with ours, what shows them, and why those that do not hold do not.

    Parameters
    ----------
    broken
        Only those that do not survive arithmetic.
    """
    from vitrail.lab.told import rows

    for holding in (False,) if broken else (True, False):
        for source, about, printed, ours, by, why in rows(holding):
            print(f"{'✗' if why else '✓'} {about} ({source}): {printed}; ours {ours}, by {by}")
            if why:
                print(f"    {why}")
