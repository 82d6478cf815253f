"""Object detector: each patch of a ViT predicts whether an object's center is in it, and its size, concept and colour.

Shapes: B images, N cells (patches), C concepts, K colours, M detections.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.registry import MODELS


class DetectorConfig(Config):
    """Config of a `Detector`. Outputs are indices into the names of concepts and colours."""

    image: ViTConfig
    concepts: tuple[str, ...]
    colours: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.concepts) < 2 or len(self.colours) < 1:
            raise ConfigError(
                f"there are {len(self.concepts)} concepts and {len(self.colours)} colours",
                "give at least 2 `concepts` and 1 colour",
            )
        if self.image.num_prefix_tokens or self.image.pool != "none":
            raise ConfigError(
                "image has prefix tokens or a pool", "remove cls_token, register_tokens and pool from the tower"
            )


class CellPredictions(NamedTuple):
    """Predictions of all cells, and their grid."""

    objectness: Tensor  # (B, N) logits of an object's center in the cell
    box: Tensor  # (B, N, 4) center offset from the middle of the cell, log width and log height, in cells
    concept: Tensor  # (B, N, C) logits
    colour: Tensor  # (B, N, K) logits
    grid: tuple[int, int]


class Detections(NamedTuple):
    """Detections by decreasing score; rows beyond `count` are empty."""

    score: Tensor  # (B, M)
    box: Tensor  # (B, M, 4) x0 y0 x1 y1 in 0 … 1
    concept: Tensor  # (B, M)
    colour: Tensor  # (B, M)
    count: Tensor  # (B,)


def normalize_images(images: Tensor) -> Tensor:
    """Convert uint8 images (B, 3, H, W) to the detector's input in −1 … 1."""
    return images.float() / 127.5 - 1


@MODELS.register("detector")
class Detector(nn.Module):
    """Map pixels (B, 3, H, W) to `CellPredictions`."""

    Config = DetectorConfig

    def __init__(self, config: DetectorConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image)
        self.output_sizes = 1, 4, len(config.concepts), len(config.colours)
        self.head = nn.Linear(config.image.block.width, sum(self.output_sizes))
        nn.init.constant_(self.head.bias[:1], -4.0)  # most cells are empty

    def forward(self, pixels: Tensor) -> CellPredictions:
        P = self.config.image.patch_size
        present, box, concept, colour = self.head(self.image(pixels)).float().split(self.output_sizes, dim=-1)
        return CellPredictions(present[..., 0], box, concept, colour, (pixels.shape[2] // P, pixels.shape[3] // P))

    @torch.no_grad()
    def detect_objects(
        self, pixels: Tensor, *, threshold: float = 0.5, max_iou: float = 0.6, max_detections: int = 32
    ) -> Detections:
        """Detect objects; of two boxes whose IoU exceeds `max_iou`, the one with the higher score is kept."""
        return select_detections(self(pixels), threshold, max_iou, max_detections)

    def workload(self, batch_size: int = 1, image_size: int | None = None) -> Workload:
        return self.image.workload(batch_size, image_size)


def decode_boxes(cells: CellPredictions) -> Tensor:
    """Decode boxes (B, N, 4) as x0 y0 x1 y1 in 0 … 1."""
    h, w = cells.grid
    at = torch.arange(h * w, device=cells.box.device)
    middle = torch.stack([at % w, at // w], dim=-1) + 0.5  # (N, 2) in cells
    centre, half = middle + cells.box[..., :2], cells.box[..., 2:].clamp(max=8).exp() / 2
    return torch.cat([centre - half, centre + half], dim=-1) / torch.tensor([w, h, w, h], device=at.device)


def select_detections(cells: CellPredictions, threshold: float, max_iou: float, max_detections: int) -> Detections:
    """Select detections by score with non-maximum suppression."""
    score, where = cells.objectness.sigmoid().topk(min(max_detections, cells.objectness.shape[1]))  # (B, M)
    B, M = score.shape

    def of(x: Tensor) -> Tensor:
        return x.gather(1, where[..., None].expand(-1, -1, x.shape[-1]))

    box = of(decode_boxes(cells))
    concept, colour = of(cells.concept).argmax(-1), of(cells.colour).argmax(-1)
    near = box_iou(box, box) > max_iou  # (B, M, M)
    keep = score > threshold
    for m in range(1, M):  # by decreasing score, so all boxes that could suppress m are decided
        keep[:, m] &= ~(near[:, m, :m] & keep[:, :m]).any(1)
    order = (~keep).long().argsort(dim=1, stable=True)
    count = keep.sum(1)
    real = torch.arange(M, device=score.device) < count[:, None]
    return Detections(
        score.gather(1, order).where(real, 0),
        box.gather(1, order[..., None].expand(B, M, 4)) * real[..., None],
        concept.gather(1, order).where(real, -1),
        colour.gather(1, order).where(real, -1),
        count,
    )


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes (B, M, 4) and (B, L, 4): (B, M, L)."""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = [(x[..., 2:] - x[..., :2]).clamp(min=0).prod(-1) for x in (a, b)]
    return shared / (area[0][:, :, None] + area[1][:, None, :] - shared).clamp(min=1e-12)


@cost.count_flops.register
def _(module: Detector, work: Workload) -> int:
    return cost.count_flops(module.image, work) + cost.count_flops(module.head, work)


@cost.count_bytes.register
def _(module: Detector, work: Workload) -> cost.MemoryBytes:
    return cost.sum_child_bytes(module, work)
