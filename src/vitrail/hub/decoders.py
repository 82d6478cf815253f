"""Decoder families: Llama (1, 2, 3, SmolLM2, Mistral's shape), Qwen2, Qwen3, Qwen3-MoE."""

from typing import Any

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.family import ACTIVATIONS, Family, need, refuse, round_trip
from vitrail.hub.maps import Move, experts, fuse_layer, layer, rename, stack, under
from vitrail.nn import AttentionConfig, BlockConfig, ExpertsConfig, GatedConfig, MLPConfig, RotaryConfig
from vitrail.nn.rotary import Linear, Llama3, Scaling, YaRN

# ---- rotary positions -------------------------------------------------------------------------------------------


def read_rotary(about: dict[str, Any], head_dim: int) -> RotaryConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    rope = {**(about.get("rope_scaling") or {}), **(about.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or about.get("rope_theta") or 10_000.0)
    if (rope.get("partial_rotary_factor") or about.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor is set, and these families turn whole heads")
    return RotaryConfig(head_dim=head_dim, theta=theta, scaling=_read_scaling(rope, about))


def _read_scaling(rope: dict[str, Any], about: dict[str, Any]) -> Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(factor=need(rope, "factor"))
        case "llama3":
            return Llama3(
                factor=need(rope, "factor"),
                original_length=need(rope, "original_max_position_embeddings"),
                low=need(rope, "low_freq_factor"),
                high=need(rope, "high_freq_factor"),
            )
        case "yarn":
            known = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
            options = {key: rope[key] for key in known if rope.get(key) is not None}
            length = rope.get("original_max_position_embeddings") or need(about, "max_position_embeddings")
            return YaRN(factor=need(rope, "factor"), original_length=length, **options)
    raise CheckpointError(f"rope_type {kind!r} is not known", "known: default, linear, llama3, yarn")


def write_rotary(rotary: RotaryConfig) -> dict[str, Any]:
    match rotary.scaling:
        case None:
            scaling: dict[str, Any] = {"rope_type": "default"}
        case Linear(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3() as s:
            scaling = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low,
                "high_freq_factor": s.high,
                "original_max_position_embeddings": s.original_length,
            }
        case YaRN() as s:
            plain = {key: value for key, value in s.plain().items() if value is not None}
            plain.pop("kind")
            scaling = {"rope_type": "yarn", "original_max_position_embeddings": plain.pop("original_length"), **plain}
        case other:
            raise CheckpointError(f"{type(other).__name__} scaling has no name in transformers")
    return {"rope_parameters": {**scaling, "rope_theta": rotary.theta}}


# ---- configs ----------------------------------------------------------------------------------------------------


def _read(about: dict[str, Any], *, bias: str, qk_norm: bool, mlp: MLPConfig, **more: Any) -> DecoderConfig:
    width, heads = need(about, "hidden_size"), need(about, "num_attention_heads")
    refuse(about, use_sliding_window="sliding windows in some layers are not built")
    eps = about.get("rms_norm_eps", 1e-6)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=about.get("num_key_value_heads") or heads,
        head_dim=about.get("head_dim"),
        bias=bias,  # pyrefly: ignore[bad-argument-type]
        qk_norm="rms" if qk_norm else None,
        eps=eps,
    )
    return DecoderConfig(
        vocab=need(about, "vocab_size"),
        layers=need(about, "num_hidden_layers"),
        block=BlockConfig(width=width, attention=attention, mlp=mlp, norm="rms", eps=eps),
        rotary=read_rotary(about, attention.channels(width)),
        tied=bool(about.get("tie_word_embeddings", False)),
        context=about.get("max_position_embeddings", 2048),
        **more,
    )


def _gated(about: dict[str, Any]) -> GatedConfig:
    name = about.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    return GatedConfig(
        hidden=need(about, "intermediate_size"),
        activation=ACTIVATIONS[name],  # pyrefly: ignore[bad-argument-type]
        bias=bool(about.get("mlp_bias", False)),
    )


def _read_llama(about: dict[str, Any]) -> DecoderConfig:
    bias = "all" if about.get("attention_bias") else "none"
    return _read(about, bias=bias, qk_norm=False, mlp=_gated(about))


def _read_qwen2(about: dict[str, Any]) -> DecoderConfig:
    return _read(about, bias="qkv", qk_norm=False, mlp=_gated(about))


def _read_qwen3(about: dict[str, Any]) -> DecoderConfig:
    about = {"head_dim": 128, **about}  # Qwen3's default, which is not width / heads
    return _read(about, bias="all" if about.get("attention_bias") else "none", qk_norm=True, mlp=_gated(about))


def _read_qwen3_moe(about: dict[str, Any]) -> DecoderConfig:
    count, active = need(about, "num_experts", "num_local_experts"), need(about, "num_experts_per_tok")
    layers = need(about, "num_hidden_layers")
    step, only = about.get("decoder_sparse_step", 1), about.get("mlp_only_layers") or []
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    dense_mlp = _gated(about)
    mlp = ExpertsConfig(
        count=count,
        active=active,
        hidden=need(about, "moe_intermediate_size"),
        renormalize=bool(about.get("norm_topk_prob", False)),
        activation=dense_mlp.activation,
    )
    bias = "all" if about.get("attention_bias") else "none"
    return _read(about, bias=bias, qk_norm=True, mlp=mlp, dense=dense, dense_mlp=dense_mlp if dense else None)


def _write(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    block = config.block
    mlp = config.dense_mlp or block.mlp
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == mlp.activation)
    return {
        "architectures": [architecture],
        "vocab_size": config.vocab,
        "hidden_size": block.width,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_key_value_heads": block.attention.groups,
        "head_dim": block.attention.channels(block.width),
        "hidden_act": activation,
        "rms_norm_eps": block.eps,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "attention_bias": block.attention.bias == "all",
        **write_rotary(config.rotary),
    }


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    return {**_write(config, "LlamaForCausalLM"), "mlp_bias": isinstance(mlp, GatedConfig) and mlp.bias}


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    about = _write(config, "Qwen2ForCausalLM")
    about.pop("attention_bias")
    return {**about, "use_sliding_window": False}


def _write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config, "Qwen3ForCausalLM"), "use_sliding_window": False}


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.block.mlp
    if not isinstance(mlp, ExpertsConfig):
        raise CheckpointError("this model has no experts")
    return {
        **_write(config, "Qwen3MoeForCausalLM"),
        "num_experts": mlp.count,
        "num_local_experts": mlp.count,  # transformers' newer spelling
        "num_experts_per_tok": mlp.active,
        "moe_intermediate_size": mlp.hidden,
        "norm_topk_prob": mlp.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense),
        "use_sliding_window": False,
    }


# ---- names ------------------------------------------------------------------------------------------------------


def _block_moves(config: BlockConfig) -> list[Move]:
    attention, D = config.attention, config.attention.channels(config.width)
    H, G, biased = attention.heads, attention.groups, attention.bias != "none"
    mine, theirs = "branches.self.op", "self_attn"
    moves = [
        *fuse_layer(f"{mine}.qkv", [f"{theirs}.{x}_proj" for x in "qkv"], [H * D, G * D, G * D], biased),
        *layer(f"{mine}.out", f"{theirs}.o_proj", attention.bias == "all"),
        *layer("branches.self.norm", "input_layernorm", False),
        *layer("branches.mlp.norm", "post_attention_layernorm", False),
    ]
    if attention.qk_norm:
        moves += layer(f"{mine}.q_norm", f"{theirs}.q_norm", False) + layer(f"{mine}.k_norm", f"{theirs}.k_norm", False)
    return moves + _mlp_moves(config.mlp)


def _mlp_moves(config: MLPConfig) -> list[Move]:
    mine, theirs = "branches.mlp.op", "mlp"
    if isinstance(config, ExpertsConfig):
        hidden, each = config.hidden, [f"{theirs}.experts.{e}" for e in range(config.count)]
        gate_up = [[f"{e}.gate_proj.weight", f"{e}.up_proj.weight"] for e in each]
        return [
            rename(f"{mine}.router.weight", f"{theirs}.gate.weight"),
            experts(f"{mine}.gate_up", gate_up, [hidden, hidden]),
            stack(f"{mine}.down", [f"{e}.down_proj.weight" for e in each]),
        ]
    hidden, bias = config.hidden, config.bias
    return [
        *fuse_layer(f"{mine}.gate_up", [f"{theirs}.gate_proj", f"{theirs}.up_proj"], [hidden, hidden], bias),
        *layer(f"{mine}.down", f"{theirs}.down_proj", bias),
    ]


def decoder_moves(config: DecoderConfig) -> list[Move]:
    moves = [rename("embed.weight", "model.embed_tokens.weight"), *layer("norm", "model.norm", False)]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"model.layers.{i}.", _block_moves(config.block_at(i)))
    return moves if config.tied else [*moves, rename("head.weight", "lm_head.weight")]


# ---- rows -------------------------------------------------------------------------------------------------------


def spelt(config: DecoderConfig) -> DecoderConfig:
    """The same model with everything said, and nothing about norms that are not there."""
    block, attention = config.block, config.block.attention
    said = attention.with_(
        kv_heads=attention.groups,
        head_dim=attention.channels(block.width),
        eps=attention.eps if attention.qk_norm else block.eps,
    )
    rotary = config.rotary.with_(dim=config.rotary.rotated)
    return config.with_(block=block.with_(attention=said), rotary=rotary, dense=tuple(sorted(set(config.dense))))


COPIES = (("lm_head.weight", "model.embed_tokens.weight"),)  # tied, and stored all the same: Qwen3-0.6B

DECODERS = tuple(
    Family(name, Decoder, read, write, round_trip(read, write, spelt), decoder_moves, copies=COPIES)
    for name, read, write in [
        ("llama", _read_llama, _write_llama),
        ("qwen2", _read_qwen2, _write_qwen2),
        ("qwen3", _read_qwen3, _write_qwen3),
        ("qwen3_moe", _read_qwen3_moe, _write_qwen3_moe),
    ]
)
