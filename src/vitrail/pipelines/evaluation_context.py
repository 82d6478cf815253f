"""Load a checkpoint, or use a loaded pipeline, in the roles that the suites of `vitrail.evals` need."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from vitrail import hub
from vitrail.connectors.feature_reduction import AnyReductionConfig
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.devices import resolve_device
from vitrail.encoders.resnet50 import ResNet50
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.context import BenchmarkAnswerModel, DrawingModel, SceneAnswerModel
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor, find_image_tower
from vitrail.evals.qformer_embedder import QFormerEmbedder
from vitrail.generate.continuation_scoring import ContinuationScorer
from vitrail.hub import resnet50_weights
from vitrail.hub.checkpoint_info import read_config, resolve_path
from vitrail.models.detector import Detector
from vitrail.models.genie_model import Genie
from vitrail.models.text_qformer import TextQFormerConfig
from vitrail.pipelines import loading
from vitrail.pipelines.base import Pipeline, select_device
from vitrail.pipelines.detector_pipeline import DetectorPipeline
from vitrail.pipelines.embedding import EmbeddingPipeline, load_text_tokenizer
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.processing.image_preprocessor import ImagePreprocessor

BLANK_IMAGE = Image.new("RGB", (64, 64), "grey")  # a unified model needs an image, so its blind baseline uses this one
# Kinds of models that have a decoder.
LANGUAGE_MODELS = ("decoder", "vlm", "cross-attention-vlm", "encoder-decoder-vlm", "unified")

P = TypeVar("P", bound=Pipeline)


class PipelineContext:
    """An `EvalContext`: a folder, a hub id or a loaded pipeline.

    device       default: a GPU if there is one
    find_scenes  finds the scenes of a recipe, given as RECIPE:SOURCE
    """

    def __init__(
        self,
        model: str | Path | Pipeline,
        *,
        device: str | torch.device | None = None,
        find_scenes: Callable[[str], SceneSourceConfig],
    ):
        self.pipeline: Any = None if isinstance(model, str | Path) else model
        self.name = str(model) if self.pipeline is None else type(model).__name__
        self._find_scenes, self._device = find_scenes, device

    @cached_property
    def device(self) -> str:
        if self.pipeline is not None:
            return str(next(self.pipeline.model.parameters()).device)
        return resolve_device(self._device)

    @property
    def takes_videos(self) -> bool:
        if self.pipeline is not None:
            return hasattr(self.pipeline, "chat")
        return loading.is_vlm(self.name)

    def open(self, name: str) -> "PipelineContext":
        return PipelineContext(name, device=self.device, find_scenes=self._find_scenes)

    def find_scenes(self, name: str) -> SceneSourceConfig:
        return self._find_scenes(name)

    # ---- images and texts in one space --------------------------------------------------------------------------

    def load_embedder(self, batch_size: int = 256) -> ContrastiveEmbedder:
        return self._load(EmbeddingPipeline).build_embedder(batch_size)

    def load_retriever(self, batch_size: int = 256) -> ContrastiveEmbedder | QFormerEmbedder:
        if self.pipeline is not None or not isinstance(config := read_config(self.name), TextQFormerConfig):
            return self.load_embedder(batch_size)
        preprocessing = ImagePreprocessor.from_folder(resolve_path(self.name), config.tower)
        tokenizer = load_text_tokenizer(self.name)
        return QFormerEmbedder(self._load_model(torch.float32), preprocessing, tokenizer, batch_size=batch_size)

    def load_feature_extractor(self, batch_size: int = 256) -> ImageFeatureExtractor:
        if self.pipeline is not None:
            pipeline = self._load(EmbeddingPipeline)
            return ImageFeatureExtractor(pipeline.model, pipeline.preprocessing, batch_size=batch_size)
        model = self._load_model(torch.float32)
        tower = find_image_tower(model)
        if tower is None:
            raise CheckpointError(
                f"{self.name} is a {type(model).__name__}, which has no image tower", "give a model with an image tower"
            )
        preprocessing = ImagePreprocessor.from_folder(
            resolve_path(self.name), tower.config, require_tower_size=tower is not model
        )
        return ImageFeatureExtractor(model, preprocessing, batch_size=batch_size)

    # ---- answers ------------------------------------------------------------------------------------------------

    def load_scene_answer_model(
        self, reduction: AnyReductionConfig | None = None, answers: Sequence[str] = ()
    ) -> SceneAnswerModel:
        pipeline = self._load_any(reduction=reduction)
        if not hasattr(pipeline, "build_scene_answer_model"):
            raise ConfigError(
                f"{self.name} is a {type(pipeline.model).__name__} and answers no questions about images",
                "give a unified model or a vision-language model",
            )
        return pipeline.build_scene_answer_model(answers)

    def load_benchmark_answer_model(
        self, template: str | None = None, reduction: AnyReductionConfig | None = None
    ) -> BenchmarkAnswerModel:
        pipeline = self._load_any(template=template, reduction=reduction)
        if self.takes_videos:
            return BenchmarkAnswerModel(pipeline, pipeline.ask_batch, [])
        return BenchmarkAnswerModel(pipeline, pipeline.ask, BLANK_IMAGE)

    def load_continuation_scorer(self) -> ContinuationScorer:
        if self.pipeline is not None:
            return ContinuationScorer(self.pipeline.model, self.pipeline.tokenizer)
        if loading.find_model_kind(self.name) not in LANGUAGE_MODELS:
            kind = type(read_config(self.name)).__name__.removesuffix("Config")
            raise CheckpointError(f"{self.name} is a {kind} and has no language model", "give a language model")
        tokenizer = hub.load_tokenizer(self.name)
        return ContinuationScorer(self._load_model(select_device(self.device)[1]), tokenizer)

    # ---- drawings and worlds ------------------------------------------------------------------------------------

    def load_drawing_model(self, options: dict[str, Any]) -> DrawingModel:
        pipeline = self._load(UnifiedPipeline)
        return DrawingModel(pipeline.model, pipeline.draw_ids, options)

    def load_detector(self) -> Detector:
        return self._load(DetectorPipeline).model

    def load_world_model(self) -> Genie:
        model = self._load_model(None)
        if not isinstance(model, Genie):
            raise CheckpointError(
                f"{self.name} is a {type(model).__name__}, not a world model", "give a Genie checkpoint"
            )
        return model

    def load_resnet50(self) -> ResNet50:
        return resnet50_weights.load_resnet50().eval()

    # ---- loading ------------------------------------------------------------------------------------------------

    def _load(self, kind: type[P]) -> P:
        """Load a kind of pipeline, or return the given one if it is of this kind."""
        if self.pipeline is None:
            return kind.load(self.name, device=self.device)
        if not isinstance(self.pipeline, kind):
            raise ConfigError(f"the suite needs {kind.__name__}, and the model is {self.name}", "give another model")
        return self.pipeline

    def _load_any(self, **options: Any) -> Any:
        if self.pipeline is None:
            return loading.load(self.name, device=self.device, **options)
        if any(value is not None for value in options.values()):
            raise ConfigError(
                "a loaded pipeline takes no chat template and no token reduction", "give its folder, or remove them"
            )
        return self.pipeline

    def _load_model(self, dtype: torch.dtype | None) -> Any:
        if self.pipeline is None:
            return hub.load(self.name, dtype=dtype, device=self.device)
        return self.pipeline.model
