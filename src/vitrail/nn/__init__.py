"""The few blocks all models are made of."""

from vitrail.nn import cost
from vitrail.nn.attend import attend, sound_gradients
from vitrail.nn.attention import Attention, AttentionConfig
from vitrail.nn.block import Block, BlockConfig
from vitrail.nn.cache import KVCache
from vitrail.nn.cost import Work
from vitrail.nn.learned import small, weigh
from vitrail.nn.mlp import ExpertsConfig, GatedConfig, MLPConfig, PlainConfig, balance_loss, make_mlp
from vitrail.nn.patches import PatchEmbed, grid_windows, patchify, unpatchify
from vitrail.nn.plan import Plan, attention_plan
from vitrail.nn.positions import LearnedPositions, grid_positions, text_positions
from vitrail.nn.rotary import LAYOUTS, Rotary, RotaryConfig, Rotation, rotate
from vitrail.nn.spacetime import FrameCache, FrameRing, Frames, FramesWork, SpaceTime, SpaceTimeConfig

__all__ = [
    "LAYOUTS",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "ExpertsConfig",
    "FrameCache",
    "FrameRing",
    "Frames",
    "FramesWork",
    "GatedConfig",
    "KVCache",
    "LearnedPositions",
    "MLPConfig",
    "PatchEmbed",
    "PlainConfig",
    "Plan",
    "Rotary",
    "RotaryConfig",
    "Rotation",
    "SpaceTime",
    "SpaceTimeConfig",
    "Work",
    "attend",
    "attention_plan",
    "balance_loss",
    "cost",
    "grid_positions",
    "grid_windows",
    "make_mlp",
    "patchify",
    "rotate",
    "small",
    "sound_gradients",
    "text_positions",
    "unpatchify",
    "weigh",
]
