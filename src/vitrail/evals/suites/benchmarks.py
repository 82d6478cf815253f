"""Registry of published benchmarks, read from their original files: prompts, scorers and baselines of each."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats import FORMATS, Sample, SampleDataset, open_dataset
from vitrail.data.formats.sample import build_question_turns
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.metrics import (
    aro_metrics,
    box_metrics,
    caption_metrics,
    chair_metrics,
    choice_metrics,
    moment_metrics,
    short_answer_metrics,
    yesno_metrics,
)
from vitrail.evals.metrics.choice_metrics import rotate_choices
from vitrail.evals.metrics.final_answer import extract_final_answer
from vitrail.evals.metrics.open_answer_metrics import open_answer_accuracy
from vitrail.evals.metrics.paired_comparison import PairedComparison, compare_paired
from vitrail.evals.metrics.scoring_table import ScoringTable
from vitrail.evals.scores import Score
from vitrail.evals.suites.image_collections import sample_rows
from vitrail.registry import BENCHMARKS, TEXT_BENCHMARKS

QUESTION_PROMPT = "{question}"
SHORT_ANSWER_PROMPT = "{question}\nAnswer the question using a single word or phrase."
YES_NO_PROMPT = "{question}\nPlease answer yes or no."
CHOICE_PROMPT = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
CAPTION_FIT_QUESTION = "Which caption fits the picture?"
CAPTION_PROMPT = "Provide a one-sentence caption for the picture."
MOMENT_PROMPT = """When does this happen in the video: {question}
Answer with its start and end in seconds, in the form: start - end seconds"""

BaselineAnswers = Callable[[ScoringTable], list[str]]


class ModelComparison(NamedTuple):
    """Comparison of two models on all samples or on a subset: both means, and the paired difference."""

    title: str
    first: float
    second: float
    difference: PairedComparison


class Benchmark(NamedTuple):
    """How a benchmark is loaded, prompted and scored.

    format             name of the file format
    prompt             prompt template with the fields {question}, {choices} and {hint}
    scorer             function from answers to scores, with its own options
    score_items        function from answers to one value per item, for paired comparisons
    baselines          functions that give answers without a model
    expand_samples     function from the samples of the file to the samples that are asked
    open_samples       function that opens the data, if a format is not enough
    group_key          key of samples that are scored together; a limit takes whole groups
    subset_key         metadata key of the subsets in comparisons
    find_unparsed      function that marks answers that cannot be parsed
    likelihood_prompt  prompt template of choice by likelihood; empty if not supported
    open_prompt        prompt template of samples without options, if others have options
    """

    format: str
    prompt: str
    scorer: Callable[..., list[Score]]
    score_items: Callable[..., list[float]] | None = None
    baselines: Mapping[str, BaselineAnswers] = {"majority": short_answer_metrics.majority_answers}
    expand_samples: Callable[..., SampleDataset] | None = None
    open_samples: Callable[..., SampleDataset] | None = None
    group_key: Callable[[Sample], Hashable] | None = None
    subset_key: str = ""
    find_unparsed: Callable[..., list[bool]] | None = None
    likelihood_prompt: str = ""
    open_prompt: str = ""

    def load_samples(
        self, path: str | Path, *, limit: int | None = None, circular: bool = False, **options: Any
    ) -> SampleDataset:
        """Load the samples that are asked.

        limit     draw at most this many samples, or groups of samples that are scored together
        circular  ask each multiple-choice question once per rotation of its options
        options   options of the file format
        """
        samples = (
            self.open_samples(path, **options) if self.open_samples else open_dataset(self.format, path, **options)
        )
        if limit is not None:
            samples = samples.select(self._select_samples(samples, limit))
        if circular and self.expand_samples is not expand_circular:
            raise ConfigError(f"{self.format} is not multiple choice, so circular does not apply", "remove circular")
        if self.expand_samples is expand_circular:
            return expand_circular(samples, all_orders=circular)
        return self.expand_samples(samples) if self.expand_samples else samples

    def _select_samples(self, samples: SampleDataset, limit: int) -> list[int]:
        if self.group_key is None:
            return sample_rows(len(samples), limit)
        groups: dict[Hashable, list[int]] = {}
        for n, sample in enumerate(samples):
            groups.setdefault(self.group_key(sample), []).append(n)
        rows = list(groups.values())
        return sorted(n for row in sample_rows(len(rows), limit) for n in rows[row])

    def build_question(self, sample: Sample, prompt: str | None = None) -> str:
        """Fill in the prompt of a sample."""
        values = {
            "question": sample.turns[0].text if sample.turns else "",
            "choices": "\n".join(f"{letter}. {text}" for letter, text in sample.choices.items()),
            "hint": sample.hint,
        }
        try:
            template = self.open_prompt if self.open_prompt and not sample.choices else self.prompt
            text = (template if prompt is None else prompt).format(**values)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            fields = ", ".join(f"{{{name}}}" for name in values)
            raise ConfigError(f"the prompt {prompt!r} cannot be formatted: {error}", f"use only {fields}") from None
        return f"{sample.hint}\n{text}" if sample.hint and prompt is None else text

    def score(
        self,
        samples: Sequence[Sample],
        answers: Sequence[str],
        blind_answers: Sequence[str] | None = None,
        **options: Any,
    ) -> list[Score]:
        """Score answers, one per sample in order, with the scores of all baselines.

        `blind_answers` are the model's answers without images, a further baseline. Reasoning before the final answer is
        ignored.
        """
        self.check_options(options)
        sheet = ScoringTable.from_samples(samples)
        baseline_answers = {name: make_answers(sheet) for name, make_answers in self.baselines.items()}
        baseline_answers |= (
            {} if blind_answers is None else {"blind": [extract_final_answer(text) for text in blind_answers]}
        )
        answers = [extract_final_answer(text) for text in answers]
        for name, texts in {"answers": answers, **baseline_answers}.items():
            if len(texts) != len(sheet):
                raise DataError(f"{len(texts):,} {name} to {len(sheet):,} samples", "pass one answer per sample")
        baseline_scores: dict[str, dict[str, float]] = {}
        for name, texts in baseline_answers.items():
            for score in self.scorer(sheet, texts, **options):
                baseline_scores.setdefault(score.title, {})[name] = score.value
        scores = self.scorer(sheet, answers, **options)
        return [
            replace(score, baselines={**score.baselines, **baseline_scores.get(score.title, {})}) for score in scores
        ]

    def compare(
        self, samples: Sequence[Sample], first: Sequence[str], second: Sequence[str], **options: Any
    ) -> PairedComparison:
        """Compare two models' answers to the same samples.

        The bootstrap draws images if several questions are about one image.
        """
        return self.compare_subsets(samples, first, second, **options)[0].difference

    def compare_subsets(
        self, samples: Sequence[Sample], first: Sequence[str], second: Sequence[str], **options: Any
    ) -> list[ModelComparison]:
        """Compare two models on all samples, and on each subset if there are several."""
        if self.score_items is None:
            raise ConfigError(f"{self.format} has no score per sample", "compare the scores of both models")
        self.check_options(options)
        sheet = ScoringTable.from_samples(samples)
        values = [self._item_scores(sheet, texts, options) for texts in (first, second)]
        subset_values = sheet.get_metadata(self.subset_key) if self.subset_key else []
        parts = [part for part in dict.fromkeys(subset_values) if part]
        rows = {"": list(range(len(sheet)))}
        for part in parts if len(parts) > 1 else ():
            rows[f"{self.subset_key} {part}"] = [n for n, value in enumerate(subset_values) if value == part]
        comparisons = []
        for title, rows_of_subset in rows.items():
            image_keys = [sheet.image_keys[n] for n in rows_of_subset]
            a, b = ([item_values[n] for n in rows_of_subset] for item_values in values)
            groups = image_keys if len(set(image_keys)) < len(image_keys) else None
            comparisons.append(
                ModelComparison(title or "all", sum(a) / len(a), sum(b) / len(b), compare_paired(a, b, groups))
            )
        return comparisons

    def grade_answers(
        self, samples: Sequence[Sample], answers: Sequence[str], **options: Any
    ) -> list[tuple[str, float | None]]:
        """Grade each answer "right", "wrong" or "unread", with its item score. Captions are not graded."""
        if self.score_items is None:
            return [("", None)] * len(answers)
        sheet = ScoringTable.from_samples(samples)
        values = self._item_scores(sheet, answers, options)
        if self.score_items is caption_metrics.caption_ciders:
            return [("", value) for value in values]
        final_answers = [extract_final_answer(text) for text in answers]
        unparsed = (
            [False] * len(answers)
            if self.find_unparsed is None
            else self.find_unparsed(sheet, final_answers, **options)
        )
        grades = (
            "unread" if is_unparsed else "right" if value >= 0.5 else "wrong"
            for is_unparsed, value in zip(unparsed, values, strict=True)
        )
        return list(zip(grades, values, strict=True))

    def _item_scores(self, table: ScoringTable, answers: Sequence[str], options: Mapping[str, Any]) -> Sequence[float]:
        """Item scores of answers, with the options that the item scorer accepts."""
        assert self.score_items is not None
        accepted = inspect.signature(self.score_items).parameters
        final_answers = [extract_final_answer(text) for text in answers]
        return self.score_items(
            table, final_answers, **{name: option for name, option in options.items() if name in accepted}
        )

    def list_scorer_options(self) -> dict[str, inspect.Parameter]:
        """List the options of the scorer."""
        return dict(list(inspect.signature(self.scorer, eval_str=True).parameters.items())[2:])

    def list_own_format_options(self) -> dict[str, inspect.Parameter]:
        """List the options of `open_samples`."""
        if self.open_samples is None:
            return {}
        parameters = list(inspect.signature(self.open_samples, eval_str=True).parameters.values())[1:]
        return {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD}

    def list_format_options(self) -> list[str]:
        """List the names of the options of `load_samples` that depend on the file format."""
        known = FORMATS[self.format].list_options() if self.format in FORMATS else []
        return [*self.list_own_format_options(), *known]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise an error for options that the scorer does not have, or for missing required options."""
        parameters = self.list_scorer_options()
        for name in options:
            if name not in parameters:
                remedy = suggest_name(name, parameters) if parameters else "remove it"
                raise ConfigError(f"scoring {self.format} has no option {name!r}", remedy)
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in options:
                raise ConfigError(f"scoring {self.format} needs the option {name}", f"set {name}")


def get_benchmark(name: str) -> Benchmark:
    """Get an image or text benchmark by name."""
    if name in TEXT_BENCHMARKS:
        return TEXT_BENCHMARKS[name].benchmark
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}", suggest_name(name, [*BENCHMARKS, *TEXT_BENCHMARKS]))
    return BENCHMARKS[name]


# ---- expansion of samples ---------------------------------------------------------------------------------------


def expand_circular(samples: SampleDataset, all_orders: bool = False) -> SampleDataset:
    """Expand each question to all rotations of its options, or keep it as it is.

    `metadata["circle"]` is equal for all rotations of a question. MMBench's files also contain rotations, with ids
    1,000,000 apart.
    """
    rows = [(n, 0) for n in range(len(samples))]
    if all_orders:
        rows = [(n, turn) for n, sample in enumerate(samples) for turn in range(max(1, len(sample.choices)))]

    def make(row: tuple[int, int]) -> Sample:
        sample, turn = samples[row[0]], row[1]
        notes = {**sample.metadata, "circle": _circle_key(sample)}
        if not turn:
            return replace(sample, metadata=notes)
        if not sample.answers:
            raise DataError(f"sample {sample.id!r} has no reference answer", "disable circular")
        options, right = rotate_choices(sample.choices, sample.answers[0], turn)
        return replace(sample, id=f"{sample.id}+{turn}", choices=options, answers=(right,), metadata=notes)

    return SampleDataset(samples.format_name, samples.path, rows, make)


def _circle_key(sample: Sample) -> tuple[str, str]:
    number = str(int(sample.id) % 1_000_000) if sample.id.isdecimal() else sample.id
    return number, sample.turns[0].text


def _question_set_key(sample: Sample) -> str:
    """Key of HallusionBench question sets."""
    return str(sample.metadata["question"]).rpartition("_")[0]


def _letter_options(options: Sequence[str]) -> dict[str, str]:
    first, second = options
    return {"A": first, "B": second}


def _expand_winoground(samples: SampleDataset) -> SampleDataset:
    """Expand Winoground samples to four choices: the caption of each image, and the image of each caption."""
    rows = [(n, side, which) for n in range(len(samples)) for side in ("text", "image") for which in (0, 1)]

    def make(row: tuple[int, str, int]) -> Sample:
        sample, side, which = samples[row[0]], row[1], row[2]
        question, options, images = CAPTION_FIT_QUESTION, sample.captions, sample.images[which : which + 1]
        if side == "image":
            question = f"Which of the two pictures fits the caption: {sample.captions[which]}"
            options, images = ("the first picture", "the second picture"), sample.images
        notes = {**sample.metadata, "example": sample.id, "side": side}
        if side == "image":
            notes["fits"] = sample.captions[which]
        return Sample(
            id=f"{sample.id}/{side}/{which}", images=images, turns=build_question_turns(question, len(images)),
            choices=_letter_options(options), answers=("AB"[which],), metadata=notes,
        )  # fmt: skip

    return SampleDataset(samples.format_name, samples.path, rows, make)


def _expand_aro(samples: SampleDataset) -> SampleDataset:
    """Expand ARO samples to choices between captions; the true caption is first in every other sample."""

    def make(n: int) -> Sample:
        sample = samples[n]
        options = sample.captions if n % 2 == 0 else sample.captions[::-1]
        right = "AB"[n % 2]
        return replace(
            sample,
            captions=(),
            turns=build_question_turns(CAPTION_FIT_QUESTION),
            choices=_letter_options(options),
            answers=(right,),
        )

    return SampleDataset(samples.format_name, samples.path, range(len(samples)), make)


def _open_captions_with_objects(
    path: str | Path, *, instances: str | Path | None = None, **options: Any
) -> SampleDataset:
    """Open COCO captions with the instance annotations of the same images."""
    if instances is None:
        raise ConfigError("CHAIR needs the objects in the images", "pass COCO's instances_*.json as instances")
    captioned = open_dataset("coco-captions", path, **options)
    instances_of = {sample.id: sample.instances for sample in open_dataset("coco-instances", instances, **options)}

    def make(sample: Sample) -> Sample:
        if sample.id not in instances_of:
            raise DataError(f"image {sample.id} of {path} is not in {instances}", "use the file of the same split")
        return replace(sample, instances=instances_of[sample.id])

    return SampleDataset("coco-captions", Path(path), list(captioned), make)


# ---- registry ---------------------------------------------------------------------------------------------------

_YES_BASELINE = {"always yes": yesno_metrics.always_yes_answers}
_OTHER_IMAGE_BASELINE = {"of another picture": caption_metrics.next_image_captions}
_SPAN_BASELINES = {
    "whole video": moment_metrics.build_whole_video_answers,
    "middle half": moment_metrics.middle_half_answers,
    "majority": moment_metrics.majority_answers,
}


def _short_answer_benchmark(
    format_name: str,
    name: str,
    score_items: Callable[..., list[float]],
    subset_key: str = "",
    *,
    prompt: str = SHORT_ANSWER_PROMPT,
    subset_name: str = "",
    binary: bool = False,
) -> Benchmark:
    """Benchmark of the mean of an item score, named `name`, on all items and for each value of `subset_key`."""
    scorer = short_answer_metrics.make_mean_scorer(
        name, score_items, subset_name or subset_key, subset_key, binary=binary
    )
    return Benchmark(format_name, prompt, scorer, score_items, subset_key=subset_key)


def _yesno_benchmark(
    format_name: str, prompt: str, scorer: Callable[..., list[Score]], score_items: Callable[..., list[float]],
    find_unparsed: Callable[..., list[bool]], **options: Any,
) -> Benchmark:  # fmt: skip
    return Benchmark(format_name, prompt, scorer, score_items, _YES_BASELINE, find_unparsed=find_unparsed, **options)


def _choice_benchmark(
    format_name: str,
    scorer: Callable[..., list[Score]],
    subset_key: str,
    score_items: Callable[..., list[float]] = choice_metrics.choice_correct,
    **options: Any,
) -> Benchmark:
    """Benchmark of multiple choice."""
    return Benchmark(
        format_name,
        CHOICE_PROMPT,
        scorer,
        score_items,
        subset_key=subset_key,
        find_unparsed=choice_metrics.find_unparsed_choices,
        **options,
    )


def _mixed_choice_benchmark(format_name: str, rule: choice_metrics.AnswerRule) -> Benchmark:
    """Benchmark of multiple choice that also has open questions, scored by `rule`."""
    return _choice_benchmark(
        format_name,
        choice_metrics.make_mixed_scorer(rule),
        "category",
        choice_metrics.make_choice_scorer(rule),
        expand_samples=expand_circular,
        group_key=_circle_key,
        open_prompt=SHORT_ANSWER_PROMPT,
    )


def _moment_benchmark(format_name: str) -> Benchmark:
    return Benchmark(
        format_name,
        MOMENT_PROMPT,
        moment_metrics.score_moments,
        moment_metrics.span_ious,
        _SPAN_BASELINES,
        find_unparsed=moment_metrics.find_missing_spans,
    )


BENCHMARKS.register(
    "vqav2",
    _short_answer_benchmark("vqa", "accuracy", short_answer_metrics.vqa_scores, "answer_type", subset_name="answers"),
)
BENCHMARKS.register("textvqa", _short_answer_benchmark("textvqa", "accuracy", short_answer_metrics.vqa_scores))
BENCHMARKS.register("gqa", _short_answer_benchmark("gqa", "accuracy", short_answer_metrics.exact_scores, binary=True))
BENCHMARKS.register("docvqa", _short_answer_benchmark("docvqa", "ANLS", short_answer_metrics.anls_scores))
BENCHMARKS.register(
    "chartqa",
    _short_answer_benchmark("chartqa", "relaxed accuracy", short_answer_metrics.relaxed_scores, binary=True),
)
BENCHMARKS.register(
    "ocrbench",
    _short_answer_benchmark(
        "ocrbench", "accuracy", short_answer_metrics.containment_scores, "type", prompt=QUESTION_PROMPT, binary=True
    ),
)
BENCHMARKS.register(
    "ocrvqa", _short_answer_benchmark("ocrvqa", "accuracy", short_answer_metrics.verbatim_scores, binary=True)
)
BENCHMARKS.register(
    "pope",
    _yesno_benchmark(
        "pope",
        YES_NO_PROMPT,
        yesno_metrics.score_pope,
        yesno_metrics.yesno_scores,
        yesno_metrics.find_unparsed_yesno,
        subset_key="split",
    ),
)
BENCHMARKS.register(
    "mme",
    _yesno_benchmark(
        "mme",
        QUESTION_PROMPT,
        yesno_metrics.score_mme,
        yesno_metrics.mme_scores,
        yesno_metrics.find_unparsed_mme,
        group_key=lambda sample: sample.images,
        subset_key="category",
    ),
)
BENCHMARKS.register(
    "hallusionbench",
    _yesno_benchmark(
        "hallusion",
        YES_NO_PROMPT,
        yesno_metrics.score_hallusion,
        yesno_metrics.hallusion_scores,
        yesno_metrics.find_unparsed_hallusion,
        group_key=_question_set_key,
    ),
)
BENCHMARKS.register(
    "mmbench",
    _choice_benchmark(
        "mmbench",
        choice_metrics.score_choices,
        "category",
        expand_samples=expand_circular,
        group_key=_circle_key,
        likelihood_prompt=QUESTION_PROMPT,
    ),
)
BENCHMARKS.register("mmmu", _mixed_choice_benchmark("mmmu", open_answer_accuracy))
BENCHMARKS.register("realworldqa", _mixed_choice_benchmark("realworldqa", short_answer_metrics.exact_match))
BENCHMARKS.register(
    "winoground",
    _choice_benchmark(
        "winoground",
        choice_metrics.score_winoground_choices,
        "side",
        expand_samples=_expand_winoground,
        likelihood_prompt=CAPTION_PROMPT,
    ),
)
BENCHMARKS.register(
    "aro",
    _choice_benchmark(
        "aro", aro_metrics.score_kinds, "part", expand_samples=_expand_aro, likelihood_prompt=CAPTION_PROMPT
    ),
)
BENCHMARKS.register(
    "captions",
    Benchmark(
        "coco-captions",
        CAPTION_PROMPT,
        caption_metrics.score_captions,
        caption_metrics.caption_ciders,
        _OTHER_IMAGE_BASELINE,
    ),
)
BENCHMARKS.register(
    "chair",
    Benchmark(
        "coco-captions",
        "Please describe the picture in detail.",
        chair_metrics.score_chair,
        None,
        _OTHER_IMAGE_BASELINE,
        open_samples=_open_captions_with_objects,
    ),
)
BENCHMARKS.register(
    "refcoco",
    Benchmark(
        "refcoco",
        'Locate "{question}" and give its box as JSON: {{"bbox_2d": [x1, y1, x2, y2]}}',
        box_metrics.score_boxes,
        box_metrics.box_ious,
        {},
        find_unparsed=box_metrics.find_missing_boxes,
    ),
)
BENCHMARKS.register("charades", _moment_benchmark("charades-sta"))
BENCHMARKS.register("qvhighlights", _moment_benchmark("qvhighlights"))
BENCHMARKS.register("activitynet", _moment_benchmark("activitynet-captions"))
