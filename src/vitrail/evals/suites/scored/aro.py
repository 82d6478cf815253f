"""ARO: the share of true captions, and its mean over kinds of relation or of attributes.

N items, K kinds
"""

from collections import Counter

import torch
from torch import Tensor

from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said
from vitrail.evals.suites.scored.choices import chosen
from vitrail.evals.suites.sheets import Sheet, mean, measured

FEWEST = 25
"""Items of a pair of attributes that is counted."""

_SYMMETRIC = """
adjusting, attached to, between, bigger than, biting, boarding, brushing, chewing, cleaning, climbing, close to, coming
from, coming out of, contain, crossing, dragging, draped over, drinking, drinking from, driving, driving down, driving
on, eating from, eating in, enclosing, exiting, facing, filled with, floating in, floating on, flying, flying above,
flying in, flying over, flying through, full of, going down, going into, going through, grazing in, growing in, growing
on, guiding, hanging from, hanging in, hanging off, hanging over, higher than, holding onto, hugging, in between,
jumping off, jumping on, jumping over, kept in, larger than, leading, leaning over, leaving, licking, longer than,
looking in, looking into, looking out, looking over, looking through, lying next to, lying on top of, making, mixed
with, mounted on, moving, on the back of, on the edge of, on the front of, on the other side of, opening, painted on,
parked at, parked beside, parked by, parked in, parked in front of, parked near, parked next to, perched on, petting,
piled on, playing, playing in, playing on, playing with, pouring, reaching for, reading, reflected on, riding on,
running in, running on, running through, seen through, sitting behind, sitting beside, sitting by, sitting in front of,
sitting near, sitting next to, sitting under, skiing down, skiing on, sleeping in, sleeping on, smiling at, sniffing,
splashing, sprinkled on, stacked on, standing against, standing around, standing behind, standing beside, standing in
front of, standing near, standing next to, staring at, stuck in, surrounding, swimming in, swinging, talking to, topped
with, touching, traveling down, traveling on, tying, typing on, underneath, wading in, waiting for, walking across,
walking by, walking down, walking next to, walking through, working in, working on, worn on, wrapped around, wrapped
in, by, of, near, next to, with, beside, on the side of, around
"""
SYMMETRIC = frozenset(" ".join(_SYMMETRIC.split()).split(", "))
"""Relations that the original calls so, and leaves out of the mean."""


def kinds(sheet: Sheet, said: Said) -> list[Score]:
    """The mean over kinds is of those that the original counts, and is left out where there is none."""
    right, of = chosen(sheet, said), [str(kind) for kind in sheet.noted("kind")]
    scores = [mean("accuracy", right, sheet.pictures, binary=True)]
    counts, parts = Counter(of), dict(zip(of, sheet.noted("part"), strict=True))
    counted = [kind for kind, part in parts.items() if _counts(kind, part, counts[kind])]
    if not counted:
        return scores
    rows = [n for n, kind in enumerate(of) if kind in counted]
    table = torch.zeros(len(rows), 2 * len(counted), dtype=torch.float64)  # (N, 2·K)
    for row, n in zip(table, rows, strict=True):
        at = 2 * counted.index(of[n])
        row[at], row[at + 1] = right[n], 1.0
    return [*scores, measured("mean over kinds", table, _over_kinds, [sheet.pictures[n] for n in rows])]


def _counts(kind: str, part: str, count: int) -> bool:
    return kind not in SYMMETRIC if part == "relation" else count >= FEWEST


def _over_kinds(sums: Tensor) -> Tensor:
    """(…, 2·K) → (…): of those that a draw has"""
    hits, counts = sums[..., ::2], sums[..., 1::2]
    return (hits / counts.clamp(min=1)).sum(-1) / (counts > 0).sum(-1)
