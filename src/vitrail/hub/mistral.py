"""Decoder families of Mistral: Mistral, Ministral, Ministral 3 and Mixtral.

Without a sliding window, Mistral and Ministral equal Llama and are exported as Llama.
"""

from functools import partial
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import require_key
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    build_expert_rules,
    build_mlp_rules,
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    read_router_loss,
    write_decoder_config,
    write_layer_types,
)
from vitrail.hub.tensor_rules import TensorRule
from vitrail.nn import MLPConfig, MoEConfig
from vitrail.nn.rotary_embedding import QueryScaling
from vitrail.registry import FAMILIES

# Defaults of the config classes of transformers.
MISTRAL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
}
MIXTRAL_DEFAULTS: dict[str, Any] = {
    **MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
MINISTRAL3_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in MISTRAL_DEFAULTS.items() if key != "rope_theta"},
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "max_position_embeddings": 262_144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def _read_mistral(hf_config: dict[str, Any], mlp: MLPConfig | None = None) -> DecoderConfig:
    """Read a decoder whose layers all have the same attention, with a sliding window if there is one."""
    kind = "full_attention" if hf_config["sliding_window"] is None else "sliding_attention"
    return read_decoder_config(
        {**hf_config, "layer_types": None},
        bias="none",
        mlp=mlp or read_gated_mlp(hf_config),
        default_layer_types=[kind] * require_key(hf_config, "num_hidden_layers"),
    )


def _read_ministral(hf_config: dict[str, Any]) -> DecoderConfig:
    types = hf_config.get("layer_types")
    if types is None:
        return _read_mistral(hf_config)
    return read_decoder_config(hf_config, bias="none", mlp=read_gated_mlp(hf_config), default_layer_types=types)


def _read_ministral3(hf_config: dict[str, Any]) -> DecoderConfig:
    """Read Ministral 3, whose queries are scaled by their position."""
    config, rope = _read_mistral(hf_config), hf_config["rope_parameters"]
    scaling = QueryScaling(
        beta=require_key(rope, "llama_4_scaling_beta"),
        original_length=require_key(rope, "original_max_position_embeddings"),
    )
    return config.replace(rotary=config.rotary.replace(query_scaling=scaling))


def _read_mixtral(hf_config: dict[str, Any]) -> DecoderConfig:
    dense = read_gated_mlp(hf_config)
    mlp = MoEConfig(
        num_experts=require_key(hf_config, "num_local_experts"),
        experts_per_token=require_key(hf_config, "num_experts_per_tok"),
        intermediate_size=dense.intermediate_size,
        activation=dense.activation,
        router_aux_loss_coef=read_router_loss(hf_config),
    )
    return _read_mistral(hf_config, mlp)


def _write_mistral(config: DecoderConfig, architecture: str = "MistralForCausalLM") -> dict[str, Any]:
    return {
        **write_decoder_config(config, architecture, "attention_bias"),
        "sliding_window": config.sliding_window,
    }


def _write_ministral(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_mistral(config, "MinistralForCausalLM"), **write_layer_types(config)}


def _write_ministral3(config: DecoderConfig) -> dict[str, Any]:
    hf_config, scaling = _write_mistral(config, "Ministral3ForCausalLM"), config.rotary.query_scaling
    if scaling is None:
        raise CheckpointError("the queries are not scaled by their position")
    rope = {"original_max_position_embeddings": scaling.original_length, **hf_config["rope_parameters"]}
    return {**hf_config, "rope_parameters": {**rope, "llama_4_scaling_beta": scaling.beta}}


def _write_mixtral(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    if not isinstance(mlp, MoEConfig):
        raise CheckpointError("the model has no experts")
    return {
        **_write_mistral(config, "MixtralForCausalLM"),
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.experts_per_token,
        "router_aux_loss_coef": mlp.router_aux_loss_coef,
    }


def _build_mixtral_mlp_rules(config: MLPConfig) -> list[TensorRule]:
    if isinstance(config, MoEConfig):
        return build_expert_rules(config, "block_sparse_moe", "w1", "w3", "w2")
    return build_mlp_rules(config)


MISTRAL = make_decoder_family("mistral", _read_mistral, _write_mistral, MISTRAL_DEFAULTS)
MINISTRAL = make_decoder_family("ministral", _read_ministral, _write_ministral, MISTRAL_DEFAULTS)
MINISTRAL3 = make_decoder_family("ministral3", _read_ministral3, _write_ministral3, MINISTRAL3_DEFAULTS)
MIXTRAL = make_decoder_family(
    "mixtral",
    _read_mixtral,
    _write_mixtral,
    MIXTRAL_DEFAULTS,
    partial(build_decoder_rules, mlp_rules=_build_mixtral_mlp_rules),
)
MISTRAL_FAMILIES = (MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL)
FAMILIES.register("mistral", MISTRAL)
FAMILIES.register("ministral", MINISTRAL)
FAMILIES.register("ministral3", MINISTRAL3)
FAMILIES.register("mixtral", MIXTRAL)
