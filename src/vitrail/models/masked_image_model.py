"""Masked image modeling: predict features of a teacher (EVA) or pixels (MAE, SimMIM) of masked patches.

Shapes: B images, C channels, P patch, N patches, M masked patches, D width, K width of a target.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig, crop_to_patches
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost, patchify
from vitrail.objectives.masking import gather_patches, indices_to_mask
from vitrail.registry import MODELS


class MaskedImageConfig(Config):
    """Config of a `MaskedImageModel`.

    image    config of the trained tower, with a mask token
    teacher  config of the tower whose features are the targets; None: pixels are the targets
    """

    image: ViTConfig
    teacher: ViTConfig | None = None

    def __post_init__(self) -> None:
        if not self.image.mask_token:
            raise ConfigError("the image tower has no mask token", "set image.mask_token")
        if self.teacher is not None and self.teacher.patch_size != self.image.patch_size:
            raise ConfigError(
                f"teacher.patch_size is {self.teacher.patch_size}, but image.patch_size is {self.image.patch_size}",
                "set both to the same size",
            )


M = TypeVar("M", bound=nn.Module)


def freeze_as_buffers(module: M, *, persistent: bool = True) -> M:
    """Convert the weights of a module to buffers, which no stage can train. They are saved if they are `persistent`."""
    for part in module.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, weight.detach(), persistent=persistent)
    return module.eval()


@MODELS.register("masked")
class MaskedImageModel(nn.Module):
    """Model of masked patches: pixels (B, C, H, W) and masked indices (B, M) to predictions and targets."""

    Config = MaskedImageConfig

    def __init__(self, config: MaskedImageConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image)
        self.teacher = None if config.teacher is None else freeze_as_buffers(ViT(config.teacher))
        targets = (
            config.image.channels * config.image.patch_size**2 if config.teacher is None else config.teacher.block.width
        )
        self.head = nn.Linear(config.image.block.width, targets)

    @property
    def pretrained_parts(self) -> tuple[str, ...]:
        """Parts that are not trained here and need pretrained weights."""
        return () if self.teacher is None else ("teacher",)

    def train(self, mode: bool = True) -> "MaskedImageModel":
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, pixels: Tensor, masked_indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the masked patches, (B, M, K) each."""
        P = self.config.image.patch_size
        patches = (pixels.shape[2] // P) * (pixels.shape[3] // P)
        x = self.image(pixels, patch_mask=indices_to_mask(masked_indices, patches))
        return self.head(gather_patches(x, masked_indices)), gather_patches(
            self.compute_targets(pixels), masked_indices
        )

    @torch.no_grad()
    def compute_targets(self, pixels: Tensor) -> Tensor:
        """Compute targets (B, N, K) of all patches: the teacher's features, or pixels."""
        if self.teacher is not None:
            return self.teacher(pixels)
        P = self.config.image.patch_size
        return patchify(crop_to_patches(pixels, P, self.config.image.image_size), (1, P, P))

    def workload(self, batch_size: int = 1, num_masked: int | None = None) -> Workload:
        """Return the workload of images of the tower's size, by default with all patches masked."""
        config = self.config.image
        return self.image.workload(batch_size).replace(
            logit_tokens=batch_size * (config.grid_size**2 if num_masked is None else num_masked)
        )


@cost.count_flops.register
def _(module: MaskedImageModel, work: Workload) -> int:
    """Count the trained parts, with the workload of `MaskedImageModel.workload`; the teacher is counted separately."""
    masked = work.replace(tokens=work.tokens if work.logit_tokens is None else work.logit_tokens)
    return cost.count_flops(module.image, work) + cost.count_flops(module.head, masked)


cost.count_bytes.register(MaskedImageModel, cost.sum_tensor_bytes)  # the teacher's weights are buffers
