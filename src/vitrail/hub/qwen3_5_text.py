"""Decoder families of Qwen3.5, dense and with experts: three of four layers have linear attention."""

from functools import partial
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import require_key
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    build_mlp_rules,
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    read_router_loss,
    write_decoder_config,
    write_layer_types,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer
from vitrail.nn import GatedDeltaNetConfig, MLPConfig, MoEConfig
from vitrail.registry import FAMILIES

# Defaults of the config classes of transformers.
QWEN3_5_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_5_MOE_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in QWEN3_5_DEFAULTS.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
FULL_ATTENTION_INTERVAL = 4  # every fourth layer has full attention


def _read_config(hf_config: dict[str, Any], mlp: MLPConfig | None = None) -> DecoderConfig:
    if hf_config.get("attn_output_gate") is False:
        raise CheckpointError("attn_output_gate is false", "only attention with an output gate is supported")
    dense = mlp or read_gated_mlp(hf_config)
    interval = hf_config.get("full_attention_interval") or FULL_ATTENTION_INTERVAL
    layers = range(require_key(hf_config, "num_hidden_layers"))
    types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    types = hf_config.get("layer_types") or types
    linear = GatedDeltaNetConfig(
        key_heads=require_key(hf_config, "linear_num_key_heads"),
        value_heads=require_key(hf_config, "linear_num_value_heads"),
        key_dim=require_key(hf_config, "linear_key_head_dim"),
        value_dim=require_key(hf_config, "linear_value_head_dim"),
        kernel_size=require_key(hf_config, "linear_conv_kernel_dim"),
        activation=dense.activation,
        eps=hf_config["rms_norm_eps"],
    )
    return read_decoder_config(
        hf_config,
        mlp=dense,
        norm="rms_zero_centered",
        qk_norm=True,
        output_gate=True,
        partial_rotary=True,
        default_layer_types=types,
        linear_attention=linear if "linear_attention" in types else None,
    )


def _read_moe(hf_config: dict[str, Any]) -> DecoderConfig:
    if hf_config.get("mlp_only_layers"):
        raise CheckpointError("mlp_only_layers are not supported", "remove them: all layers of Qwen3.5 have experts")
    activation = read_gated_mlp({**hf_config, "intermediate_size": 1}).activation
    mlp = MoEConfig(
        num_experts=require_key(hf_config, "num_experts", "num_local_experts"),
        experts_per_token=require_key(hf_config, "num_experts_per_tok"),
        intermediate_size=require_key(hf_config, "moe_intermediate_size"),
        shared_intermediate_size=require_key(hf_config, "shared_expert_intermediate_size"),
        shared_gate=True,
        activation=activation,
        router_aux_loss_coef=read_router_loss(hf_config),
    )
    return _read_config(hf_config, mlp)


def _write_config(config: DecoderConfig, architecture: str = "Qwen3_5ForCausalLM") -> dict[str, Any]:
    linear = config.linear_attention or GatedDeltaNetConfig(key_heads=1, value_heads=1)
    hf_config, layer_types = write_decoder_config(config, architecture), write_layer_types(config)
    del layer_types["sliding_window"]
    return {
        **hf_config,
        "rope_parameters": {"partial_rotary_factor": 1.0, **hf_config["rope_parameters"]},
        **layer_types,
        "attn_output_gate": True,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.kernel_size,
    }


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    if not isinstance(mlp, MoEConfig):
        raise CheckpointError("the model has no experts")
    hf_config = _write_config(config, "Qwen3_5MoeForCausalLM")
    del hf_config["intermediate_size"]
    return {
        **hf_config,
        "num_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.experts_per_token,
        "moe_intermediate_size": mlp.intermediate_size,
        "shared_expert_intermediate_size": mlp.shared_intermediate_size,
        "router_aux_loss_coef": mlp.router_aux_loss_coef,
    }


def _build_moe_rules(config: MLPConfig) -> list[TensorRule]:
    rules = build_mlp_rules(config)
    if not isinstance(config, MoEConfig) or not config.shared_intermediate_size:
        return rules
    native, hidden = "branches.mlp.op", config.shared_intermediate_size
    shared = [
        *fuse_layer("gate_up", ["gate_proj", "up_proj"], [hidden, hidden], bias=False),
        *rename_layer("down", "down_proj", bias=False),
    ]
    gate = rename(f"{native}.shared_gate.weight", "mlp.shared_expert_gate.weight")
    return [*rules, *add_prefix(f"{native}.shared.", "mlp.shared_expert.", shared), gate]


QWEN3_5_TEXT = make_decoder_family("qwen3_5_text", _read_config, _write_config, QWEN3_5_DEFAULTS)
QWEN3_5_MOE_TEXT = make_decoder_family(
    "qwen3_5_moe_text",
    _read_moe,
    _write_moe,
    QWEN3_5_MOE_DEFAULTS,
    partial(build_decoder_rules, mlp_rules=_build_moe_rules),
)
FAMILIES.register("qwen3_5_text", QWEN3_5_TEXT)
FAMILIES.register("qwen3_5_moe_text", QWEN3_5_MOE_TEXT)
