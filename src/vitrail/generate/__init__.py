"""Sampling: text from a decoder, token by token."""

from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.generate.text import Piece, Written, generate, stream

__all__ = ["GREEDY", "Piece", "Sampling", "Written", "generate", "stream"]
