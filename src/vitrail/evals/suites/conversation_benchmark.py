"""Benchmark of one's own conversations: the answers of a model against the assistant's turns of a file."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Literal

from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import Sample, SampleDataset
from vitrail.data.formats.sample import ContentPart, Turn, build_question_turns
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, score_by_subset
from vitrail.evals.metrics.short_answer_metrics import contains_answer, exact_match
from vitrail.evals.scores import Score
from vitrail.evals.suites.benchmarks import QUESTION_PROMPT, Benchmark
from vitrail.registry import BENCHMARKS

METRICS = {"exact": exact_match, "contains": contains_answer}
MAX_QUESTION_SUBSETS = 10  # files with more different questions have one score


def open_questions(
    path: str | Path, *, split: str | None = None, image_folder: str | Path | None = None
) -> SampleDataset:
    """Open conversations as questions: one for every turn of the user, without the earlier turns.

    The file has LLaVA's format, or any other with questions and answers. The split is that of the data source
    `conversations`.
    """
    source = ConversationSource(
        ConversationsConfig.from_dict(
            {
                "path": str(path),
                "split": split or "all",
                "image_folder": None if image_folder is None else str(image_folder),
            }
        )
    )
    rows = []
    for item in range(len(source)):
        turns = source[item].turns
        if turns[0].role == "system":
            raise DataError(
                f"{path}: sample {source[item].id} has a system message, which this benchmark cannot use",
                "remove the system messages",
            )
        rows += [(item, number) for number in range(0, len(turns) - 1, 2) if turns[number + 1].text.strip()]
    questions = {source[item].turns[number].text.strip() for item, number in rows}
    has_subsets = len(questions) <= MAX_QUESTION_SUBSETS

    def make(row: tuple[int, int]) -> Sample:
        item, number = row
        sample = source[item]
        question = sample.turns[number].text.strip()
        media_parts = [part for turn in sample.turns[: number + 1] for part in turn.parts if part.kind != "text"]
        images = tuple(sample.images[part.index] for part in media_parts if part.kind == "image")
        videos = tuple(sample.videos[part.index] for part in media_parts if part.kind == "video")
        return Sample(
            id=f"{sample.id}/{number // 2}",
            images=images,
            videos=videos,
            turns=_build_turns(question, media_parts),
            answers=(sample.turns[number + 1].text.strip(),),
            metadata={"question": question} if has_subsets else {},
        )

    return SampleDataset(source.samples.format_name, Path(path), rows, make)


def _build_turns(question: str, media: list[ContentPart]) -> tuple[Turn, ...]:
    """Build a question after its images and videos."""
    if all(part.kind == "image" for part in media):
        return build_question_turns(question, len(media))
    return (Turn("user", (*media, ContentPart("text", question))),)


def score_answers(
    table: ScoringTable, answers: AnswerTexts, *, match: Literal["exact", "contains"] = "exact"
) -> list[Score]:
    """Score the accuracy of all answers, and of the answers to each question if there are few different ones.

    match  exact: an answer is right if it equals the assistant's turn, ignoring case and a final full stop. contains:
           if it contains the assistant's turn, ignoring case
    """
    values = grade_answers(table, answers, match=match)
    return score_by_subset("accuracy", values, table, "question", table.get_metadata("question"), binary=True)


def grade_answers(table: ScoringTable, answers: AnswerTexts, *, match: str = "exact") -> ItemScores:
    if match not in METRICS:
        raise ConfigError(f"match is {match!r}", f"known: {', '.join(METRICS)}")
    return [METRICS[match](answer, references) for answer, references in zip(answers, table.references, strict=True)]


def find_most_common_answers(table: ScoringTable) -> list[str]:
    """Baseline: the most common answer to the same question."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    questions = table.get_metadata("question")
    for question, (reference, *_) in zip(questions, table.references, strict=True):
        counts[question][reference] += 1
    return [counts[question].most_common(1)[0][0] for question in questions]


BENCHMARKS.register(
    "conversations",
    Benchmark(
        "llava",
        QUESTION_PROMPT,
        score_answers,
        grade_answers,
        {"majority": find_most_common_answers},
        open_samples=open_questions,
        subset_key="question",
    ),
)
