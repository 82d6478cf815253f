"""Decoder family of GLM-4: norms around both branches, and rotary positions of adjacent channels, half of a head."""

from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    build_fused_mlp_rules,
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    write_decoder_config,
)
from vitrail.hub.tensor_rules import TensorRule
from vitrail.registry import FAMILIES

# Defaults of the config class of transformers.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
# Norms of Gemma, as `build_decoder_rules` names them → those of GLM-4.
NORM_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _read_config(hf_config: dict[str, Any]) -> DecoderConfig:
    config = read_decoder_config(
        hf_config,
        bias="qkv" if hf_config["attention_bias"] else "none",
        mlp=read_gated_mlp({**hf_config, "mlp_bias": False}),
        sandwich_norms=True,
        partial_rotary=True,
    )
    return config.replace(rotary=config.rotary.replace(pairing="adjacent"))


def _write_config(config: DecoderConfig) -> dict[str, Any]:
    hf_config = write_decoder_config(config, "Glm4ForCausalLM")
    hf_config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    # The default pad_token_id may be beyond the vocabulary.
    return {**hf_config, "attention_bias": config.block.attention.bias == "qkv", "pad_token_id": None}


def _build_rules(config: DecoderConfig) -> list[TensorRule]:
    def rename_norm(name: str) -> str:
        *parents, norm, suffix = name.split(".")
        return ".".join([*parents, NORM_NAMES.get(norm, norm), suffix])

    rules = build_decoder_rules(config, build_fused_mlp_rules)
    return [rule._replace(hf=tuple(map(rename_norm, rule.hf))) for rule in rules]


GLM4 = make_decoder_family("glm4", _read_config, _write_config, DEFAULTS, _build_rules)
FAMILIES.register("glm4", GLM4)
