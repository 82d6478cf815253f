"""GLM-4.5V of transformers: GLM-4.1V with a language model of experts, of which the first layers have none."""

from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    make_decoder_family,
    read_decoder_config,
    write_decoder_config,
)
from vitrail.hub.deepseek_text import (
    V3_ROUTING,
    build_deepseek_mlp_rules,
    read_dense_layers,
    read_experts,
    write_experts,
)
from vitrail.hub.glm4v import DEFAULTS, TEXT_DEFAULTS, GLM4VVariant, build_glm4v_family
from vitrail.registry import FAMILIES

# Defaults of the config classes of transformers.
MOE_TEXT_DEFAULTS: dict[str, Any] = {
    **TEXT_DEFAULTS,
    "vocab_size": 151_424,
    "intermediate_size": 10_944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
MOE_DEFAULTS: dict[str, Any] = {**DEFAULTS, "image_token_id": 151_363, "video_token_id": 151_364}


def _read_text(hf_config: dict[str, Any]) -> DecoderConfig:
    return read_decoder_config(
        hf_config,
        bias="qkv" if hf_config["attention_bias"] else "none",
        mlp=read_experts(hf_config, V3_ROUTING),
        partial_rotary=True,
        **read_dense_layers(hf_config),
    )


def _write_text(config: DecoderConfig) -> dict[str, Any]:
    hf_config = write_decoder_config(config, "Glm4vMoeForConditionalGeneration")
    hf_config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return hf_config | {"attention_bias": config.block.attention.bias == "qkv", **write_experts(config)}


# Part of GLM-4.5V only: GLM-4.5 itself also has layers that predict further tokens.
GLM4_MOE_TEXT = make_decoder_family(
    "glm4v_moe_text",
    _read_text,
    _write_text,
    MOE_TEXT_DEFAULTS,
    lambda config: build_decoder_rules(config, build_deepseek_mlp_rules),
)
GLM4V_MOE = build_glm4v_family(
    GLM4VVariant("glm4v_moe", "Glm4vMoeForConditionalGeneration", GLM4_MOE_TEXT, MOE_TEXT_DEFAULTS, {}, MOE_DEFAULTS)
)
FAMILIES.register("glm4v_moe", GLM4V_MOE)
