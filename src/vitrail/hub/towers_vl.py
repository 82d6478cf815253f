"""Towers of vision-language models that stand alone: InternViT, that of Llama-3.2-Vision, and Segment Anything's."""

from collections.abc import Mapping
from typing import Any

from vitrail.encoders.sam import SAM, SAMConfig
from vitrail.encoders.tiled import TiledViT, TiledViTConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.encoders import patch_moves
from vitrail.hub.family import ACTIVATIONS, Family, round_trip
from vitrail.hub.maps import Move, fuse_layer, layer, rename, reshape, under, view
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig

About = dict[str, Any]

# What transformers takes for granted where a config.json leaves it out.
DEFAULTS: dict[str, About] = {
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


def whole(about: About, defaults: Mapping[str, Any]) -> About:
    return {**defaults, **{key: value for key, value in about.items() if value is not None}}


def one_size(about: About, key: str) -> int:
    """A size that some files say once and some for every axis."""
    value = about[key]
    sizes = set(value) if isinstance(value, list | tuple) else {value}
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int):
        raise CheckpointError(f"{key} is {value!r}: one number is expected, or the same for every axis")
    return size


def activation_of(about: About) -> Any:
    name = about["hidden_act"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: str) -> str:
    """As transformers calls it."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


def tower_row(name: str, model: type, read: Any, write: Any, moves: Any) -> Family:
    return Family(name, model, read, write, round_trip(read, write), moves)


# ---- InternVL ---------------------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {"layer_norm": "layer", "rms_norm": "rms"}


def _read_internvl(about: About) -> ViTConfig:
    about = whole(about, DEFAULTS["internvl_vision"])
    norm, mean = NORMS[about["norm_type"]], about["use_mean_pooling"]
    if norm == "rms" and not mean:
        raise CheckpointError("use_mean_pooling is off with norm_type 'rms_norm': a last norm unlike the others")
    attention = AttentionConfig(
        heads=about["num_attention_heads"],
        bias="all" if about["attention_bias"] else "out",
        qk_norm="rms" if about["use_qk_norm"] else None,
        qk_norm_over="heads" if about["use_qk_norm"] else "head",
    )
    block = BlockConfig(
        width=about["hidden_size"],
        attention=attention,
        mlp=PlainConfig(hidden=about["intermediate_size"], activation=activation_of(about)),
        norm=norm,
        eps=about["layer_norm_eps"],
        layer_scale=about["layer_scale_init_value"],
    )
    return ViTConfig(
        layers=about["num_hidden_layers"],
        block=block,
        image=one_size(about, "image_size"),
        patch=one_size(about, "patch_size"),
        channels=about["num_channels"],
        cls=True,
        mask=about["use_mask_token"],
        positions="cls_and_patches" if about["use_absolute_position_embeddings"] else "none",
        norm_last="none" if mean else "tokens",
    )


def _write_internvl(config: ViTConfig) -> About:
    block = config.block
    return {
        "architectures": ["InternVLVisionModel"],
        "hidden_size": block.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "attention_bias": block.attention.bias == "all",
        "use_qk_norm": block.attention.qk_norm is not None,
        "intermediate_size": block.mlp.hidden,
        "hidden_act": activation_name(block.mlp.activation),
        "norm_type": next(name for name, ours in NORMS.items() if ours == block.norm),
        "layer_norm_eps": block.eps,
        "image_size": [config.image] * 2,
        "patch_size": [config.patch] * 2,
        "num_channels": config.channels,
        "use_mask_token": config.mask,
        "use_absolute_position_embeddings": config.positions != "none",
        "layer_scale_init_value": block.layer_scale,
        "use_mean_pooling": config.norm_last == "none",
    }


def _internvl_moves(config: ViTConfig) -> list[Move]:
    W, rows, whole = config.block.width, 1 + config.side**2, config.block.norm == "layer"
    attention = config.block.attention
    moves = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        *patch_moves(config, "embeddings.patch_embeddings.projection"),
    ]
    if config.mask:
        moves += [view("mask", "embeddings.mask_token", (W,), (1, 1, W))]
    if config.positions != "none":
        moves += [view("positions.table", "embeddings.position_embeddings", (rows, W), (1, rows, W))]
    if config.norm_last != "none":
        moves += layer("norm_last", "layernorm")
    qkv = [f"attention.{name}_proj" for name in "qkv"]
    block = [
        *layer("branches.self.norm", "layernorm_before", whole),
        *layer("branches.mlp.norm", "layernorm_after", whole),
        *fuse_layer("branches.self.op.qkv", qkv, [W] * 3, attention.bias == "all"),
        *layer("branches.self.op.out", "attention.projection_layer"),
        *layer("branches.mlp.op.up", "mlp.fc1"),
        *layer("branches.mlp.op.down", "mlp.fc2"),
        rename("branches.self.scale", "lambda_1"),
        rename("branches.mlp.scale", "lambda_2"),
    ]
    if attention.qk_norm is not None:
        for name in ("q_norm", "k_norm"):
            block += layer(f"branches.self.op.{name}", f"attention.{name}", bias=False)
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"encoder.layer.{i}.", block)
    return moves


# ---- Llama-3.2-Vision -------------------------------------------------------------------------------------------


def _read_mllama(about: About) -> TiledViTConfig:
    """An index of intermediate_layers_indices is the state that enters the block of that number, as in Meta's own
    code; transformers 5 takes what leaves it."""
    about = whole(about, DEFAULTS["mllama_vision_model"])
    block = BlockConfig(
        width=about["hidden_size"],
        attention=AttentionConfig(heads=about["attention_heads"]),
        mlp=PlainConfig(hidden=about["intermediate_size"], activation=activation_of(about)),
        eps=about["norm_eps"],
    )
    return TiledViTConfig(
        layers=about["num_hidden_layers"],
        over=about["num_global_layers"],
        block=block,
        image=one_size(about, "image_size"),
        patch=one_size(about, "patch_size"),
        channels=about["num_channels"],
        tiles=about["max_num_tiles"],
        ratios=tuple((rows, columns) for rows, columns in about["supported_aspect_ratios"]),
        taps=tuple(about["intermediate_layers_indices"]),
    )


def _write_mllama(config: TiledViTConfig) -> About:
    return {
        "architectures": ["MllamaVisionModel"],
        "hidden_size": config.block.width,
        "hidden_act": activation_name(config.block.mlp.activation),
        "num_hidden_layers": config.layers,
        "num_global_layers": config.over,
        "attention_heads": config.block.attention.heads,
        "num_channels": config.channels,
        "intermediate_size": config.block.mlp.hidden,
        "vision_output_dim": config.width,
        "image_size": config.image,
        "patch_size": config.patch,
        "norm_eps": config.block.eps,
        "max_num_tiles": config.tiles,
        "intermediate_layers_indices": list(config.taps),
        "supported_aspect_ratios": [list(ratio) for ratio in config.ratios],
    }


def _mllama_moves(config: TiledViTConfig) -> list[Move]:
    W, P, T, L, R = config.block.width, config.patch, config.tiles, config.tokens, len(config.ratios) + 1
    gated = "gated_positional_embedding"
    moves = [
        reshape("embed.proj.weight", "patch_embedding.weight", (W, config.channels, P, P)),
        rename("cls", "class_embedding"),
        rename("positions", f"{gated}.embedding"),
        rename("positions_gate", f"{gated}.gate"),
        view("tile_positions", f"{gated}.tile_embedding.weight", (R, T, L, W), (R, T * L * W)),
        *layer("norm_first", "layernorm_pre"),
        *layer("norm_last", "layernorm_post"),
    ]
    for ours, theirs in (("before", "pre_tile_positional_embedding"), ("after", "post_tile_positional_embedding")):
        moves += [
            view(ours, f"{theirs}.embedding.weight", (R, T, W), (R, T * W)),
            rename(f"{ours}_gate", f"{theirs}.gate"),
        ]
    block = [
        *layer("branches.self.norm", "input_layernorm"),
        *layer("branches.mlp.norm", "post_attention_layernorm"),
        *fuse_layer("branches.self.op.qkv", [f"self_attn.{name}_proj" for name in "qkv"], [W] * 3, bias=False),
        *layer("branches.self.op.out", "self_attn.o_proj", bias=False),
        *layer("branches.mlp.op.up", "mlp.fc1"),
        *layer("branches.mlp.op.down", "mlp.fc2"),
    ]
    gates = [rename("branches.self.gate", "gate_attn"), rename("branches.mlp.gate", "gate_ffn")]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"transformer.layers.{i}.", block)
    for i in range(config.over):
        moves += under(f"over.{i}.", f"global_transformer.layers.{i}.", block + gates)
    return moves


# ---- Segment Anything -------------------------------------------------------------------------------------------


def _read_sam(about: About) -> SAMConfig:
    about = whole(about, DEFAULTS["sam_vision_model"])
    width, layers = about["hidden_size"], about["num_hidden_layers"]
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=about["num_attention_heads"], bias="all" if about["qkv_bias"] else "out"),
        mlp=PlainConfig(hidden=about.get("mlp_dim", int(width * about["mlp_ratio"])), activation=activation_of(about)),
        eps=about["layer_norm_eps"],
    )
    return SAMConfig(
        layers=layers,
        block=block,
        image=one_size(about, "image_size"),
        patch=one_size(about, "patch_size"),
        channels=about["num_channels"],
        window=about["window_size"],
        # A tower of fewer blocks may come with the usual one's indices; transformers passes over those it lacks.
        full=tuple(i for i in about["global_attn_indexes"] if i < layers),
        positions=about["use_abs_pos"],
        relative=about["use_rel_pos"],
        gives=about["output_channels"],
    )


def _write_sam(config: SAMConfig) -> About:
    block = config.block
    return {
        "architectures": ["SamVisionModel"],
        "hidden_size": block.width,
        "output_channels": config.gives,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_channels": config.channels,
        "image_size": config.image,
        "patch_size": config.patch,
        "hidden_act": activation_name(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "qkv_bias": block.attention.bias == "all",
        "mlp_dim": block.mlp.hidden,
        "use_abs_pos": config.positions,
        "use_rel_pos": config.relative,
        "window_size": config.window,
        "global_attn_indexes": list(config.full),
    }


def neck_moves(width: int, gives: int, ours: str, theirs: str) -> list[Move]:
    return [
        reshape(f"{ours}.narrow.weight", f"{theirs}.conv1.weight", (gives, width, 1, 1)),
        *layer(f"{ours}.norm1", f"{theirs}.layer_norm1"),
        *layer(f"{ours}.around", f"{theirs}.conv2", bias=False),
        *layer(f"{ours}.norm2", f"{theirs}.layer_norm2"),
    ]


def _sam_moves(config: SAMConfig) -> list[Move]:
    W, P, S = config.block.width, config.patch, config.side
    moves = [
        reshape("embed.proj.weight", "patch_embed.projection.weight", (W, config.channels, P, P)),
        rename("embed.proj.bias", "patch_embed.projection.bias"),
        *neck_moves(W, config.gives, "neck", "neck"),
    ]
    if config.positions:
        moves += [view("positions.table", "pos_embed", (S * S, W), (1, S, S, W))]
    block = [
        *layer("norm", "layer_norm1"),
        *layer("attention.qkv", "attn.qkv", config.block.attention.bias == "all"),
        *layer("attention.out", "attn.proj"),
        *layer("mlp.norm", "layer_norm2"),
        *layer("mlp.op.up", "mlp.lin1"),
        *layer("mlp.op.down", "mlp.lin2"),
    ]
    if config.relative:
        block += [rename("attention.rows", "attn.rel_pos_h"), rename("attention.columns", "attn.rel_pos_w")]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"layers.{i}.", block)
    return under("", "vision_encoder.", moves)


# ---- rows -------------------------------------------------------------------------------------------------------


TOWERS_VL: tuple[Family, ...] = (
    tower_row("internvl_vision", ViT, _read_internvl, _write_internvl, _internvl_moves),
    tower_row("mllama_vision_model", TiledViT, _read_mllama, _write_mllama, _mllama_moves),
    tower_row("sam_vision_model", SAM, _read_sam, _write_sam, _sam_moves),
)
