"""Tokens that stand for a picture: text sees them instead of it, and they alone see the picture (VoCo-LLaMA).

B rows, L tokens
"""

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn import Plan


class VoCoPlan(Plan):
    """Causal within segments, but a picture is seen by itself and its own VoCo tokens alone. In place of spans it has
    groups (B, L): k for the tokens of the k-th picture, −k for those that stand for it, 0 for text."""

    def sees(self, q: Tensor, k: Tensor, qs: Tensor | None, ks: Tensor | None, qp: Tensor, kp: Tensor) -> Tensor:
        seen = (k <= q) & ((kp <= 0) | (qp.abs() == kp))
        if qs is None or ks is None:
            return seen
        return seen & ((qs == ks) | (ks == 0) if self.common else qs == ks)

    def to(self, device: torch.device | str) -> "VoCoPlan":
        assert self.spans is not None
        segments = None if self.segments is None else self.segments.to(device, non_blocking=True)
        return voco_plan(self.spans.to(device, non_blocking=True), segments, common=self.common)


def voco_plan(groups: Tensor, segments: Tensor | None = None, *, common: bool = False) -> VoCoPlan:
    """The plan of a decoder's rows (B, L). Segments are samples or turns, as in `attention_plan`; all of them see
    segment 0 where it is `common`.

    No text reaches a picture on any way but through its VoCo tokens, so once they are read the picture's keys and
    values can be dropped.
    """
    if groups.ndim != 2 or groups.is_floating_point():
        raise ConfigError(f"groups must be integers (B, L), not {groups.dtype} {tuple(groups.shape)}")
    more = {"segments": segments, "key_segments": segments}
    return VoCoPlan(causal=True, spans=groups, key_spans=groups, common=common, **more)


def voco_groups(pictures: Tensor, voco: Tensor) -> Tensor:
    """(B, L) of rows in which these tokens are pictures' and those stand for them, right behind each."""
    begins = pictures & ~torch.nn.functional.pad(pictures, (1, 0))[:, :-1]
    number = begins.long().cumsum(1)
    return number * (pictures.long() - voco.long())
