"""`vitrail.train`, `evaluate`, `tokenize` and `tokenize_videos`: what the commands do, returning objects."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from vitrail import evals
from vitrail import recipe as recipes
from vitrail.codecs import image_tokenization, video_tokenization
from vitrail.codecs.causal_video_codec import CausalVideoCodecConfig
from vitrail.codecs.image_sources import ImageResizeConfig, find_images
from vitrail.codecs.token_file import TokenFile
from vitrail.codecs.video_codec import VideoCodecConfig
from vitrail.codecs.video_token_file import VideoTokenFile
from vitrail.codecs.video_tokenization import AnyVideoCodec
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.errors import ConfigError, suggest_name
from vitrail.evals import EvaluationResult
from vitrail.models.genie_model import GenieConfig
from vitrail.pipelines.base import Pipeline, find_bundled_model, load_model, read_config_of
from vitrail.pipelines.codec_pipeline import CodecPipeline
from vitrail.pipelines.evaluation_context import PipelineContext
from vitrail.pipelines.loading import load
from vitrail.recipe.recipe_loading import load_recipe, resume_from_stage
from vitrail.recipe.recipe_schema import Recipe
from vitrail.recipe.recipe_training import final_weights_folder, train_recipe

VIDEO_CODEC_CONFIGS = (CausalVideoCodecConfig, VideoCodecConfig, GenieConfig)


class TrainingResult(NamedTuple):
    """A finished training.

    recipe   the recipe with all overrides
    folder   checkpoints, logs and the final weights
    weights  the folder of the final weights
    """

    recipe: Recipe
    folder: Path
    weights: Path

    def load(self, *, device: str | torch.device | None = None) -> Any:
        """Load the pipeline of the final weights."""
        return load(self.weights, device=device)


def train(
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    stop_after: str | None = None,
    start_stage: str | None = None,
    checkpoint: str | Path | None = None,
    device: str | None = None,
    loggers: Sequence[str] | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train a recipe. The same call resumes an interrupted training.

    recipe       name of a recipe, a .toml file, or a `Recipe`
    out          folder for checkpoints, logs and the final weights
    stop_after   stop after this stage
    start_stage  train from this stage on; needs `checkpoint`, a model that is trained through all stages before it
    loggers      where metrics go besides log.jsonl, by name; default: all that are installed
    overrides    keys of the recipe and their values: seed=3, or dotted keys as **{"stages.0.steps": 500}
    """
    if (start_stage is None) != (checkpoint is None):
        raise ConfigError("start_stage and checkpoint go together", "give the stage, and the model to start it from")
    if isinstance(recipe, Recipe):
        if overrides:
            raise ConfigError("overrides need a recipe by name or file", "change the Recipe with replace")
        chosen = recipe
    else:
        chosen = load_recipe(recipe, overrides)
    if start_stage is not None and checkpoint is not None:
        chosen = resume_from_stage(chosen, start_stage, str(checkpoint))
    folder = Path(out)
    train_recipe(chosen, folder, stop_after=stop_after, device=device, loggers=loggers)
    return TrainingResult(chosen, folder, final_weights_folder(chosen, folder, stop_after))


def evaluate(
    model: str | Path | Pipeline,
    suite: str,
    *,
    device: str | torch.device | None = None,
    **options: Any,
) -> EvaluationResult:
    """Evaluate a model on a suite or a benchmark. The result has the scores, and `save` writes them to a JSON file.

    model    a bundled model, a folder, a hub id, or a pipeline that `vitrail.load` returned
    suite    name of a suite or a benchmark; `vitrail.evals.list_suites()` lists all
    options  options of the suite, as `vitrail eval MODEL SUITE --help` lists them, such as limit=100
    """
    context = PipelineContext(model, device=device, find_scenes=find_recipe_scenes)
    return evals.run(context, suite, options)


def find_recipe_scenes(name: str) -> SceneSourceConfig:
    """Find the scenes of a recipe, given as RECIPE:SOURCE."""
    recipe_name, _, source = name.rpartition(":")
    if not recipe_name:
        raise ConfigError(f"{name!r} names no recipe", "write RECIPE:SOURCE, such as mini:draw")
    all_sources = recipes.load_recipe(recipe_name).sources
    scenes = {key: one for key, one in all_sources.items() if isinstance(one, SceneSourceConfig)}
    if source not in scenes:
        raise ConfigError(f"recipe {recipe_name!r} has no source of scenes {source!r}", suggest_name(source, scenes))
    return scenes[source]


def tokenize(
    images: str | Path | Sequence[str | Path],
    codec: str | Path | CodecPipeline,
    out: str | Path,
    *,
    fit: Literal["cover", "pad", "crop"] = "cover",
    image_size: int | None = None,
    batch_size: int = 32,
    num_workers: int = 2,
    device: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> TokenFile:
    """Encode image files, folders and shards to a bit-packed file of code ids. The same call resumes a partial file.

    fit         cover: resize to the codec's image size or `image_size`, and crop the centre; pad: repeat edges up to
                full patches; crop: drop remaining pixels
    progress    called with the number of images done since the last call, and of all images

    Unreadable images are listed in `errors` of the file. To encode images in memory use `CodecPipeline.encode`.
    """
    if image_size is not None and fit != "cover":
        raise ConfigError(f"image_size needs fit = 'cover', not {fit!r}", "remove one of the two")
    resize = ImageResizeConfig(how=fit, size=None if image_size is None else (image_size, image_size))
    inputs = [images] if isinstance(images, str | Path) else list(images)
    sources = find_images([str(one) for one in inputs])
    pipeline = codec if isinstance(codec, CodecPipeline) else CodecPipeline.load(codec, device=device)
    return image_tokenization.tokenize_images(
        pipeline.model,
        sources,
        out,
        resize=resize,
        codec_name=pipeline.name,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=None if progress is None else lambda count: progress(count, len(sources)),
    )


def tokenize_videos(
    videos: str | Path | Sequence[str | Path],
    codec: str | Path | AnyVideoCodec,
    out: str | Path,
    *,
    fit: Literal["cover", "pad", "crop"] = "pad",
    image_size: int | None = None,
    segment_frames: int | None = None,
    chunk_frames: int | None = None,
    start: float = 0.0,
    end: float | None = None,
    fps: float | None = None,
    device: str | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> VideoTokenFile:
    """Encode video files and folders to a file of bit-packed ids or of latents. The same call resumes a partial file.

    See `vitrail.codecs.tokenize_videos` for the arguments. `fit` and `image_size` are those of `tokenize`.
    """
    if image_size is not None and fit != "cover":
        raise ConfigError(f"image_size needs fit = 'cover', not {fit!r}", "remove one of the two")
    sources = video_tokenization.find_videos([videos] if isinstance(videos, str | Path) else list(videos))
    model = load_video_codec(codec, device) if isinstance(codec, str | Path) else codec
    return video_tokenization.tokenize_videos(
        model,
        sources,
        out,
        resize=ImageResizeConfig(how=fit, size=None if image_size is None else (image_size, image_size)),
        codec_name=Path(codec).resolve().name if isinstance(codec, str | Path) else "codec",
        segment_frames=segment_frames,
        chunk_frames=chunk_frames,
        start=start,
        end=end,
        fps=fps,
        progress=progress,
    )


def has_video_codec(name_or_path: str | Path) -> bool:
    """Whether a model is a video codec, or contains one."""
    return isinstance(read_config_of(find_bundled_model(name_or_path)), VIDEO_CODEC_CONFIGS)


def load_video_codec(name_or_path: str | Path, device: str | None = None) -> AnyVideoCodec:
    """Load a video codec, or the one of a world model."""
    if not has_video_codec(name_or_path):
        raise ConfigError(f"{name_or_path} is no video codec", "give a causal video codec, or the codec of Genie")
    model: Any = load_model(find_bundled_model(name_or_path), device, None)
    codec: AnyVideoCodec = getattr(model, "codec", model)
    return codec.eval()
