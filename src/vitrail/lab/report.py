"""All that the lab knows on one page: what can be computed at once, and what is kept in files of results.

A section is left out where there is nothing to show, and the page says so; no file is passed over in silence.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import ConfigError, nearest
from vitrail.lab import report_computed, report_kept, report_measured
from vitrail.lab.report_files import Files, read_files
from vitrail.show.page import Section, code, table

LEAD = (
    "How many visual tokens are enough, and what each design costs and keeps. Every figure says which command made it, "
    "when, on what hardware and from which commit, as far as its file tells. Nothing is fetched to show this page; "
    "heads of tables sort them.",
)


class Part(NamedTuple):
    """A section: what it shows of the files, or None where they hold nothing of it, and `how` they would."""

    title: str
    make: Callable[[Files], Sequence[str] | None]
    how: str = ""


PARTS: dict[str, Part] = {
    "law": Part("The law of scores over tokens", lambda _: report_computed.law()),
    "plan": Part("A plan", lambda _: report_computed.plan_example()),
    "experiment": Part(
        "How many tokens models of ours need",
        report_measured.experiment,
        "vitrail scaling run --out out/scaling, or scaling fewer mini, and scaling.json of that folder kept in results",
    ),
    "divergence": Part(
        "Divergence",
        report_measured.divergence,
        "vitrail scaling diverge --model stories15M --json results/divergence-stories15m.json",
    ),
    "ledger": Part("What systems cost", lambda _: report_computed.systems()),
    "figures": Part("Figures of texts, worked out again", lambda _: report_computed.figures()),
    "bounds": Part("What codes can hold", lambda _: report_computed.bounds()),
    "information": Part(
        "What bottlenecks keep",
        report_measured.information,
        "vitrail information MODEL --json results/information-NAME.json",
    ),
    "claims": Part("Claims", report_kept.claims),
    "rates": Part("Quality against bits", report_measured.rates, "vitrail codec compare MODEL -o results/NAME.json"),
    "sweeps": Part("Sweeps", report_kept.sweeps, "vitrail sweep NAME"),
    "trainings": Part("Trainings", report_kept.trainings, "vitrail train NAME"),
    "speed": Part("Speed", report_kept.speed, "python perf/NAME.py --out perf/results/NAME.json"),
}


def report(
    results: Path, speed: Path, names: Sequence[str] = (), step: Callable[[str], Any] = lambda what: None
) -> list[Section]:
    """The sections of the page, all of them unless some are named; `step` is told what begins."""
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(f"the report has no section {unknown[0]!r}", nearest(unknown[0], PARTS))
    if not results.is_dir():
        raise ConfigError(f"{results} is no folder", "give the folder of results with --results")
    files = read_files(results, speed)
    sections, missing = [], []
    for name, part in PARTS.items():
        if names and name not in names:
            continue
        step(part.title)
        body = part.make(files)
        if body is None:
            missing.append((part.title, code(part.how)))
        else:
            sections.append(Section(part.title, body))
    return [*sections, *_left_out(missing, files, names)]


def _left_out(missing: Sequence[tuple[str, str]], files: Files, names: Sequence[str]) -> list[Section]:
    unread = [] if names else [(str(file), "holds none of the kinds of results shown here") for file in files.found[""]]
    about = [(title, "no file of results has it yet; to write one:", how) for title, how in missing]
    rows = [*about, *((file, why, "") for file, why in unread)]
    if not rows:
        return []
    said = f"Looked for in {files.results}."
    return [Section("Not on this page", [said, table(("what", "why", "command"), rows, "What was left out")])]
