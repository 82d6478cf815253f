"""Parts that the decoder families share: rotary settings, config.json, tensor rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from vitrail.backbones.decoder import Decoder, DecoderConfig, LayerType
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import (
    ACTIVATIONS,
    CheckpointFamily,
    build_round_trip_check,
    require_key,
)
from vitrail.hub.tensor_rules import (
    TensorRule,
    add_prefix,
    fuse_layer,
    rename,
    rename_layer,
    stack,
    stack_experts,
    view,
)
from vitrail.nn import (
    AttentionConfig,
    BlockConfig,
    GatedDeltaNetConfig,
    GatedMLPConfig,
    LatentConfig,
    MLPConfig,
    MoEConfig,
    RotaryConfig,
)
from vitrail.nn.norms import NormKind
from vitrail.nn.rotary_embedding import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    RotaryScaling,
    YaRNScaling,
)

# ---- rotary positions -------------------------------------------------------------------------------------------

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
LEGACY_ROPE_TYPES = {"su": "longrope"}
BY_CONTEXT_LENGTH = ("dynamic", "yarn", "longrope")  # types that may take the original length from the config


def read_rotary(hf_config: dict[str, Any], head_dim: int, *, partial: bool = False) -> RotaryConfig:
    """Read rotary settings: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    `partial`: the family rotates only `partial_rotary_factor` of the channels. Others refuse the key.
    """
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10_000.0)
    scaling = _read_scaling(rope, hf_config)
    is_proportional = isinstance(scaling, ProportionalScaling)  # which reads partial_rotary_factor itself
    share = rope.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0
    share = 1.0 if is_proportional else share
    if share != 1.0 and not partial:
        raise CheckpointError("partial_rotary_factor is not supported by these families")
    return RotaryConfig(
        head_dim=head_dim,
        theta=theta,
        rotary_dim=None if share == 1.0 else int(head_dim * share),
        scaling=scaling,
    )


def _read_scaling(rope: dict[str, Any], hf_config: dict[str, Any]) -> RotaryScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = LEGACY_ROPE_TYPES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope_type {kind!r} is not supported", f"known: {', '.join(ROPE_TYPES)}")

    def require(key: str) -> Any:
        if rope.get(key) is None:
            raise CheckpointError(
                f"the rope parameter {key!r} is missing, which rope_type {kind!r} needs",
                f"add {key!r} to rope_scaling or rope_parameters, as in the config of the original model",
            )
        return rope[key]

    context: Any = require_key(hf_config, "max_position_embeddings") if kind in BY_CONTEXT_LENGTH else None
    original = hf_config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    match kind:
        case "linear":
            return LinearScaling(factor=require("factor"))
        case "dynamic":
            return DynamicNTKScaling(factor=require("factor"), original_length=context)
        case "llama3":
            return Llama3Scaling(
                factor=require("factor"),
                original_length=require("original_max_position_embeddings"),
                low_freq_factor=require("low_freq_factor"),
                high_freq_factor=require("high_freq_factor"),
            )
        case "yarn":
            known = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
            options = {key: rope[key] for key in known if rope.get(key) is not None}
            factor = require("factor") if original is None else rope.get("factor") or context / original
            return YaRNScaling(factor=factor, original_length=original or context, **options)
        case "proportional":
            share = rope.get("partial_rotary_factor")
            return ProportionalScaling(share=1.0 if share is None else share, factor=rope.get("factor") or 1.0)
        case "longrope":
            length = original or context
            return LongRoPEScaling(
                short_factor=tuple(require("short_factor")),
                long_factor=tuple(require("long_factor")),
                original_length=length,
                factor=rope.get("factor") or context / length,
                attention_factor=rope.get("attention_factor"),
            )
    return None


def write_rotary(rotary: RotaryConfig) -> dict[str, Any]:
    """Write rotary settings as `rope_parameters`."""
    match rotary.scaling:
        case None:
            scaling: dict[str, Any] = {"rope_type": "default"}
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case ProportionalScaling(share=share, factor=factor):
            scaling = {"rope_type": "proportional", "partial_rotary_factor": share}
            scaling |= {} if factor == 1 else {"factor": factor}
        case DynamicNTKScaling(factor=factor):  # original_length is max_position_embeddings
            scaling = {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling() as s:
            scaling = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_length,
            }
        case YaRNScaling() | LongRoPEScaling() as s:
            fields = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in s.to_dict().items()
                if value is not None
            }
            kind, length = fields.pop("kind"), fields.pop("original_length")
            scaling = {"rope_type": kind, "original_max_position_embeddings": length, **fields}
        case other:
            raise CheckpointError(f"transformers has no {type(other).__name__} rope scaling")
    share, channels = rotary.num_rotated_channels / rotary.head_dim, rotary.num_rotated_channels
    if int(rotary.head_dim * share) != channels:  # readers round down
        share = (channels + 0.5) / rotary.head_dim
    partial = {} if share == 1 else {"partial_rotary_factor": share}
    return {"rope_parameters": {**scaling, "rope_theta": rotary.theta, **partial}}


# ---- configs ----------------------------------------------------------------------------------------------------


def read_decoder_config(
    hf_config: dict[str, Any],
    *,
    mlp: MLPConfig,
    bias: str | None = None,
    norm: NormKind = "rms",
    qk_norm: bool = False,
    sandwich_norms: bool = False,
    default_layer_types: Sequence[str] | None = None,
    partial_rotary: bool = False,
    output_gate: bool = False,
    latent: LatentConfig | None = None,
    **fields: Any,
) -> DecoderConfig:
    """Read the keys that all families share.

    bias                 biases of the attention; None to follow attention_bias
    sandwich_norms       norms before and after each branch
    default_layer_types  layer types of a config without layer_types; None for full attention in all layers
    partial_rotary       the family reads partial_rotary_factor
    output_gate          the query projection also gives a gate of the heads
    latent               sizes of latent attention
    fields               further fields of `DecoderConfig`
    """
    width, heads = require_key(hf_config, "hidden_size"), require_key(hf_config, "num_attention_heads")
    eps, layers = hf_config.get("rms_norm_eps", 1e-6), require_key(hf_config, "num_hidden_layers")
    attention = AttentionConfig(
        heads=heads,
        kv_heads=heads if latent else hf_config.get("num_key_value_heads") or heads,
        head_dim=None if latent else hf_config.get("head_dim"),
        bias=bias or ("all" if hf_config.get("attention_bias") else "none"),  # pyrefly: ignore[bad-argument-type]
        qk_norm=norm if qk_norm else None,
        eps=eps,
        query_pre_attn_scalar=hf_config.get("query_pre_attn_scalar"),
        output_gate=output_gate,
        logit_softcap=hf_config.get("attn_logit_softcapping"),
        latent=latent,
    )
    if layers < 1:  # also where another family counts its cross-attention layers off
        raise CheckpointError(f"the decoder has {layers} layers of self-attention", "correct num_hidden_layers")
    layer_types = ("full_attention",) * layers
    if default_layer_types is not None:
        layer_types = _read_layer_types(hf_config.get("layer_types") or default_layer_types, layers)
    slides = "sliding_attention" in layer_types
    position = "both" if sandwich_norms else "before"
    return DecoderConfig(
        vocab_size=require_key(hf_config, "vocab_size"),
        layers=layers,
        block=BlockConfig(width=width, attention=attention, mlp=mlp, norm=norm, eps=eps, norm_position=position),
        rotary=read_rotary(hf_config, attention.resolve_rotary_dim(width), partial=partial_rotary),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        context_length=require_key(hf_config, "max_position_embeddings"),
        layer_types=_shorten_cycle(layer_types),
        sliding_window=require_key(hf_config, "sliding_window") if slides else None,
        logit_softcap=hf_config.get("final_logit_softcapping"),
        **fields,
    )


def _read_layer_types(names: Sequence[str], layers: int) -> tuple[LayerType, ...]:
    if len(names) != layers:
        raise CheckpointError(f"layer_types has {len(names)} entries for {layers} layers", "give one for each layer")
    known: dict[str, LayerType] = {kind: kind for kind in get_args(LayerType)}
    for name in names:
        if name not in known:
            raise CheckpointError(f"layer_types has {name!r}, which is not supported", f"known: {', '.join(known)}")
    return tuple(known[name] for name in names)


def _shorten_cycle(types: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    """Return the shortest group of layer types that repeats."""
    lengths = range(1, len(types) + 1)
    return next(types[:n] for n in lengths if all(kind == types[i % n] for i, kind in enumerate(types)))


def read_gated_mlp(hf_config: dict[str, Any], activation_key: str = "hidden_act") -> GatedMLPConfig:
    """Read the MLP of a dense layer."""
    name = hf_config.get(activation_key, "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{activation_key} {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    return GatedMLPConfig(
        intermediate_size=require_key(hf_config, "intermediate_size"),
        activation=ACTIVATIONS[name],  # pyrefly: ignore[bad-argument-type]
        bias=bool(hf_config.get("mlp_bias", False)),
    )


def write_decoder_config(config: DecoderConfig, architecture: str, *without: str) -> dict[str, Any]:
    """Write the keys that all families share, but not those in `without`."""
    block = config.block
    mlp = config.dense_mlp or block.mlp
    activation = next(name for name, native in ACTIVATIONS.items() if native == mlp.activation)
    hf_config = {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": block.width,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_key_value_heads": block.attention.num_kv_heads,
        "head_dim": block.attention.resolve_head_dim(block.width),
        "hidden_act": activation,
        "rms_norm_eps": block.eps,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": block.attention.bias == "all",
        **write_rotary(config.rotary),
    }
    return {key: value for key, value in hf_config.items() if key not in without}


def write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    """Write the attention of each layer and the sliding window."""
    types = [config.layer_types[i % len(config.layer_types)] for i in range(config.layers)]
    return {"layer_types": types, "sliding_window": config.sliding_window}


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_block_rules(config: BlockConfig, is_fused: bool) -> list[TensorRule]:
    if config.linear_attention is not None:
        return _build_linear_rules(config.linear_attention)
    attention, native, hf = config.attention, "branches.self.op", "self_attn"
    rules = [
        *_build_projection_rules(attention, config.width, is_fused),
        *rename_layer(f"{native}.out", f"{hf}.o_proj", attention.bias == "all"),
        *rename_layer("branches.self.norm", "input_layernorm", False),
    ]
    if config.norm_position == "both":
        names = {"self.post_norm": "post_attention", "mlp.post_norm": "post_feedforward"}
        if not isinstance(config.mlp, MoEConfig) or config.mlp.norm is None:  # else experts have norms
            names["mlp.norm"] = "pre_feedforward"
        for native_name, hf_name in names.items():
            rules += rename_layer(f"branches.{native_name}", f"{hf_name}_layernorm", False)
    else:
        rules += rename_layer("branches.mlp.norm", "post_attention_layernorm", False)
    if config.output_scale:
        rules.append(rename("output_scale", "layer_scalar"))
    if attention.qk_norm:
        for norm in ("q_norm", "k_norm"):
            rules += rename_layer(f"{native}.{norm}", f"{hf}.{norm}", False)
    return rules


def _build_projection_rules(attention: AttentionConfig, width: int, is_fused: bool) -> list[TensorRule]:
    """Build the rules of the projections to queries, keys and values."""
    D, native, hf = attention.resolve_head_dim(width), "branches.self.op", "self_attn"
    H, G, biased = attention.heads * (1 + attention.output_gate), attention.num_kv_heads, attention.bias != "none"
    if attention.latent is not None:
        names = (
            {"q": "q_proj"} if attention.latent.q_lora_rank is None else {"q": "q_b_proj", "q_norm": "q_a_layernorm"}
        )
        names |= {"kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
        down = {"kv_down": "kv_a_proj_with_mqa"} | ({"q_down": "q_a_proj"} if "q_norm" in names else {})
        return [
            *(rename(f"{native}.{x}.weight", f"{hf}.{y}.weight") for x, y in names.items()),
            *(rule for x, y in down.items() for rule in rename_layer(f"{native}.{x}", f"{hf}.{y}", biased)),
        ]
    if is_fused:
        return rename_layer(f"{native}.qkv", f"{hf}.qkv_proj", biased)
    projected, sizes = "qk" if attention.share_kv else "qkv", {"q": H * D, "k": G * D, "v": G * D}
    return fuse_layer(f"{native}.qkv", [f"{hf}.{x}_proj" for x in projected], [sizes[x] for x in projected], biased)


def _build_linear_rules(config: GatedDeltaNetConfig) -> list[TensorRule]:
    """Build the rules of a block with linear attention and norms before its branches."""
    native, hf = "branches.linear.op", "linear_attn"
    layers = {"qkv": "in_proj_qkv", "gate": "in_proj_z", "rate": "in_proj_b", "decay": "in_proj_a", "out": "out_proj"}
    names = {"decay_bias": "dt_bias", "log_decay": "A_log", "norm.weight": "norm.weight"}
    shape = (config.num_channels, config.kernel_size)
    return [
        *rename_layer("branches.linear.norm", "input_layernorm", False),
        *rename_layer("branches.mlp.norm", "post_attention_layernorm", False),
        *(rename(f"{native}.{x}.weight", f"{hf}.{y}.weight") for x, y in layers.items()),
        *(rename(f"{native}.{x}", f"{hf}.{y}") for x, y in names.items()),
        view(f"{native}.kernel", f"{hf}.conv1d.weight", shape, (shape[0], 1, shape[1])),
    ]


def build_mlp_rules(config: MLPConfig) -> list[TensorRule]:
    """Build the rules of an MLP, or of experts with Qwen's names."""
    native, hf = "branches.mlp.op", "mlp"
    if isinstance(config, MoEConfig):
        return build_expert_rules(config, hf, "gate_proj", "up_proj", "down_proj")
    hidden, bias = config.intermediate_size, config.bias
    return [
        *fuse_layer(f"{native}.gate_up", [f"{hf}.gate_proj", f"{hf}.up_proj"], [hidden, hidden], bias),
        *rename_layer(f"{native}.down", f"{hf}.down_proj", bias),
    ]


def read_router_loss(hf_config: dict[str, Any]) -> float:
    """Read the weight of the load-balancing loss; the default is that of transformers."""
    coefficient = hf_config.get("router_aux_loss_coef")
    return 0.001 if coefficient is None else coefficient


def build_fused_mlp_rules(config: GatedMLPConfig) -> list[TensorRule]:
    """Build the rules of an MLP whose gate and up projection are one tensor in the files."""
    native = "branches.mlp.op"
    return [
        rename(f"{native}.gate_up.weight", "mlp.gate_up_proj.weight"),
        rename(f"{native}.down.weight", "mlp.down_proj.weight"),
    ]


def build_expert_rules(config: MoEConfig, hf: str, gate: str, up: str, down: str) -> list[TensorRule]:
    """Build the rules of experts; `gate`, `up` and `down` are the names of their matrices."""
    native, hidden = "branches.mlp.op", config.intermediate_size
    expert_names = [f"{hf}.experts.{e}" for e in range(config.num_experts)]
    gate_up = [[f"{e}.{gate}.weight", f"{e}.{up}.weight"] for e in expert_names]
    return [
        rename(f"{native}.router.weight", f"{hf}.gate.weight"),
        stack_experts(f"{native}.gate_up", gate_up, [hidden, hidden]),
        stack(f"{native}.down", [f"{e}.{down}.weight" for e in expert_names]),
    ]


def build_decoder_rules(
    config: DecoderConfig,
    mlp_rules: Callable[[Any], list[TensorRule]] = build_mlp_rules,
    *,
    is_fused: bool = False,
) -> list[TensorRule]:
    """Build the tensor rules of a Llama-like decoder. `is_fused`: q, k and v are one tensor in the files (Phi-3)."""
    rules = [rename("embed.weight", "model.embed_tokens.weight"), *rename_layer("norm", "model.norm", False)]
    for i in range(config.layers):
        block = config.block_config(i)
        block_rules = [*_build_block_rules(block, is_fused), *mlp_rules(block.mlp)]
        rules += add_prefix(f"blocks.{i}.", f"model.layers.{i}.", block_rules)
    return rules if config.tie_word_embeddings else [*rules, rename("head.weight", "lm_head.weight")]


# ---- families ---------------------------------------------------------------------------------------------------


def normalize_decoder_config(config: DecoderConfig) -> DecoderConfig:
    """Return the equivalent config with all defaults filled in and settings of absent norms removed."""
    block = config.block

    def fill(attention: AttentionConfig) -> AttentionConfig:
        head_dim = attention.resolve_head_dim(block.width)
        return attention.replace(
            kv_heads=attention.num_kv_heads,
            head_dim=head_dim,
            eps=attention.eps if attention.qk_norm or attention.latent else block.eps,
            query_pre_attn_scalar=attention.query_pre_attn_scalar or head_dim,
        )

    rotary, sliding_rotary = (
        rotary and rotary.replace(rotary_dim=rotary.num_rotated_channels)
        for rotary in (config.rotary, config.sliding_rotary or (config.sliding_window and config.rotary))
    )
    return config.replace(
        block=block.replace(attention=fill(block.attention)),
        sliding_attention=config.sliding_window and fill(config.sliding_attention or block.attention),
        rotary=rotary,
        sliding_rotary=sliding_rotary,
        dense_layers=tuple(sorted(set(config.dense_layers))),
        layer_types=_shorten_cycle(
            tuple(config.layer_types[i % len(config.layer_types)] for i in range(config.layers))
        ),
    )


DUPLICATE_TENSORS = (("lm_head.weight", "model.embed_tokens.weight"),)  # tied, but stored anyway, as in Qwen3-0.6B


def make_decoder_family(
    name: str,
    read: Callable[[dict[str, Any]], DecoderConfig],
    write: Callable[[DecoderConfig], dict[str, Any]],
    defaults: Mapping[str, Any],
    rules: Callable[[DecoderConfig], list[TensorRule]] = build_decoder_rules,
    **family_fields: Any,
) -> CheckpointFamily:
    """Make the family of a decoder.

    defaults       those of the config class of transformers
    family_fields  further fields of `CheckpointFamily`
    """
    return CheckpointFamily(
        name,
        Decoder,
        lambda hf_config: read({**defaults, **hf_config}),
        write,
        build_round_trip_check(lambda hf_config: read({**defaults, **hf_config}), write, normalize_decoder_config),
        rules,
        duplicate_tensors=DUPLICATE_TENSORS,
        class_defaults=defaults,
        **family_fields,
    )
