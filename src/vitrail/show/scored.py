"""What a suite found as a page: scores beside what can be had without the model, some answers, and how it was asked."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.evals.shares import Score
from vitrail.evals.suites.benchmarks import Benchmark
from vitrail.show.measured import KINDS
from vitrail.show.page import Html, Section, code, figure, heading, lines, marked, page, row, table, tiles

EACH = 6  # examples under one heading
SIDE = 256  # pixels of an example's longer side
FRAMES = 4  # that are shown of a video
UNDER = {"right": "Right", "wrong": "Wrong", "unread": "Not read", "": "Some answers"}


class Example(NamedTuple):
    """`under` is the heading that it stands under."""

    under: str
    pictures: Sequence[Image.Image]
    said: Sequence[str]  # a line each


def scored(
    suite: str,
    model: str,
    about: Mapping[str, Any],
    scores: Sequence[Score],
    examples: Sequence[Example],
    drawn: Sequence[Section] = (),
) -> str:
    """The page. `about` is all that tells how it came about, the command among it; `drawn` comes behind the scores."""
    told = KINDS.get(suite, {})
    rows = [(told.get(score.title, score.title), str(score), score.baselines) for score in scores]
    found = Section(
        "Scores",
        [
            "In brackets: where the true value lies, at 95 %. Beside: what can be had without the model, or by the "
            "model without the picture.",
            table(("", "measured", "beside"), rows),
        ],
    )
    shown = [part for name in dict.fromkeys(one.under for one in examples) for part in _under(name, examples)]
    lead = [Html(f"<p>{code(str(about['command']))}</p>")] if "command" in about else []
    plain = [(key, _plain(value)) for key, value in about.items() if key != "command"]
    return page(
        f"{suite}: {model}",
        lead,
        [
            found,
            *drawn,
            *([Section("Examples", shown)] if shown else []),
            Section("Settings", [table(("", ""), [("model", model), *plain])]),
        ],
    )


def _under(name: str, examples: Sequence[Example]) -> list[str]:
    blocks = [
        [row(*(figure(_small(picture), "") for picture in one.pictures)), Html(f"<p>{lines(*one.said)}</p>")]
        for one in examples
        if one.under == name
    ]
    return [heading(name), tiles(*blocks)]


def _small(picture: Image.Image) -> Image.Image:
    made = picture.convert("RGB")
    made.thumbnail((SIDE, SIDE))
    return made


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "not said" if value is None else str(value)


# ---- benchmarks -------------------------------------------------------------------------------------------------


def examples_of(
    row: Benchmark,
    samples: Sequence[Sample],
    questions: Sequence[str],
    said: Sequence[str],
    unseen: Sequence[str] | None = None,
    **options: Any,
) -> list[Example]:
    """Some right, wrong and unread answers, drawn alike from all of each."""
    verdicts = row.verdicts(samples, said, **options)
    made = []
    for kind, title in UNDER.items():
        numbers = [n for n, (verdict, _) in enumerate(verdicts) if verdict == kind]
        for n in sorted(random.Random(0).sample(numbers, min(EACH, len(numbers)))):
            sample, value = samples[n], verdicts[n][1]
            answer = f"answer: {said[n] or '(nothing)'}"
            told = [questions[n], marked(kind == "right", answer) if kind in ("right", "wrong") else answer]
            told += [f"right: {truth}"] if (truth := _truth(sample)) else []
            told += [f"scored {value:.2f}"] if value is not None and value not in (0.0, 1.0) else []
            told += [f"without the picture: {unseen[n] or '(nothing)'}"] if unseen is not None else []
            made.append(Example(title, _pictures(sample), told))
    return made


def _pictures(sample: Sample) -> list[Image.Image]:
    """Those of a sample, and some frames of its videos."""
    films = (sample.film(i).sample(count=FRAMES) for i in range(len(sample.videos)))
    stills = [sample.image(i) for i in range(len(sample.pictures))]
    return [*stills, *(Image.fromarray(frame) for film in films for frame in film.frames)]


def _truth(sample: Sample) -> str:
    if sample.choices and sample.answers:
        return f"{sample.answers[0]}. {sample.choices.get(sample.answers[0], '')}"
    if sample.answers:
        return " / ".join(list(dict.fromkeys(sample.answers))[:3])
    if sample.captions:
        return sample.captions[0]
    if sample.moments:
        return ", ".join(f"{start:g} - {end:g} s" for start, end in sample.moments)
    return ", ".join(f"{x:.0f}" for x in sample.instances[0].box) if sample.instances else ""


# ---- scenes -----------------------------------------------------------------------------------------------------


class Gathered:
    """Looks on while questions are answered or drawings judged, and keeps the first right and wrong ones of each
    kind."""

    def __init__(self, suite: str, each: int = 2):
        self.told, self.each = KINDS[suite], each
        self.counts: dict[tuple[str, bool], int] = {}
        self.examples: list[Example] = []

    def __call__(self, kind: str, pixels: Tensor, asked: str, right: bool, said: str = "", truth: str = "") -> None:
        """`pixels` are uint8 (3, H, W)"""
        seen = self.counts[kind, right] = self.counts.get((kind, right), 0) + 1
        if seen > self.each:
            return
        picture = Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy())
        told = [asked, marked(right, f"answer: {said}"), f"right: {truth}"] if truth else [marked(right, asked)]
        self.examples.append(Example(self.told.get(kind, kind), [picture], told))
