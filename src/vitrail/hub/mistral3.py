"""Mistral 3 (Mistral Small 3.x, Ministral 3, Devstral Small 2): the tower of Pixtral, a merger and a decoder."""

from typing import Any

from vitrail.connectors import MergerConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.checkpoint_family import ACTIVATIONS, fill_defaults
from vitrail.hub.pixtral import (
    IMAGE_TOKEN_ID,
    build_pixtral_family,
    build_pixtral_rules,
    read_pixtral_parts,
    write_pixtral_parts,
)
from vitrail.hub.tensor_rules import TensorRule, permute_columns, rename_layer
from vitrail.hub.vlm_towers import to_hf_activation
from vitrail.models.vlm import VLMConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "image_token_index": IMAGE_TOKEN_ID,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
}
VISION_DEFAULTS: HFConfig = {  # of a config.json without vision_config
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": 64,
    "image_size": 1540,
    "patch_size": 14,
    "hidden_act": "gelu",
}
TEXT_DEFAULTS: HFConfig = {  # of a config.json without text_config
    "model_type": "mistral",
    "vocab_size": 131_072,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000_000.0,
    "sliding_window": None,
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    if hf_config.get("image_token_id") is not None:  # the newer key
        hf_config = {**hf_config, "image_token_index": hf_config["image_token_id"]}
    hf_config = fill_defaults(hf_config, DEFAULTS)
    text = hf_config.get("text_config") or TEXT_DEFAULTS
    activation, merge_size = hf_config["projector_hidden_act"], hf_config["spatial_merge_size"]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"projector_hidden_act {activation!r} is not supported", f"known: {', '.join(ACTIVATIONS)}"
        )
    parts = read_pixtral_parts({**hf_config, "text_config": text}, merge_size, VISION_DEFAULTS)
    tower, decoder = parts["tower"], parts["decoder"]
    parts["decoder"] = decoder.replace(tie_word_embeddings=_read_tie(hf_config, text))
    connector = MergerConfig(
        in_features=tower.block.width,
        out_features=decoder.block.width,
        merge=merge_size,
        intermediate_size=decoder.block.width,
        norm="rms",
        eps=decoder.block.eps,
        block_size=tower.block.width,
        activation=ACTIVATIONS[activation],  # pyrefly: ignore
        bias=hf_config["multimodal_projector_bias"],
        order="blocks",
    )
    return VLMConfig(connector=connector, **parts)


def _read_tie(hf_config: HFConfig, text: HFConfig) -> bool:
    """Read whether the head shares the embedding: the key of the top level, true by default.

    transformers before version 5 took the key of text_config, false by default.
    """
    if hf_config.get("tie_word_embeddings") is not None:
        return bool(hf_config["tie_word_embeddings"])
    version = str(hf_config.get("transformers_version") or "")
    return bool(text.get("tie_word_embeddings", False)) if version.startswith("4.") else True


def _write_config(config: VLMConfig) -> HFConfig:
    connector = config.connector
    if not isinstance(connector, MergerConfig):
        raise ConfigError("Mistral 3 needs a merger")
    return {
        **write_pixtral_parts(config),
        "architectures": ["Mistral3ForConditionalGeneration"],
        "spatial_merge_size": connector.merge,
        "projector_hidden_act": to_hf_activation(connector.activation),
        "multimodal_projector_bias": connector.bias,
    }


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    connector = config.connector
    assert isinstance(connector, MergerConfig)
    # A block is channels × rows × columns in the file, and rows × columns × channels here.
    sizes = (connector.in_features, connector.merge, connector.merge)
    return build_pixtral_rules(
        config,
        [
            *rename_layer("norm", "norm", bias=False),
            permute_columns("block_layer.weight", "patch_merger.merging_layer.weight", sizes, (1, 2, 0)),
            *rename_layer("layers.linears.0", "linear_1", connector.bias),
            *rename_layer("layers.linears.1", "linear_2", connector.bias),
        ],
    )


MISTRAL3 = build_pixtral_family(
    "mistral3",
    _read_config,
    _write_config,
    _build_rules,
    class_defaults=DEFAULTS,
    part_defaults={
        "vision_config": VISION_DEFAULTS,
        "text_config": {key: value for key, value in TEXT_DEFAULTS.items() if value is not None},
    },
)
FAMILIES.register("mistral3", MISTRAL3)
