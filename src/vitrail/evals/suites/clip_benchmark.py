"""Score the answers of a model to questions about clips, by kind of question, number of frames and context extension.

B clips, Q questions of a clip, S tokens of a turn
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.backbones.context_extension import ExtensionMethod, use_extended_context
from vitrail.data.clips.clip_questions import NUM_QUESTIONS, QUESTION_KINDS, ClipQuestions, get_piece_table
from vitrail.data.clips.clip_source import ClipLayout, ClipSource
from vitrail.data.clips.clip_tokens import ClipTokenizer
from vitrail.errors import ConfigError
from vitrail.evals.scores import Proportion, Score
from vitrail.models.chat_layout import ChatFormat
from vitrail.models.video_rows import VideoRowTemplate, answer_video_turns, build_video_row_template
from vitrail.models.vlm import VLM
from vitrail.processing.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 10
MAX_BATCH_TOKENS = 1 << 16  # of the rows of a batch
NEAR = 0.1  # a time is near if its error is at most this fraction of the clip
NEAR_KIND = "when, near"
BASELINE_CLIPS = 1536  # clips that baselines are fitted to, and as many that they are tested on


class ClipAnswers(NamedTuple):
    """Answers of a model to the questions about some clips of one layout."""

    layout: ClipLayout
    kinds: list[str]
    questions: list[str]
    answers: list[str]
    references: list[str]


class ClipModel(NamedTuple):
    """A model with what is needed to prompt it."""

    model: VLM
    tokenizer: Tokenizer
    chat_format: ChatFormat


def evaluate_clips(
    clip_model: ClipModel,
    source: ClipSource,
    count: int,
    methods: Sequence[ExtensionMethod] = ("none",),
    trained_frames: int = 32,
) -> list[Score]:
    """Score the accuracy by kind of question for each number of frames and each context extension.

    `count` clips of each number of frames have the rates of the source in turn. Clips of more than `trained_frames`
    frames are longer than those of the training: they are scored with every extension. An answer is correct if it
    equals the reference. A time is near if its error is at most a tenth of the clip.
    """
    if count < len(source.config.fps):
        raise ConfigError(f"{count} clips for {len(source.config.fps)} rates", "give at least one clip of each rate")
    tokenizer, scores = ClipTokenizer(clip_model.tokenizer), []
    trained = max(
        _build_template(clip_model, source, ClipLayout(trained_frames, fps), 1).num_positions
        for fps in source.config.fps
    )
    for num_frames in source.config.num_frames:
        layouts = [ClipLayout(num_frames, fps) for fps in source.config.fps]
        baselines = measure_clip_baselines(source, layouts)
        for method in methods if num_frames > trained_frames else ("none",):
            answered = [
                _answer_layout(clip_model, tokenizer, source, layout, range(n, count, len(layouts)), method, trained)
                for n, layout in enumerate(layouts)
            ]
            scores += list(score_clip_answers(answered, baselines, {"frames": num_frames, "context": method}))
    return scores


def _build_template(
    clip_model: ClipModel, source: ClipSource, layout: ClipLayout, turn_length: int
) -> VideoRowTemplate:
    side = source.config.image_size
    return build_video_row_template(
        clip_model.model.config,
        clip_model.tokenizer,
        clip_model.chat_format,
        layout.timestamps,
        (side, side),
        NUM_QUESTIONS,
        turn_length,
    )


def _answer_layout(
    clip_model: ClipModel,
    tokenizer: ClipTokenizer,
    source: ClipSource,
    layout: ClipLayout,
    indices: Sequence[int],
    method: ExtensionMethod,
    trained_positions: int,
) -> ClipAnswers:
    """Answer the questions about the clips of these indices."""
    model, table = clip_model.model, get_piece_table()
    device = model.decoder.embed.weight.device
    result = ClipAnswers(layout, [], [], [], [])
    probe = source.sample_questions(torch.tensor(indices), layout)[1]
    turn_length = tokenizer.measure(probe) + MAX_ANSWER_TOKENS
    template = _build_template(clip_model, source, layout, turn_length).to(device)
    batch_size = max(1, MAX_BATCH_TOKENS // template.num_tokens)
    with use_extended_context(model.decoder, template.num_positions, method, trained_positions):
        for start in range(0, len(indices), batch_size):
            index = torch.tensor(indices[start : start + batch_size], device=device)
            data = source.render_indices(index, layout)
            turns = tokenizer.encode(data.questions, turn_length)
            ids = _remove_answers(turns.ids, turns.question_lengths, tokenizer.eos_token_id)
            answers = answer_video_turns(
                model, template, data.frames, ids, turns.question_lengths, tokenizer.eos_token_id, MAX_ANSWER_TOKENS
            )
            rows = answers.flatten(0, 1).tolist()
            result.answers.extend(clip_model.tokenizer.decode(_until(row, tokenizer.eos_token_id)) for row in rows)
            result.references.extend(table.to_texts(data.questions.answer.flatten(0, 1)))
            result.questions.extend(table.to_texts(data.questions.question.flatten(0, 1)))
            result.kinds.extend(QUESTION_KINDS[kind] for kind in data.questions.kind.flatten().tolist())
    return result


def _remove_answers(ids: Tensor, lengths: Tensor, stop_id: int) -> Tensor:
    place = torch.arange(ids.shape[-1], device=ids.device)
    return torch.where(place < lengths[..., None], ids, stop_id)


def _until(ids: list[int], stop_id: int) -> list[int]:
    return ids[: ids.index(stop_id)] if stop_id in ids else ids


# ---- scores -----------------------------------------------------------------------------------------------------


def score_clip_answers(
    answered: Sequence[ClipAnswers], baselines: dict[str, dict[str, float]], subset: dict[str, str | int]
) -> Iterator[Score]:
    """Yield the accuracy of each kind of question, over all layouts."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for one in answered:
        for kind, answer, reference in zip(one.kinds, one.answers, one.references, strict=True):
            hits[kind].append(answer.strip() == reference)
            if kind == "when":
                hits[NEAR_KIND].append(is_near(answer, reference, one.layout))
    for kind in (*QUESTION_KINDS, NEAR_KIND):
        if hits[kind]:
            proportion = Proportion(sum(hits[kind]), len(hits[kind]))
            score = Score.from_proportion(kind, proportion, **baselines.get(kind, {}))
            yield Score(kind, score.value, score.interval, score.count, score.baselines, subset)


def is_near(answer: str, reference: str, layout: ClipLayout) -> bool:
    """Whether a time in seconds differs from the reference by at most a tenth of the clip."""
    try:
        seconds = float(answer.removesuffix(" seconds"))
    except ValueError:
        return False
    return abs(seconds - float(reference.removesuffix(" seconds"))) <= NEAR * layout.num_frames / layout.fps


def measure_clip_baselines(source: ClipSource, layouts: Sequence[ClipLayout]) -> dict[str, dict[str, float]]:
    """Measure baselines by kind of question: the most frequent answer, and the best answer from the question alone.

    Both know the number of frames and the rate. They are fitted to clips of the training split.
    """
    hits: dict[str, dict[str, list[bool]]] = defaultdict(lambda: {"majority": [], "blind": []})
    for layout in layouts:
        train = ClipSource(source.config.replace(split="train"))
        index = torch.arange(BASELINE_CLIPS // len(layouts))
        common: dict[str, Counter[str]] = defaultdict(Counter)
        by_question: dict[str, Counter[str]] = defaultdict(Counter)
        for kind, question, answer in _list_questions(train.sample_questions(index, layout)[1]):
            common[kind][answer] += 1
            by_question[question][answer] += 1
        for kind, question, answer in _list_questions(source.sample_questions(index, layout)[1]):
            frequent = common[kind].most_common(1)[0][0]
            guess = by_question[question].most_common(1)[0][0] if question in by_question else frequent
            hits[kind]["majority"].append(frequent == answer)
            hits[kind]["blind"].append(guess == answer)
            if kind == "when":
                median = _find_median_time(common["when"])
                hits[NEAR_KIND]["majority"].append(is_near(median, answer, layout))
                hits[NEAR_KIND]["blind"].append(
                    is_near(
                        _find_median_time(by_question[question]) if question in by_question else median, answer, layout
                    )
                )
    return {kind: {name: sum(own) / len(own) for name, own in rows.items()} for kind, rows in hits.items()}


def _list_questions(questions: ClipQuestions) -> Iterator[tuple[str, str, str]]:
    table = get_piece_table()
    texts = (table.to_texts(rows.flatten(0, 1)) for rows in (questions.question, questions.answer))
    kinds = (QUESTION_KINDS[kind] for kind in questions.kind.flatten().tolist())
    yield from zip(kinds, *texts, strict=True)


def _find_median_time(answers: Counter[str]) -> str:
    times = sorted(answers.elements(), key=lambda text: float(text.removesuffix(" seconds")))
    return times[len(times) // 2]
