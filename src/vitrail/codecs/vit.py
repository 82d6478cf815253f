"""The transformer pair of BSQ-ViT and QLIP: a ViT on patches of pixels, and one on the grid of their codes.

Both are `vitrail.encoders.vit.ViT`: to the decoder a code is a patch of one pixel with many channels, so that
positions, rotary tables, blocks and norms are the same, and pictures of any size are.

B batch, C channels, H, W pixels, P patch, h, w codes along a side, N = h·w, D width
"""

from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost, unpatchify


class ViTPairConfig(Config, tag="vit", tag_field="kind"):
    """`decoder` has patch 1; its channels are the numbers it is given for a code, its image the codes along a side.

    `hidden` is the width of a layer with tanh before the pixels (BSQ-ViT, QLIP); without it they are one product away.
    """

    encoder: ViTConfig
    decoder: ViTConfig
    hidden: int | None = None

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return self.encoder.patch

    @property
    def channels(self) -> int:
        return self.encoder.channels

    @property
    def reads(self) -> int:
        """Channels that the decoder reads."""
        return self.decoder.channels

    @property
    def size(self) -> tuple[int, int]:
        return self.encoder.image, self.encoder.image

    def __post_init__(self) -> None:
        if self.encoder.image % self.encoder.patch:
            raise ConfigError(
                f"a picture of {self.encoder.image} pixels leaves some over of patches of {self.encoder.patch}",
                "a codec must read every pixel: choose a multiple",
            )
        if self.decoder.patch != 1 or self.decoder.prefix or self.decoder.pool != "none":
            raise ConfigError("a codec's decoder has a token for every code and no other", "patch 1; no cls, no pool")


class ViTDecoder(nn.Module):
    """codes (B, h, w, channels) → pixels (B, C, H, W)"""

    def __init__(self, config: ViTPairConfig):
        super().__init__()
        self.patch = P = config.encoder.patch
        width, pixels = config.decoder.block.width, config.channels * P * P
        self.body = ViT(config.decoder)
        self.hidden = nn.Sequential(nn.Linear(width, config.hidden), nn.Tanh()) if config.hidden else nn.Identity()
        self.last = nn.Linear(config.hidden or width, pixels)

    def forward(self, codes: Tensor) -> Tensor:
        h, w = codes.shape[1:3]
        x = self.last(self.hidden(self.body(codes.movedim(-1, 1))))  # (B, N, C·P·P)
        return unpatchify(x, (1, self.patch, self.patch), (1, h, w))[:, :, 0]


@cost.flops.register
def _(module: ViTDecoder, work: Work) -> int:
    return sum(cost.flops(part, work) for part in (module.body, module.hidden, module.last))


for _kind in (nn.Tanh, nn.GELU):
    cost.flops.register(_kind, lambda module, work: 0)
    cost.bytes.register(_kind, lambda module, work: cost.Bytes())
cost.bytes.register(ViTDecoder, cost.sum_bytes)
