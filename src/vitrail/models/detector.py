"""What is where: each patch of a ViT says whether an object has its centre there, how large, what, in which colour.

B pictures, N cells (patches), C concepts, K colours, M objects found
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost


class DetectorConfig(Config):
    """The names are part of the model: a row of its answers means nothing without them."""

    image: ViTConfig
    concepts: tuple[str, ...]
    colours: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.concepts) < 2 or len(self.colours) < 1:
            raise ConfigError("a detector tells at least two concepts apart", "name them in `concepts`")
        if self.image.prefix or self.image.pool != "none":
            raise ConfigError("a detector's tower has patches alone", "leave out cls, registers and pool")


class Cells(NamedTuple):
    """What the cells say, and the grid they lie in."""

    present: Tensor  # (B, N) logit of an object's centre being here
    box: Tensor  # (B, N, 4) centre within the cell, in cells from its middle, then log of width and height in cells
    concept: Tensor  # (B, N, C) logits
    colour: Tensor  # (B, N, K) logits
    grid: tuple[int, int]


class Found(NamedTuple):
    """Objects by falling score; rows past `count` are empty."""

    score: Tensor  # (B, M)
    box: Tensor  # (B, M, 4) x0 y0 x1 y1 in 0…1
    concept: Tensor  # (B, M)
    colour: Tensor  # (B, M)
    count: Tensor  # (B,)


def seen(pixels: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) → the −1…1 that a detector reads"""
    return pixels.float() / 127.5 - 1


class Detector(nn.Module):
    """pixels (B, 3, H, W) → `Cells`"""

    def __init__(self, config: DetectorConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image)
        self.parts = 1, 4, len(config.concepts), len(config.colours)
        self.head = nn.Linear(config.image.block.width, sum(self.parts))
        nn.init.constant_(self.head.bias[:1], -4.0)  # most cells are empty

    def forward(self, pixels: Tensor) -> Cells:
        P = self.config.image.patch
        present, box, concept, colour = self.head(self.image(pixels)).float().split(self.parts, dim=-1)
        return Cells(present[..., 0], box, concept, colour, (pixels.shape[2] // P, pixels.shape[3] // P))

    @torch.no_grad()
    def find(self, pixels: Tensor, *, threshold: float = 0.5, overlap: float = 0.6, most: int = 32) -> Found:
        """The objects of each picture. Of two whose boxes share more than `overlap`, the surer one stays."""
        return choose(self(pixels), threshold, overlap, most)

    def work(self, batch: int = 1, size: int | None = None) -> Work:
        return self.image.work(batch, size)


def boxes(cells: Cells) -> Tensor:
    """(B, N, 4) x0 y0 x1 y1 in 0…1"""
    h, w = cells.grid
    at = torch.arange(h * w, device=cells.box.device)
    middle = torch.stack([at % w, at // w], dim=-1) + 0.5  # (N, 2) in cells
    centre, half = middle + cells.box[..., :2], cells.box[..., 2:].clamp(max=8).exp() / 2
    return torch.cat([centre - half, centre + half], dim=-1) / torch.tensor([w, h, w, h], device=at.device)


def choose(cells: Cells, threshold: float, overlap: float, most: int) -> Found:
    score, where = cells.present.sigmoid().topk(min(most, cells.present.shape[1]))  # (B, M)
    B, M = score.shape

    def of(x: Tensor) -> Tensor:
        return x.gather(1, where[..., None].expand(-1, -1, x.shape[-1]))

    box = of(boxes(cells))
    concept, colour = of(cells.concept).argmax(-1), of(cells.colour).argmax(-1)
    near = iou(box, box) > overlap  # (B, M, M)
    kept = score > threshold
    for m in range(1, M):  # by falling score, so that whoever could cover m is settled
        kept[:, m] &= ~(near[:, m, :m] & kept[:, :m]).any(1)
    order = (~kept).long().argsort(dim=1, stable=True)
    count = kept.sum(1)
    real = torch.arange(M, device=score.device) < count[:, None]
    return Found(
        score.gather(1, order).where(real, 0),
        box.gather(1, order[..., None].expand(B, M, 4)) * real[..., None],
        concept.gather(1, order).where(real, -1),
        colour.gather(1, order).where(real, -1),
        count,
    )


def iou(a: Tensor, b: Tensor) -> Tensor:
    """(B, M, 4), (B, L, 4) → (B, M, L)"""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = [(x[..., 2:] - x[..., :2]).clamp(min=0).prod(-1) for x in (a, b)]
    return shared / (area[0][:, :, None] + area[1][:, None, :] - shared).clamp(min=1e-12)


@cost.flops.register
def _(module: Detector, work: Work) -> int:
    return cost.flops(module.image, work) + cost.flops(module.head, work)


@cost.bytes.register
def _(module: Detector, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work)
