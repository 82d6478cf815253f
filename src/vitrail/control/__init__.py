"""Worlds to act in: what a model imagines, as an environment."""

from vitrail.control.world import Imagined, World

__all__ = ["Imagined", "World"]
