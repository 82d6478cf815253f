"""ARO scoring: accuracy, and its mean over kinds of relations and attributes.

N items, K kinds
"""

from collections import Counter

import torch
from torch import Tensor

from vitrail.evals.metrics.choice_metrics import choice_correct
from vitrail.evals.metrics.scoring_table import AnswerTexts, ScoringTable, score_from_sums, score_mean
from vitrail.evals.scores import Score

MIN_ATTRIBUTE_COUNT = 25
"""Minimum number of items of an attribute pair that counts for the mean."""

_SYMMETRIC_TEXT = """
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
SYMMETRIC_RELATIONS = frozenset(" ".join(_SYMMETRIC_TEXT.split()).split(", "))
"""Relations that the original excludes from the mean as symmetric."""


def score_kinds(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score accuracy and the mean over kinds, as far as the original counts a kind."""
    correct, item_kinds = choice_correct(table, answers), [str(kind) for kind in table.get_metadata("kind")]
    scores = [score_mean("accuracy", correct, table.image_keys, binary=True)]
    kind_counts, parts = Counter(item_kinds), dict(zip(item_kinds, table.get_metadata("part"), strict=True))
    counted = [kind for kind, part in parts.items() if _is_counted(kind, part, kind_counts[kind])]
    if not counted:
        return scores
    rows = [n for n, kind in enumerate(item_kinds) if kind in counted]
    sums = torch.zeros(len(rows), 2 * len(counted), dtype=torch.float64)  # (N, 2·K)
    for row, n in zip(sums, rows, strict=True):
        column = 2 * counted.index(item_kinds[n])
        row[column], row[column + 1] = correct[n], 1.0
    return [*scores, score_from_sums("mean over kinds", sums, _mean_over_kinds, [table.image_keys[n] for n in rows])]


def _is_counted(kind: str, part: str, count: int) -> bool:
    return kind not in SYMMETRIC_RELATIONS if part == "relation" else count >= MIN_ATTRIBUTE_COUNT


def _mean_over_kinds(sums: Tensor) -> Tensor:
    """Mean accuracy over the kinds in a draw: (…, 2·K) → (…)."""
    hits, counts = sums[..., ::2], sums[..., 1::2]
    return (hits / counts.clamp(min=1)).sum(-1) / (counts > 0).sum(-1)
