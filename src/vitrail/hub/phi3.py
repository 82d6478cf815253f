"""Decoder family of Phi-3, Phi-3.5 and Phi-4: fused projections, partial rotary positions and LongRoPE."""

from functools import partial
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import require_key
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    build_fused_mlp_rules,
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    write_decoder_config,
)
from vitrail.nn.rotary_embedding import LongRoPEScaling
from vitrail.registry import FAMILIES

# Defaults of the config class of transformers.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "sliding_window": None,
}
LEGACY_ROPE_TYPES = ("su", "yarn")  # names of LongRoPE in older files


def _read_config(hf_config: dict[str, Any]) -> DecoderConfig:
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind or "default"
    rope["rope_type"] = "longrope" if kind in LEGACY_ROPE_TYPES else kind
    if rope["rope_type"] not in ("default", "longrope"):
        raise CheckpointError(f"rope_type {kind!r} is not supported", "known: default, longrope")
    window = "full_attention" if hf_config["sliding_window"] is None else "sliding_attention"
    return read_decoder_config(
        {**hf_config, "rope_scaling": None, "rope_parameters": rope, "layer_types": None},
        bias="none",
        mlp=read_gated_mlp(hf_config),
        partial_rotary=True,
        default_layer_types=[window] * require_key(hf_config, "num_hidden_layers"),
    )


def _write_config(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rotary.scaling
    length = scaling.original_length if isinstance(scaling, LongRoPEScaling) else config.context_length
    return {
        **write_decoder_config(config, "Phi3ForCausalLM", "attention_bias"),
        "original_max_position_embeddings": length,
        "sliding_window": config.sliding_window,
        "pad_token_id": None,  # the default may be beyond the vocabulary
    }


def write_published_config(config: DecoderConfig, rope_type: str) -> dict[str, Any]:
    """Convert a native config to the keys that the published code reads: `rope_theta` and `rope_scaling`."""
    hf_config = _write_config(config)
    rope, scaling = hf_config.pop("rope_parameters"), config.rotary.scaling
    if isinstance(scaling, LongRoPEScaling):
        factors = {key: list(getattr(scaling, key)) for key in ("short_factor", "long_factor")}
        hf_config["rope_scaling"] = {"type": rope_type, **factors}
    share = rope.get("partial_rotary_factor")
    return {
        **{key: value for key, value in hf_config.items() if key not in ("architectures", "head_dim")},
        "rope_theta": rope["rope_theta"],
        **({} if share is None else {"partial_rotary_factor": share}),
    }


PHI3 = make_decoder_family(
    "phi3",
    _read_config,
    _write_config,
    DEFAULTS,
    partial(build_decoder_rules, mlp_rules=build_fused_mlp_rules, is_fused=True),
)
FAMILIES.register("phi3", PHI3)
