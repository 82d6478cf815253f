"""Token streams: parts, positions, spans, loss masks, packing into rows, and merging of features."""

from vitrail.stream.feature_merge import check_features, merge_features
from vitrail.stream.fixed_shape import (
    RowLayout,
    RowPart,
    RowTemplate,
    TemplateRows,
    build_row_template,
    build_rows,
    count_turns,
)
from vitrail.stream.packing import PackedBatch, assign_rows, pack_streams, split_by_sample, unpack_streams
from vitrail.stream.position_rules import POSITION_RULES, PositionRule
from vitrail.stream.stream_builder import FeatureSource, Stream, StreamRules, build_stream
from vitrail.stream.stream_parts import (
    TOKEN_KINDS,
    Part,
    TokenKind,
    TokenRun,
    action_part,
    image_part,
    interleave_patches,
    query_part,
    text_part,
    video_part,
)
from vitrail.stream.timestamps import compute_patch_times, format_frame_labels, format_timestamp
from vitrail.stream.voco_plan import VoCoPlan, voco_groups, voco_plan

__all__ = [
    "POSITION_RULES",
    "TOKEN_KINDS",
    "FeatureSource",
    "PackedBatch",
    "Part",
    "PositionRule",
    "RowLayout",
    "RowPart",
    "RowTemplate",
    "Stream",
    "StreamRules",
    "TemplateRows",
    "TokenKind",
    "TokenRun",
    "VoCoPlan",
    "action_part",
    "assign_rows",
    "build_row_template",
    "build_rows",
    "build_stream",
    "check_features",
    "compute_patch_times",
    "count_turns",
    "format_frame_labels",
    "format_timestamp",
    "image_part",
    "interleave_patches",
    "merge_features",
    "pack_streams",
    "query_part",
    "split_by_sample",
    "text_part",
    "unpack_streams",
    "video_part",
    "voco_groups",
    "voco_plan",
]
