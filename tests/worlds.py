"""Small worlds that several test files use: a soft dot on a torus, moved left or right, and a Genie of its size."""

import torch
from torch import Tensor

from vitrail.codecs.quantizers import FSQConfig, VQConfig
from vitrail.codecs.video_codec import VideoCodecConfig
from vitrail.models.genie_model import Genie, GenieConfig, GenieDynamicsConfig
from vitrail.models.latent_action_model import LatentActionConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, SpaceTimeConfig

SIDE = 8


def dots(count: int, frames: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Videos (B, T, 3, 8, 8) in −1 … 1 and what was done: 0 left, 1 right, by two pixels. Places are no whole pixels,
    so that no code can name them all."""
    chance = torch.Generator().manual_seed(seed)
    actions = torch.randint(0, 2, (count, frames - 1), generator=chance)
    moved = torch.cat([torch.zeros(count, 1), (2.0 * (2 * actions - 1)).cumsum(1)], 1)
    x = torch.rand(count, 1, generator=chance) * SIDE + moved
    y = torch.rand(count, 1, generator=chance) * SIDE

    def near(place: Tensor) -> Tensor:
        off = (torch.arange(SIDE) - place[..., None]).remainder(SIDE)
        return torch.exp(-torch.minimum(off, SIDE - off).square() / 4.5)

    bright = near(x)[:, :, None, None, :] * near(y)[:, :, None, :, None]
    return (bright * 2 - 1).expand(-1, -1, 3, -1, -1).contiguous(), actions


def transformer(layers: int = 1, memory: int = 3, width: int = 16) -> SpaceTimeConfig:
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=2, qk_norm="rms"),
        mlp=PlainMLPConfig(intermediate_size=2 * width),
        norm="rms",
    )
    return SpaceTimeConfig(layers=layers, block=block, context_frames=memory)


def codec_config(codes: int | None = None, **more) -> VideoCodecConfig:
    quantizer = FSQConfig(levels=(5, 5)) if codes is None else VQConfig(codebook_size=codes, dim=4)
    return VideoCodecConfig(
        image_size=SIDE, patch_size=4, encoder=transformer(**more), decoder=transformer(**more), quantizer=quantizer
    )


def latent_config(**more) -> LatentActionConfig:
    return LatentActionConfig(image_size=SIDE, patch_size=4, encoder=transformer(**more), decoder=transformer(**more))


def genie_config(*, latent: bool = True, acts: str = "added", codes: int | None = None, **more) -> GenieConfig:
    return GenieConfig(
        codec=codec_config(codes, **more),
        dynamics=GenieDynamicsConfig(transformer=transformer(**more), action_conditioning=acts),
        latent=latent_config(**more) if latent else None,
        num_controls=None if latent else 2,
    )


def genie(**given) -> Genie:
    torch.manual_seed(0)
    return Genie(genie_config(**given)).eval()
