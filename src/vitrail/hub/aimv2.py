"""The vision tower of AIMv2 in transformers: RMS norms, SwiGLU, learned or fixed positions."""

from typing import Any

from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import fill_defaults
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer, view
from vitrail.hub.vlm_towers import build_tower_family, read_activation, read_square_size, to_hf_activation
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "mlp_bias": False,
    "use_head": True,
    "is_native": False,
}


def _read_config(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    return ViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=BlockConfig(
            width=hf_config["hidden_size"],
            attention=AttentionConfig(
                heads=hf_config["num_attention_heads"], bias="all" if hf_config["qkv_bias"] else "none"
            ),
            mlp=GatedMLPConfig(
                intermediate_size=hf_config["intermediate_size"],
                activation=read_activation(hf_config),
                bias=hf_config["mlp_bias"],
            ),
            norm="rms",
            eps=hf_config["rms_norm_eps"],
        ),
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        channels=hf_config["num_channels"],
        positions="sincos" if hf_config["is_native"] else "patches",
        norm_patches=True,
        pool="query" if hf_config["use_head"] else "none",
    )


def _write_config(config: ViTConfig) -> HFConfig:
    block = config.block
    if not isinstance(block.mlp, GatedMLPConfig):
        raise CheckpointError("AIMv2 needs a gated MLP")
    return {
        "architectures": ["Aimv2VisionModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_channels": config.channels,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "rms_norm_eps": block.eps,
        "qkv_bias": block.attention.bias == "all",
        "mlp_bias": block.mlp.bias,
        "use_head": config.pool == "query",
        "is_native": config.positions == "sincos",
    }


def _build_rules(config: ViTConfig) -> list[TensorRule]:
    block, mlp = config.block, config.block.mlp
    assert isinstance(mlp, GatedMLPConfig)
    W, hidden, has_bias = block.width, mlp.intermediate_size, block.attention.bias == "all"
    rules = [
        *build_patch_embed_rules(config, "embeddings.patch_embed"),
        *rename_layer("norm_patches", "embeddings.rms_norm", bias=False),
        *rename_layer("norm_last", "rms_norm", bias=False),
    ]
    if config.positions == "patches":
        rules += [rename("positions.table", "embeddings.position_embedding.weight")]
    if config.pool == "query":
        rules += [
            view("pooler.query", "head.cls_token", (W,), (1, 1, W)),
            *fuse_layer("pooler.kv", ["head.k_proj", "head.v_proj"], [W, W], has_bias),
            *rename_layer("pooler.out", "head.output_proj"),
        ]
    block_rules = [
        *rename_layer("branches.self.norm", "rms_norm1", bias=False),
        *rename_layer("branches.mlp.norm", "rms_norm2", bias=False),
        *fuse_layer("branches.self.op.qkv", [f"attention.{name}_proj" for name in "qkv"], [W] * 3, has_bias),
        *rename_layer("branches.self.op.out", "attention.out_proj", has_bias),
        *fuse_layer("branches.mlp.op.gate_up", ["ffn.gate_proj", "ffn.up_proj"], [hidden, hidden], mlp.bias),
        *rename_layer("branches.mlp.op.down", "ffn.down_proj", mlp.bias),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", block_rules)
    return rules


AIMV2_VISION = build_tower_family("aimv2_vision_model", ViT, _read_config, _write_config, _build_rules, DEFAULTS)
FAMILIES.register("aimv2_vision_model", AIMV2_VISION)
