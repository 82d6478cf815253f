"""QLIP's first training stage: contrastive and reconstruction losses from one encoder pass.

B samples, h, w codes per side, E embedding width
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from vitrail.config import NonNegativeFloat
from vitrail.data.image_captions import extract_caption_texts
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.hub.lpips_weights import load_lpips
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.models.qlip_model import QLIP
from vitrail.objectives.reconstruction_loss import ReconstructionWeights
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.tasks.codec_task import CodecSettings, PerceptualNetworkLoader, QuantizerWeights, ReconstructionLoss
from vitrail.tasks.contrastive_task import ContrastiveSettings, ContrastiveTask
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

DEFAULT_CODEC_SETTINGS = CodecSettings(
    weights=ReconstructionWeights(l2=1000.0, quantizer=1.0), quantizer=QuantizerWeights(commit=1.0, entropy=1.0)
)


class QlipSettings(ContrastiveSettings):
    """Settings of the contrastive task, and the following.

    contrastive_weight  weight of the contrastive loss
    codec               settings of the reconstruction losses. The defaults are the published weights: 1000 for the L2
                        loss, 1 for the quantizer losses, commitment and entropy included
    """

    contrastive_weight: NonNegativeFloat = 1.0
    codec: CodecSettings = DEFAULT_CODEC_SETTINGS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.image_size is not None:
            raise ConfigError("images have the tower's image size", "remove settings.codec.image_size")


class QlipTask(ContrastiveTask):
    """Adds reconstruction losses to `ContrastiveTask`, on the same images and captions.

    A QLIP model has the interface of a contrastive model, so it is passed to the base class as one.
    """

    settings: QlipSettings  # pyrefly: ignore

    def __init__(
        self,
        model: QLIP,
        sources: Mapping[str, NamedImageSource | SceneSource],
        tokenizer: Tokenizer | None,
        settings: QlipSettings,
        load_network: PerceptualNetworkLoader | None = None,
    ):
        super().__init__(cast(ContrastiveModel, model), sources, tokenizer, settings)
        self.qlip, self.reconstruction_loss = model, ReconstructionLoss(model, settings.codec, load_network)
        self.loss_weights = {
            **self.loss_weights,
            "pairs": settings.contrastive_weight,
            **self.reconstruction_loss.loss_weights,
        }

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        inputs, codec = self._make_batch(batch), self.qlip.codec
        features, embeddings = self.qlip.encode_features_and_image(inputs.pixels)
        quantized = codec.quantize(features)
        reconstructions = codec.decode(quantized.codes)
        return self.contrastive_losses(inputs, embeddings.float()) | self.reconstruction_loss(
            inputs.pixels, reconstructions, quantized
        )


TASKS.register(
    "qlip",
    TaskSpec(
        lambda model, sources, tokenizer, settings: QlipTask(model, sources, tokenizer, settings, load_lpips),
        QLIP,
        ("captions",),
        QlipSettings,
        extract_caption_texts,
    ),
)
