"""Suites of models that answer questions about images: `questions`, `stress` and `naming`."""

from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.evaluation import BatchedSuite, EvaluationResult
from vitrail.evals.suites.scene_options import SceneSuite, check_question_kinds, resolve_things
from vitrail.registry import SUITES

if TYPE_CHECKING:
    from vitrail.connectors.feature_reduction import AnyReductionConfig
    from vitrail.data.language import SceneLanguage
    from vitrail.data.scenes.scene_source import SceneSource
    from vitrail.evals.context import EvalContext

ANSWER_MODEL = "A unified model or a vision-language model: a folder or a hub id."
SCENE_PAGE = {"page": "An HTML file for the scores, with right and wrong answers of each kind"}
DEFAULT_KINDS = (
    "existence_random", "existence_popular", "existence_adversarial", "counting", "colour", "position", "relation",
    "what", "reading", "unanswerable_colour", "unanswerable_position",
    "unanswerable_relation",
)  # fmt: skip

Reduction = Literal["vispruner", "visionzip", "pool"]


class TokenReduction:
    """What suites do with their options `reduce` and `keep`, which reduce the image tokens of a model."""

    __slots__ = ()

    reduce: Reduction | None
    keep: int | None

    @property
    def reduction(self) -> "AnyReductionConfig | None":
        from vitrail.connectors.feature_reduction import make_reduction_config

        return make_reduction_config(self.reduce, self.keep)

    @property
    def reduction_settings(self) -> dict[str, Any]:
        """The options as they are saved with the scores."""
        return {} if self.reduce is None else {"reduce": self.reduce, "keep": self.keep}

    def label_model(self, model: str) -> str:
        """Return the name of the model in answer files, with the reduction."""
        return model if self.reduce is None else f"{model} ({self.reduce}, {self.keep})"


class AnswerSuite(TokenReduction, BatchedSuite):
    """A suite of a model that answers questions.

    reduce  method that removes vision features before the connector. Needs keep
    keep    number of tokens that remain of each view of an image
    """

    model_description = ANSWER_MODEL

    reduce: Reduction | None = None
    keep: int | None = None


class SceneAnswerSuite(TokenReduction, SceneSuite):
    """A suite of a model that answers questions about scenes.

    held_out  use question templates that training never uses
    reduce    method that removes vision features before the connector. Needs keep
    keep      number of tokens that remain of each view of an image
    """

    model_description = ANSWER_MODEL

    held_out: bool = False
    reduce: Reduction | None = None
    keep: int | None = None

    def open_question_scenes(
        self, preset: str, image_size: int, changes: dict[str, object]
    ) -> "tuple[SceneSource, SceneLanguage]":
        """Open scenes of a preset with changes, and the language about them."""
        from vitrail.data.scene_annotations import build_scene_language

        source = self.open_scenes(preset, image_size, changes)
        return source, build_scene_language(source)


@SUITES.register("questions")
class QuestionSuite(SceneAnswerSuite):
    """Ask questions about generated scenes. Baselines: the best answer without the image.

    preset  preset of the scenes
    kinds   kinds of questions. May be repeated
    things  things in the scenes: hundred (those that mini draws), thirty (a subset of them), or the things of a
            recipe's scenes, as RECIPE:SOURCE. Default: all
    sizes   minimum and maximum size of things, as fractions of the image side. Default: as in the preset
    image_size    shorter side of the images in pixels. Default: the image size of the model's policy
    aspect_ratio  width and height of the images, as a ratio
    """

    example = "vitrail eval out/mini/final questions --vendors twemoji --held-out"
    output_files = SCENE_PAGE

    preset: str = "mixed"
    kinds: tuple[str, ...] = DEFAULT_KINDS
    things: str = ""
    sizes: tuple[float, float] | None = None
    image_size: int | None = None
    aspect_ratio: tuple[int, int] | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.scenes.config import PRESETS
        from vitrail.evals.examples import ExampleCollector
        from vitrail.evals.suites.scene_benchmarks import evaluate_answers

        check_question_kinds(self.kinds)
        if self.preset not in PRESETS:
            raise ConfigError(f"there is no preset {self.preset!r}", suggest_name(self.preset, PRESETS))
        changes: dict[str, object] = {"things": resolve_things(self.things, context.find_scenes)} if self.things else {}
        for name in ("sizes", "aspect_ratio"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value
        model, examples = context.load_scene_answer_model(self.reduction), ExampleCollector()
        scores = evaluate_answers(
            model.answer,
            *self.open_question_scenes(self.preset, self.image_size or model.image_size, changes),
            self.kinds,
            self.count,
            held_out=self.held_out,
            batch_size=self.batch_size,
            on_result=examples,
        )
        settings = {"preset": self.preset, "held_out": self.held_out, **self.scene_settings, **changes}
        settings |= {} if self.image_size is None else {"image_size": self.image_size}
        return EvaluationResult(scores, settings | self.reduction_settings, load_examples=lambda: examples.examples)


@SUITES.register("stress")
class StressSuite(SceneAnswerSuite):
    """Ask the same questions about plain and hard scenes: transparent, sub-patch, moving, occluded and crowded things.

    kinds  kinds of questions. May be repeated. Default: those that all these scenes support
    """

    example = "vitrail eval out/mini/final stress --vendors twemoji"

    kinds: tuple[str, ...] = ()

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.suites.stress_scenes import (
            STRESS_PRESETS,
            STRESS_QUESTION_KINDS,
            evaluate_stress_scenes,
        )

        kinds = self.kinds or STRESS_QUESTION_KINDS
        check_question_kinds(kinds)
        model = context.load_scene_answer_model(self.reduction)
        scores = evaluate_stress_scenes(
            model.answer,
            lambda preset, changes: self.open_question_scenes(preset, model.image_size, changes),
            kinds,
            self.count,
            patch_fraction=model.patch_fraction,
            held_out=self.held_out,
            batch_size=self.batch_size,
        )
        skipped = sorted(set(STRESS_PRESETS) - {score.subset["scenes"] for score in scores})
        settings = {"held_out": self.held_out, "patch_fraction": model.patch_fraction, "skipped": skipped}
        warning = f"skipped: {', '.join(skipped)}, because a patch is {model.patch_fraction:.3f} of the image side"
        return EvaluationResult(
            scores,
            settings | self.scene_settings | self.reduction_settings,
            warning=warning if skipped else "",
        )


@SUITES.register("naming")
class NamingSuite(AnswerSuite):
    """Ask what single images show. An answer is right if it equals the name of the image.

    data                image sources (`vitrail data list`) or folders. May be repeated
    split               split of datasets with classes, such as cifar10. Other sources are used completely
    include_categories  use only this category, such as animals. May be repeated
    known_from          use only names that this source also has, such as the training data. May be repeated
    name_from           name of an image: its own name, or its category (for a folder: the sub-folder)
    trim                crop images to their opaque region
    held_out            use question templates that training never uses
    limit               maximum number of images, sampled evenly
    """

    example = "vitrail eval out/mini/final naming --data cifar10 --limit 1000"

    data: tuple[str, ...] = ("cifar10",)
    split: Literal["all", "train", "test"] = "test"
    include_categories: tuple[str, ...] = ()
    known_from: tuple[str, ...] = ()
    name_from: Literal["own", "category"] = "own"
    trim: bool = False
    held_out: bool = False
    limit: int | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
        from vitrail.evals.suites.image_naming import evaluate_naming

        config = NamedImagesConfig(
            datasets=self.data,
            split=self.split,
            include_categories=self.include_categories,
            name_from=self.name_from,
            trim=self.trim,
        )
        source, known_names = NamedImageSource(config), []
        if self.known_from:
            training_source = NamedImageSource(NamedImagesConfig(datasets=self.known_from, name_from=self.name_from))
            known_names = [record.name for record in training_source.records]
        model = context.load_scene_answer_model(self.reduction, sorted({record.name for record in source.records}))
        scores = evaluate_naming(
            model.answer,
            source,
            model.image_size,
            allowed_names=known_names,
            limit=self.limit,
            unseen_question=self.held_out,
            batch_size=min(self.batch_size, 64),
        )
        settings = {
            "data": self.data,
            "split": self.split,
            "include_categories": self.include_categories,
            "known_from": self.known_from,
            "name_from": self.name_from,
            "trim": self.trim,
            "held_out": self.held_out,
            "limit": self.limit,
        }
        return EvaluationResult(scores, settings | self.reduction_settings)
