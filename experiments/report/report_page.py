"""Build the HTML report of computed figures and stored results.

Sections without data are left out. The last section lists them, and all files that were not recognized.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.report import report_computed, report_experiments, report_results
from experiments.report.report_inputs import ReportInputs, read_report_inputs
from vitrail.errors import ConfigError, suggest_name
from vitrail.plots.html_page import Section, render_code, render_table

INTRODUCTION = (
    "How many visual tokens are enough, and the cost and quality of each design. Each figure states its command, date, "
    "hardware and commit, if its file records them. The page needs no network. Click a table head to sort by it.",
)


class SectionBuilder(NamedTuple):
    """A section: its builder, which returns None without data, and the command that produces the data."""

    title: str
    build: Callable[[ReportInputs], Sequence[str] | None]
    command: str = ""


SECTION_BUILDERS: dict[str, SectionBuilder] = {
    "law": SectionBuilder("Scaling law of scores over visual tokens", lambda _: report_computed.build_law_section()),
    "plan": SectionBuilder("Example of a token budget", lambda _: report_computed.build_plan_section()),
    "experiment": SectionBuilder(
        "Token-scaling experiment",
        report_experiments.build_experiment_section,
        "python -m experiments.token_scaling run --out out/scaling; then copy scaling.json to results",
    ),
    "divergence": SectionBuilder(
        "Divergence",
        report_experiments.build_divergence_section,
        "vitrail scaling diverge --model stories15M --json results/divergence-stories15m.json",
    ),
    "ledger": SectionBuilder("Cost of systems", lambda _: report_computed.build_systems_section()),
    "figures": SectionBuilder("Published figures, recomputed", lambda _: report_computed.build_figures_section()),
    "bounds": SectionBuilder("Information bounds of codes", lambda _: report_computed.build_bounds_section()),
    "information": SectionBuilder(
        "Information at bottlenecks",
        report_experiments.build_information_section,
        "vitrail information MODEL --json results/information-NAME.json",
    ),
    "claims": SectionBuilder("Claims", report_results.build_claims_section),
    "rates": SectionBuilder(
        "Rate–distortion", report_experiments.build_rates_section, "vitrail codec compare MODEL -o results/NAME.json"
    ),
    "sweeps": SectionBuilder("Sweeps", report_results.build_sweep_section, "vitrail sweep NAME"),
    "trainings": SectionBuilder("Trainings", report_results.build_training_section, "vitrail train NAME"),
    "speed": SectionBuilder(
        "Speed", report_results.build_speed_section, "python perf/NAME.py --out perf/results/NAME.json"
    ),
}


def build_report(
    results_folder: Path, speed_folder: Path, names: Sequence[str] = (), log: Callable[[str], Any] = lambda _what: None
) -> list[Section]:
    """Build the sections of the page, all or those named; `log` receives the title of each."""
    if unknown := [name for name in names if name not in SECTION_BUILDERS]:
        raise ConfigError(f"the report has no section {unknown[0]!r}", suggest_name(unknown[0], SECTION_BUILDERS))
    if not results_folder.is_dir():
        raise ConfigError(f"{results_folder} is not a folder", "give the results folder with --results")
    files = read_report_inputs(results_folder, speed_folder)
    sections, missing = [], []
    for name, part in SECTION_BUILDERS.items():
        if names and name not in names:
            continue
        log(part.title)
        body = part.build(files)
        if body is None:
            missing.append((part.title, render_code(part.command)))
        else:
            sections.append(Section(part.title, body))
    return [*sections, *_build_missing_section(missing, files, names)]


def _build_missing_section(
    missing: Sequence[tuple[str, str]], inputs: ReportInputs, names: Sequence[str]
) -> list[Section]:
    unread = [] if names else [(str(file), "unknown kind of results") for file in inputs.files_by_kind[""]]
    without_data = [(title, "no results file; to write one:", how) for title, how in missing]
    rows = [*without_data, *((file, why, "") for file, why in unread)]
    if not rows:
        return []
    note = f"Searched in {inputs.results_folder}."
    return [
        Section("Not on this page", [note, render_table(("section or file", "reason", "command"), rows, "Left out")])
    ]
