"""Vision tower from a codec's encoder and quantizer: its features are the codes of an image.

To use the features before the quantizer, use the encoder itself, which is a ViT.

Shapes: B batch, C channels, H, W pixels, N codes, d width of a code.
"""

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import BridgeKind, make_bridge
from vitrail.codecs.quantizers import Quantizer, QuantizerConfig, make_quantizer
from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.nn import Workload, cost
from vitrail.registry import ENCODERS


class CodecTowerConfig(EncoderConfig, tag="codes", tag_field="kind"):
    """Config of a `CodecTower`. `pre_quant` is the projection between encoder and quantizer."""

    encoder: ViTConfig
    quantizer: QuantizerConfig
    pre_quant: BridgeKind = "linear"

    @property
    def patch_size(self) -> int:
        return self.encoder.patch_size

    @property
    def image_size(self) -> int:
        return self.encoder.image_size

    @property
    def channels(self) -> int:
        return self.encoder.channels

    @property
    def width(self) -> int:
        """Width of a code."""
        with torch.device("meta"):
            return make_quantizer(self.quantizer).width


@ENCODERS.register("codes")
class CodecTower(nn.Module):
    """Encode pixels (B, C, H, W) to codes (B, N, d).

    Gradients pass the quantizer as in codec training; running means of a codebook do not change.
    """

    Config = CodecTowerConfig

    def __init__(self, config: CodecTowerConfig):
        super().__init__()
        self.config = config
        self.encoder = ViT(config.encoder)
        self.quantizer: Quantizer = make_quantizer(config.quantizer)
        width = config.encoder.block.width
        self.pre_quant_proj = make_bridge(config.pre_quant, width, width, self.quantizer.dim)

    def train(self, mode: bool = True) -> "CodecTower":
        super().train(mode)
        self.quantizer.eval()
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.pre_quant_proj(self.encoder(pixels))
        return self.quantizer(features).codes.to(features.dtype)


@cost.count_flops.register
def _(module: CodecTower, work: Workload) -> int:
    """`workload` counts patches; the encoder adds its own prefix tokens."""
    encoder_work = Workload.full_attention(
        module.config.encoder.num_prefix_tokens + work.tokens // work.sequences, work.sequences
    )
    return cost.count_flops(module.encoder, encoder_work) + sum(
        cost.count_flops(p, work) for p in (module.pre_quant_proj, module.quantizer)
    )


cost.count_bytes.register(CodecTower, cost.sum_child_bytes)
