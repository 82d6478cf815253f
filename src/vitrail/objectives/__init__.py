"""Losses as plain functions."""

from vitrail.objectives.cross_entropy import Losses, cross_entropy, linear_cross_entropy, linear_losses

__all__ = ["Losses", "cross_entropy", "linear_cross_entropy", "linear_losses"]
