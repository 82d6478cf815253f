"""Four 8-bit channels in one int64, 16 bits a lane: red, green, blue, opacity from the lowest up.

Colours are sRGB values, multiplied by opacity, and all arithmetic is in whole numbers, so that a picture has the same
bits on every device, compiled or not, and however a batch is cut. A lane never passes 255 · 256 + 128 < 2¹⁶ on the way.

… any axes.
"""

import torch
from torch import Tensor

LOW = 0x00FF00FF00FF00FF  # the 8 bits in use of each lane
HALF = 0x0080008000800080  # one half in each lane, before a shift by 8
EACH = 0x0000000100010001  # one in each colour's lane
OPACITY = 0x00FF << 48


def pack(channels: Tensor) -> Tensor:
    """(4, …) values of 0…255 → (…) int64"""
    red, green, blue, opacity = channels.long()
    return red | green << 16 | blue << 32 | opacity << 48


def channel(packed: Tensor, which: int) -> Tensor:
    """(…) one channel, 0…255"""
    return packed >> 16 * which & 0xFF


def full(level: Tensor) -> Tensor:
    """0…255 → 0…256, so that a shift by 8 divides by what was full."""
    return level + (level >> 7)


def lerp(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    """From a (share 0) to b (share 256), rounded. Channels that are no larger than opacity stay so."""
    mixed = a * (256 - share)
    mixed += b * share
    return _shifted(mixed)


def over(top: Tensor, below: Tensor) -> Tensor:
    """A layer with its colours multiplied by its opacity, laid over another."""
    left = below * (256 - full(channel(top, 3)))
    return _shifted(left).add_(top)


def faded(layer: Tensor, share: int) -> Tensor:
    """A layer of which a share of 0…256 is left, rounded: what lies below it shines through."""
    return _shifted(layer * share)


def tinted(tones: Tensor, ink: Tensor, light: Tensor) -> Tensor:
    """A layer of tones (lanes: share of ink, that and the share of light together, nothing, opacity) in the given ink
    and light, which are packed colours of 0…256."""
    share = channel(tones, 0)
    mixed = ink * share
    mixed += light * (channel(tones, 1) - share)
    return _shifted(mixed).add_(tones & OPACITY)


def shaded(layer: Tensor, shade: Tensor) -> Tensor:
    """A layer whose colours become sums of its red, green, blue and opacity: shade (12, …) in 1/4096, the three sums
    one behind the other. No colour passes opacity."""
    red, green, blue, opacity = (channel(layer, which) for which in range(4))
    out = layer & OPACITY
    for which in range(3):
        r, g, b, a = shade[4 * which : 4 * which + 4]
        mixed = r * red + g * green + b * blue + a * opacity + 2048 >> 12
        out = out | torch.minimum(mixed.clamp(min=0), opacity) << 16 * which
    return out


def bytes_of(packed: Tensor) -> Tensor:
    """(B, H, W) → uint8 (B, 3, H, W) the colours, as a view"""
    return packed.view(torch.uint8).unflatten(-1, (-1, 8))[..., 0:6:2].permute(0, 3, 1, 2)


def _shifted(lanes: Tensor) -> Tensor:
    """Lanes divided by 256 and rounded, in place: memory is what this arithmetic waits for."""
    lanes += HALF
    lanes >>= 8
    lanes &= LOW
    return lanes
