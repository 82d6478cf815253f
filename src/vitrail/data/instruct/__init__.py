"""Instruction data from captions and boxes: a text model writes questions and answers without access to the image."""

from vitrail.data.instruct.image_descriptions import ImageDescription, describe_samples, describe_scenes
from vitrail.data.instruct.instruction_data import GenerateFn, KindStatistics, make_instruction_data
from vitrail.data.instruct.instruction_prompts import INSTRUCTION_KINDS, InstructionKind, build_prompt
from vitrail.data.instruct.pair_filter import find_rejection_reason
from vitrail.data.instruct.pair_parser import QAPair, format_pairs, parse_pairs

__all__ = [
    "INSTRUCTION_KINDS",
    "GenerateFn",
    "ImageDescription",
    "InstructionKind",
    "KindStatistics",
    "QAPair",
    "build_prompt",
    "describe_samples",
    "describe_scenes",
    "find_rejection_reason",
    "format_pairs",
    "make_instruction_data",
    "parse_pairs",
]  # fmt: skip
