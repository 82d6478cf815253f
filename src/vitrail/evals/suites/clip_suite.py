"""The suite `clips`: questions about time in clips of moving shapes."""

from typing import TYPE_CHECKING, Literal

from vitrail.errors import ConfigError
from vitrail.evals.evaluation import EvaluationResult, Suite
from vitrail.registry import SUITES

if TYPE_CHECKING:
    from vitrail.evals.context import EvalContext


@SUITES.register("clips")
class ClipSuite(Suite):
    """Ask about clips: what happens first, how often, when, in which part, and what is in one frame only.

    The clips are those of the test split. Baselines: the most frequent answer, and the best answer without the clip.

    num_frames      frames of the clips. May be repeated
    fps             frames per second. May be repeated; the clips have these rates in turn
    count           clips of each number of frames. Each has four questions
    extend          context extension of clips that are longer than those of the training: none, yarn or ntk. May be
                    repeated
    trained_frames  frames of the longest clips of the training
    seed            seed of the clips
    """

    model_description = "A model that the task video-qa trained: a folder."
    example = "vitrail eval out/video-time/final clips --num-frames 32 --num-frames 128 --extend yarn"

    num_frames: tuple[int, ...] = (8, 16, 32)
    fps: tuple[float, ...] = (1.0, 2.0, 4.0)
    count: int = 384
    extend: tuple[Literal["none", "yarn", "ntk"], ...] = ("none",)
    trained_frames: int = 32
    seed: int = 3701

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.clips.clip_source import ClipSource, ClipSourceConfig
        from vitrail.evals.suites.clip_benchmark import ClipModel, evaluate_clips

        if not context.takes_videos:
            raise ConfigError(f"{context.name} does not support videos", "use a model that the task video-qa trained")
        config = ClipSourceConfig(num_frames=self.num_frames, fps=self.fps, split="test", seed=self.seed)
        pipeline = context.load_benchmark_answer_model().model
        clip_model = ClipModel(pipeline.model, pipeline.tokenizer, pipeline.chat_format)
        scores = evaluate_clips(
            clip_model, ClipSource(config), self.count, tuple(dict.fromkeys(self.extend)), self.trained_frames
        )
        settings = {name: getattr(self, name) for name in ("num_frames", "fps", "count", "extend", "trained_frames")}
        return EvaluationResult(scores, settings | {"seed": self.seed})
