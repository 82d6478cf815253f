"""OPT, the decoder of BLIP-2: learned positions, LayerNorm, a plain MLP with ReLU, and biases."""

from typing import Any

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, require_key
from vitrail.hub.decoder_families import normalize_decoder_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, RotaryConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

POSITION_OFFSET = 2  # unused rows at the start of the position table
EPS = 1e-5  # fixed; not part of the config

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "vocab_size": 50_272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "activation_function": "relu",
    "enable_bias": True,
    "tie_word_embeddings": True,
}


def _read_config(hf_config: HFConfig) -> DecoderConfig:
    hf_config = {**DEFAULTS, **hf_config}
    width, heads = require_key(hf_config, "hidden_size"), require_key(hf_config, "num_attention_heads")
    if not hf_config["do_layer_norm_before"]:
        raise CheckpointError("do_layer_norm_before is false: post-norm (OPT-350m) is not supported")
    if (hf_config.get("word_embed_proj_dim") or width) != width:
        raise CheckpointError(
            f"word_embed_proj_dim {hf_config['word_embed_proj_dim']} differs from the width {width} (OPT-350m)"
        )
    if not hf_config["layer_norm_elementwise_affine"] or hf_config.get("_remove_final_layer_norm"):
        raise CheckpointError(
            "norms without weights, or without a last norm, are not supported (Galactica and older files)"
        )
    name = hf_config["activation_function"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"activation_function {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    bias, context = bool(hf_config["enable_bias"]), require_key(hf_config, "max_position_embeddings")
    attention = AttentionConfig(heads=heads, bias="all" if bias else "none")
    mlp = PlainMLPConfig(intermediate_size=require_key(hf_config, "ffn_dim"), activation=ACTIVATIONS[name], bias=bias)  # pyrefly: ignore
    return DecoderConfig(
        vocab_size=require_key(hf_config, "vocab_size"),
        layers=require_key(hf_config, "num_hidden_layers"),
        block=BlockConfig(width=width, attention=attention, mlp=mlp, eps=EPS),
        rotary=RotaryConfig(head_dim=attention.resolve_head_dim(width), rotary_dim=0),
        learned_positions=context + POSITION_OFFSET,
        context_length=context,
        tie_word_embeddings=bool(hf_config["tie_word_embeddings"]),
    )


def _write_config(config: DecoderConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": block.width,
        "word_embed_proj_dim": block.width,
        "ffn_dim": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "activation_function": next(name for name, native in ACTIVATIONS.items() if native == block.mlp.activation),
        "max_position_embeddings": config.context_length,
        "enable_bias": block.attention.bias == "all",
        "do_layer_norm_before": True,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _build_rules(config: DecoderConfig) -> list[TensorRule]:
    W, bias = config.block.width, config.block.attention.bias == "all"
    rules = [
        rename("embed.weight", "embed_tokens.weight"),
        rename("positions.weight", "embed_positions.weight"),
        *rename_layer("norm", "final_layer_norm"),
    ]
    block = [
        *rename_layer("branches.self.norm", "self_attn_layer_norm"),
        *fuse_layer("branches.self.op.qkv", [f"self_attn.{name}_proj" for name in "qkv"], [W] * 3, bias),
        *rename_layer("branches.self.op.out", "self_attn.out_proj", bias),
        *rename_layer("branches.mlp.norm", "final_layer_norm"),
        *rename_layer("branches.mlp.op.up", "fc1", bias),
        *rename_layer("branches.mlp.op.down", "fc2", bias),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"layers.{i}.", block)
    rules = add_prefix("", "model.decoder.", rules)
    return rules if config.tie_word_embeddings else [*rules, rename("head.weight", "lm_head.weight")]


DUPLICATE_TENSORS = (("lm_head.weight", "model.decoder.embed_tokens.weight"),)
OPT = CheckpointFamily(
    "opt",
    Decoder,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_decoder_config),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    class_defaults=DEFAULTS,
)
FAMILIES.register("opt", OPT)
