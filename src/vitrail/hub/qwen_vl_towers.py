"""Towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. They are parts of the `qwen_vl` families and cannot be loaded alone.

Every checkpoint with such a tower also contains its merger, which is a connector here.
"""

import math
from typing import Any

from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, fill_defaults
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, fuse_layer, rename, rename_layer
from vitrail.hub.vlm_towers import (
    HFConfig,
    build_tower_family,
    read_activation,
    read_square_size,
    to_hf_activation,
)
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig

# Defaults of transformers for keys that a config.json leaves out.
SHARED_DEFAULTS = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
DEFAULTS: dict[str, HFConfig] = {
    "qwen2_vl_vision": {
        **SHARED_DEFAULTS,
        "depth": 32,
        "embed_dim": 1280,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "patch_size": 14,
    },
    "qwen2_5_vl_vision": {
        **SHARED_DEFAULTS,
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl_vision": {
        **SHARED_DEFAULTS,
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}


def _read_qwen(
    hf_config: HFConfig, width: int, mlp: PlainMLPConfig | GatedMLPConfig, norm: Any, **fields: Any
) -> PackedViTConfig:
    rope = hf_config.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}: only 'axial' is supported")
    attention = AttentionConfig(heads=hf_config["num_heads"], bias="all")
    return PackedViTConfig(
        layers=hf_config["depth"],
        block=BlockConfig(width=width, attention=attention, mlp=mlp, norm=norm, eps=1e-6),
        patch_size=read_square_size(hf_config, "patch_size"),
        temporal_patch_size=read_square_size(hf_config, "temporal_patch_size"),
        spatial_merge_size=hf_config["spatial_merge_size"],
        channels=hf_config["in_channels"],
        theta=float(rope.get("rope_theta", 10_000.0)),
        **fields,
    )


def _read_qwen2(hf_config: HFConfig) -> PackedViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["qwen2_vl_vision"])
    width = hf_config["embed_dim"]
    return _read_qwen(
        hf_config,
        width,
        PlainMLPConfig(intermediate_size=int(width * hf_config["mlp_ratio"]), activation=read_activation(hf_config)),
        "layer",
    )


def _read_qwen2_5(hf_config: HFConfig) -> PackedViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["qwen2_5_vl_vision"])
    mlp = GatedMLPConfig(
        intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config), bias=True
    )
    window = hf_config["window_size"] // hf_config["spatial_merge_size"] // read_square_size(hf_config, "patch_size")
    if window < 1:
        raise CheckpointError(f"window_size is {hf_config['window_size']}: smaller than one token")
    full = tuple(sorted(i for i in hf_config["fullatt_block_indexes"] if i < hf_config["depth"]))
    return _read_qwen(hf_config, hf_config["hidden_size"], mlp, "rms", window_size=window, full_attention_layers=full)


def _read_qwen3(hf_config: HFConfig) -> PackedViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["qwen3_vl_vision"])
    mlp = PlainMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config))
    num_positions, taps = hf_config["num_position_embeddings"], tuple(hf_config["deepstack_visual_indexes"])
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise CheckpointError(f"num_position_embeddings is {num_positions}: positions need a square grid")
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(f"deepstack_visual_indexes are {list(taps)}: they must increase")
    more: HFConfig = {
        "position_grid_size": math.isqrt(num_positions),
        "feature_layers": tuple(i + 1 for i in taps),
        "patch_bias": True,
    }
    return _read_qwen(hf_config, hf_config["hidden_size"], mlp, "layer", **more)


def _read_qwen3_5(hf_config: HFConfig) -> PackedViTConfig:
    """Read the tower of Qwen3.5: that of Qwen3-VL without DeepStack, whose key released files have as an empty list."""
    if hf_config.get("deepstack_visual_indexes"):
        raise CheckpointError("deepstack_visual_indexes are given, which Qwen3.5 does not have", "remove them")
    return _read_qwen3({**hf_config, "deepstack_visual_indexes": []})


def _write_qwen(config: PackedViTConfig) -> HFConfig:
    """Write the shared keys. The output width of the merger is missing: the tower does not know it."""
    return {
        "depth": config.layers,
        "hidden_size": config.block.width,
        "intermediate_size": config.block.mlp.intermediate_size,
        "hidden_act": to_hf_activation(config.block.mlp.activation),
        "num_heads": config.block.attention.heads,
        "in_channels": config.channels,
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "spatial_merge_size": config.spatial_merge_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.theta},
    }


def _write_qwen2(config: PackedViTConfig) -> HFConfig:
    hf_config = _write_qwen(config)
    width, hidden = hf_config.pop("hidden_size"), hf_config.pop("intermediate_size")
    if hidden % width:
        raise CheckpointError(f"the MLP width {hidden} is not a multiple of {width}", "Qwen2-VL stores it as a ratio")
    return {**hf_config, "embed_dim": width, "mlp_ratio": hidden // width}


def _write_qwen2_5(config: PackedViTConfig) -> HFConfig:
    window = config.window_size * config.spatial_merge_size * config.patch_size
    return {**_write_qwen(config), "window_size": window, "fullatt_block_indexes": list(config.full_attention_layers)}


def _write_qwen3(config: PackedViTConfig) -> HFConfig:
    taps = [layer - 1 for layer in config.feature_layers]
    return {
        **_write_qwen(config),
        "num_position_embeddings": config.position_grid_size**2,
        "deepstack_visual_indexes": taps,
    }


def _write_qwen3_5(config: PackedViTConfig) -> HFConfig:
    hf_config = _write_qwen3(config)
    if hf_config.pop("deepstack_visual_indexes"):
        raise CheckpointError("the tower has feature layers, which Qwen3.5 does not have")
    return hf_config


def _build_qwen_rules(config: PackedViTConfig, mlp: list[TensorRule]) -> list[TensorRule]:
    W, P = config.block.width, config.patch_size
    rules = [
        flatten_kernel(
            "embed.proj.weight", "patch_embed.proj.weight", (W, config.channels, config.temporal_patch_size, P, P)
        )
    ]
    if config.patch_bias:
        rules += [rename("embed.proj.bias", "patch_embed.proj.bias")]
    if config.position_grid_size:
        rules += [rename("positions.table", "pos_embed.weight")]
    block = [
        *rename_layer("branches.self.norm", "norm1", config.block.norm == "layer"),
        *rename_layer("branches.mlp.norm", "norm2", config.block.norm == "layer"),
        *rename_layer("branches.self.op.qkv", "attn.qkv"),
        *rename_layer("branches.self.op.out", "attn.proj"),
        *add_prefix("branches.mlp.op.", "mlp.", mlp),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"blocks.{i}.", block)
    return rules


def _build_qwen2_rules(config: PackedViTConfig) -> list[TensorRule]:
    return _build_qwen_rules(config, [*rename_layer("up", "fc1"), *rename_layer("down", "fc2")])


def _build_qwen2_5_rules(config: PackedViTConfig) -> list[TensorRule]:
    mlp = fuse_layer("gate_up", ["gate_proj", "up_proj"], [config.block.mlp.intermediate_size] * 2)
    return _build_qwen_rules(config, [*mlp, *rename_layer("down", "down_proj")])


def _build_qwen3_rules(config: PackedViTConfig) -> list[TensorRule]:
    return _build_qwen_rules(config, [*rename_layer("up", "linear_fc1"), *rename_layer("down", "linear_fc2")])


QWEN_VL_TOWERS: dict[str, CheckpointFamily] = {
    "qwen2_vl": build_tower_family(
        "qwen2_vl_vision", PackedViT, _read_qwen2, _write_qwen2, _build_qwen2_rules, DEFAULTS["qwen2_vl_vision"]
    ),
    "qwen2_5_vl": build_tower_family(
        "qwen2_5_vl_vision",
        PackedViT,
        _read_qwen2_5,
        _write_qwen2_5,
        _build_qwen2_5_rules,
        DEFAULTS["qwen2_5_vl_vision"],
    ),
    "qwen3_vl": build_tower_family(
        "qwen3_vl_vision", PackedViT, _read_qwen3, _write_qwen3, _build_qwen3_rules, DEFAULTS["qwen3_vl_vision"]
    ),
    "qwen3_5": build_tower_family(
        "qwen3_5_vision",
        PackedViT,
        _read_qwen3_5,
        _write_qwen3_5,
        _build_qwen3_rules,
        {key: value for key, value in DEFAULTS["qwen3_vl_vision"].items() if key != "deepstack_visual_indexes"},
    ),
}
"""model_type of a vision-language model → its tower, without the merger."""
