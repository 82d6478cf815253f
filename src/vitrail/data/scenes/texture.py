"""What the renderer reads of an atlas: packed texels of all levels, and the colours that tint them.

S sprites, L levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.lanes import full, pack
from vitrail.data.scenes.scene import COLOURS

WORD_TONE = 32  # lightness of the letters of an untinted word; its halo is white
_DARKEST, _LIGHTEST = 192, 160  # of 255: how far a tint goes towards black and towards light


class Texture(NamedTuple):
    """A level holds every sprite twice: as it is, and as the tones that a tint colours."""

    texels: Tensor  # (texels,) int64, packed as in `lanes`: level, natural or tones, sprite, row, column
    start: Tensor  # (L,) where a level begins
    side: Tensor  # (L,) of its cells
    ink: Tensor  # (colours,) packed, 0…256
    light: Tensor  # (2, colours) packed: what lightens a tinted thing; what surrounds the letters of a tinted word
    word: Tensor  # (S,) int64: 1 where the sprite is a word

    @classmethod
    def of(cls, levels: dict[int, Tensor], word: Tensor) -> "Texture":
        """From levels of uint8 (S, 4, side, side), the smallest first; lies on their device."""
        tone = _tone(levels[max(levels)], word)
        planes = [
            torch.cat([pack(cells.transpose(0, 1)) for cells in (level, tones(level, tone, word))]).flatten()
            for level in levels.values()
        ]
        sizes = torch.tensor([len(plane) for plane in planes])
        rgb = torch.tensor([colour.rgb for colour in COLOURS]).T  # (3, colours)
        # Letters of a bright colour have a black halo, others a white one.
        light = torch.stack([torch.full_like(rgb[0], 256), torch.where(_luma(rgb) > 127, 0, 256)])
        parts = (
            torch.cat(planes),
            sizes.cumsum(0) - sizes,
            torch.tensor(list(levels)),
            pack(torch.cat([full(rgb), torch.zeros_like(rgb[:1])])),
            pack(torch.stack([light, light, light, torch.zeros_like(light)])),
            word.long(),
        )
        return cls(*(part.to(parts[0].device) for part in parts))


def tones(level: Tensor, tone: Tensor, word: Tensor) -> Tensor:
    """uint8 (S, 4, side, side) → (S, 4, side, side): what is left of a sprite when its hue is taken away.

    The channels are the share of ink, that and the share of light together, nothing, opacity. What has the sprite's own
    tone is all ink; what is darker has less of it; what is lighter is mixed with light.
    """
    opacity, tone = level[:, 3].int(), tone.int()[:, None, None]
    luma = _luma(level[:, :3].int().transpose(0, 1))  # (S, side, side), multiplied by opacity as the colours are
    above = luma - (opacity * full(tone) >> 8)
    reach = torch.where(word, 255, _LIGHTEST).int()[:, None, None]
    darker = (_DARKEST << 12) // tone.clamp(min=1)  # a share of 4096 for each level below the tone
    lighter = (reach << 12) // (255 - tone).clamp(min=1)
    dark, light = above.clamp(max=0).neg() * darker >> 12, above.clamp(min=0) * lighter >> 12
    ink = (opacity - dark - light).clamp(min=0)
    return torch.stack([ink, torch.minimum(ink + light, opacity), torch.zeros_like(ink), opacity], 1)


def _tone(level: Tensor, word: Tensor) -> Tensor:
    """(S,) the mean lightness of what is opaque; of a word, that of its letters."""
    rgb, opacity = level[:, :3].long(), level[:, 3].long()
    luma = _luma(rgb.transpose(0, 1)).sum((1, 2)) * 255 // opacity.sum((1, 2)).clamp(min=1)
    return torch.where(word, WORD_TONE, luma.clamp(max=255))


def _luma(rgb: Tensor) -> Tensor:
    """(3, …) → (…), in whole numbers"""
    return (77 * rgb[0] + 150 * rgb[1] + 29 * rgb[2]) >> 8
