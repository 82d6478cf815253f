"""Loss functions."""

from vitrail.objectives.contrastive_loss import clip_loss, reference_clip_loss, reference_siglip_loss, siglip_loss
from vitrail.objectives.fused_cross_entropy import TokenLosses, cross_entropy, linear_cross_entropy, linear_token_losses

__all__ = [
    "TokenLosses",
    "clip_loss",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_token_losses",
    "reference_clip_loss",
    "reference_siglip_loss",
    "siglip_loss",
]
