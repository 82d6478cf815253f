"""Suites of models that draw images: `drawing`, `fidelity` and `dpg`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError
from vitrail.evals.evaluation import BatchedSuite, EvaluationResult
from vitrail.registry import SUITES

if TYPE_CHECKING:
    from vitrail.data.scenes.scene_source import SceneSource
    from vitrail.evals.context import DrawingModel, EvalContext
    from vitrail.evals.drawing_judge import DrawingJudge
    from vitrail.evals.suites.dpg_benchmark import ModelGraphAnswerer
    from vitrail.models.detector import Detector

DENSE_SCENES: dict[str, object] = {
    "objects": [4, 4], "sizes": [0.25, 0.45], "repeat_probability": 0.8, "tint_probability": 0.6, "combinations": "all",
}  # fmt: skip
"""Changes of the drawing preset for dense prompts: repeated things, and colours for most of them."""
PROMPTED_SCENES: dict[str, object] = {"repeat_probability": 0.3, "tint_probability": 0.5}
"""Changes of the drawing preset, so that scenes match every kind of prompt."""
MAX_ANSWER_BATCH = 16  # questions of a graph that a model answers in one batch


class DrawingSuite(BatchedSuite):
    """A suite that draws images.

    held_out        use templates of prompts that training never uses
    guidance_scale  strength of classifier-free guidance
    steps           decoding steps of a masked model
    temperature     sampling temperature of the codes
    tries           drawings of each prompt, of which the model selects the best, as in `vitrail draw --tries`
    seed            seed of the prompts and of the drawings
    """

    model_description = "A unified model: a folder or a hub id."

    held_out: bool = False
    guidance_scale: float = 3.0
    steps: int = 24
    temperature: float = 1.0
    tries: int = 1
    seed: int = 0

    @property
    def drawing_settings(self) -> dict[str, Any]:
        """The options of the drawings, as the model takes them and as they are saved with the scores."""
        names = ("guidance_scale", "steps", "temperature", "tries", "seed")
        return {name: getattr(self, name) for name in names}


def build_judge(detector: "Detector", source: "SceneSource", device: str) -> "DrawingJudge":
    """Build a judge of the things that the scenes of a source contain."""
    from vitrail.data.language import SceneLanguage
    from vitrail.evals.drawing_judge import DrawingJudge

    table = source.atlas.table
    return DrawingJudge(detector, SceneLanguage.build(table).to(device), table)


@SUITES.register("drawing")
class PromptDrawingSuite(DrawingSuite):
    """Draw prompts of GenEval's six kinds and score the drawings with a judge.

    Baselines: drawings scored with the prompts of others, and codec reconstructions of true images.

    judge        a detector: a folder, or judge, which ships
    count        number of prompts of each kind
    concepts     use only so many of the things that the judge knows. Default: all
    atlas        sprites whose names appear in the prompts: emoji, or a .safetensors file
    true_images  sprites of the true images, preferably those that the model is trained to draw; or the scenes of a
                 recipe, as RECIPE:SOURCE. "" skips this baseline
    """

    example = "vitrail eval out/mini/final drawing --count 50 --guidance-scale 3"
    output_files = {"page": "An HTML file for the scores, with drawings that the judge accepts and rejects"}

    judge: str = "judge"
    count: int = 50
    concepts: int | None = None
    atlas: str = "emoji"
    true_images: str = "flat"

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.scenes.atlas_library import open_atlas
        from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
        from vitrail.evals.examples import ExampleCollector
        from vitrail.evals.suites.scene_benchmarks import evaluate_drawing_ceiling, evaluate_drawings

        if ":" in self.true_images:
            config = context.find_scenes(self.true_images)
        else:
            config = SceneSourceConfig(atlas=self.true_images, preset="drawing", scene=PROMPTED_SCENES)
        model, detector = context.load_drawing_model(self.drawing_settings), context.open(self.judge).load_detector()
        model.output_size = detector.config.image.image_size
        names = detector.config.concepts[: self.concepts]
        source = SceneSource(SceneSourceConfig(atlas=self.atlas), open_atlas(self.atlas)).with_things(names)
        examples = ExampleCollector()
        scores = evaluate_drawings(
            model.draw,
            build_judge(detector, source, context.device),
            self.count,
            seed=self.seed,
            held_out=self.held_out,
            batch_size=self.batch_size,
            on_result=examples,
        )
        if self.true_images:
            true = SceneSource(config.replace(image_size=model.image_size), open_atlas(config.atlas)).with_things(names)
            judge = build_judge(detector, true, context.device)
            scores.append(
                evaluate_drawing_ceiling(model.reconstruct, judge, true, self.count, batch_size=self.batch_size)
            )
        settings = {
            "judge": self.judge,
            "count": self.count,
            "concepts": len(names),
            "held_out": self.held_out,
            **self.drawing_settings,
            "true_images": self.true_images,
        }
        return EvaluationResult(scores, settings, load_examples=lambda: examples.examples)


@SUITES.register("fidelity")
class FidelitySuite(DrawingSuite):
    """Draw prompts of GenEval's six kinds about scenes, and measure the Fréchet distance to these scenes (gFID).

    Features come from ResNet-50, whose weights are fetched the first time. Baselines: codec reconstructions of the
    scenes, and the same number of other scenes. The distance grows as the number of images falls, so compare only
    equal numbers.

    true_scenes  the scenes of a recipe, as RECIPE:SOURCE
    count        number of prompts of each kind. Papers use thousands in total
    """

    example = "vitrail eval out/mini/final fidelity --true-scenes mini:draw --count 400"

    true_scenes: str = "mini:draw"
    count: int = 50

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.language import SceneLanguage
        from vitrail.data.scenes.atlas_library import open_atlas
        from vitrail.data.scenes.scene_source import SceneSource
        from vitrail.evals.suites.drawing_fidelity import evaluate_drawing_fidelity

        config = context.find_scenes(self.true_scenes)
        model, network = context.load_drawing_model(self.drawing_settings), context.load_resnet50().to(context.device)
        config = config.replace(image_size=model.image_size, seed=config.seed + 1 + self.seed)
        source = SceneSource(config, open_atlas(config.atlas))
        score = evaluate_drawing_fidelity(
            model.draw,
            model.reconstruct,
            source,
            SceneLanguage.build(source.atlas.table).to(context.device),
            self.count,
            network,
            held_out=self.held_out,
            batch_size=self.batch_size,
        )
        settings = {
            "true_scenes": self.true_scenes,
            "count": self.count,
            "held_out": self.held_out,
            **self.drawing_settings,
        }
        return EvaluationResult([score], settings)


@SUITES.register("dpg")
class DensePromptSuite(DrawingSuite):
    """Draw dense prompts and score the drawings by the question graphs of the prompts, as in DPG-Bench.

    Prompts describe scenes: four things with colours, counts and positions. Baselines: drawings scored with the prompts
    of others, and codec reconstructions of the true images.

    data                 dpg_bench.csv, the prompts of DPG-Bench. They are open-ended, so qa_model is required
    qa_model             a unified or vision-language model that answers yes or no, instead of the judge: a folder
    judge                a detector: a folder, or judge, which ships
    count                number of prompts; with data the first ones
    drawings_per_prompt  drawings of each prompt. Their scores are averaged. Accuracies by category use the last
                         drawing, as in the original
    concepts             use only so many of the things that the judge knows. Default: all
    atlas                sprites of the scenes and the true images. Use those that the model is trained to draw
    score_true_images    also score codec reconstructions of the true images
    """

    example = "vitrail eval out/mini/final dpg --count 50 --drawings-per-prompt 4"
    output_files = {
        "page": "An HTML file for the scores, with drawings that match their prompt and drawings that do not"
    }

    data: Path | None = None
    qa_model: str | None = None
    judge: str = "judge"
    count: int = 50
    drawings_per_prompt: int = 1
    concepts: int | None = None
    atlas: str = "flat"
    score_true_images: bool = True

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.formats.dpg_bench import read_dpg
        from vitrail.evals.examples import ExampleCollector
        from vitrail.evals.suites import dpg_benchmark

        self._check_options()
        graphs = read_dpg(self.data)[: self.count] if self.data is not None else []
        model = context.load_drawing_model(self.drawing_settings)
        qa_model = None if self.qa_model is None else context.open(self.qa_model).load_scene_answer_model()
        prompts = None
        source = None
        answer_graphs = None
        if self.data is None:
            detector = context.open(self.judge).load_detector()
            source = self._open_scenes(model, detector)
            judge = build_judge(detector, source, context.device)
            prompts = dpg_benchmark.build_dense_prompts(judge.language, source, self.count, held_out=self.held_out)
            graphs, answer_graphs = prompts.graphs, dpg_benchmark.make_judge_answerer(judge, prompts)
            model.output_size = detector.config.image.image_size
        answerer: ModelGraphAnswerer | None = None
        if qa_model is not None:
            size = min(self.batch_size, MAX_ANSWER_BATCH)
            answerer = dpg_benchmark.ModelGraphAnswerer(qa_model.answer, graphs, batch_size=size)
            answer_graphs = answerer
            model.output_size = qa_model.image_size
        assert answer_graphs is not None  # data requires qa_model
        examples = ExampleCollector()
        scores = dpg_benchmark.evaluate_dense_drawings(
            model.draw,
            answer_graphs,
            graphs,
            drawings_per_prompt=self.drawings_per_prompt,
            batch_size=self.batch_size,
            on_result=examples,
        )
        if self.score_true_images and prompts is not None and source is not None:
            scores.append(
                dpg_benchmark.evaluate_dense_ceiling(
                    model.reconstruct, answer_graphs, prompts, source, batch_size=self.batch_size
                )
            )
        scores += [] if answerer is None else [answerer.score]
        settings = {
            "data": self.data,
            "qa_model": self.qa_model,
            "judge": self.judge if self.qa_model is None else None,
            "count": len(graphs),
            "drawings_per_prompt": self.drawings_per_prompt,
            "held_out": self.held_out,
            **self.drawing_settings,
            "atlas": self.atlas,
            "questions": sum(len(graph.questions) for graph in graphs),
        }
        messages = [f"example: {graphs[0].prompt}"]
        return EvaluationResult(scores, settings, messages, load_examples=lambda: examples.examples)

    def _check_options(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--count is {self.count}", "give at least 1")
        if self.data is not None and self.held_out:
            raise ConfigError("--held-out does not apply to the prompts of --data", "remove --held-out")
        if self.data is not None and self.qa_model is None:
            raise ConfigError(f"the judge cannot answer the questions of {self.data}", "give a model with --qa-model")

    def _open_scenes(self, model: "DrawingModel", detector: "Detector") -> "SceneSource":
        """Open the scenes that dense prompts describe, with things that the detector knows."""
        from vitrail.data.scenes.atlas_library import open_atlas
        from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig

        config = SceneSourceConfig(
            atlas=self.atlas, preset="drawing", scene=DENSE_SCENES, image_size=model.image_size, seed=self.seed
        )
        return SceneSource(config, open_atlas(self.atlas)).with_things(detector.config.concepts[: self.concepts])
