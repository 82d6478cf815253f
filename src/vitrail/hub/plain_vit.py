"""The original ViT of transformers: `ViTModel` with its pooler, and `ViTForImageClassification`."""

from typing import Any

from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename_layer, view
from vitrail.hub.vlm_towers import read_activation, read_square_size, to_hf_activation
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
    "pooler_act": "tanh",
}
DEFAULT_NUM_LABELS = 2


def read_plain_vit(hf_config: HFConfig, **fields: Any) -> ViTConfig:
    """Read the keys that BLIP's towers share; `fields` are further fields of the config."""
    block = BlockConfig(
        width=hf_config["hidden_size"],
        attention=AttentionConfig(
            heads=hf_config["num_attention_heads"], bias="all" if hf_config["qkv_bias"] else "out"
        ),
        mlp=PlainMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config)),
        eps=hf_config["layer_norm_eps"],
    )
    return ViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=block,
        image_size=read_square_size(hf_config, "image_size"),
        patch_size=read_square_size(hf_config, "patch_size"),
        cls_token=True,
        positions="cls_and_patches",
        **fields,
    )


def _read_tower(hf_config: HFConfig, **fields: Any) -> ViTConfig:
    return read_plain_vit(hf_config, channels=hf_config["num_channels"], pool="cls", **fields)


def _read_config(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    if hf_config["pooler_act"] != "tanh":
        raise CheckpointError(f"pooler_act is {hf_config['pooler_act']!r}", "known: tanh")
    width = hf_config.get("pooler_output_size") or hf_config["hidden_size"]
    return _read_tower(hf_config, head_width=width, head_activation="tanh")


def _read_classifier(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    labels = hf_config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else hf_config.get("num_labels") or DEFAULT_NUM_LABELS
    return _read_tower(hf_config, head_width=count)


def _write_tower(config: ViTConfig) -> HFConfig:
    block = config.block
    return {
        "hidden_size": block.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "intermediate_size": block.mlp.intermediate_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "qkv_bias": block.attention.bias == "all",
    }


def _write_config(config: ViTConfig) -> HFConfig:
    return {
        "architectures": ["ViTModel"],
        **_write_tower(config),
        "pooler_act": "tanh",
        "pooler_output_size": config.head_width,
    }


def _write_classifier(config: ViTConfig) -> HFConfig:
    labels = {str(i): f"LABEL_{i}" for i in range(config.head_width)}
    return {
        "model_type": "vit",
        **_write_tower(config),
        "architectures": ["ViTForImageClassification"],
        "id2label": labels,
        "label2id": {name: int(i) for i, name in labels.items()},
    }


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows = config.block.width, 1 + config.grid_size**2
    rules = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        view("positions.table", "embeddings.position_embeddings", (rows, W), (1, rows, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embeddings.projection"),
        *rename_layer("norm_last", "layernorm"),
    ]
    block = [
        *rename_layer("branches.self.norm", "layernorm_before"),
        *rename_layer("branches.mlp.norm", "layernorm_after"),
        *fuse_layer(
            "branches.self.op.qkv",
            [f"attention.attention.{name}" for name in ("query", "key", "value")],
            [W] * 3,
            config.block.attention.bias == "all",
        ),
        *rename_layer("branches.self.op.out", "attention.output.dense"),
        *rename_layer("branches.mlp.op.up", "intermediate.dense"),
        *rename_layer("branches.mlp.op.down", "output.dense"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layer.{i}.", block)
    return rules


def _build_rules(config: ViTConfig) -> list[TensorRule]:
    return [*_build_tower_rules(config), *rename_layer("head", "pooler.dense")]


def _build_classifier_rules(config: ViTConfig) -> list[TensorRule]:
    return [*add_prefix("", "vit.", _build_tower_rules(config)), *rename_layer("head", "classifier")]


VIT, VIT_CLASSIFIER = (
    CheckpointFamily(
        "vit",
        ViT,
        _read_config,
        _write_config,
        build_round_trip_check(_read_config, _write_config),
        _build_rules,
        legacy_prefix="vit.",
        class_defaults=DEFAULTS,
    ),
    CheckpointFamily(
        "ViTForImageClassification",
        ViT,
        _read_classifier,
        _write_classifier,
        build_round_trip_check(_read_classifier, _write_classifier),
        _build_classifier_rules,
        config_key="architectures",
    ),
)
FAMILIES.register("vit", VIT)
FAMILIES.register("ViTForImageClassification", VIT_CLASSIFIER)
