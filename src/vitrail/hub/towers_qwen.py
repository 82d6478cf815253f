"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: parts for a whole model to put together, not families to load.

No file holds one alone: where a tower is stored, so is the merger behind it, which is a connector.
"""

import math
from typing import Any

from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.family import Family
from vitrail.hub.maps import Move, fuse_layer, layer, rename, reshape, under
from vitrail.hub.towers_vl import About, activation_name, activation_of, one_size, tower_row, whole
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig

# What transformers takes for granted where a config.json leaves it out.
QWEN = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
DEFAULTS: dict[str, About] = {
    "qwen2_vl_vision": {
        **QWEN,
        "depth": 32,
        "embed_dim": 1280,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "patch_size": 14,
    },
    "qwen2_5_vl_vision": {
        **QWEN,
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl_vision": {
        **QWEN,
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}


def _read_qwen(about: About, width: int, mlp: PlainConfig | GatedConfig, norm: Any, **more: Any) -> PackedViTConfig:
    rope = about.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}: the towers turn by rows and columns ('axial')")
    attention = AttentionConfig(heads=about["num_heads"], bias="all")
    return PackedViTConfig(
        layers=about["depth"],
        block=BlockConfig(width=width, attention=attention, mlp=mlp, norm=norm, eps=1e-6),
        patch=one_size(about, "patch_size"),
        temporal=one_size(about, "temporal_patch_size"),
        merge=about["spatial_merge_size"],
        channels=about["in_channels"],
        theta=float(rope.get("rope_theta", 10_000.0)),
        **more,
    )


def _read_qwen2(about: About) -> PackedViTConfig:
    about = whole(about, DEFAULTS["qwen2_vl_vision"])
    width = about["embed_dim"]
    return _read_qwen(
        about, width, PlainConfig(hidden=int(width * about["mlp_ratio"]), activation=activation_of(about)), "layer"
    )


def _read_qwen2_5(about: About) -> PackedViTConfig:
    about = whole(about, DEFAULTS["qwen2_5_vl_vision"])
    mlp = GatedConfig(hidden=about["intermediate_size"], activation=activation_of(about), bias=True)
    window = about["window_size"] // about["spatial_merge_size"] // one_size(about, "patch_size")
    if window < 1:
        raise CheckpointError(f"window_size is {about['window_size']}: less than one token")
    full = tuple(sorted(i for i in about["fullatt_block_indexes"] if i < about["depth"]))
    return _read_qwen(about, about["hidden_size"], mlp, "rms", window=window, full=full)


def _read_qwen3(about: About) -> PackedViTConfig:
    about = whole(about, DEFAULTS["qwen3_vl_vision"])
    mlp = PlainConfig(hidden=about["intermediate_size"], activation=activation_of(about))
    places, taps = about["num_position_embeddings"], tuple(about["deepstack_visual_indexes"])
    if math.isqrt(places) ** 2 != places:
        raise CheckpointError(f"num_position_embeddings is {places}: positions are learned on a square grid")
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(f"deepstack_visual_indexes are {list(taps)}: expected in rising order")
    more: About = {"positions": math.isqrt(places), "taps": tuple(i + 1 for i in taps), "patch_bias": True}
    return _read_qwen(about, about["hidden_size"], mlp, "layer", **more)


def _write_qwen(config: PackedViTConfig) -> About:
    """Without the width that the merger gives, which the tower does not know."""
    return {
        "depth": config.layers,
        "hidden_size": config.block.width,
        "intermediate_size": config.block.mlp.hidden,
        "hidden_act": activation_name(config.block.mlp.activation),
        "num_heads": config.block.attention.heads,
        "in_channels": config.channels,
        "patch_size": config.patch,
        "temporal_patch_size": config.temporal,
        "spatial_merge_size": config.merge,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.theta},
    }


def _write_qwen2(config: PackedViTConfig) -> About:
    about = _write_qwen(config)
    width, hidden = about.pop("hidden_size"), about.pop("intermediate_size")
    if hidden % width:
        raise CheckpointError(f"a hidden width of {hidden} is no multiple of {width}", "Qwen2-VL counts in multiples")
    return {**about, "embed_dim": width, "mlp_ratio": hidden // width}


def _write_qwen2_5(config: PackedViTConfig) -> About:
    window = config.window * config.merge * config.patch
    return {**_write_qwen(config), "window_size": window, "fullatt_block_indexes": list(config.full)}


def _write_qwen3(config: PackedViTConfig) -> About:
    taps = [layer - 1 for layer in config.taps]
    return {**_write_qwen(config), "num_position_embeddings": config.positions**2, "deepstack_visual_indexes": taps}


def _qwen_moves(config: PackedViTConfig, mlp: list[Move]) -> list[Move]:
    W, P = config.block.width, config.patch
    moves = [reshape("embed.proj.weight", "patch_embed.proj.weight", (W, config.channels, config.temporal, P, P))]
    if config.patch_bias:
        moves += [rename("embed.proj.bias", "patch_embed.proj.bias")]
    if config.positions:
        moves += [rename("positions.table", "pos_embed.weight")]
    block = [
        *layer("branches.self.norm", "norm1", config.block.norm == "layer"),
        *layer("branches.mlp.norm", "norm2", config.block.norm == "layer"),
        *layer("branches.self.op.qkv", "attn.qkv"),
        *layer("branches.self.op.out", "attn.proj"),
        *under("branches.mlp.op.", "mlp.", mlp),
    ]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"blocks.{i}.", block)
    return moves


def _qwen2_moves(config: PackedViTConfig) -> list[Move]:
    return _qwen_moves(config, [*layer("up", "fc1"), *layer("down", "fc2")])


def _qwen2_5_moves(config: PackedViTConfig) -> list[Move]:
    gated = fuse_layer("gate_up", ["gate_proj", "up_proj"], [config.block.mlp.hidden] * 2)
    return _qwen_moves(config, [*gated, *layer("down", "down_proj")])


def _qwen3_moves(config: PackedViTConfig) -> list[Move]:
    return _qwen_moves(config, [*layer("up", "linear_fc1"), *layer("down", "linear_fc2")])


QWEN_TOWERS: dict[str, Family] = {
    "qwen2_vl": tower_row("qwen2_vl_vision", PackedViT, _read_qwen2, _write_qwen2, _qwen2_moves),
    "qwen2_5_vl": tower_row("qwen2_5_vl_vision", PackedViT, _read_qwen2_5, _write_qwen2_5, _qwen2_5_moves),
    "qwen3_vl": tower_row("qwen3_vl_vision", PackedViT, _read_qwen3, _write_qwen3, _qwen3_moves),
}
"""model_type of a whole model → its tower, without what merges its features: no file holds it alone."""
