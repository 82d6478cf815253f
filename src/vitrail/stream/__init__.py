"""One stream of tokens: order, positions, segments, spans, losses, packing, and the count of tokens kept honest."""

from vitrail.stream.build import Rules, Source, Stream, build
from vitrail.stream.merge import check, merge
from vitrail.stream.pack import Batch, bins, pack, split, unpack
from vitrail.stream.parts import KINDS, Kind, Part, actions, patch_by_patch, picture, queries, video, words
from vitrail.stream.positions import POSITIONS, PositionRule
from vitrail.stream.stamps import patch_times, stamp

__all__ = [
    "KINDS",
    "POSITIONS",
    "Batch",
    "Kind",
    "Part",
    "PositionRule",
    "Rules",
    "Source",
    "Stream",
    "actions",
    "bins",
    "build",
    "check",
    "merge",
    "pack",
    "patch_by_patch",
    "patch_times",
    "picture",
    "queries",
    "split",
    "stamp",
    "unpack",
    "video",
    "words",
]
