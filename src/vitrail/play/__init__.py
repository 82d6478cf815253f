"""Worlds to play in: a world model ready to hand, and a page in the browser where it answers to keys."""

from vitrail.play.controls import Controls
from vitrail.play.playground import Playground

__all__ = ["Controls", "Playground"]
