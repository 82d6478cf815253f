"""ViT encoder and decoder of BSQ-ViT and QLIP.

Both are `ViT` towers: for the decoder, a code is a patch of one pixel with many channels. So both share positions,
rotary embeddings, blocks and norms, and support images of any size.

Shapes: B batch, C channels, H, W pixels, P patch, h, w codes along a side, N = h·w, D width.
"""

from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.nn import cost, unpatchify


class ViTAutoencoderConfig(Config, tag="vit", tag_field="kind"):
    """Config of a ViT encoder and a `ViTDecoder`.

    `decoder` has patch size 1; its channels are the numbers it gets for each code, its image size the codes along a
    side. `intermediate_size` is the width of a tanh layer before the pixels (BSQ-ViT, QLIP); None: a single linear
    layer.
    """

    encoder: ViTConfig
    decoder: ViTConfig
    intermediate_size: int | None = None

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        return self.encoder.patch_size

    @property
    def channels(self) -> int:
        return self.encoder.channels

    @property
    def decoder_channels(self) -> int:
        """Number of input channels of the decoder."""
        return self.decoder.channels

    @property
    def image_size(self) -> tuple[int, int]:
        return self.encoder.image_size, self.encoder.image_size

    def __post_init__(self) -> None:
        if self.encoder.image_size % self.encoder.patch_size:
            raise ConfigError(
                f"an image of {self.encoder.image_size} pixels does not divide into patches of "
                f"{self.encoder.patch_size}",
                "choose an image_size that is a multiple of patch_size",
            )
        if self.decoder.patch_size != 1 or self.decoder.num_prefix_tokens or self.decoder.pool != "none":
            raise ConfigError(
                "net.decoder must have one token for each code", "set patch_size = 1, without prefix tokens and pool"
            )


class ViTDecoder(nn.Module):
    """Decode codes (B, h, w, channels) to pixels (B, C, H, W)."""

    def __init__(self, config: ViTAutoencoderConfig):
        super().__init__()
        P = config.encoder.patch_size
        self.patch = P
        width, pixels = config.decoder.block.width, config.channels * P * P
        self.body = ViT(config.decoder)
        self.hidden = (
            nn.Sequential(nn.Linear(width, config.intermediate_size), nn.Tanh())
            if config.intermediate_size
            else nn.Identity()
        )
        self.last = nn.Linear(config.intermediate_size or width, pixels)

    def forward(self, codes: Tensor) -> Tensor:
        h, w = codes.shape[1:3]
        x = self.last(self.hidden(self.body(codes.movedim(-1, 1))))  # (B, N, C·P·P)
        return unpatchify(x, (1, self.patch, self.patch), (1, h, w))[:, :, 0]


for _kind in (nn.Tanh, nn.GELU):
    cost.count_flops.register(_kind, lambda _module, _work: 0)
    cost.count_bytes.register(_kind, lambda _module, _work: cost.MemoryBytes())
cost.count_flops.register(ViTDecoder, cost.sum_child_flops)
cost.count_bytes.register(ViTDecoder, cost.sum_child_bytes)
