"""ResNet-50 as a frozen feature network: features for a Fréchet distance, and a teacher.

Keras' form of the first ResNet: a stage halves its grid in the first 1×1 convolution of its first block. The batch
norms are folded into the convolutions, so nothing here can drift while something else is trained.

B pictures, H, W pixels, D = 2048
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError

MEANS = (123.68, 116.779, 103.939)  # red, green, blue of 0…255, as the first networks of Caffe had them
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks
WIDTH, CLASSES, MINIMUM, TRAINED = 2048, 1000, 32, 224


class Block(nn.Module):
    """1×1, 3×3, 1×1 beside a short cut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.a = nn.Conv2d(inputs, width, 1, stride)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.c = nn.Conv2d(width, 4 * width, 1)
        self.short = nn.Conv2d(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.short(x))


class ResNet50(nn.Module):
    """pixels (B, 3, H, W) in −1…1 → (B, D). Gradients reach the pixels, not the weights.

    `side` is what a measure resizes pictures to: 224, as in training. Its name says so where it is another.
    """

    def __init__(self, side: int = TRAINED) -> None:
        super().__init__()
        if side < MINIMUM:
            raise ConfigError(f"ResNet-50 cannot read pictures of {side} pixels", f"at least {MINIMUM} a side")
        self.side = side
        self.name = "ResNet50" if side == TRAINED else f"ResNet50@{side}"
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.stages, inputs = nn.ModuleList(), 64
        for width, blocks in STAGES:
            stage = nn.ModuleList()
            for block in range(blocks):
                stage.append(Block(inputs, width, 2 if block == 0 and len(self.stages) else 1))
                inputs = 4 * width
            self.stages.append(stage)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.requires_grad_(False)

    def maps(self, pixels: Tensor) -> Tensor:
        """(B, D, H/32, W/32), rounded up: what a student is held against place by place."""
        if pixels.ndim != 4 or pixels.shape[1] != 3 or min(pixels.shape[2:]) < MINIMUM:
            raise ImageError(
                f"ResNet-50 cannot read pictures of shape {tuple(pixels.shape)}",
                f"give (B, 3, H, W) of at least {MINIMUM} × {MINIMUM} pixels",
            )
        if not pixels.is_floating_point():
            raise ImageError(f"ResNet-50 reads pixels in −1…1, not {pixels.dtype}", "divide by 127.5, subtract 1")
        bytes_ = (pixels.flip(1) + 1) * 127.5  # it reads blue, green, red of 0…255
        x = bytes_ - bytes_.new_tensor(MEANS[::-1])[:, None, None]
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)  # behind a ReLU, Keras' border of zeros is never the largest
        for stage in self.stages:
            for block in stage:  # pyrefly: ignore
                x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        return self.maps(pixels).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """(B, D) → (B, 1000), the classes of ImageNet."""
        return self.head(features)
