"""Render the Markdown page of claims: the verdict of each, with the origin of its results."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from experiments.claims.claims import (
    VERDICT_RULE,
    Claim,
    ClaimResult,
    evaluate_claim,
    format_difference,
    format_interval,
    format_score,
    load_claims,
)
from experiments.results_files import ORIGIN_LABELS, ResultsFile, read_results_files

INTRODUCTION = """# Claims

Design claims of published papers, tested at small scale: other data, smaller models and fewer steps. A verdict holds
for this scale only. `python -m experiments.claims report` writes this page from the files in [results](../results).
`python -m experiments.claims run NAME` runs the missing experiments of a claim and prints its verdict.
Ratios such as 1:10³ in the QLIP claims are the weights of the contrastive and the reconstruction loss.
"""
COLUMNS = ("claim", "published", "claimed effect", "ours", "effect", "interval", "verdict", "command")


def iter_claim_results(folder: Path) -> Iterable[tuple[Claim, ResultsFile | None]]:
    """Yield every claim with its results from a folder, or None if a file is missing."""
    for claim in load_claims().values():
        yield claim, read_results_files([folder / f"{name}.json" for name in claim.result_files])


def render_claims_page(folder: Path) -> str:
    measured, waiting = [], []
    for claim, kept in iter_claim_results(folder):
        if kept is None:
            waiting.append(claim)
        else:
            measured.append((evaluate_claim(claim, kept.values), kept))
    parts = [INTRODUCTION, f"**The rule.** {VERDICT_RULE}\n", _render_summary([one for one, _ in measured])]
    for source, group in groupby(measured, key=lambda pair: pair[0].claim.source):
        rows = list(group)
        parts += [
            f"## {source}\n",
            _render_origins([kept for _, kept in rows]),
            _render_table(COLUMNS, [_format_row(one) for one, _ in rows]),
        ]
    if waiting:
        rows = [
            (claim.description, claim.source, claim.published, _format_claimed_range(claim), format_command(claim))
            for claim in waiting
        ]
        parts += [
            "## Not run yet\n",
            _render_table(("claim", "source", "published", "claimed effect", "command"), rows),
        ]
    return "\n".join(parts)


def format_command(claim: Claim) -> str:
    return (
        f"`python -m experiments.claims run {claim.name}`"
        if claim.sweep
        else ", ".join(f"`{each}`" for each in claim.commands)
    )


def _render_summary(results: Sequence[ClaimResult]) -> str:
    counts = ", ".join(
        f"{sum(one.verdict == verdict for one in results)} {words}"
        for verdict, words in (("holds", "hold"), ("does not hold", "do not hold"), ("undecided", "are undecided"))
    )
    return f"{len(results)} claims have results: {counts}.\n"


def _render_origins(files: Sequence[ResultsFile]) -> str:
    lines = []
    for name, origin in {name: origin for kept in files for name, origin in kept.origin.items()}.items():
        command = [f"`{origin['command']}`"] if "command" in origin else []
        details = [*command, *(f"{word}{origin[key]}" for key, word in ORIGIN_LABELS.items() if key in origin)]
        note = f" Note: {origin['note']}." if "note" in origin else ""
        lines.append(f"- [{name}.json](../results/{name}.json): {', '.join(details)}.{note}")
    return "\n".join(lines) + "\n"


def _format_claimed_range(claim: Claim) -> str:
    return claim.claimed_range + (
        "" if claim.baseline is None else f"; both better than {format_score(claim.baseline, claim.unit)}"
    )


def _format_row(result: ClaimResult) -> tuple[str, ...]:
    claim = result.claim
    ours = result.mean_scores
    verdict = f"**{result.verdict}**, {result.seed_summary}{result.baseline_note}"
    effect = format_difference(result.effect, claim.unit, show_sign=True)
    interval = format_interval(result.interval, claim.unit)
    return (
        claim.description,
        claim.published,
        _format_claimed_range(claim),
        ours,
        effect,
        interval,
        verdict,
        format_command(claim),
    )


def _render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
