"""DINOv3 of transformers: rotary positions of patch centers, register tokens, no learned positions."""

from typing import Any

import torch

from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import fill_defaults
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, rename, rename_layer, view
from vitrail.hub.vlm_towers import build_tower_family, read_activation, read_square_size, to_hf_activation
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "query_bias": True,
    "key_bias": False,
    "value_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
    "layerscale_value": 1.0,
    "use_gated_mlp": False,
    "num_register_tokens": 0,
}
BIAS_KEYS = ("query_bias", "key_bias", "value_bias", "proj_bias")
BIASES: dict[tuple[bool, ...], Any] = {
    (True, False, True, True): "all_but_k",
    (True, True, True, True): "all",
    (True, True, True, False): "qkv",
    (False, False, False, True): "out",
    (False, False, False, False): "none",
}


def _read_config(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    width, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    bias = tuple(bool(hf_config[key]) for key in BIAS_KEYS)
    if bias not in BIASES:
        settings = ", ".join(f"{key} {value}" for key, value in zip(BIAS_KEYS, bias, strict=True))
        raise CheckpointError(f"{settings}: this combination is not supported", "use all biases, or all but key_bias")
    mlp_class = GatedMLPConfig if hf_config["use_gated_mlp"] else PlainMLPConfig
    return ViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=BlockConfig(
            width=width,
            attention=AttentionConfig(heads=heads, bias=BIASES[bias]),
            mlp=mlp_class(
                intermediate_size=hf_config["intermediate_size"],
                activation=read_activation(hf_config),
                bias=hf_config["mlp_bias"],
            ),
            eps=hf_config["layer_norm_eps"],
            layer_scale=hf_config["layerscale_value"],
        ),
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        channels=hf_config["num_channels"],
        cls_token=True,
        register_tokens=hf_config["num_register_tokens"],
        mask_token=True,
        positions="none",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", theta=float(hf_config["rope_theta"])),
        rotary_centered=True,
        pool="cls",
    )


def _write_config(config: ViTConfig) -> HFConfig:
    block = config.block
    bias = next(key for key, value in BIASES.items() if value == block.attention.bias)
    if config.rotary is None:
        raise CheckpointError("DINOv3 needs rotary positions")
    return {
        "architectures": ["DINOv3ViTModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "rope_theta": config.rotary.theta,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        **dict(zip(BIAS_KEYS, bias, strict=True)),
        "mlp_bias": getattr(block.mlp, "bias", False),
        "layerscale_value": block.layer_scale,
        "use_gated_mlp": isinstance(block.mlp, GatedMLPConfig),
        "num_register_tokens": config.register_tokens,
    }


def _build_block_rules(block: BlockConfig) -> list[TensorRule]:
    W, attention, mlp = block.width, block.attention, block.mlp
    qkv, native = [f"attention.{name}_proj" for name in "qkv"], "branches.self.op"
    rules = [
        *rename_layer("branches.self.norm", "norm1"),
        *rename_layer("branches.mlp.norm", "norm2"),
        rename("branches.self.scale", "layer_scale1.lambda1"),
        rename("branches.mlp.scale", "layer_scale2.lambda1"),
        *rename_layer(f"{native}.out", "attention.o_proj", attention.bias not in ("none", "qkv")),
    ]
    if attention.bias == "all_but_k":
        rules += [
            fuse(f"{native}.qkv.weight", [f"{name}.weight" for name in qkv], [W] * 3),
            *(rename(f"{native}.{name}_bias", f"attention.{name}_proj.bias") for name in "qv"),
        ]
    else:
        rules += fuse_layer(f"{native}.qkv", qkv, [W] * 3, attention.bias in ("qkv", "all"))
    hidden, bias = mlp.intermediate_size, getattr(mlp, "bias", False)
    if isinstance(mlp, GatedMLPConfig):
        rules += fuse_layer("branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [hidden, hidden], bias)
    else:
        rules += rename_layer("branches.mlp.op.up", "mlp.up_proj", bias)
    return [*rules, *rename_layer("branches.mlp.op.down", "mlp.down_proj", bias)]


def _build_rules(config: ViTConfig) -> list[TensorRule]:
    W, R = config.block.width, config.register_tokens
    rules = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        view("mask", "embeddings.mask_token", (W,), (1, 1, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embeddings"),
        *rename_layer("norm_last", "norm"),
    ]
    registers = view("registers", "embeddings.register_tokens", (R, W), (1, R, W))
    if not R:  # transformers saves an empty tensor
        registers = TensorRule((), registers.hf, lambda _tensors: [], lambda _tensors: [torch.empty(1, 0, W)])
    rules += [registers]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"layer.{i}.", _build_block_rules(config.block))
    return rules


DINOV3 = build_tower_family(
    "dinov3_vit",
    ViT,
    _read_config,
    _write_config,
    _build_rules,
    DEFAULTS,
    legacy_names=(("layer.", "model.layer."),),  # of transformers 5 in memory
)
FAMILIES.register("dinov3_vit", DINOV3)
