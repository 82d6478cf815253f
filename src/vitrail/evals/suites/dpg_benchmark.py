"""DPG-Bench: generates images from dense prompts and scores them with a graph of questions per prompt.

B images, H, W pixels
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.data.formats.sample import show_progress
from vitrail.data.language import SceneLanguage
from vitrail.data.language.dense_prompts import DensePromptBatch, generate_dense_prompts
from vitrail.data.question_graphs import QuestionGraph
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.evals.drawing_judge import DrawingJudge
from vitrail.evals.metrics.dpg_metrics import iter_category_answers, score_prompts
from vitrail.evals.metrics.scoring_table import score_mean
from vitrail.evals.metrics.yesno_metrics import read_words
from vitrail.evals.scores import Proportion, Score
from vitrail.evals.suites.scene_benchmarks import (
    BATCH,
    CEILING_NAME,
    MAX_EMPTY_BATCHES,
    AnswerFn,
    DrawFn,
    ResultCallback,
    ignore_result,
)

GraphAnswerFn = Callable[[Tensor, Sequence[int]], list[list[bool]]]
"""Images uint8 (B, 3, H, W) and the graph index of each → whether each question is answered yes."""

GraphAnswers = list[list[list[bool]]]
"""Answers by prompt, image and question."""


def build_dense_prompts(
    language: SceneLanguage, source: SceneSource, count: int, *, held_out: bool = False
) -> DensePromptBatch:
    """Build `count` dense prompts from the first scenes of a source that support one."""
    if count < 1:
        raise ConfigError(f"{count} prompts", "set at least 1")
    graphs, specs, index = [], [], []
    for batch in range(MAX_EMPTY_BATCHES + count):
        scene_indices = torch.arange(batch * BATCH, (batch + 1) * BATCH, device=language.concept.device)
        prompts = generate_dense_prompts(
            language, source.sample_scenes(scene_indices), source.config.seed, held_out=held_out
        )
        graphs, specs, index = graphs + prompts.graphs, specs + prompts.specs, [*index, prompts.scenes.index]
        if len(graphs) >= count:
            return DensePromptBatch(graphs[:count], specs[:count], source.sample_scenes(torch.cat(index)[:count]))
    raise ConfigError(
        f"scenes of {source.name!r} rarely support a dense prompt", "use scenes with more distinct objects"
    )


def make_judge_answerer(judge: DrawingJudge, prompts: DensePromptBatch) -> GraphAnswerFn:
    """Answer the questions with the detection judge."""

    def look(pixels: Tensor, numbers: Sequence[int]) -> list[list[bool]]:
        return prompts.answer_questions(
            judge.language, numbers, judge.detect_scenes(pixels.to(judge.language.concept.device))
        )

    return look


class ModelGraphAnswerer:
    """Answers the questions with a model. Answers other than yes count as no; unparsed answers are counted."""

    def __init__(self, answer_fn: AnswerFn, graphs: Sequence[QuestionGraph], *, batch_size: int = BATCH):
        self.answer_fn, self.graphs, self.batch_size = answer_fn, graphs, batch_size
        self.num_asked, self.num_unparsed = 0, 0

    def __call__(self, pixels: Tensor, graph_indices: Sequence[int]) -> list[list[bool]]:
        texts = [[question.text for question in self.graphs[number].questions] for number in graph_indices]
        pairs = [(row, text) for row, graph_texts in enumerate(texts) for text in graph_texts]
        texts_out: list[str] = []
        for first in range(0, len(pairs), self.batch_size):
            chunk = pairs[first : first + self.batch_size]
            texts_out += self.answer_fn(pixels[[row for row, _ in chunk]], [text for _, text in chunk])
        parsed = [read_words(answer) for answer in texts_out]
        self.num_asked, self.num_unparsed = self.num_asked + len(parsed), self.num_unparsed + parsed.count("")
        answers = iter(answer == "yes" for answer in parsed)
        return [[next(answers) for _ in graph_texts] for graph_texts in texts]

    @property
    def score(self) -> Score:
        return Score.from_proportion("neither yes nor no", Proportion(self.num_unparsed, self.num_asked))


def evaluate_dense_drawings(
    draw: DrawFn,
    answer_graphs: GraphAnswerFn,
    graphs: Sequence[QuestionGraph],
    *,
    drawings_per_prompt: int = 1,
    batch_size: int = BATCH,
    on_result: ResultCallback = ignore_result,
) -> list[Score]:
    """Compute the DPG-Bench score and the category scores of generated images.

    The baseline "other prompts" scores the same images with the questions of the previous prompt. Intervals are
    bootstrapped over prompts.
    """
    if drawings_per_prompt < 1:
        raise ConfigError(f"{drawings_per_prompt} drawings per prompt", "set at least 1")
    own_answers: GraphAnswers = [[] for _ in graphs]
    shifted_answers: GraphAnswers = [[] for _ in graphs]
    parts = [(turn, first) for turn in range(drawings_per_prompt) for first in range(0, len(graphs), batch_size)]
    for turn, first in show_progress(parts, "drawings"):
        rows = range(first, min(first + batch_size, len(graphs)))
        pixels = draw([graphs[row].prompt for row in rows], turn * len(graphs) + first)
        for row, picture, yes in zip(rows, pixels, answer_graphs(pixels, rows), strict=True):
            own_answers[row].append(yes)
            failed = [question.text for question, is_yes in zip(graphs[row].questions, yes, strict=True) if not is_yes]
            on_result("dense", picture, " ".join([graphs[row].prompt, *failed]), not failed)
        if len(graphs) > 1:
            previous = [row - 1 if row else len(graphs) - 1 for row in rows]
            for row, yes in zip(previous, answer_graphs(pixels, previous), strict=True):
                shifted_answers[row].append(yes)
    scores = score_dense_answers(graphs, own_answers)
    if len(graphs) < 2:
        return scores
    baselines = [score.value for score in score_dense_answers(graphs, shifted_answers)]
    return [replace(score, baselines={"other prompts": value}) for score, value in zip(scores, baselines, strict=True)]


def evaluate_dense_ceiling(
    reconstruct: Callable[[Tensor], Tensor],
    answer_graphs: GraphAnswerFn,
    prompts: DensePromptBatch,
    source: SceneSource,
    *,
    batch_size: int = BATCH,
) -> Score:
    """Score the ground-truth images of the prompts' scenes after reconstruction by a codec (uint8 (B, 3, H, W)).

    This is an upper bound for images generated with the codec.
    """
    answers: GraphAnswers = []
    for first in show_progress(range(0, len(prompts.graphs), batch_size), "true images"):
        rows = range(first, min(first + batch_size, len(prompts.graphs)))
        pixels = source.render_scenes(prompts.scenes[rows.start : rows.stop])
        answers += [[yes] for yes in answer_graphs(reconstruct(pixels), rows)]
    return replace(score_dense_answers(prompts.graphs, answers)[0], name=CEILING_NAME)


def score_dense_answers(graphs: Sequence[QuestionGraph], answers: GraphAnswers) -> list[Score]:
    """Benchmark score, then category scores: level 1 in order of occurrence, level 2 sorted by name."""
    scores = [score_mean("DPG score", score_prompts(graphs, answers), range(len(graphs)))]
    category_answers = list(iter_category_answers(graphs, answers))
    for level, names in (
        (1, dict.fromkeys(answer.level1 for answer in category_answers)),
        (2, sorted({answer.level2 for answer in category_answers})),
    ):
        for name in names:
            selected = [
                answer for answer in category_answers if (answer.level1 if level == 1 else answer.level2) == name
            ]
            values, rows = [float(answer.is_yes) for answer in selected], [answer.prompt_index for answer in selected]
            scores.append(score_mean(name, values, rows, {"level": level}, binary=True))
    return scores
