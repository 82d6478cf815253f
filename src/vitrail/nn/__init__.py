"""Building blocks of all models: attention, MLPs, transformer blocks, caches and their costs."""

from vitrail.nn import cost
from vitrail.nn.attention import Attention, AttentionConfig, LatentConfig
from vitrail.nn.attention_backends import compute_attention, disable_cudnn_attention
from vitrail.nn.attention_plans import AttentionPlan, attention_plan
from vitrail.nn.block import Block, BlockConfig
from vitrail.nn.cost import Workload
from vitrail.nn.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from vitrail.nn.kv_cache import KVCache
from vitrail.nn.latent_attention import LatentAttention
from vitrail.nn.mlp import GatedMLPConfig, MLPConfig, MoEConfig, PlainMLPConfig, make_mlp, pop_load_balancing_loss
from vitrail.nn.paged_attention import PagedKVCache, PagedPass
from vitrail.nn.parameters import count_parameter_bytes, make_small_parameter
from vitrail.nn.patch_embed import PatchEmbed, compute_window_ids, patchify, unpatchify
from vitrail.nn.position_embedding import (
    LearnedPositionEmbedding,
    build_grid_positions,
    build_sincos_embedding,
    build_text_positions,
)
from vitrail.nn.rotary_embedding import ROTARY_LAYOUTS, RotaryConfig, RotaryEmbedding, Rotation, apply_rotation
from vitrail.nn.spacetime_transformer import (
    AnyFrameCache,
    FrameCache,
    FrameRingCache,
    FramesWorkload,
    SpaceTimeConfig,
    SpaceTimeTransformer,
)

__all__ = [
    "ROTARY_LAYOUTS",
    "AnyFrameCache",
    "Attention",
    "AttentionConfig",
    "AttentionPlan",
    "Block",
    "BlockConfig",
    "FrameCache",
    "FrameRingCache",
    "FramesWorkload",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedMLPConfig",
    "KVCache",
    "LatentAttention",
    "LatentConfig",
    "LearnedPositionEmbedding",
    "MLPConfig",
    "MoEConfig",
    "PagedKVCache",
    "PagedPass",
    "PatchEmbed",
    "PlainMLPConfig",
    "RotaryConfig",
    "RotaryEmbedding",
    "Rotation",
    "SpaceTimeConfig",
    "SpaceTimeTransformer",
    "Workload",
    "apply_rotation",
    "attention_plan",
    "build_grid_positions",
    "build_sincos_embedding",
    "build_text_positions",
    "compute_attention",
    "compute_window_ids",
    "cost",
    "count_parameter_bytes",
    "disable_cudnn_attention",
    "make_mlp",
    "make_small_parameter",
    "patchify",
    "pop_load_balancing_loss",
    "unpatchify",
]
