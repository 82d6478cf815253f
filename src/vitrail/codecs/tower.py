"""A codec's encoder and quantizer as a tower: a picture is seen by its codes, and by nothing that was lost on the way.

What stands before the quantizer is the encoder itself, a tower like any other.

B batch, C channels, H, W pixels, N codes, d width of a code
"""

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import Bridge, make_bridge
from vitrail.codecs.quantizers import Quantizer, QuantizerConfig, make_quantizer
from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.nn import Work, cost


class CodesTowerConfig(Config, tag="codes", tag_field="kind"):
    """`into` is what a codec has between its encoder and its quantizer."""

    encoder: ViTConfig
    quantizer: QuantizerConfig
    into: Bridge = "linear"

    @property
    def patch(self) -> int:
        return self.encoder.patch

    @property
    def image(self) -> int:
        return self.encoder.image

    @property
    def channels(self) -> int:
        return self.encoder.channels

    @property
    def width(self) -> int:
        """Of a code."""
        with torch.device("meta"):
            return make_quantizer(self.quantizer).width


class CodesTower(nn.Module):
    """pixels (B, C, H, W) → codes (B, N, d). A gradient passes the quantizer as it does in training a codec; running
    means of a codebook stay as they are."""

    def __init__(self, config: CodesTowerConfig):
        super().__init__()
        self.config = config
        self.encoder = ViT(config.encoder)
        self.quantizer: Quantizer = make_quantizer(config.quantizer)
        wide = config.encoder.block.width
        self.into = make_bridge(config.into, wide, wide, self.quantizer.dim)

    def train(self, mode: bool = True) -> "CodesTower":
        super().train(mode)
        self.quantizer.eval()
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.into(self.encoder(pixels))
        return self.quantizer(features).codes.to(features.dtype)


@cost.flops.register
def _(module: CodesTower, work: Work) -> int:
    """`work` counts patches; a prefix is the encoder's own."""
    seen = Work.full(module.config.encoder.prefix + work.tokens // work.rows, work.rows)
    return cost.flops(module.encoder, seen) + sum(cost.flops(p, work) for p in (module.into, module.quantizer))


cost.bytes.register(CodesTower, cost.sum_bytes)
