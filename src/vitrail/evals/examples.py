"""Examples of answers and drawings, right and wrong, for the page of an evaluation."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from vitrail.data.formats import Sample

EXAMPLES_PER_GROUP = 6
FRAMES_PER_VIDEO = 4  # frames shown per video
GROUP_TITLES = {"right": "Right", "wrong": "Wrong", "unread": "Not parsed", "": "Examples"}


class Verdict(NamedTuple):
    """A line of an example that is right or wrong."""

    is_correct: bool
    text: str


class Example(NamedTuple):
    """Images and lines of text of one example; `group` is its heading."""

    group: str
    images: Sequence[Image.Image]
    lines: Sequence[str | Verdict]


class ExampleCollector:
    """Callback that collects the first right and wrong examples of each kind during an evaluation."""

    def __init__(self, max_per_kind: int = 2):
        self.max_per_kind = max_per_kind
        self.counts: dict[tuple[str, bool], int] = {}
        self.examples: list[Example] = []

    def __call__(
        self, kind: str, pixels: Tensor, question: str, correct: bool, response: str = "", reference: str = ""
    ) -> None:
        """Add an example; `pixels` is uint8 (3, H, W)."""
        count = self.counts.get((kind, correct), 0) + 1
        self.counts[kind, correct] = count
        if count > self.max_per_kind:
            return
        image = Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy())
        answered = [question, Verdict(correct, f"answer: {response}"), f"reference: {reference}"]
        self.examples.append(Example(kind, [image], answered if reference else [Verdict(correct, question)]))


def select_examples(
    samples: Sequence[Sample],
    questions: Sequence[str],
    answers: Sequence[str],
    grades: Sequence[tuple[str, float | None]],
    blind_answers: Sequence[str] | None = None,
) -> list[Example]:
    """Select random examples of right, wrong and unparsed answers to benchmark samples.

    `grades` are those of `Benchmark.grade_answers`.
    """
    examples = []
    for kind, title in GROUP_TITLES.items():
        numbers = [n for n, (grade, _) in enumerate(grades) if grade == kind]
        for n in sorted(random.Random(0).sample(numbers, min(EXAMPLES_PER_GROUP, len(numbers)))):
            sample, value = samples[n], grades[n][1]
            answer = f"answer: {answers[n] or '(empty)'}"
            lines = [questions[n], Verdict(kind == "right", answer) if kind in ("right", "wrong") else answer]
            lines += [f"reference: {truth}"] if (truth := _format_reference(sample)) else []
            lines += [f"score: {value:.2f}"] if value is not None and value not in (0.0, 1.0) else []
            lines += [f"without the image: {blind_answers[n] or '(empty)'}"] if blind_answers is not None else []
            examples.append(Example(title, _collect_images(sample), lines))
    return examples


def _collect_images(sample: Sample) -> list[Image.Image]:
    """Collect the images of a sample, and some frames of its videos."""
    clips = (sample.open_video(i).sample_frames(count=FRAMES_PER_VIDEO) for i in range(len(sample.videos)))
    stills = [sample.load_image(i) for i in range(len(sample.images))]
    return [*stills, *(Image.fromarray(frame) for clip in clips for frame in clip.frames)]


def _format_reference(sample: Sample) -> str:
    if sample.choices and sample.answers:
        return f"{sample.answers[0]}. {sample.choices.get(sample.answers[0], '')}"
    if sample.answers:
        return " / ".join(list(dict.fromkeys(sample.answers))[:3])
    if sample.captions:
        return sample.captions[0]
    if sample.moments:
        return ", ".join(f"{start:g} - {end:g} s" for start, end in sample.moments)
    return ", ".join(f"{x:.0f}" for x in sample.instances[0].box) if sample.instances else ""
