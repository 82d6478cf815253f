"""The encoder of T5 and UMT5 in transformers, alone (`T5EncoderModel`) or from a checkpoint with a decoder."""

from collections.abc import Callable
from typing import Any

from vitrail.encoders.t5_encoder import T5Encoder, T5EncoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, rename
from vitrail.nn import GatedMLPConfig, MLPConfig, PlainMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
T5_DEFAULTS: HFConfig = {
    "vocab_size": 32_128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
}
UMT5_DEFAULTS: HFConfig = {
    **T5_DEFAULTS,
    "vocab_size": 250_112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
MLP_KINDS: dict[str, Callable[[int], MLPConfig]] = {
    "relu": lambda size: PlainMLPConfig(intermediate_size=size, activation="relu", bias=False),
    "gelu": lambda size: PlainMLPConfig(intermediate_size=size, activation="gelu", bias=False),
    "silu": lambda size: PlainMLPConfig(intermediate_size=size, activation="silu", bias=False),
    "gated-gelu": lambda size: GatedMLPConfig(intermediate_size=size, activation="gelu_tanh"),
    "gated-silu": lambda size: GatedMLPConfig(intermediate_size=size, activation="silu"),
    "gated-relu": lambda size: GatedMLPConfig(intermediate_size=size, activation="relu"),
}
"""`feed_forward_proj` → MLP of a hidden size."""


def _build_rules(config: T5EncoderConfig) -> list[TensorRule]:
    inner, hidden = config.heads * config.head_dim, config.mlp.intermediate_size
    attention, mlp = "layer.0.SelfAttention", "layer.1.DenseReluDense"
    bias = rename("bias.table.weight", f"{attention}.relative_attention_bias.weight")
    block = [
        rename("attention_norm.weight", "layer.0.layer_norm.weight"),
        fuse("qkv.weight", [f"{attention}.{name}.weight" for name in "qkv"], [inner] * 3),
        rename("out.weight", f"{attention}.o.weight"),
        rename("mlp_norm.weight", "layer.1.layer_norm.weight"),
        fuse("mlp.gate_up.weight", [f"{mlp}.wi_0.weight", f"{mlp}.wi_1.weight"], [hidden] * 2)
        if isinstance(config.mlp, GatedMLPConfig)
        else rename("mlp.up.weight", f"{mlp}.wi.weight"),
        rename("mlp.down.weight", f"{mlp}.wo.weight"),
        *([] if config.shared_position_bias else [bias]),
    ]
    rules = [
        rename("embed.weight", "shared.weight"),
        rename("norm.weight", "encoder.final_layer_norm.weight"),
        *(add_prefix("", "encoder.block.0.", [bias]) if config.shared_position_bias else []),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.block.{i}.", block)
    return rules


def build_t5_family(name: str, architecture: str, defaults: HFConfig, shared_position_bias: bool) -> CheckpointFamily:
    """Build the family of a T5 encoder."""

    def read_config(hf_config: HFConfig) -> T5EncoderConfig:
        hf_config = fill_defaults(hf_config, defaults)
        kind = hf_config["feed_forward_proj"]
        if kind not in MLP_KINDS:
            raise CheckpointError(f"feed_forward_proj {kind!r} is not supported", f"known: {', '.join(MLP_KINDS)}")
        return T5EncoderConfig(
            vocab_size=hf_config["vocab_size"],
            layers=hf_config["num_layers"],
            width=hf_config["d_model"],
            heads=hf_config["num_heads"],
            head_dim=hf_config["d_kv"],
            mlp=MLP_KINDS[kind](hf_config["d_ff"]),
            eps=hf_config["layer_norm_epsilon"],
            num_buckets=hf_config["relative_attention_num_buckets"],
            max_distance=hf_config["relative_attention_max_distance"],
            shared_position_bias=shared_position_bias,
        )

    def write_config(config: T5EncoderConfig) -> HFConfig:
        size = config.mlp.intermediate_size
        kind = next((kind for kind, make in MLP_KINDS.items() if make(size) == config.mlp), None)
        if kind is None or config.shared_position_bias != shared_position_bias:
            raise CheckpointError(f"this T5 encoder cannot be written as {name}")
        return {
            "architectures": [architecture],
            "vocab_size": config.vocab_size,
            "d_model": config.width,
            "d_kv": config.head_dim,
            "d_ff": size,
            "num_layers": config.layers,
            "num_heads": config.heads,
            "relative_attention_num_buckets": config.num_buckets,
            "relative_attention_max_distance": config.max_distance,
            "layer_norm_epsilon": config.eps,
            "feed_forward_proj": kind,
        }

    return CheckpointFamily(
        name,
        T5Encoder,
        read_config,
        write_config,
        build_round_trip_check(read_config, write_config),
        _build_rules,
        ignored_prefixes=("decoder.", "lm_head."),
        duplicate_tensors=(("encoder.embed_tokens.weight", "shared.weight"),),
        legacy_names=(("shared.", "encoder.embed_tokens."),),
        class_defaults=defaults,
    )


T5 = build_t5_family("t5", "T5EncoderModel", T5_DEFAULTS, True)
UMT5 = build_t5_family("umt5", "UMT5EncoderModel", UMT5_DEFAULTS, False)
FAMILIES.register("t5", T5)
FAMILIES.register("umt5", UMT5)
