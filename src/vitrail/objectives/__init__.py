"""Losses as plain functions."""

from vitrail.objectives.contrastive import clip_loss, plain_clip_loss, plain_siglip_loss, siglip_loss
from vitrail.objectives.cross_entropy import Losses, cross_entropy, linear_cross_entropy, linear_losses

__all__ = [
    "Losses",
    "clip_loss",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_losses",
    "plain_clip_loss",
    "plain_siglip_loss",
    "siglip_loss",
]
