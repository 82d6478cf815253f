"""The page of claims: every one held against the results that are kept, with where these come from."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from vitrail.lab.claims import RULE, Claim, Found, between, claims, judge, level, told
from vitrail.lab.kept import Kept, read_several

HEAD = """# Claims

Design claims of the papers, re-tested in miniature: other data, smaller models and fewer steps than those they were
made for, so that a verdict is one on this size alone. `vitrail claims report` writes this page from the files in
[results](../results); `vitrail claims run NAME` runs what a claim needs, or what is left of it, and gives its verdict.
"""
ORIGIN = {"date": "", "device": "", "torch": "torch ", "commit": "commit "}
COLUMNS = ("claim", "published", "claimed effect", "ours", "effect", "interval", "verdict", "command")


def found(folder: Path) -> Iterable[tuple[Claim, Kept | None]]:
    """Every claim with what a folder of results has on it."""
    for claim in claims().values():
        yield claim, read_several([folder / f"{name}.json" for name in claim.files])


def page(folder: Path) -> str:
    measured, waiting = [], []
    for claim, kept in found(folder):
        if kept is None:
            waiting.append(claim)
        else:
            measured.append((judge(claim, kept.values), kept))
    parts = [HEAD, f"**The rule.** {RULE}\n", _summary([one for one, _ in measured])]
    for source, group in groupby(measured, key=lambda pair: pair[0].claim.source):
        rows = list(group)
        parts += [
            f"## {source}\n",
            _origins([kept for _, kept in rows]),
            _table(COLUMNS, [_row(one) for one, _ in rows]),
        ]
    if waiting:
        rows = [(claim.says, claim.source, claim.published, _claimed(claim), command(claim)) for claim in waiting]
        parts += ["## Not run yet\n", _table(("claim", "source", "published", "claimed effect", "command"), rows)]
    return "\n".join(parts)


def command(claim: Claim) -> str:
    return f"`vitrail claims run {claim.name}`" if claim.sweep else ", ".join(f"`{each}`" for each in claim.commands)


def _summary(every: Sequence[Found]) -> str:
    counts = ", ".join(
        f"{sum(one.verdict == verdict for one in every)} {words}"
        for verdict, words in (("holds", "hold"), ("does not hold", "do not"), ("undecided", "are undecided"))
    )
    return f"Of {len(every)} claims with results, {counts}.\n"


def _origins(every: Sequence[Kept]) -> str:
    lines = []
    for name, origin in {name: origin for kept in every for name, origin in kept.origin.items()}.items():
        asked = [f"`{origin['command']}`"] if "command" in origin else []
        about = [*asked, *(f"{word}{origin[key]}" for key, word in ORIGIN.items() if key in origin)]
        note = f" Note: {origin['note']}." if "note" in origin else ""
        lines.append(f"- [{name}.json](../results/{name}.json): {', '.join(about)}.{note}")
    return "\n".join(lines) + "\n"


def _claimed(claim: Claim) -> str:
    return claim.range + ("" if claim.floor is None else f"; both better than {level(claim.floor, claim.unit)}")


def _row(one: Found) -> tuple[str, ...]:
    claim = one.claim
    ours = f"{claim.first}: {level(one.first, claim.unit)}; {claim.second}: {level(one.second, claim.unit)}"
    verdict = f"**{one.verdict}**, {one.seeds}{one.floored}"
    effect = told(one.effect, claim.unit, sign=True)
    interval = between(one.interval, claim.unit)
    return claim.says, claim.published, _claimed(claim), ours, effect, interval, verdict, command(claim)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
