"""Benchmarks on synthetic scenes: questions with known answers, and generated images scored by a judge.

B images, H, W pixels
"""

import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vitrail.data.formats.sample import show_progress
from vitrail.data.language import SceneLanguage, generate_prompts, generate_questions, matches_spec, measure_baselines
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.evals.drawing_judge import DrawingJudge, sample_matching_scenes
from vitrail.evals.scores import Proportion, Score

AnswerFn = Callable[[Tensor, list[str]], list[str]]
"""Images uint8 (B, 3, H, W) and one question about each → responses."""

DrawFn = Callable[[list[str], int], Tensor]
"""Prompts and the index of the first → images uint8 (B, 3, H, W)."""


class ResultCallback(Protocol):
    """Called with every image uint8 (3, H, W), its question or prompt, and the result."""

    def __call__(
        self, kind: str, pixels: Tensor, question: str, correct: bool, response: str = "", reference: str = "", /
    ) -> None: ...


def ignore_result(
    kind: str, pixels: Tensor, question: str, correct: bool, response: str = "", reference: str = ""
) -> None:
    """Do nothing."""


BATCH = 64
MAX_EMPTY_BATCHES = 200  # batches without enough questions of a kind before an error is raised
BASELINE_SCENES = 4096  # scenes that blind baselines are fitted to, and as many that they are tested on
CEILING_NAME = "true images through the codec"
REFUSAL_START = "there is no"  # start of answers that reject the question


def normalize_answer(text: str) -> str:
    """Normalise an answer to lower-case words without punctuation."""
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def evaluate_answers(
    answer_fn: AnswerFn,
    source: SceneSource,
    language: SceneLanguage,
    question_kinds: Sequence[str],
    count: int,
    *,
    held_out: bool = False,
    start: int = 0,
    batch_size: int = BATCH,
    on_result: ResultCallback = ignore_result,
) -> list[Score]:
    """Score the accuracy per kind of question, with blind baselines; and rejections of questions over all kinds.

    An answer is correct if it equals the reference word for word. Rejections are scored for questions without and with
    an answer. `held_out` uses question templates that training does not use.
    """
    if count < 1:
        raise ConfigError(f"{count} questions", "set at least 1")
    scores = []
    num_rejected, num_asked = {True: 0, False: 0}, {True: 0, False: 0}  # by whether the question has no answer
    for kind in question_kinds:
        hits = 0
        for pixels, questions, answers in _iter_questions(source, language, kind, count, held_out, start):
            responses = []
            for first in range(0, len(questions), batch_size):
                rows = slice(first, first + batch_size)
                responses += answer_fn(pixels[rows], questions[rows])
            for n, (response, reference) in enumerate(
                zip(map(normalize_answer, responses), map(normalize_answer, answers), strict=True)
            ):
                on_result(kind, pixels[n], questions[n], response == reference, responses[n], answers[n])
                hits += response == reference
                num_asked[reference.startswith(REFUSAL_START)] += 1
                num_rejected[reference.startswith(REFUSAL_START)] += response.startswith(REFUSAL_START)
        scores.append(
            Score.from_proportion(
                kind, Proportion(hits, count), **_blind_baselines(source, language, kind, held_out, start + 2**20)
            )
        )
    names = {True: "refusals of unanswerable questions", False: "refusals of answerable questions"}
    scores += [
        Score.from_proportion(name, Proportion(num_rejected[unanswerable], num_asked[unanswerable]))
        for unanswerable, name in names.items()
        if num_asked[unanswerable]
    ]
    return scores


def _iter_questions(
    source: SceneSource, language: SceneLanguage, kind: str, count: int, held_out: bool, start: int
) -> Iterator[tuple[Tensor, list[str], list[str]]]:
    """Yield `count` questions of a kind in batches: images, questions and reference answers."""
    num_yielded = 0
    for batch in range(MAX_EMPTY_BATCHES + count):
        index = torch.arange(start + batch * BATCH, start + (batch + 1) * BATCH, device=language.concept.device)
        rendered = source.render_indices(index)
        qa = generate_questions(language, rendered.scenes, source.config.seed, kind, held_out=held_out)
        rows = qa.valid.nonzero()[: count - num_yielded, 0]
        if len(rows):
            to_texts = language.pieces.to_texts
            yield rendered.pixels[rows], to_texts(qa.question[rows]), to_texts(qa.answer[rows])
        num_yielded += len(rows)
        if num_yielded == count:
            return
    raise ConfigError(f"scenes of {source.name!r} rarely support questions of kind {kind!r}", "remove the kind")


def _blind_baselines(
    source: SceneSource, language: SceneLanguage, kind: str, held_out: bool, start: int
) -> dict[str, float]:
    """Baselines: the most common answer, and the best answer from the question alone."""
    index = torch.arange(start, start + 2 * BASELINE_SCENES, device=language.concept.device)
    qa = generate_questions(language, source.sample_scenes(index), source.config.seed, kind, held_out=held_out)
    return {name: getattr(baseline, name) for baseline in measure_baselines(qa) for name in ("majority", "blind")}


def evaluate_drawings(
    draw: DrawFn,
    judge: DrawingJudge,
    count: int,
    *,
    seed: int = 0,
    held_out: bool = False,
    batch_size: int = BATCH,
    on_result: ResultCallback = ignore_result,
) -> list[Score]:
    """Score the fraction of generated images that the judge accepts, per GenEval prompt kind and overall.

    The baseline "other prompts" judges the same images against the next prompt of the kind.
    """
    if count < 1:
        raise ConfigError(f"{count} drawings of each kind", "set at least 1")
    scores, hits, other_hits = [], 0, 0
    for number, kind in enumerate(DRAWING_PROMPT_KINDS):
        prompt_batch = generate_prompts(
            judge.language, kind, count, seed, held_out=held_out, concepts=judge.known_concepts
        )
        texts = judge.language.pieces.to_texts(prompt_batch.text)
        other_specs = prompt_batch.spec[torch.arange(count).roll(1)]
        num_correct, num_accepted = 0, 0
        for first in show_progress(range(0, count, batch_size), f"drawings, {kind}"):
            rows = slice(first, first + batch_size)
            pixels = draw(texts[rows], number * count + first)
            scenes = judge.detect_scenes(pixels.to(prompt_batch.spec.count.device))
            is_correct = matches_spec(judge.language, prompt_batch.spec[rows], scenes)
            num_correct += int(is_correct.sum())
            for picture, text, hit in zip(pixels, texts[rows], is_correct.tolist(), strict=True):
                on_result(kind, picture, text, bool(hit))
            num_accepted += int(matches_spec(judge.language, other_specs[rows], scenes).sum())
        scores.append(
            Score.from_proportion(kind, Proportion(num_correct, count), **{"other prompts": num_accepted / count})
        )
        hits, other_hits = hits + num_correct, other_hits + num_accepted
    total = count * len(DRAWING_PROMPT_KINDS)
    return [*scores, Score.from_proportion("all", Proportion(hits, total), **{"other prompts": other_hits / total})]


def evaluate_drawing_ceiling(
    reconstruct: Callable[[Tensor], Tensor],
    judge: DrawingJudge,
    source: SceneSource,
    count: int,
    *,
    batch_size: int = BATCH,
) -> Score:
    """Score ground-truth images after reconstruction by a codec (uint8 (B, 3, H, W)) with the judge.

    This is an upper bound for images generated with the codec.
    """
    hits = 0
    for kind in DRAWING_PROMPT_KINDS:
        spec, rendered = sample_matching_scenes(judge.language, source, kind, count)
        for first in range(0, count, batch_size):
            rows = slice(first, first + batch_size)
            hits += int(judge.judge_images(spec[rows], reconstruct(rendered.pixels[rows]).to(spec.count.device)).sum())
    return Score.from_proportion(CEILING_NAME, Proportion(hits, count * len(DRAWING_PROMPT_KINDS)))
