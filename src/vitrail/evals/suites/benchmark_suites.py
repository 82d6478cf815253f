"""Suites of published benchmarks, which are read from their own files. Each benchmark has a suite with its options."""

import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vitrail.config import list_options
from vitrail.errors import ConfigError
from vitrail.evals.evaluation import BatchedSuite, EvaluationResult, Suite
from vitrail.evals.suites.answer_suites import AnswerSuite
from vitrail.registry import BENCHMARKS, TEXT_BENCHMARKS

if TYPE_CHECKING:
    from vitrail.evals.context import EvalContext
    from vitrail.evals.examples import Example
    from vitrail.evals.suites.benchmarks import Benchmark

FORMAT_OPTIONS = ("image_folder", "video_folder", "annotation_file", "label_file", "instances", "split")
SCORER_OPTIONS = ("mode", "boxes", "tokenizer", "synonyms", "meteor", "clip_model")


class BenchmarkSuite(AnswerSuite, kw_only=True):
    """Evaluate a model on a published benchmark with the benchmark's own scoring.

    data             the file or folder of the benchmark (POPE: three files; MME: a folder), or parquet from the hub
    image_folder     folder of the images. Default: the folder of the file
    video_folder     folder of the videos. Default: the folder of the file
    annotation_file  VQAv2: the file of the answers
    instances        CHAIR: COCO instances
    synonyms         CHAIR: a file with one line an object: its name and synonyms, separated by commas
    split            OCR-VQA: train, val or test, by default test. Conversations: all, train or test, by default all
    limit            maximum number of samples, sampled evenly. Samples that are scored together (both questions about
                     an image of MME, all orders of a choice) count as one
    prompt           prompt instead of the benchmark's own. {question}, {choices} and {hint} are filled in
    blind            also evaluate without images, as a baseline
    circular         ask with every rotation of the options. An answer is right if all rotations are right
    score_by         answers: generated answers. likelihood: the likeliest option; for captions, this is ARO's own rule
    mode             POPE: pope, lmms-eval or vlmevalkit, which parse and count answers differently
    boxes            format of boxes in answers: qwen-vl, qwen2.5-vl, qwen3-vl, internvl, llava or pixels
    tokenizer        captions: plain, or ptb, the tokenizer of COCO, which needs Java
    meteor           captions: also compute METEOR, which needs Java
    clip_model       captions: a contrastive model for CLIPScore and RefCLIPScore: a folder or a hub id
    max_new_tokens   maximum tokens of an answer
    num_frames       frames to sample from each video
    fps              frames to sample from each second of a video. Default: the checkpoint's setting
    chat_template    name of a chat template instead of the checkpoint's
    answers          a JSON Lines file that every answer is appended to. Answers of the same model in it are reused
    batch_size       questions a batch
    """

    output_files = {"page": "An HTML file for the scores, with examples of right, wrong and unparsed answers"}
    benchmark_name: ClassVar[str] = ""

    data: Path
    image_folder: Path | None = None
    video_folder: Path | None = None
    annotation_file: Path | None = None
    instances: Path | None = None
    synonyms: Path | None = None
    split: str | None = None
    limit: int | None = None
    prompt: str | None = None
    blind: bool = True
    circular: bool = False
    score_by: Literal["answers", "likelihood"] = "answers"
    mode: str | None = None
    boxes: str | None = None
    tokenizer: str | None = None
    meteor: bool = False
    clip_model: str | None = None
    max_new_tokens: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    chat_template: str | None = None
    answers: Path | None = None
    batch_size: int = 16

    @classmethod
    def has_option(cls, name: str) -> bool:
        from vitrail.evals.suites.benchmarks import expand_circular

        benchmark: Benchmark = BENCHMARKS[cls.benchmark_name]
        known = (*benchmark.list_format_options(), *benchmark.list_scorer_options())
        applies = {option: option in known for option in (*FORMAT_OPTIONS, *SCORER_OPTIONS)}
        applies |= {
            "circular": benchmark.expand_samples is expand_circular,
            "score_by": bool(benchmark.likelihood_prompt),
            "num_frames": "video_folder" in known,
            "fps": "video_folder" in known,
            "clip_model": "clip" in known,
        }
        return applies.get(name, True)

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.metrics.clip_score import ClipCaptionScorer

        benchmark: Benchmark = BENCHMARKS[self.benchmark_name]
        format_options, scorer_options = split_options(self, benchmark)
        benchmark.check_options(scorer_options | ({} if self.clip_model is None else {"clip": self.clip_model}))
        samples = benchmark.load_samples(self.data, limit=self.limit, circular=self.circular, **format_options)
        # Errors in data, prompts and scoring are raised before weights are loaded.
        samples.check()
        video_options = self._check_video_options(context, bool(samples[0].videos))
        benchmark.build_question(samples[0], self.prompt)
        benchmark.score(samples, [""] * len(samples), **scorer_options)
        self._check_likelihood_options(benchmark)
        clip = None
        if self.clip_model is not None:
            clip = ClipCaptionScorer(context.open(self.clip_model).load_embedder(), samples)
        ask = self._build_asker(context, benchmark, samples, video_options)
        answers, blind_answers = ask(False), ask(True) if self.blind else None
        scored = scorer_options | ({} if clip is None else {"clip": clip})
        scores = benchmark.score(samples, answers, blind_answers, **scored)
        default_prompt = benchmark.likelihood_prompt if self.score_by == "likelihood" else benchmark.prompt
        settings: dict[str, Any] = {
            "data": self.data,
            "by": self.score_by,
            "prompt": self.prompt or default_prompt,
            "limit": self.limit,
            "circular": self.circular,
            "max_new_tokens": self.max_new_tokens,
            **format_options,
            **scorer_options,
            **video_options,
            **self.reduction_settings,
        }
        settings |= {"skipped": samples.skipped} if samples.skipped else {}
        settings |= {} if clip is None else {"clip": {"model": self.clip_model, **clip.embedder.describe_inputs()}}

        def load_examples() -> "list[Example]":
            from vitrail.evals.examples import select_examples

            questions = [benchmark.build_question(sample, self.prompt) for sample in samples]
            grades = benchmark.grade_answers(samples, answers, **scorer_options)
            return select_examples(samples, questions, answers, grades, blind_answers)

        return EvaluationResult(
            scores,
            settings,
            [str(samples)] if samples.skipped else [],
            "" if clip is None else clip.embedder.truncation_warning,
            load_examples,
        )

    def _build_asker(
        self, context: "EvalContext", benchmark: "Benchmark", samples: Any, video_options: Mapping[str, Any]
    ) -> Callable[[bool], list[str]]:
        """Load the model; return a function that answers all samples, with or without their images."""
        from vitrail.evals.suites.generation import generate_answers
        from vitrail.evals.suites.likelihood_choice import choose_by_likelihood

        model, answer_batch, blank_media = context.load_benchmark_answer_model(self.chat_template, self.reduction)
        name = context.name if self.chat_template is None else f"{context.name} ({self.chat_template})"
        files: dict[str, Any] = {
            "answers_file": self.answers,
            "model_name": self.label_model(name),
            "no_images": blank_media,
            "batch_size": self.batch_size,
        }

        def ask(blind: bool) -> list[str]:
            if self.score_by == "likelihood":
                return choose_by_likelihood(
                    model.loglikelihoods, benchmark, samples, prompt=self.prompt, blind=blind, **files
                )
            options: dict[str, Any] = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
            if blind or not samples[0].videos:
                options["answer_batch"] = answer_batch
            else:  # videos are evaluated one at a time
                options |= video_options
            return generate_answers(
                model, samples, lambda sample: benchmark.build_question(sample, self.prompt), blind=blind,
                **files, **options,
            )  # fmt: skip

        return ask

    def _check_video_options(self, context: "EvalContext", has_videos: bool) -> dict[str, Any]:
        """Return the options that set how many frames of a video are read."""
        chosen = (("num_frames", self.num_frames), ("fps", self.fps))
        options = {name: value for name, value in chosen if value is not None}
        if options and not has_videos:
            raise ConfigError("--num-frames and --fps need videos, but the benchmark has none", "remove them")
        if len(options) > 1:
            raise ConfigError("--num-frames and --fps exclude each other", "give one of the two")
        if has_videos and not context.takes_videos:
            raise ConfigError(f"{context.name} does not support videos", "use a vision-language model such as Qwen3-VL")
        return options

    def _check_likelihood_options(self, benchmark: "Benchmark") -> None:
        if self.score_by != "likelihood":
            return
        if not benchmark.likelihood_prompt:
            raise ConfigError(
                f"--score-by likelihood needs options, but {benchmark.format} has none", "remove --score-by"
            )
        if self.max_new_tokens is not None:
            raise ConfigError("--score-by likelihood generates no text", "remove --max-new-tokens")


class TextBenchmarkSuite(BatchedSuite, kw_only=True):
    """Choose among continuations by likelihood, with the prompts and scores of lm-evaluation-harness.

    acc selects the option with the largest log-likelihood, acc_norm the largest log-likelihood a character.

    data        the file or folder of the benchmark, or parquet from the hub
    label_file  PIQA, Social IQa, WinoGrande: the file of the answers, if it is not beside the data
    limit       maximum number of samples, sampled evenly
    blind       also score the options without their question, as a baseline
    answers     a JSON Lines file that the likelihoods of every sample are appended to. Results of the same model in it
                are reused
    batch_size  questions a batch
    """

    model_description = (
        "A language model, or a vision-language or unified model, whose decoder is used. A folder, a file, a hub id, "
        "stories15M or smollm2-135m."
    )
    output_files = {"page": "An HTML file for the scores, with examples of right and wrong choices"}
    benchmark_name: ClassVar[str] = ""

    data: Path
    label_file: Path | None = None
    limit: int | None = None
    blind: bool = True
    answers: Path | None = None
    batch_size: int = 16

    @classmethod
    def has_option(cls, name: str) -> bool:
        benchmark: Benchmark = TEXT_BENCHMARKS[cls.benchmark_name].benchmark
        return name != "label_file" or name in benchmark.list_format_options()

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.suites.text_benchmarks import score_continuations

        text_benchmark = TEXT_BENCHMARKS[self.benchmark_name]
        benchmark: Benchmark = text_benchmark.benchmark
        samples = benchmark.load_samples(self.data, limit=self.limit, **split_options(self, benchmark)[0])
        # Errors in data and scoring are raised before weights are loaded.
        samples.check()
        benchmark.score(samples, [next(iter(sample.choices)) for sample in samples])
        scorer = context.load_continuation_scorer()

        def ask(blind: bool) -> list[str]:
            return score_continuations(
                scorer.score_texts,
                text_benchmark,
                samples,
                batch_size=self.batch_size,
                blind=blind,
                answers_file=self.answers,
                model_name=context.name,
            )

        answers, blind_answers = ask(False), ask(True) if self.blind else None
        settings = {"data": self.data, "labels": self.label_file, "prompt": benchmark.prompt, "limit": self.limit}
        warning = f"{scorer.num_truncated:,} texts exceed the context and are truncated on the left"

        def load_examples() -> "list[Example]":
            from vitrail.evals.examples import select_examples
            from vitrail.evals.metrics.likelihood_metrics import choose_letter

            questions = [benchmark.build_question(sample, f"{benchmark.prompt}\n{{choices}}") for sample in samples]
            letters = [choose_letter(answer, sample) for answer, sample in zip(answers, samples, strict=True)]
            return select_examples(samples, questions, letters, benchmark.grade_answers(samples, letters))

        return EvaluationResult(
            benchmark.score(samples, answers, blind_answers),
            settings | {"texts_cut": scorer.num_truncated},
            warning=warning if scorer.num_truncated else "",
            load_examples=load_examples,
        )


def split_options(suite: Suite, benchmark: "Benchmark") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are given for the file format, and those for the scorer."""

    def given(*names: str) -> dict[str, Any]:
        values = {each.name: getattr(suite, each.name) for each in list_options(type(suite)) if each.name in names}
        defaults = {each.name: each.default for each in list_options(type(suite))}
        return {name: values[name] for name in names if name in values and values[name] != defaults[name]}

    scorer_options = dict.fromkeys([*SCORER_OPTIONS, *benchmark.list_scorer_options()])
    scorer_options.pop("clip_model", None)
    return given(*dict.fromkeys([*FORMAT_OPTIONS, *benchmark.list_own_format_options()])), given(*scorer_options)


def make_benchmark_suite(name: str) -> type[Suite]:
    """Make the suite of a benchmark: the options of all benchmarks, and those that only this one has."""
    base = BenchmarkSuite if name in BENCHMARKS else TextBenchmarkSuite
    benchmark: Benchmark = BENCHMARKS[name] if base is BenchmarkSuite else TEXT_BENCHMARKS[name].benchmark
    known = (*base.__struct_fields__, "clip")
    parameters = {**benchmark.list_own_format_options(), **benchmark.list_scorer_options()}
    own = [each for each in parameters.values() if each.name not in known]
    docs = [inspect.getdoc(part) or "" for part in (base, benchmark.open_samples, benchmark.scorer) if part is not None]
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": "\n\n".join(docs),
        "__annotations__": {each.name: each.annotation for each in own},
        "benchmark_name": name,
        "example": f"vitrail eval MODEL {name} --data FILE",
        **{each.name: each.default for each in own if each.default is not each.empty},
    }
    return types.new_class(name, (base,), {"kw_only": True}, lambda body: body.update(namespace))
