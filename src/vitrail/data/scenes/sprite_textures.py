"""Sprite textures for the renderer: packed texels of all atlas levels, and the tint colours.

Shapes: S sprites, L levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.packed_pixels import pack_channels, scale_to_256
from vitrail.data.scenes.scene import COLOURS

WORD_LIGHTNESS = 32  # lightness of the letters of an untinted word, which has a white halo
_DARKEST, _LIGHTEST = 192, 160  # of 255: maximum darkening and lightening of a tint


class SpriteTextures(NamedTuple):
    """Texels of all sprites. Each level holds every sprite twice: with its own colours, and as tones for tinting."""

    texels: Tensor  # (texels,) int64, packed as in `packed_pixels`: level, colours or tones, sprite, row, column
    level_start: Tensor  # (L,) index of a level's first texel
    cell_size: Tensor  # (L,) cell size of a level
    tint_colour: Tensor  # (colours,) packed, 0…256
    tint_highlight: Tensor  # (2, colours) packed: highlight of a tinted thing; halo of a tinted word
    is_word: Tensor  # (S,) int64: 1 if the sprite is a word

    @classmethod
    def from_levels(cls, levels: dict[int, Tensor], is_word: Tensor) -> "SpriteTextures":
        """Build textures from levels of uint8 (S, 4, side, side), smallest first, on their device."""
        tone = _base_tone(levels[max(levels)], is_word)
        planes = [
            torch.cat(
                [pack_channels(cells.transpose(0, 1)) for cells in (level, compute_tone_planes(level, tone, is_word))]
            ).flatten()
            for level in levels.values()
        ]
        sizes = torch.tensor([len(plane) for plane in planes])
        rgb = torch.tensor([colour.rgb for colour in COLOURS]).T  # (3, colours)
        # Bright letters have a black halo, others a white one.
        light = torch.stack([torch.full_like(rgb[0], 256), torch.where(_luma(rgb) > 127, 0, 256)])
        parts = (
            torch.cat(planes),
            sizes.cumsum(0) - sizes,
            torch.tensor(list(levels)),
            pack_channels(torch.cat([scale_to_256(rgb), torch.zeros_like(rgb[:1])])),
            pack_channels(torch.stack([light, light, light, torch.zeros_like(light)])),
            is_word.long(),
        )
        return cls(*(part.to(parts[0].device) for part in parts))


def compute_tone_planes(level: Tensor, base_tone: Tensor, is_word: Tensor) -> Tensor:
    """Convert sprites, uint8 (S, 4, side, side), to tone planes (S, 4, side, side) without hue.

    The channels are: amount of tint colour, amounts of tint colour and highlight together, zero, opacity. Texels with
    the sprite's base tone are fully tinted. Darker texels have less tint colour. Lighter texels mix in the highlight.
    """
    opacity, base_tone = level[:, 3].int(), base_tone.int()[:, None, None]
    luma = _luma(level[:, :3].int().transpose(0, 1))  # (S, side, side), premultiplied like the colours
    above = luma - (opacity * scale_to_256(base_tone) >> 8)
    reach = torch.where(is_word, 255, _LIGHTEST).int()[:, None, None]
    darker = (_DARKEST << 12) // base_tone.clamp(min=1)  # in 1/4096 for each value below the tone
    lighter = (reach << 12) // (255 - base_tone).clamp(min=1)
    dark, light = above.clamp(max=0).neg() * darker >> 12, above.clamp(min=0) * lighter >> 12
    ink = (opacity - dark - light).clamp(min=0)
    return torch.stack([ink, torch.minimum(ink + light, opacity), torch.zeros_like(ink), opacity], 1)


def _base_tone(level: Tensor, word: Tensor) -> Tensor:
    """Return the base tones (S,): the mean lightness of opaque texels, or that of the letters of a word."""
    rgb, opacity = level[:, :3].long(), level[:, 3].long()
    luma = _luma(rgb.transpose(0, 1)).sum((1, 2)) * 255 // opacity.sum((1, 2)).clamp(min=1)
    return torch.where(word, WORD_LIGHTNESS, luma.clamp(max=255))


def _luma(rgb: Tensor) -> Tensor:
    """Return the luma of RGB (3, …) → (…), in integers."""
    return (77 * rgb[0] + 150 * rgb[1] + 29 * rgb[2]) >> 8
