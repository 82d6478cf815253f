"""Separate towers of vision-language models: InternViT, the tower of Llama-3.2-Vision, and Segment Anything."""

from typing import Any

from vitrail.encoders.sam import SAM, SAMConfig
from vitrail.encoders.tiled_vit import TiledViT, TiledViTConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, fuse_layer, rename, rename_layer, view
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: dict[str, HFConfig] = {
    "internvl_vision": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": False,
        "use_qk_norm": False,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "num_channels": 3,
        "use_mask_token": False,
        "use_absolute_position_embeddings": True,
        "layer_scale_init_value": 0.1,
        "use_mean_pooling": True,
    },
    "mllama_vision_model": {
        "hidden_size": 1280,
        "hidden_act": "gelu",
        "num_hidden_layers": 32,
        "num_global_layers": 8,
        "attention_heads": 16,
        "num_channels": 3,
        "intermediate_size": 5120,
        "image_size": 448,
        "patch_size": 14,
        "norm_eps": 1e-5,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
    "sam_vision_model": {
        "hidden_size": 768,
        "output_channels": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "mlp_ratio": 4.0,
        "use_abs_pos": True,
        "use_rel_pos": True,
        "window_size": 14,
        "global_attn_indexes": [2, 5, 8, 11],
    },
}  # fmt: skip


def read_square_size(hf_config: HFConfig, key: str) -> int:
    """Read a size that is one number or one equal number for every axis."""
    value = hf_config[key]
    sizes = set(value) if isinstance(value, list | tuple) else {value}
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int):
        raise CheckpointError(f"{key} is {value!r}: one number, or the same number for every axis, is required")
    return size


def read_activation(hf_config: HFConfig) -> Any:
    """Read hidden_act."""
    name = hf_config["hidden_act"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def to_hf_activation(activation: str) -> str:
    """Return the transformers name of a native activation."""
    return next(name for name, native in ACTIVATIONS.items() if native == activation)


def build_tower_family(
    name: str,
    model_class: type,
    from_hf_config: Any,
    to_hf_config: Any,
    tensor_rules: Any,
    defaults: HFConfig,
    **family_fields: Any,
) -> CheckpointFamily:
    """Build the family of a separate tower. `family_fields` are further fields of `CheckpointFamily`."""
    return CheckpointFamily(
        name,
        model_class,
        from_hf_config,
        to_hf_config,
        build_round_trip_check(from_hf_config, to_hf_config),
        tensor_rules,
        class_defaults=defaults,
        **family_fields,
    )


# ---- InternVL ---------------------------------------------------------------------------------------------------

NORM_TYPES: dict[str, Any] = {"layer_norm": "layer", "rms_norm": "rms"}


def _read_internvl(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["internvl_vision"])
    norm, use_mean_pooling = NORM_TYPES[hf_config["norm_type"]], hf_config["use_mean_pooling"]
    if norm == "rms" and not use_mean_pooling:
        raise CheckpointError(
            "use_mean_pooling is false with norm_type 'rms_norm': a last LayerNorm among RMS norms is not supported"
        )
    attention = AttentionConfig(
        heads=hf_config["num_attention_heads"],
        bias="all" if hf_config["attention_bias"] else "out",
        qk_norm="rms" if hf_config["use_qk_norm"] else None,
        qk_norm_over="heads" if hf_config["use_qk_norm"] else "head",
    )
    block = BlockConfig(
        width=hf_config["hidden_size"],
        attention=attention,
        mlp=PlainMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config)),
        norm=norm,
        eps=hf_config["layer_norm_eps"],
        layer_scale=hf_config["layer_scale_init_value"],
    )
    return ViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=block,
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        channels=hf_config["num_channels"],
        cls_token=True,
        mask_token=hf_config["use_mask_token"],
        positions="cls_and_patches" if hf_config["use_absolute_position_embeddings"] else "none",
        norm_last="none" if use_mean_pooling else "tokens",
    )


def _write_internvl(config: ViTConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["InternVLVisionModel"],
        "hidden_size": block.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "attention_bias": block.attention.bias == "all",
        "use_qk_norm": block.attention.qk_norm is not None,
        "intermediate_size": block.mlp.intermediate_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "norm_type": next(name for name, native in NORM_TYPES.items() if native == block.norm),
        "layer_norm_eps": block.eps,
        "image_size": [config.image_size] * 2,
        "patch_size": [config.patch_size] * 2,
        "num_channels": config.channels,
        "use_mask_token": config.mask_token,
        "use_absolute_position_embeddings": config.positions != "none",
        "layer_scale_init_value": block.layer_scale,
        "use_mean_pooling": config.norm_last == "none",
    }


def _build_internvl_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows, has_bias = config.block.width, 1 + config.grid_size**2, config.block.norm == "layer"
    attention = config.block.attention
    rules = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embeddings.projection"),
    ]
    if config.mask_token:
        rules += [view("mask", "embeddings.mask_token", (W,), (1, 1, W))]
    if config.positions != "none":
        rules += [view("positions.table", "embeddings.position_embeddings", (rows, W), (1, rows, W))]
    if config.norm_last != "none":
        rules += rename_layer("norm_last", "layernorm")
    qkv = [f"attention.{name}_proj" for name in "qkv"]
    block = [
        *rename_layer("branches.self.norm", "layernorm_before", has_bias),
        *rename_layer("branches.mlp.norm", "layernorm_after", has_bias),
        *fuse_layer("branches.self.op.qkv", qkv, [W] * 3, attention.bias == "all"),
        *rename_layer("branches.self.op.out", "attention.projection_layer"),
        *rename_layer("branches.mlp.op.up", "mlp.fc1"),
        *rename_layer("branches.mlp.op.down", "mlp.fc2"),
        rename("branches.self.scale", "lambda_1"),
        rename("branches.mlp.scale", "lambda_2"),
    ]
    if attention.qk_norm is not None:
        for name in ("q_norm", "k_norm"):
            block += rename_layer(f"branches.self.op.{name}", f"attention.{name}", bias=False)
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layer.{i}.", block)
    return rules


# ---- Llama-3.2-Vision -------------------------------------------------------------------------------------------


def _read_mllama(hf_config: HFConfig) -> TiledViTConfig:
    """Read the config of the Llama-3.2-Vision tower.

    intermediate_layers_indices are the inputs of these blocks, as in Meta's code; transformers 5 takes their outputs.
    """
    hf_config = fill_defaults(hf_config, DEFAULTS["mllama_vision_model"])
    block = BlockConfig(
        width=hf_config["hidden_size"],
        attention=AttentionConfig(heads=hf_config["attention_heads"]),
        mlp=PlainMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config)),
        eps=hf_config["norm_eps"],
    )
    return TiledViTConfig(
        layers=hf_config["num_hidden_layers"],
        global_layers=hf_config["num_global_layers"],
        block=block,
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        channels=hf_config["num_channels"],
        max_tiles=hf_config["max_num_tiles"],
        aspect_ratios=tuple((rows, columns) for rows, columns in hf_config["supported_aspect_ratios"]),
        feature_layers=tuple(hf_config["intermediate_layers_indices"]),
    )


def _write_mllama(config: TiledViTConfig) -> HFConfig:
    return {
        "architectures": ["MllamaVisionModel"],
        "hidden_size": config.block.width,
        "hidden_act": to_hf_activation(config.block.mlp.activation),
        "num_hidden_layers": config.layers,
        "num_global_layers": config.global_layers,
        "attention_heads": config.block.attention.heads,
        "num_channels": config.channels,
        "intermediate_size": config.block.mlp.intermediate_size,
        "vision_output_dim": config.width,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "norm_eps": config.block.eps,
        "max_num_tiles": config.max_tiles,
        "intermediate_layers_indices": list(config.feature_layers),
        "supported_aspect_ratios": [list(ratio) for ratio in config.aspect_ratios],
    }


def _build_mllama_rules(config: TiledViTConfig) -> list[TensorRule]:
    W, P, T, L, R = (
        config.block.width,
        config.patch_size,
        config.max_tiles,
        config.tokens_per_tile,
        len(config.aspect_ratios) + 1,
    )
    gated = "gated_positional_embedding"
    rules = [
        flatten_kernel("embed.proj.weight", "patch_embedding.weight", (W, config.channels, P, P)),
        rename("cls", "class_embedding"),
        rename("positions", f"{gated}.embedding"),
        rename("positions_gate", f"{gated}.gate"),
        view("tile_positions", f"{gated}.tile_embedding.weight", (R, T, L, W), (R, T * L * W)),
        *rename_layer("norm_first", "layernorm_pre"),
        *rename_layer("norm_last", "layernorm_post"),
    ]
    for native, hf in (("before", "pre_tile_positional_embedding"), ("after", "post_tile_positional_embedding")):
        rules += [
            view(native, f"{hf}.embedding.weight", (R, T, W), (R, T * W)),
            rename(f"{native}_gate", f"{hf}.gate"),
        ]
    block = [
        *rename_layer("branches.self.norm", "input_layernorm"),
        *rename_layer("branches.mlp.norm", "post_attention_layernorm"),
        *fuse_layer("branches.self.op.qkv", [f"self_attn.{name}_proj" for name in "qkv"], [W] * 3, bias=False),
        *rename_layer("branches.self.op.out", "self_attn.o_proj", bias=False),
        *rename_layer("branches.mlp.op.up", "mlp.fc1"),
        *rename_layer("branches.mlp.op.down", "mlp.fc2"),
    ]
    gates = [rename("branches.self.gate", "gate_attn"), rename("branches.mlp.gate", "gate_ffn")]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"transformer.layers.{i}.", block)
    for i in range(config.global_layers):
        rules += add_prefix(f"global_blocks.{i}.", f"global_transformer.layers.{i}.", block + gates)
    return rules


# ---- Segment Anything -------------------------------------------------------------------------------------------


def _read_sam(hf_config: HFConfig) -> SAMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["sam_vision_model"])
    width, layers = hf_config["hidden_size"], hf_config["num_hidden_layers"]
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(
            heads=hf_config["num_attention_heads"], bias="all" if hf_config["qkv_bias"] else "out"
        ),
        mlp=PlainMLPConfig(
            intermediate_size=hf_config.get("mlp_dim", int(width * hf_config["mlp_ratio"])),
            activation=read_activation(hf_config),
        ),
        eps=hf_config["layer_norm_eps"],
    )
    return SAMConfig(
        layers=layers,
        block=block,
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        channels=hf_config["num_channels"],
        window_size=hf_config["window_size"],
        # A tower with fewer blocks may have the default indices; transformers ignores those out of range.
        full_attention_layers=tuple(i for i in hf_config["global_attn_indexes"] if i < layers),
        use_absolute_positions=hf_config["use_abs_pos"],
        use_relative_positions=hf_config["use_rel_pos"],
        out_features=hf_config["output_channels"],
    )


def _write_sam(config: SAMConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["SamVisionModel"],
        "hidden_size": block.width,
        "output_channels": config.out_features,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_channels": config.channels,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "qkv_bias": block.attention.bias == "all",
        "mlp_dim": block.mlp.intermediate_size,
        "use_abs_pos": config.use_absolute_positions,
        "use_rel_pos": config.use_relative_positions,
        "window_size": config.window_size,
        "global_attn_indexes": list(config.full_attention_layers),
    }


def build_neck_rules(width: int, out_features: int, native: str, hf: str) -> list[TensorRule]:
    """Build the tensor rules of the neck of Segment Anything."""
    return [
        flatten_kernel(f"{native}.conv1.weight", f"{hf}.conv1.weight", (out_features, width, 1, 1)),
        *rename_layer(f"{native}.norm1", f"{hf}.layer_norm1"),
        *rename_layer(f"{native}.conv2", f"{hf}.conv2", bias=False),
        *rename_layer(f"{native}.norm2", f"{hf}.layer_norm2"),
    ]


def _build_sam_rules(config: SAMConfig) -> list[TensorRule]:
    W, P, S = config.block.width, config.patch_size, config.grid_size
    rules = [
        flatten_kernel("embed.proj.weight", "patch_embed.projection.weight", (W, config.channels, P, P)),
        rename("embed.proj.bias", "patch_embed.projection.bias"),
        *build_neck_rules(W, config.out_features, "neck", "neck"),
    ]
    if config.use_absolute_positions:
        rules += [view("positions.table", "pos_embed", (S * S, W), (1, S, S, W))]
    block = [
        *rename_layer("norm", "layer_norm1"),
        *rename_layer("attention.qkv", "attn.qkv", config.block.attention.bias == "all"),
        *rename_layer("attention.out", "attn.proj"),
        *rename_layer("mlp.norm", "layer_norm2"),
        *rename_layer("mlp.op.up", "mlp.lin1"),
        *rename_layer("mlp.op.down", "mlp.lin2"),
    ]
    if config.use_relative_positions:
        block += [rename("attention.rows", "attn.rel_pos_h"), rename("attention.columns", "attn.rel_pos_w")]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"layers.{i}.", block)
    return add_prefix("", "vision_encoder.", rules)


# ---- families ---------------------------------------------------------------------------------------------------


VLM_TOWERS: tuple[CheckpointFamily, ...] = (
    build_tower_family(
        "internvl_vision", ViT, _read_internvl, _write_internvl, _build_internvl_rules, DEFAULTS["internvl_vision"]
    ),
    build_tower_family(
        "mllama_vision_model",
        TiledViT,
        _read_mllama,
        _write_mllama,
        _build_mllama_rules,
        DEFAULTS["mllama_vision_model"],
    ),
    build_tower_family("sam_vision_model", SAM, _read_sam, _write_sam, _build_sam_rules, DEFAULTS["sam_vision_model"]),
)
INTERNVL_VISION, MLLAMA_VISION, SAM_VISION = VLM_TOWERS
FAMILIES.register("internvl_vision", INTERNVL_VISION)
FAMILIES.register("mllama_vision_model", MLLAMA_VISION)
FAMILIES.register("sam_vision_model", SAM_VISION)
