"""InternLM2, the language model of InternVL2: a Llama with other tensor names. It is exported as Llama."""

from typing import Any

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, make_read_only
from vitrail.hub.decoder_families import LLAMA
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer, ungroup_qkv
from vitrail.registry import FAMILIES

# Defaults of the published config class, InternLM2Config.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 103_168,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bias": True,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def _read_config(hf_config: dict[str, Any]) -> DecoderConfig:
    hf_config = {**DEFAULTS, **hf_config}
    return LLAMA.from_hf_config({**hf_config, "attention_bias": hf_config["bias"], "head_dim": None})


def _build_rules(config: DecoderConfig) -> list[TensorRule]:
    attention, hidden = config.block.attention, config.block.mlp.intermediate_size
    shape = attention.heads, attention.num_kv_heads, attention.resolve_head_dim(config.block.width)
    has_bias = attention.bias == "all"
    block = [
        ungroup_qkv(f"{(op := 'branches.self.op')}.qkv.weight", "attention.wqkv.weight", *shape),
        *([ungroup_qkv(f"{op}.qkv.bias", "attention.wqkv.bias", *shape)] if has_bias else []),
        *rename_layer(f"{op}.out", "attention.wo", has_bias),
        *rename_layer("branches.self.norm", "attention_norm", False),
        *rename_layer("branches.mlp.norm", "ffn_norm", False),
        *fuse_layer("branches.mlp.op.gate_up", ["feed_forward.w1", "feed_forward.w3"], [hidden, hidden], False),
        *rename_layer("branches.mlp.op.down", "feed_forward.w2", False),
    ]
    rules = [rename("embed.weight", "model.tok_embeddings.weight"), *rename_layer("norm", "model.norm", False)]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"model.layers.{i}.", block)
    return rules if config.tie_word_embeddings else [*rules, rename("head.weight", "output.weight")]


INTERNLM2 = CheckpointFamily(
    "internlm2", Decoder, _read_config, tensor_rules=_build_rules, **make_read_only(LLAMA.name)
)
FAMILIES.register("internlm2", INTERNLM2)
