"""Instruction data from captions and boxes: a text model that never sees the picture writes questions and answers."""

from vitrail.data.instruct.checks import refuse
from vitrail.data.instruct.make import Writer, Yield, make
from vitrail.data.instruct.parse import Pair, parse, spell
from vitrail.data.instruct.prompts import KINDS, Kind, prompt
from vitrail.data.instruct.seen import Seen, from_samples, from_scenes

__all__ = [
    "KINDS", "Kind", "Pair", "Seen", "Writer", "Yield", "from_samples", "from_scenes", "make", "parse", "prompt",
    "refuse", "spell",
]  # fmt: skip
