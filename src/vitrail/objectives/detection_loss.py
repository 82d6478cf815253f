"""Loss of a grid detector: each cell predicts the object whose centre lies in it.

B images, N cells, O objects
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class DetectionTargets(NamedTuple):
    """Targets of every cell."""

    object_index: Tensor  # (B, N) index of the object whose centre lies in the cell; −1 for none
    box: Tensor  # (B, N, 4) offset of the centre from the cell's centre, log width and log height, in cells


def build_detection_targets(box: Tensor, is_filled: Tensor, grid: tuple[int, int]) -> DetectionTargets:
    """Assign objects to cells: box (B, O, 4) is x0 y0 x1 y1 in 0…1, filled (B, O) marks real objects.

    If two centres share a cell, the later object gets it.
    """
    h, w = grid
    scaled = box * box.new_tensor([w, h, w, h])
    centre, size = (scaled[..., :2] + scaled[..., 2:]) / 2, (scaled[..., 2:] - scaled[..., :2]).clamp(min=1e-3)
    column, row = centre[..., 0].long().clamp(0, w - 1), centre[..., 1].long().clamp(0, h - 1)
    cell = torch.where(is_filled, row * w + column, h * w)  # (B, O); empty slots go to an extra cell
    owner = torch.full((len(box), h * w + 1), -1, device=box.device)
    for o in range(box.shape[1]):  # one by one, because the order of scatter's writes is undefined
        owner.scatter_(1, cell[:, o : o + 1], o)
    owner = owner[:, :-1]
    own = torch.cat([centre - torch.stack([column, row], -1) - 0.5, size.log()], dim=-1)  # (B, O, 4)
    return DetectionTargets(owner, own.gather(1, owner.clamp(min=0)[..., None].expand(-1, -1, 4)))


def compute_detection_losses(
    present: Tensor,
    box: Tensor,
    concept: Tensor,
    colour: Tensor,
    targets: DetectionTargets,
    concept_labels: Tensor,
    colour_labels: Tensor,
) -> dict[str, Tensor]:
    """Return losses summed over the batch: focal loss of presence, L1 of boxes, cross-entropy of concepts and colours.

    Predictions per cell: present (B, N), box (B, N, 4), concept (B, N, C), colour (B, N, K). Labels per object:
    concept_labels and colour_labels (B, O).
    """
    occupied = targets.object_index >= 0  # (B, N)
    slot = targets.object_index.clamp(min=0)
    plain = F.binary_cross_entropy_with_logits(present, occupied.float(), reduction="none")
    confidence = torch.where(occupied, present.sigmoid(), 1 - present.sigmoid())

    def label_loss(logits: Tensor, label: Tensor) -> Tensor:
        label = torch.where(occupied, label.gather(1, slot), -100)  # (B, N)
        return F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=-100, reduction="sum")

    return {
        "present": ((1 - confidence) ** 2 * plain).sum(),
        "box": ((box - targets.box).abs().sum(-1) * occupied).sum(),
        "concept": label_loss(concept, concept_labels),
        "colour": label_loss(colour, colour_labels),
    }
