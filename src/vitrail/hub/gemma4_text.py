"""Decoder family of Gemma 4, dense and with experts.

Layers with full attention have their own head width and number of key/value heads, and may use keys as values.
"""

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
    read_rotary,
    write_decoder_config,
    write_layer_types,
    write_rotary,
)
from vitrail.hub.tensor_rules import TensorRule, fuse_layer, rename, rename_layer
from vitrail.nn import MLPConfig, MoEConfig
from vitrail.registry import FAMILIES

# Defaults of the config class of transformers.
GEMMA4_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
GLOBAL_HEAD_DIM = 512  # of layers with full attention, if the config names none
SLIDING_WINDOW_PATTERN = 6  # every sixth layer has full attention, if the config lists no layer types
KV_KEYS = ("head_dim", "num_key_value_heads")


def _read_config(hf_config: dict[str, Any]) -> DecoderConfig:
    _refuse_unsupported(hf_config)
    types = _list_layer_types(hf_config)
    full = _read_full_attention(hf_config, types)
    ropes = dict(hf_config["rope_parameters"])
    missing = sorted(set(types) - {kind for kind, rope in ropes.items() if isinstance(rope, dict)})
    if missing:
        raise CheckpointError(f"rope_parameters has no {missing[0]}", "give full_attention and sliding_attention")
    share_kv, mlp = bool(hf_config["attention_k_eq_v"]), _read_mlp(hf_config)
    config = read_decoder_config(
        {**hf_config, **full, "query_pre_attn_scalar": 1.0, "rope_parameters": ropes["full_attention"]},
        mlp=mlp,
        qk_norm=True,
        sandwich_norms=True,
        default_layer_types=types,
        scale_embeddings=True,
    )
    attention = config.block.attention.replace(v_norm=True)
    config = config.replace(
        block=config.block.replace(attention=attention.replace(share_kv=share_kv), output_scale=True)
    )
    if config.sliding_window is None:
        return config
    head_dim, kv_heads = (require_key(hf_config, key) for key in KV_KEYS)
    return config.replace(
        sliding_rotary=read_rotary({**hf_config, "rope_parameters": ropes["sliding_attention"]}, head_dim),
        sliding_attention=attention.replace(head_dim=head_dim, kv_heads=kv_heads),
    )


def _refuse_unsupported(hf_config: dict[str, Any]) -> None:
    if hf_config["use_bidirectional_attention"] == "all":
        raise CheckpointError(
            "use_bidirectional_attention is 'all': bidirectional attention among text tokens is not supported",
            "use a Gemma 4 that generates text: the key is null or 'vision'",
        )
    for key, what in (
        ("hidden_size_per_layer_input", "embeddings for each layer"),
        ("num_kv_shared_layers", "layers that share keys and values"),
    ):
        if hf_config[key]:
            raise CheckpointError(
                f"{key} is {hf_config[key]}: {what}, as in Gemma 4 E2B and E4B, are not supported",
                "use Gemma 4 26B-A4B or 31B",
            )


def _list_layer_types(hf_config: dict[str, Any]) -> list[str]:
    """List the layer types. transformers forces full attention in the last layer."""
    layers = require_key(hf_config, "num_hidden_layers")
    default = [
        "full_attention" if (i + 1) % SLIDING_WINDOW_PATTERN == 0 else "sliding_attention" for i in range(layers)
    ]
    return [*(hf_config.get("layer_types") or default)[:-1], "full_attention"]


def _read_full_attention(hf_config: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Read the head width and key/value heads of full attention, from released files or those of transformers 5.22."""
    own = {key: require_key(hf_config, key) for key in KV_KEYS}
    overrides = hf_config.get("per_layer_config")
    if overrides is None:
        kv_heads = hf_config.get("num_global_key_value_heads") if hf_config["attention_k_eq_v"] else None
        return {
            "head_dim": hf_config.get("global_head_dim") or GLOBAL_HEAD_DIM,
            "num_key_value_heads": kv_heads or own["num_key_value_heads"],
        }
    layers = [own | {k: v for k, v in overrides.get(str(i), {}).items() if v is not None} for i in range(len(types))]
    full = [layer for layer, kind in zip(layers, types, strict=True) if kind == "full_attention"]
    sliding = [layer for layer, kind in zip(layers, types, strict=True) if kind != "full_attention"]
    if any(layer != full[0] or layer.keys() != own.keys() for layer in full) or any(layer != own for layer in sliding):
        raise CheckpointError(
            "per_layer_config differs within one type of layers, or sets other keys than head_dim and "
            "num_key_value_heads",
            "give all layers with full_attention the same head_dim and num_key_value_heads, and the others none",
        )
    return full[0]


def _read_mlp(hf_config: dict[str, Any]) -> MLPConfig:
    dense = read_gated_mlp(hf_config, "hidden_activation")
    if not hf_config["enable_moe_block"]:
        return dense
    return MoEConfig(
        num_experts=require_key(hf_config, "num_experts"),
        experts_per_token=require_key(hf_config, "top_k_experts"),
        intermediate_size=require_key(hf_config, "moe_intermediate_size", "expert_intermediate_size"),
        shared_intermediate_size=dense.intermediate_size,
        activation=dense.activation,
        norm="rms",
        eps=hf_config["rms_norm_eps"],
    )


def _write_config(config: DecoderConfig) -> dict[str, Any]:
    full, mlp = config.block.attention, config.block.mlp
    sliding, width = config.sliding_attention or full, config.block.width
    hf_config = write_decoder_config(config, "Gemma4ForCausalLM")
    activation = hf_config.pop("hidden_act")
    experts: dict[str, Any] = {"enable_moe_block": False}
    if isinstance(mlp, MoEConfig):
        experts = {
            "enable_moe_block": True,
            "intermediate_size": mlp.shared_intermediate_size,
            "num_experts": mlp.num_experts,
            "top_k_experts": mlp.experts_per_token,
            "moe_intermediate_size": mlp.intermediate_size,
        }
    return {
        **hf_config,
        **write_layer_types(config),
        **experts,
        "sliding_window": config.sliding_window or config.context_length,  # transformers requires a number
        "head_dim": sliding.resolve_head_dim(width),
        "num_key_value_heads": sliding.num_kv_heads,
        "global_head_dim": full.resolve_head_dim(width),
        "num_global_key_value_heads": full.num_kv_heads if full.share_kv else None,
        "attention_k_eq_v": full.share_kv,
        "hidden_activation": activation,
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": write_rotary(config.rotary)["rope_parameters"],
            "sliding_attention": write_rotary(config.sliding_rotary or config.rotary)["rope_parameters"],
        },
    }


def _build_moe_rules(config: MLPConfig) -> list[TensorRule]:
    if not isinstance(config, MoEConfig):
        return build_mlp_rules(config)
    native, hidden = "branches.mlp.op", config.shared_intermediate_size
    norms = {
        "shared": "pre_feedforward_layernorm",
        "shared_post": "post_feedforward_layernorm_1",
        "experts": "pre_feedforward_layernorm_2",
        "experts_post": "post_feedforward_layernorm_2",
    }
    names = {
        "router.weight": "router.proj.weight",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "gate_up": "experts.gate_up_proj",
        "down": "experts.down_proj",
        **{f"norms.{name}.weight": f"{norm}.weight" for name, norm in norms.items()},
    }
    return [
        *fuse_layer(f"{native}.shared.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [hidden, hidden], bias=False),
        *rename_layer(f"{native}.shared.down", "mlp.down_proj", bias=False),
        *(rename(f"{native}.{name}", hf) for name, hf in names.items()),
    ]


GEMMA4_TEXT = make_decoder_family(
    "gemma4_text",
    _read_config,
    _write_config,
    GEMMA4_DEFAULTS,
    partial(build_decoder_rules, mlp_rules=_build_moe_rules),
)
FAMILIES.register("gemma4_text", GEMMA4_TEXT)
