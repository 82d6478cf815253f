"""What a picture shows, asked of a model that answers.

N pictures, S pixels of a side
"""

from collections import Counter
from collections.abc import Iterable

import torch

from vitrail.data.named import NamedSource
from vitrail.data.sources.progress import bar
from vitrail.data.talks import NAMING
from vitrail.data.views import PLAIN, views
from vitrail.errors import DataError
from vitrail.evals.shares import Score, Share
from vitrail.evals.suites.sets import some_of
from vitrail.evals.suites.talking import Answerer, plain

UNSEEN = "tell me what you can make out here."  # asked in no training


def named(
    answerer: Answerer,
    source: NamedSource,
    side: int,
    *,
    among: Iterable[str] = (),
    limit: int | None = None,
    unseen: bool = False,
    batch: int = 64,
) -> list[Score]:
    """The share of pictures that are called by their name, word for word, beside the commonest name; and how many of
    the names there are were given right at least once. `among` leaves only pictures with one of these names."""
    known = {name.lower() for name in among}
    rows = [row for row, about in enumerate(source.abouts) if not known or about.name.lower() in known]
    rows = [rows[i] for i in some_of(len(rows), limit)]
    if not rows:
        raise DataError(f"no picture of {', '.join(source.config.data)} has one of the names", "ask for others")
    question, names = UNSEEN if unseen else NAMING[0], [plain(source.abouts[row].name) for row in rows]
    right = []
    with bar("asking what pictures show", len(rows), unit="") as progress:
        for first in range(0, len(rows), batch):
            index = torch.tensor(rows[first : first + batch])
            shown = views(source.pixels(index), PLAIN.with_(side=side))  # (B, 3, S, S) in −1 … 1
            given = answerer(((shown + 1) * 127.5).round().clamp(0, 255).byte(), [question] * len(index))
            right += [plain(a) == b for a, b in zip(given, names[first : first + batch], strict=True)]
            progress.update(len(index))
    kinds, found = Counter(names), {name for name, hit in zip(names, right, strict=True) if hit}
    commonest = max(kinds.values()) / len(names)
    return [
        Score.counted("named", Share(sum(right), len(names)), commonest=commonest),
        Score.counted("names given right at least once", Share(len(found), len(kinds))),
    ]
