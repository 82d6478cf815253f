"""The loss of a detector whose cells speak for the objects that have their centre in them.

B pictures, N cells, O objects
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Targets(NamedTuple):
    owner: Tensor  # (B, N) object whose centre lies in the cell; −1 for none
    box: Tensor  # (B, N, 4) centre in cells from the cell's middle, log of width and height in cells


def targets(box: Tensor, filled: Tensor, grid: tuple[int, int]) -> Targets:
    """box (B, O, 4) x0 y0 x1 y1 in 0…1, filled (B, O). Where two centres share a cell, the later object has it."""
    h, w = grid
    scaled = box * box.new_tensor([w, h, w, h])
    centre, size = (scaled[..., :2] + scaled[..., 2:]) / 2, (scaled[..., 2:] - scaled[..., :2]).clamp(min=1e-3)
    column, row = centre[..., 0].long().clamp(0, w - 1), centre[..., 1].long().clamp(0, h - 1)
    cell = torch.where(filled, row * w + column, h * w)  # (B, O); empty slots write behind the last cell
    owner = torch.full((len(box), h * w + 1), -1, device=box.device)
    for o in range(box.shape[1]):  # in turn, since the order of a scatter's writes is not certain
        owner.scatter_(1, cell[:, o : o + 1], o)
    owner = owner[:, :-1]
    own = torch.cat([centre - torch.stack([column, row], -1) - 0.5, size.log()], dim=-1)  # (B, O, 4)
    return Targets(owner, own.gather(1, owner.clamp(min=0)[..., None].expand(-1, -1, 4)))


def detection_losses(
    present: Tensor, box: Tensor, concept: Tensor, colour: Tensor, wanted: Targets, what: Tensor, hue: Tensor
) -> dict[str, Tensor]:
    """Sums over the batch: focal loss of presence, L1 of boxes, cross-entropy of concepts and of colours.

    present (B, N), box (B, N, 4), concept (B, N, C), colour (B, N, K) as the cells say them; what, hue (B, O)
    """
    there = wanted.owner >= 0  # (B, N)
    slot = wanted.owner.clamp(min=0)
    plain = F.binary_cross_entropy_with_logits(present, there.float(), reduction="none")
    sure = torch.where(there, present.sigmoid(), 1 - present.sigmoid())

    def of(logits: Tensor, label: Tensor) -> Tensor:
        label = torch.where(there, label.gather(1, slot), -100)  # (B, N)
        return F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=-100, reduction="sum")

    return {
        "present": ((1 - sure) ** 2 * plain).sum(),
        "box": ((box - wanted.box).abs().sum(-1) * there).sum(),
        "concept": of(concept, what),
        "colour": of(colour, hue),
    }
