"""`python -m experiments.report`: an HTML report of all results."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.cli import main
from vitrail.errors import ConfigError

app = App(
    name="python -m experiments.report",
    help="Write a self-contained HTML report of all results.",
    help_epilogue="Example: python -m experiments.report -o report.html",
)


@app.default
def write_report(
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
    results: Path = Path("results"),
    speed: Path = Path("perf/results"),
    section: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
) -> None:
    """Write a self-contained HTML report of all results, each with its command, commit, hardware and date.

    The report covers scaling laws, system costs, information at bottlenecks, claims, rates, sweeps, training runs and
    speed. Results that do not exist are left out, and the report lists them.

    Parameters
    ----------
    out
        The HTML file to write.
    results
        Folder of the results.
    speed
        Folder of the benchmark results of speed.
    section
        Write only this section: law, plan, experiment, divergence, ledger, figures, bounds, information, claims, rates,
        sweeps, trainings or speed. May be repeated.
    """
    from experiments.report.report_page import INTRODUCTION, SECTION_BUILDERS
    from experiments.report.report_page import build_report as make
    from vitrail.cli.output_files import check_writable
    from vitrail.cli.step_progress import progress_over_steps
    from vitrail.plots.html_page import render_page

    check_writable(out, "--out")
    with progress_over_steps(len(section or SECTION_BUILDERS)) as step:
        text = render_page("Vitrail report", INTRODUCTION, make(results, speed, section, step), is_long=True)
    try:
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    print(out)


if __name__ == "__main__":
    main(app)
