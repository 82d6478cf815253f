"""QLIP's first stage: pictures are compared with words and drawn again, from one pass of the encoder.

B samples, h, w codes along a side, E width of the embedding
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.errors import ConfigError
from vitrail.models.clip import Contrastive
from vitrail.models.qlip import QLIP
from vitrail.objectives.reconstruction import Weights
from vitrail.processing.text import Tokenizer
from vitrail.tasks.codec import CodecSettings, Networks, QuantizerWeights, Reconstruction
from vitrail.tasks.contrast import ContrastSettings, ContrastTask
from vitrail.train.task import Batch

DRAWN = CodecSettings(weights=Weights(l2=1000.0, quantizer=1.0), quantizer=QuantizerWeights(commit=1.0, entropy=1.0))


class QlipSettings(ContrastSettings):
    """Settings of the contrastive task, and

    align  weight of the contrastive loss
    codec  settings of the codec's losses; as published, the squared difference counts a thousand times as much as the
           contrastive loss, the quantizer's as much, its commitment wholly
    """

    align: float = 1.0
    codec: CodecSettings = DRAWN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align < 0:
            raise ConfigError(f"a weight of {self.align}", "give 0 or more")
        if self.codec.side is not None:
            raise ConfigError("the tower's side is the pictures' side", "leave settings.codec.side out")


class QlipTask(ContrastTask):
    """Captions, labels and false captions are those of `ContrastTask`; its model here is a QLIP, which has all that it
    asks of one."""

    settings: QlipSettings  # pyrefly: ignore

    def __init__(
        self,
        model: QLIP,
        sources: Mapping[str, NamedSource | SceneSource],
        words: Tokenizer | None,
        settings: QlipSettings,
        networks: Networks | None = None,
    ):
        super().__init__(cast(Contrastive, model), sources, words, settings)
        self.qlip, self.losses = model, Reconstruction(model, settings.codec, networks)
        self.weights = {**self.weights, "pairs": settings.align, **self.losses.weights}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        made, codec = self._made(batch), self.qlip.codec
        features, embeddings = self.qlip.look(made.pixels)
        found = codec.quantize(features)
        drawn = codec.decode(found.codes)
        return self.compared(made, embeddings.float()) | self.losses(made.pixels, drawn, found)
