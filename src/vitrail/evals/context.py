"""What suites need of the model that they evaluate. `vitrail.pipelines.evaluation_context.PipelineContext` provides it.

B images, H, W pixels, S side of an image
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor
from torch.nn.functional import interpolate

from vitrail.connectors.feature_reduction import AnyReductionConfig
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.encoders.resnet50 import ResNet50
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor
from vitrail.evals.qformer_embedder import QFormerEmbedder
from vitrail.evals.suites.generation import BatchAnswerFn
from vitrail.evals.suites.scene_benchmarks import AnswerFn
from vitrail.generate.continuation_scoring import ContinuationScorer
from vitrail.models.detector import Detector
from vitrail.models.genie_model import Genie
from vitrail.models.unified_model import UnifiedModel
from vitrail.processing.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 24  # tokens of an answer about a scene, except captions: all correct answers are shorter


class SceneAnswerModel(NamedTuple):
    """A model that answers short questions about images of one size.

    answer          images uint8 (B, 3, H, W) and B questions → B answers
    image_size      side of the images that the model expects
    patch_fraction  side of the finest patch as a fraction of the image side
    """

    answer: AnswerFn
    image_size: int
    patch_fraction: float


def max_answer_tokens(tokenizer: Tokenizer, answers: Sequence[str]) -> int:
    """Return a token limit one above the longest correct answer, so that a longer answer counts as wrong."""
    return max([MAX_ANSWER_TOKENS, *(len(ids) + 1 for ids in tokenizer.encode_batch(answers))])


class BenchmarkAnswerModel(NamedTuple):
    """A model that answers the questions of benchmarks.

    model         a pipeline with `ask` and `loglikelihoods`
    answer_batch  answers questions about images in one batch
    blank_media   media of a question without images: none, or a grey image for models that need one
    """

    model: Any
    answer_batch: BatchAnswerFn
    blank_media: Any


class DrawingModel:
    """A unified model that draws prompts and reconstructs images.

    draw_ids     prompts and the options of `UnifiedPipeline.draw_ids` → code ids
    options      options of every drawing. Prompt n has the seed `options["seed"]` + n
    image_size   size of the model's images
    output_size  size of the returned images, which the scorer needs
    """

    def __init__(self, model: UnifiedModel, draw_ids: Callable[..., Tensor], options: dict[str, Any]):
        self.model, self.draw_ids, self.options = model, draw_ids, options
        self.output_size = model.codec.image_size[0]
        self.image_size = self.output_size

    def draw(self, prompts: list[str], first_index: int) -> Tensor:
        """Draw prompts, uint8 (B, 3, S, S). `first_index` is the index of the first prompt."""
        return self._decode(self.draw_ids(prompts, **{**self.options, "seed": self.options["seed"] + first_index}))

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """Encode and decode images: uint8 (B, 3, H, W) of `image_size` → (B, 3, S, S) of `output_size`."""
        return self._decode(self.model.encode_images(self.model.codec.to_pixels(pixels))[1])

    def _decode(self, ids: Tensor) -> Tensor:
        pixels = self.model.decode_pixels(ids).float()
        if pixels.shape[-1] != self.output_size:
            pixels = interpolate(pixels, (self.output_size, self.output_size), mode="bicubic", antialias=True)
        return self.model.codec.to_uint8(pixels)


class EvalContext(Protocol):
    """The model that is evaluated, and whatever else a suite opens by name.

    name    name of the model in results
    device  device of all models

    Each method loads the model in one role, and raises an error if the model does not have it.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def takes_videos(self) -> bool:
        """Whether questions may be about videos and about no image. Reads the config only."""
        ...

    def open(self, name: str) -> Self:
        """Open another model on the same device."""
        ...

    def find_scenes(self, name: str) -> SceneSourceConfig:
        """Find the scenes of a recipe, given as RECIPE:SOURCE."""
        ...

    def load_embedder(self, batch_size: int = 256) -> ContrastiveEmbedder: ...

    def load_retriever(self, batch_size: int = 256) -> ContrastiveEmbedder | QFormerEmbedder: ...

    def load_feature_extractor(self, batch_size: int = 256) -> ImageFeatureExtractor: ...

    def load_scene_answer_model(
        self, reduction: AnyReductionConfig | None = None, answers: Sequence[str] = ()
    ) -> SceneAnswerModel:
        """`answers` are correct answers that may be long: they extend the token limit."""
        ...

    def load_benchmark_answer_model(
        self, template: str | None = None, reduction: AnyReductionConfig | None = None
    ) -> BenchmarkAnswerModel: ...

    def load_continuation_scorer(self) -> ContinuationScorer: ...

    def load_drawing_model(self, options: dict[str, Any]) -> DrawingModel: ...

    def load_detector(self) -> Detector: ...

    def load_world_model(self) -> Genie: ...

    def load_resnet50(self) -> ResNet50:
        """Load ResNet-50 on the CPU, whose features Fréchet distances compare. It is fetched the first time."""
        ...
