"""Decoder families of Gemma 1, 2 and 3."""

from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import reject_settings, require_key
from vitrail.hub.decoder_config import (
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    read_rotary,
    write_decoder_config,
    write_layer_types,
    write_rotary,
)
from vitrail.nn import AttentionConfig
from vitrail.registry import FAMILIES

# Defaults of the config classes of transformers.
GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "attention_bias": False,
}
GEMMA2_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in GEMMA_DEFAULTS.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3_DEFAULTS: dict[str, Any] = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
NO_BIDIRECTIONAL_ATTENTION = "bidirectional attention among text tokens is not supported"


def _read_gemma(hf_config: dict[str, Any], **fields: Any) -> DecoderConfig:
    reject_settings(hf_config, use_bidirectional_attention=NO_BIDIRECTIONAL_ATTENTION)
    key = "hidden_activation" if "hidden_activation" in hf_config else "hidden_act"
    return read_decoder_config(
        hf_config,
        norm="rms_zero_centered",
        mlp=read_gated_mlp(hf_config, key),
        scale_embeddings=True,
        **fields,
    )


def _read_gemma1(hf_config: dict[str, Any]) -> DecoderConfig:
    """Read Gemma 1. Its released configs say gelu for the tanh form, and have hidden_activation null or equal."""
    activation = hf_config["hidden_act"]
    without = {key: value for key, value in hf_config.items() if key != "hidden_activation"}
    return _read_gemma(without | {"hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation})


def _read_gemma2(hf_config: dict[str, Any], pattern: int = 2, **fields: Any) -> DecoderConfig:
    layers = range(require_key(hf_config, "num_hidden_layers"))
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]
    return _read_gemma(hf_config, sandwich_norms=True, default_layer_types=types, **fields)


def _read_gemma3(hf_config: dict[str, Any]) -> DecoderConfig:
    """Read Gemma 3, whose sliding layers have their own rotary positions. rope_scaling is for the others."""
    rope = hf_config.get("rope_parameters") or {}
    if rope and not isinstance(rope.get("full_attention"), dict):
        raise CheckpointError("rope_parameters has no full_attention", "give full_attention and sliding_attention")
    full = {key: value for key, value in hf_config.items() if key != "rope_parameters"}
    sliding = {key: value for key, value in full.items() if key != "rope_scaling"}
    if "full_attention" in rope:
        full["rope_parameters"] = rope["full_attention"]
    sliding["rope_theta"] = hf_config["rope_local_base_freq"]
    sliding["rope_parameters"] = rope.get("sliding_attention") or {}
    config = _read_gemma2(full, hf_config["sliding_window_pattern"], qk_norm=True)
    if config.sliding_window is None:
        return config
    head_dim = config.block.attention.resolve_head_dim(config.block.width)
    return config.replace(sliding_rotary=read_rotary(sliding, head_dim))


def _write_gemma1(config: DecoderConfig) -> dict[str, Any]:
    return write_decoder_config(config, "GemmaForCausalLM")


def _write_attention(config: AttentionConfig, head_dim: int) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar or head_dim
    return {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.logit_softcap,
    }


def _write_gemma2(config: DecoderConfig, architecture: str = "Gemma2ForCausalLM") -> dict[str, Any]:
    hf_config = write_decoder_config(config, architecture)
    activation = hf_config.pop("hidden_act")
    return {
        **hf_config,
        **write_layer_types(config),
        "sliding_window": config.sliding_window or config.context_length,  # transformers requires a number
        **_write_attention(config.block.attention, hf_config["head_dim"]),
        "hidden_activation": activation,
        "final_logit_softcapping": config.logit_softcap,
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    sliding = write_rotary(config.sliding_rotary or config.rotary)["rope_parameters"]
    rope = {"full_attention": write_rotary(config.rotary)["rope_parameters"], "sliding_attention": sliding}
    return {**_write_gemma2(config, "Gemma3ForCausalLM"), "rope_parameters": rope}


GEMMA = make_decoder_family("gemma", _read_gemma1, _write_gemma1, GEMMA_DEFAULTS)
GEMMA2 = make_decoder_family("gemma2", _read_gemma2, _write_gemma2, GEMMA2_DEFAULTS)
GEMMA3 = make_decoder_family("gemma3_text", _read_gemma3, _write_gemma3, GEMMA3_DEFAULTS)
GEMMA_FAMILIES = (GEMMA, GEMMA2, GEMMA3)
FAMILIES.register("gemma", GEMMA)
FAMILIES.register("gemma2", GEMMA2)
FAMILIES.register("gemma3_text", GEMMA3)
