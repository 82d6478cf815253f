"""Decoder families: Llama (1, 2, 3, SmolLM2), Qwen2, Qwen3, Qwen3-MoE, and the table of all families."""

from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import require_key
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    make_decoder_family,
    normalize_decoder_config,
    read_decoder_config,
    read_gated_mlp,
    read_rotary,
    read_router_loss,
    write_decoder_config,
    write_layer_types,
    write_rotary,
)
from vitrail.hub.deepseek_text import DEEPSEEK_V2, DEEPSEEK_V3
from vitrail.hub.gemma import GEMMA_FAMILIES
from vitrail.hub.gemma4_text import GEMMA4_TEXT
from vitrail.hub.glm4 import GLM4
from vitrail.hub.mistral import MISTRAL_FAMILIES
from vitrail.hub.phi3 import PHI3
from vitrail.hub.qwen3_5_text import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from vitrail.nn import GatedMLPConfig, MoEConfig
from vitrail.registry import FAMILIES

__all__ = ["DECODER_FAMILIES", "build_decoder_rules", "normalize_decoder_config", "read_rotary", "write_rotary"]

# Defaults of the config classes of transformers. A released config.json lists only the keys that differ from them.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN2_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_DEFAULTS: dict[str, Any] = {**QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False}
QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in QWEN3_DEFAULTS.items() if key != "max_window_layers"},
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "head_dim": None,
    "num_local_experts": 128,  # the older key num_experts takes precedence
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _read_llama(hf_config: dict[str, Any]) -> DecoderConfig:
    return read_decoder_config(hf_config, mlp=read_gated_mlp(hf_config))


def _read_qwen(hf_config: dict[str, Any], first_sliding_layer: int, **fields: Any) -> DecoderConfig:
    """Read a model of Qwen. `sliding_window` has an effect only with `use_sliding_window`."""
    is_sliding = bool(hf_config.get("use_sliding_window")) and hf_config.get("sliding_window") is not None
    if not is_sliding and "sliding_attention" in (hf_config.get("layer_types") or ()):
        raise CheckpointError(
            "layer_types has sliding_attention, but use_sliding_window is false or sliding_window is null",
            "set use_sliding_window to true and sliding_window to a number, or use full_attention",
        )
    layers = range(require_key(hf_config, "num_hidden_layers"))
    types = ["sliding_attention" if is_sliding and i >= first_sliding_layer else "full_attention" for i in layers]
    return read_decoder_config(hf_config, default_layer_types=types, **fields)


def _read_qwen2(hf_config: dict[str, Any]) -> DecoderConfig:
    return _read_qwen(hf_config, hf_config["max_window_layers"], bias="qkv", mlp=read_gated_mlp(hf_config))


def _read_qwen3(hf_config: dict[str, Any]) -> DecoderConfig:
    return _read_qwen(hf_config, hf_config["max_window_layers"], qk_norm=True, mlp=read_gated_mlp(hf_config))


def _read_qwen3_moe(hf_config: dict[str, Any]) -> DecoderConfig:
    count, active = (
        require_key(hf_config, "num_experts", "num_local_experts"),
        require_key(hf_config, "num_experts_per_tok"),
    )
    layers = require_key(hf_config, "num_hidden_layers")
    step, only = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    dense_mlp = read_gated_mlp(hf_config)
    mlp = MoEConfig(
        num_experts=count,
        experts_per_token=active,
        intermediate_size=require_key(hf_config, "moe_intermediate_size"),
        renormalize=bool(hf_config.get("norm_topk_prob", False)),
        activation=dense_mlp.activation,
        router_aux_loss_coef=read_router_loss(hf_config),
    )
    return _read_qwen(
        hf_config,
        0,
        qk_norm=True,
        mlp=mlp,
        dense_layers=dense,
        dense_mlp=dense_mlp if dense else None,
    )


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    mlp_bias = isinstance(mlp, GatedMLPConfig) and mlp.bias
    return {**write_decoder_config(config, "LlamaForCausalLM"), "mlp_bias": mlp_bias}


def _write_qwen_layers(config: DecoderConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {**write_layer_types(config), "use_sliding_window": config.sliding_window is not None}
    types = fields["layer_types"]
    if config.sliding_window is not None and types == sorted(types):  # full_attention, then sliding_attention
        fields["max_window_layers"] = types.index("sliding_attention")
    return fields


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    return {**write_decoder_config(config, "Qwen2ForCausalLM", "attention_bias"), **_write_qwen_layers(config)}


def _write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return {**write_decoder_config(config, "Qwen3ForCausalLM"), **_write_qwen_layers(config)}


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    if not isinstance(mlp, MoEConfig):
        raise CheckpointError("the model has no experts")
    return {
        **write_decoder_config(config, "Qwen3MoeForCausalLM"),
        "num_experts": mlp.num_experts,
        "num_local_experts": mlp.num_experts,  # newer key of transformers
        "num_experts_per_tok": mlp.experts_per_token,
        "moe_intermediate_size": mlp.intermediate_size,
        "norm_topk_prob": mlp.renormalize,
        "router_aux_loss_coef": mlp.router_aux_loss_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }


LLAMA = make_decoder_family("llama", _read_llama, _write_llama, LLAMA_DEFAULTS)
QWEN2 = make_decoder_family("qwen2", _read_qwen2, _write_qwen2, QWEN2_DEFAULTS)
QWEN3 = make_decoder_family("qwen3", _read_qwen3, _write_qwen3, QWEN3_DEFAULTS)
QWEN3_MOE = make_decoder_family("qwen3_moe", _read_qwen3_moe, _write_qwen3_moe, QWEN3_MOE_DEFAULTS)
FAMILIES.register("llama", LLAMA)
FAMILIES.register("qwen2", QWEN2)
FAMILIES.register("qwen3", QWEN3)
FAMILIES.register("qwen3_moe", QWEN3_MOE)

DECODER_FAMILIES = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    *GEMMA_FAMILIES,
    GEMMA4_TEXT,
    *MISTRAL_FAMILIES,
    PHI3,
    GLM4,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
)
"""Families of language models, also of those inside vision-language models. The first that fits is written."""
