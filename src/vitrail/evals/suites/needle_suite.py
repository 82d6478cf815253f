"""The suite `needle`: find one image among the frames of a long video (needle in a haystack)."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.errors import ConfigError
from vitrail.evals.evaluation import EvaluationResult, Suite
from vitrail.registry import SUITES

if TYPE_CHECKING:
    from vitrail.data.formats import Sample
    from vitrail.evals.context import EvalContext
    from vitrail.evals.examples import Example
    from vitrail.evals.suites.needle_search import Frames, Haystack, NeedleResult
    from vitrail.models.video_inputs import Video

MAX_EXAMPLES_PER_GROUP = 4  # examples of right, wrong and blind answers on the page


class NeedleSetup(NamedTuple):
    """A haystack, and the needles to find in it."""

    haystack: "Haystack"
    needles: "Sequence[Sample]"


@SUITES.register("needle")
class NeedleSuite(Suite):
    """Find a needle in a haystack: insert one image into a video and ask a question that only this image answers.

    Every needle is tested at every depth of every length, and once a length without the needle. Frames have timestamps
    one second apart.

    num_frames      frames of the haystack, without the needle. May be repeated
    depths          number of depths, evenly spaced from the start to the end
    video           a video that provides the haystack. Default: scenes
    needles         LongVA's dataset.json, or another JSON list of path, prompt and answer. Default: images of single
                    words
    image_folder    folder of the needle images. Default: `images` beside the file
    count           number of needles; of a file the first ones
    preset          preset of the haystack scenes. They contain no words
    image_size      side of the scenes, and maximum shorter side of video frames, in pixels
    seed            seed of the scenes and words
    atlas           sprites of the scenes: emoji, or a .safetensors file
    max_new_tokens  maximum tokens of an answer
    chat_template   name of a chat template instead of the checkpoint's
    """

    model_description = "A vision-language model that supports videos: a folder or a hub id."
    example = "vitrail eval Qwen/Qwen3-VL-2B-Instruct needle --num-frames 64 --video film.mp4"
    output_files = {
        "heatmap": "A PNG or SVG for the heat map of accuracy over lengths and depths",
        "page": "An HTML file for the scores, with the heat map and examples of found and missed needles",
    }

    num_frames: tuple[int, ...] = (8, 32)
    depths: int = 5
    video: Path | None = None
    needles: Path | None = None
    image_folder: Path | None = None
    count: int = 5
    preset: str = "plain"
    image_size: int = 224
    seed: int = 7171
    atlas: str = "emoji"
    max_new_tokens: int = 24
    chat_template: str | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.suites.needle_search import (
            count_prompt_tokens,
            needle_index,
            run_needle_search,
            spread_depths,
        )
        from vitrail.models.video_inputs import Video

        depths = spread_depths(self.depths)
        for length in self.num_frames:
            needle_index(length, 0)  # refuses an invalid length
        self._check_options(context)
        haystack, needles = self._open_data()
        model = context.load_benchmark_answer_model(self.chat_template).model

        def to_video(frames: "Frames") -> "Video":
            return Video(frames, timestamps=range(len(frames)))

        def count_tokens(frames: "Frames", question: str) -> int:
            return model.count_tokens(to_video(frames), question, max_new_tokens=self.max_new_tokens)

        def ask(frames: "Frames", question: str) -> str:
            return model.ask(to_video(frames), question, max_new_tokens=self.max_new_tokens)

        tokens = count_prompt_tokens(count_tokens, haystack, needles, self.num_frames)
        result = run_needle_search(ask, haystack, needles, self.num_frames, depths)
        settings: dict[str, Any] = {
            "num_frames": list(tokens),
            "depths": [float(depth) for depth in depths],
            "tokens": tokens,
            "haystack": self.preset if self.video is None else self.video.name,
            "count": len(needles),
            "max_new_tokens": self.max_new_tokens,
            "needles": "words" if self.needles is None else self.needles.name,
            "side": self.image_size,
            "seed": self.seed,
            "atlas": self.atlas,
        }
        return EvaluationResult(
            result.scores,
            settings,
            load_examples=lambda: collect_needle_examples(result, needles),
            details=result,
        )

    def _check_options(self, context: "EvalContext") -> None:
        if not context.takes_videos:
            raise ConfigError(f"{context.name} does not support videos", "use a vision-language model such as Qwen3-VL")
        if self.count < 1 or self.image_size < 8:
            raise ConfigError(
                f"--count is {self.count} and --image-size is {self.image_size}", "give at least 1 needle and 8 pixels"
            )
        if self.image_folder is not None and self.needles is None:
            raise ConfigError("--image-folder needs --needles", "give --needles as well")

    def _open_data(self) -> NeedleSetup:
        from vitrail.data.formats import open_dataset
        from vitrail.data.scenes.atlas_library import open_atlas
        from vitrail.data.video_file import open_video
        from vitrail.evals.suites import haystack_sources

        sprites = cache(lambda: open_atlas(self.atlas))  # opened only if scenes or words are drawn
        if self.video is not None:
            haystack = haystack_sources.video_haystack(open_video(self.video), self.image_size)
        else:
            haystack = haystack_sources.scene_haystack(sprites(), self.preset, self.image_size, self.seed)
        if self.needles is None:
            words = haystack_sources.make_word_needles(sprites(), self.count, self.image_size, self.seed)
            return NeedleSetup(haystack, words)
        options = {} if self.image_folder is None else {"image_folder": self.image_folder}
        samples = open_dataset("v-niah", self.needles, **options)
        samples.check()
        return NeedleSetup(haystack, list(samples)[: self.count])


def collect_needle_examples(result: "NeedleResult", needles: "Sequence[Sample]") -> "list[Example]":
    """Collect the first examples of right, wrong and blind answers."""
    from vitrail.evals.examples import GROUP_TITLES, Example, Verdict

    blind = "Without the needle"
    found: dict[str, list[Example]] = {GROUP_TITLES["right"]: [], GROUP_TITLES["wrong"]: [], blind: []}
    for trial in result.trials:
        needle = needles[trial.needle]
        group = blind if trial.depth is None else GROUP_TITLES["right" if trial.is_correct else "wrong"]
        if len(found[group]) == MAX_EXAMPLES_PER_GROUP:
            continue
        where = f"{trial.num_frames:,} frames" + ("" if trial.depth is None else f", at {float(trial.depth):.0%}")
        answer = Verdict(trial.is_correct, f"answer: {trial.response or '(nothing)'}")
        lines = [needle.turns[0].text, where, answer, f"right: {needle.answers[0]}"]
        found[group].append(Example(group, [] if trial.depth is None else [needle.load_image()], lines))
    return [example for examples in found.values() for example in examples]
