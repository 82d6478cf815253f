"""VoCo tokens (VoCo-LLaMA): text attends to them instead of the image, and only they attend to the image.

Shapes: B rows, L tokens.
"""

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn import AttentionPlan


class VoCoPlan(AttentionPlan):
    """Causal attention plan in which only an image and its VoCo tokens attend to the image.

    In place of spans it has groups (B, L): k for the tokens of the k-th image, −k for its VoCo tokens, 0 for text.
    """

    def allows(self, q: Tensor, k: Tensor, qs: Tensor | None, ks: Tensor | None, qp: Tensor, kp: Tensor) -> Tensor:
        allowed = (k <= q) & ((kp <= 0) | (qp.abs() == kp))
        if qs is None or ks is None:
            return allowed
        return allowed & ((qs == ks) | (ks == 0) if self.shares_segment_zero else qs == ks)

    def to(self, device: torch.device | str) -> "VoCoPlan":
        assert self.spans is not None
        segments = None if self.segments is None else self.segments.to(device, non_blocking=True)
        return voco_plan(self.spans.to(device, non_blocking=True), segments, common=self.shares_segment_zero)


def voco_plan(groups: Tensor, segments: Tensor | None = None, *, common: bool = False) -> VoCoPlan:
    """Make the attention plan of decoder rows (B, L).

    Segments are samples or turns, as in `attention_plan`; with `common`, all of them attend to segment 0. Text reaches
    an image only through its VoCo tokens, so the image's keys and values can be dropped after these are computed.
    """
    if groups.ndim != 2 or groups.is_floating_point():
        raise ConfigError(f"groups are {groups.dtype} {tuple(groups.shape)}", "give integers (B, L)")
    segment_args = {"segments": segments, "key_segments": segments}
    return VoCoPlan(causal=True, spans=groups, key_spans=groups, shares_segment_zero=common, **segment_args)


def voco_groups(image_mask: Tensor, voco_mask: Tensor) -> Tensor:
    """Return groups (B, L) from masks of image tokens and of the VoCo tokens that follow each image."""
    starts = image_mask & ~torch.nn.functional.pad(image_mask, (1, 0))[:, :-1]
    number = starts.long().cumsum(1)
    return number * (image_mask.long() - voco_mask.long())
