"""Normalization layers by name."""

from typing import Literal

from torch import Tensor, nn

NormKind = Literal["layer", "rms", "rms_zero_centered"]


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm that scales by 1 + weight, in float32 (Gemma). The weight starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def make_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """Return a LayerNorm or an RMSNorm."""
    match kind:
        case "layer":
            return nn.LayerNorm(width, eps=eps)
        case "rms":
            return nn.RMSNorm(width, eps=eps)
        case "rms_zero_centered":
            return ZeroCenteredRMSNorm(width, eps=eps)
