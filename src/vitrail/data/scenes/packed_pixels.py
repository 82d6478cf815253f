"""Packed pixels: four 8-bit channels in one int64, in lanes of 16 bits (red, green, blue, opacity from the lowest).

Colours are sRGB values premultiplied by opacity. All arithmetic uses integers, so images are bit-identical on every
device, compiled or not, and for any batch size. A lane never exceeds 255 · 256 + 128 < 2¹⁶ in between.

Shapes: … stands for any axes.
"""

import torch
from torch import Tensor

LANE_MASK = 0x00FF00FF00FF00FF  # the 8 used bits of each lane
LANE_HALVES = 0x0080008000800080  # one half in each lane, for rounding before a shift by 8
OPACITY_MASK = 0x00FF << 48


def pack_channels(channels: Tensor) -> Tensor:
    """Pack channels (4, …) with values 0…255 into int64 (…)."""
    red, green, blue, opacity = channels.long()
    return red | green << 16 | blue << 32 | opacity << 48


def extract_channel(packed: Tensor, index: int) -> Tensor:
    """Return one channel (…), 0…255."""
    return packed >> 16 * index & 0xFF


def scale_to_256(level: Tensor) -> Tensor:
    """Map 0…255 to 0…256, so that a shift by 8 divides by the full value."""
    return level + (level >> 7)


def lerp(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Interpolate from a (weight 0) to b (weight 256), rounded. Channels stay at most as large as opacity."""
    mixed = a * (256 - weight)
    mixed += b * weight
    return _divide_by_256(mixed)


def blend_over(top: Tensor, below: Tensor) -> Tensor:
    """Blend a premultiplied layer over another."""
    left = below * (256 - scale_to_256(extract_channel(top, 3)))
    return _divide_by_256(left).add_(top)


def scale_layer(layer: Tensor, weight: int) -> Tensor:
    """Scale a layer, including its opacity, by a weight of 0…256, rounded."""
    return _divide_by_256(layer * weight)


def apply_tint(tones: Tensor, ink: Tensor, light: Tensor) -> Tensor:
    """Colour a layer of tone planes with packed tint and highlight colours of 0…256.

    See `sprite_textures.compute_tone_planes` for the lanes of the layer.
    """
    share = extract_channel(tones, 0)
    mixed = ink * share
    mixed += light * (extract_channel(tones, 1) - share)
    return _divide_by_256(mixed).add_(tones & OPACITY_MASK)


def apply_colour_matrix(layer: Tensor, shade: Tensor) -> Tensor:
    """Apply a colour matrix (12, …) in 1/4096 to a layer.

    Each new colour is a weighted sum of red, green, blue and opacity, and is clamped to opacity.
    """
    red, green, blue, opacity = (extract_channel(layer, which) for which in range(4))
    out = layer & OPACITY_MASK
    for which in range(3):
        r, g, b, a = shade[4 * which : 4 * which + 4]
        mixed = r * red + g * green + b * blue + a * opacity + 2048 >> 12
        out = out | torch.minimum(mixed.clamp(min=0), opacity) << 16 * which
    return out


def to_rgb_bytes(packed: Tensor) -> Tensor:
    """Return the colours of packed pixels (B, H, W) as a uint8 view (B, 3, H, W)."""
    return packed.view(torch.uint8).unflatten(-1, (-1, 8))[..., 0:6:2].permute(0, 3, 1, 2)


def _divide_by_256(lanes: Tensor) -> Tensor:
    """Divide the lanes by 256 and round, in place, because memory bandwidth is the bottleneck."""
    lanes += LANE_HALVES
    lanes >>= 8
    lanes &= LANE_MASK
    return lanes
