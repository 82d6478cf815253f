"""A tower that learns by guessing what is hidden: a teacher's features (EVA), or mere pixels (MAE, SimMIM).

B pictures, C channels, P patch, N patches, M of them masked, D width, K numbers of a target
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig, whole_patches
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost, patchify
from vitrail.objectives.masked import at, flags


class MaskedConfig(Config):
    """
    image     the tower that is kept, with a mask token
    teacher   the tower whose features are the targets; without one the targets are pixels
    """

    image: ViTConfig
    teacher: ViTConfig | None = None

    def __post_init__(self) -> None:
        if not self.image.mask:
            raise ConfigError("a tower that guesses what is hidden needs a mask token", "set image.mask")
        if self.teacher is not None and self.teacher.patch != self.image.patch:
            raise ConfigError(
                f"the teacher's patches are of {self.teacher.patch} pixels, the tower's of {self.image.patch}",
                "each patch learns from the teacher's at its place: give both the same size",
            )


M = TypeVar("M", bound=nn.Module)


def frozen(module: M) -> M:
    """The module with its weights as buffers. They are saved and loaded like any others, and no stage trains them,
    whatever parts it names: what it names are parameters."""
    for part in module.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, weight.detach())
    return module.eval()


class Masked(nn.Module):
    """pixels (B, C, H, W), places (B, M) → what is said of the masked patches, and what should be."""

    def __init__(self, config: MaskedConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image)
        self.teacher = None if config.teacher is None else frozen(ViT(config.teacher))
        targets = (
            config.image.channels * config.image.patch**2 if config.teacher is None else config.teacher.block.width
        )
        self.head = nn.Linear(config.image.block.width, targets)

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts that learn nothing here, and must come from elsewhere."""
        return () if self.teacher is None else ("teacher",)

    def train(self, mode: bool = True) -> "Masked":
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, pixels: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """(B, M, K) twice"""
        P = self.config.image.patch
        patches = (pixels.shape[2] // P) * (pixels.shape[3] // P)
        x = self.image(pixels, masked=flags(places, patches))
        return self.head(at(x, places)), at(self.targets(pixels), places)

    @torch.no_grad()
    def targets(self, pixels: Tensor) -> Tensor:
        """(B, N, K): the teacher's features, or the pixels, of every patch, masked or not"""
        if self.teacher is not None:
            return self.teacher(pixels)
        P = self.config.image.patch
        return patchify(whole_patches(pixels, P, self.config.image.image), (1, P, P))

    def work(self, batch: int = 1, masked: int | None = None) -> Work:
        """So many pictures of the tower's own size, of each of which so many patches are masked; all unless told."""
        config = self.config.image
        return self.image.work(batch).with_(asked=batch * (config.side**2 if masked is None else masked))


@cost.flops.register
def _(module: Masked, work: Work) -> int:
    """Of what trains; `work` as `Masked.work` gives it. The teacher's, run forward alone, are its own."""
    masked = work.with_(tokens=work.tokens if work.asked is None else work.asked)
    return cost.flops(module.image, work) + cost.flops(module.head, masked)


@cost.bytes.register
def _(module: Masked, work: Work) -> cost.Bytes:
    """A frozen teacher's weights are buffers, which count too."""
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return cost.Bytes(weights=size, read=size)
