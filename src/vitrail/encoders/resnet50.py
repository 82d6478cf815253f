"""Frozen ResNet-50 for Fréchet distances and as a teacher.

This is Keras' ResNet v1: a stage halves the resolution in the first 1×1 convolution of its first block. Batch norms are
folded into the convolutions.

B images, H, W pixels, D = 2048
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError

CHANNEL_MEANS = (123.68, 116.779, 103.939)  # RGB in 0…255, as in Caffe
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks
WIDTH, CLASSES, MINIMUM, TRAINED = 2048, 1000, 32, 224


class Bottleneck(nn.Module):
    """Bottleneck block: 1×1, 3×3 and 1×1 convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.a = nn.Conv2d(inputs, width, 1, stride)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.c = nn.Conv2d(width, 4 * width, 1)
        self.short = nn.Conv2d(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.short(x))


class ResNet50(nn.Module):
    """ResNet-50: pixels (B, 3, H, W) in −1…1 → (B, D). The weights are frozen; gradients reach the pixels.

    Metrics resize images to `image_size`, 224 as in training. Other sizes are part of `name`.
    """

    def __init__(self, image_size: int = TRAINED) -> None:
        super().__init__()
        if image_size < MINIMUM:
            raise ConfigError(f"ResNet-50 image_size is {image_size}", f"use at least {MINIMUM}")
        self.image_size = image_size
        self.name = "ResNet50" if image_size == TRAINED else f"ResNet50@{image_size}"
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.stages, inputs = nn.ModuleList(), 64
        for width, blocks in STAGES:
            stage = nn.ModuleList()
            for block in range(blocks):
                stage.append(Bottleneck(inputs, width, 2 if block == 0 and len(self.stages) else 1))
                inputs = 4 * width
            self.stages.append(stage)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.requires_grad_(False)

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Return the last feature map (B, D, ⌈H/32⌉, ⌈W/32⌉)."""
        if pixels.ndim != 4 or pixels.shape[1] != 3 or min(pixels.shape[2:]) < MINIMUM:
            raise ImageError(
                f"pixels of ResNet-50 have shape {tuple(pixels.shape)}",
                f"pass (B, 3, H, W) with at least {MINIMUM} × {MINIMUM} pixels",
            )
        if not pixels.is_floating_point():
            raise ImageError(f"ResNet-50 needs pixels in −1…1, not {pixels.dtype}", "divide by 127.5, subtract 1")
        bytes_ = (pixels.flip(1) + 1) * 127.5  # BGR in 0…255
        x = bytes_ - bytes_.new_tensor(CHANNEL_MEANS[::-1])[:, None, None]
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)  # after a ReLU, Keras' zero padding is equivalent
        for stage in self.stages:
            for block in stage:  # pyrefly: ignore
                x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        return self.forward_features(pixels).mean((2, 3))

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits of the ImageNet classes: (B, D) → (B, 1000)."""
        return self.head(features)
