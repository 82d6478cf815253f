"""Persimmon, the decoder of Fuyu: LayerNorm, squared ReLU, biases, norms of queries and keys, half-rotated heads."""

from typing import Any

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check
from vitrail.hub.decoder_config import normalize_decoder_config, read_rotary, write_rotary
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename, rename_layer, ungroup_qkv
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "vocab_size": 262_144,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "hidden_act": "relu2",
    "max_position_embeddings": 16_384,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "qk_layernorm": True,
    "partial_rotary_factor": 0.5,
}
THETA = 25_000.0  # of the released models; transformers 5 writes it in every file and has another default


def _read_config(hf_config: HFConfig) -> DecoderConfig:
    hf_config = {**DEFAULTS, "rope_theta": THETA, **hf_config}
    name, width, eps = hf_config["hidden_act"], hf_config["hidden_size"], hf_config["layer_norm_eps"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    attention = AttentionConfig(
        heads=hf_config["num_attention_heads"],
        bias="all",
        qk_norm="layer" if hf_config["qk_layernorm"] else None,
        eps=eps,
    )
    mlp = PlainMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=ACTIVATIONS[name])  # pyrefly: ignore
    return DecoderConfig(
        vocab_size=hf_config["vocab_size"],
        layers=hf_config["num_hidden_layers"],
        block=BlockConfig(width=width, attention=attention, mlp=mlp, eps=eps),
        rotary=read_rotary(hf_config, attention.resolve_head_dim(width), partial=True),
        context_length=hf_config["max_position_embeddings"],
        tie_word_embeddings=bool(hf_config["tie_word_embeddings"]),
    )


def _write_config(config: DecoderConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["PersimmonForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "hidden_act": next(name for name, native in ACTIVATIONS.items() if native == block.mlp.activation),
        "max_position_embeddings": config.context_length,
        "layer_norm_eps": block.eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qk_layernorm": block.attention.qk_norm is not None,
        **write_rotary(config.rotary),
    }


def _build_rules(config: DecoderConfig) -> list[TensorRule]:
    attention = config.block.attention
    native, hf, D = "branches.self.op", "self_attn", attention.resolve_head_dim(config.block.width)
    block = [
        *rename_layer("branches.self.norm", "input_layernorm"),
        *(
            ungroup_qkv(f"{native}.qkv.{part}", f"{hf}.query_key_value.{part}", attention.heads, attention.heads, D)
            for part in ("weight", "bias")
        ),
        *rename_layer(f"{native}.out", f"{hf}.dense"),
        *rename_layer("branches.mlp.norm", "post_attention_layernorm"),
        *rename_layer("branches.mlp.op.up", "mlp.dense_h_to_4h"),
        *rename_layer("branches.mlp.op.down", "mlp.dense_4h_to_h"),
    ]
    if attention.qk_norm is not None:
        block += [rule for x in "qk" for rule in rename_layer(f"{native}.{x}_norm", f"{hf}.{x}_layernorm")]
    rules = [rename("embed.weight", "model.embed_tokens.weight"), *rename_layer("norm", "model.final_layernorm")]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"model.layers.{i}.", block)
    return rules if config.tie_word_embeddings else [*rules, rename("head.weight", "lm_head.weight")]


PERSIMMON = CheckpointFamily(
    "persimmon",
    Decoder,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_decoder_config),
    _build_rules,
    duplicate_tensors=(("lm_head.weight", "model.embed_tokens.weight"),),
    class_defaults=DEFAULTS,
)
FAMILIES.register("persimmon", PERSIMMON)
