"""Decoder families of DeepSeek-V2 and V3, with latent attention, and experts in all layers but the first ones.

Moonlight, the language models of DeepSeek-VL2 and Kimi-VL, and Kimi K2 are such models too. The checkpoints of V3 hold
a further layer that predicts several tokens at once, which is not read.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.checkpoint_family import make_read_only, reject_settings, require_key
from vitrail.hub.decoder_config import (
    build_decoder_rules,
    build_expert_rules,
    build_mlp_rules,
    make_decoder_family,
    read_decoder_config,
    read_gated_mlp,
    write_decoder_config,
)
from vitrail.hub.tensor_rules import TensorRule, fuse_layer, rename, rename_layer
from vitrail.nn import LatentConfig, MLPConfig, MoEConfig
from vitrail.nn.rotary_embedding import YaRNScaling, compute_yarn_mscale
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of the config classes of transformers.
V2_DEFAULTS: HFConfig = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "v_head_dim": 128,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}
V3_DEFAULTS: HFConfig = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_interleave": True,
    "attention_bias": False,
}
V2_ROUTING: HFConfig = {"topk_method": "greedy", "scoring_func": "softmax"}
V3_ROUTING: HFConfig = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORING_FUNCTIONS = ("softmax", "sigmoid")
DEFAULT_AUX_LOSS = 0.001  # of the config classes in DeepSeek's repositories; transformers has none
LATENT_EPS = 1e-6  # of the norms of the latents; fixed, not part of the config
LATENT_KEYS = LatentConfig.__struct_fields__
FURTHER_LAYER = "model.layers.61."  # of DeepSeek-V3, which predicts further tokens


# ---- experts ----------------------------------------------------------------------------------------------------


def read_experts(hf_config: HFConfig, routing: HFConfig) -> MoEConfig:
    """Read the experts. `routing` are the defaults of topk_method and scoring_func."""
    method, scoring = (hf_config.get(key) or routing[key] for key in ("topk_method", "scoring_func"))
    for key, value, known in (("topk_method", method, TOPK_METHODS), ("scoring_func", scoring, SCORING_FUNCTIONS)):
        if value not in known:
            raise CheckpointError(f"{key} {value!r} is not supported", f"known: {', '.join(known)}")
    if (hf_config.get("moe_layer_freq") or 1) != 1:
        raise CheckpointError(f"moe_layer_freq is {hf_config['moe_layer_freq']}", "only 1 is supported")
    renormalize = bool(hf_config.get("norm_topk_prob"))
    if renormalize and scoring == "softmax":
        raise CheckpointError(
            "norm_topk_prob is true with softmax scores, which readers of DeepSeek-V2 treat differently",
            "set it to false, as in released models",
        )
    size = require_key(hf_config, "moe_intermediate_size")
    return MoEConfig(
        num_experts=hf_config.get("num_local_experts") or require_key(hf_config, "n_routed_experts"),
        experts_per_token=require_key(hf_config, "num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * (hf_config.get("n_shared_experts") or 0),
        renormalize=renormalize,
        scoring=scoring,
        correction_bias=method == "noaux_tc",
        num_groups=1 if method == "greedy" else hf_config.get("n_group") or 1,
        top_groups=1 if method == "greedy" else hf_config.get("topk_group") or 1,
        group_score="best" if method == "group_limited_greedy" else "two_best",
        weight_scale=float(hf_config["routed_scaling_factor"]),
        activation=read_gated_mlp(hf_config).activation,
        router_aux_loss_coef=_read_aux_loss(hf_config),
    )


def _read_aux_loss(hf_config: HFConfig) -> float:
    """Read the weight of the load-balancing loss.

    Under an even load, DeepSeek's loss is 1, and ours `experts_per_token`. `seq_aux` is not used: the loss is that of
    all tokens together.
    """
    alpha = hf_config.get("aux_loss_alpha")
    return (DEFAULT_AUX_LOSS if alpha is None else alpha) / require_key(hf_config, "num_experts_per_tok")


def read_dense_layers(hf_config: HFConfig) -> HFConfig:
    """Read the first layers, which have no experts, as settings of `DecoderConfig`."""
    count = min(hf_config["first_k_dense_replace"] or 0, require_key(hf_config, "num_hidden_layers"))
    return {"dense_layers": tuple(range(count)), "dense_mlp": read_gated_mlp(hf_config) if count else None}


def write_experts(config: DecoderConfig) -> HFConfig:
    """Write the experts and the number of the first layers without them."""
    experts, num_dense = config.block.mlp, len(config.dense_layers)
    if not isinstance(experts, MoEConfig) or sorted(config.dense_layers) != list(range(num_dense)):
        raise ConfigError("DeepSeek needs experts in all layers but the first")
    if not experts.shared_intermediate_size or experts.shared_intermediate_size % experts.intermediate_size:
        raise ConfigError(
            f"shared_intermediate_size is {experts.shared_intermediate_size}, and intermediate_size "
            f"{experts.intermediate_size}",
            "make the shared expert a multiple of the others",
        )
    return {
        "moe_intermediate_size": experts.intermediate_size,
        "num_experts_per_tok": experts.experts_per_token,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "n_routed_experts": experts.num_experts,
        "routed_scaling_factor": experts.weight_scale,
        "n_group": experts.num_groups,
        "topk_group": experts.top_groups,
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": experts.renormalize,
        "aux_loss_alpha": round(experts.router_aux_loss_coef * experts.experts_per_token, 9),
    }


def build_deepseek_mlp_rules(config: MLPConfig) -> list[TensorRule]:
    """Build the rules of a dense layer, or of experts with a shared one."""
    if not isinstance(config, MoEConfig):
        return build_mlp_rules(config)
    native, hf = "branches.mlp.op", "mlp"
    rules = build_expert_rules(config, hf, "gate_proj", "up_proj", "down_proj")
    if config.correction_bias:
        rules.append(rename(f"{native}.correction_bias", f"{hf}.gate.e_score_correction_bias"))
    if config.shared_intermediate_size:
        shared = [f"{hf}.shared_experts.{part}_proj" for part in ("gate", "up")]
        rules += fuse_layer(f"{native}.shared.gate_up", shared, [config.shared_intermediate_size] * 2, False)
        rules += rename_layer(f"{native}.shared.down", f"{hf}.shared_experts.down_proj", False)
    return rules


# ---- decoders ---------------------------------------------------------------------------------------------------


def read_deepseek(hf_config: HFConfig, routing: HFConfig) -> DecoderConfig:
    """Read a decoder with latent attention. `routing` are the defaults of topk_method and scoring_func."""
    required = {key: require_key(hf_config, key) for key in LATENT_KEYS if key != "q_lora_rank"}
    latent = LatentConfig(**required, q_lora_rank=hf_config.get("q_lora_rank"))
    config = read_decoder_config(
        hf_config, mlp=read_experts(hf_config, routing), latent=latent, **read_dense_layers(hf_config)
    )
    attention = config.block.attention.replace(eps=LATENT_EPS, query_pre_attn_scalar=_compute_scalar(config))
    return config.replace(
        block=config.block.replace(attention=attention),
        rotary=config.rotary.replace(pairing="adjacent" if hf_config.get("rope_interleave", True) else "half"),
    )


def _compute_scalar(config: DecoderConfig) -> float:
    """Compute query_pre_attn_scalar: YaRN sharpens the scores as well."""
    scaling, channels = config.rotary.scaling, config.block.attention.resolve_head_dim(config.block.width)
    if not isinstance(scaling, YaRNScaling) or not scaling.mscale_all_dim:
        return float(channels)
    return channels / compute_yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 4


def write_deepseek(config: DecoderConfig, architecture: str) -> HFConfig:
    """Write a decoder with latent attention, without topk_method and scoring_func."""
    attention = config.block.attention
    if attention.latent is None:
        raise ConfigError("DeepSeek needs latent attention", "set attention.latent")
    return {
        **write_decoder_config(config, architecture, "head_dim"),
        **attention.latent.to_dict(),
        **write_experts(config),
    }


def _write_v2(config: DecoderConfig) -> HFConfig:
    hf_config = write_deepseek(config, "DeepseekV2ForCausalLM")
    return hf_config | {"topk_method": "greedy" if hf_config["n_group"] == 1 else "group_limited_greedy"}


def _write_v3(config: DecoderConfig) -> HFConfig:
    return {
        **write_deepseek(config, "DeepseekV3ForCausalLM"),
        **V3_ROUTING,
        "rope_interleave": config.rotary.pairing == "adjacent",
        "num_nextn_predict_layers": 0,
    }


def _read_v2(hf_config: HFConfig) -> DecoderConfig:
    reject_settings(hf_config, mlp_bias="experts have no biases")
    return read_deepseek({**hf_config, "rope_interleave": True}, V2_ROUTING)


_RULES = partial(build_decoder_rules, mlp_rules=build_deepseek_mlp_rules)
_read_v3 = partial(read_deepseek, routing=V3_ROUTING)
DEEPSEEK_V2 = make_decoder_family("deepseek_v2", _read_v2, _write_v2, V2_DEFAULTS, _RULES)
DEEPSEEK_V3 = make_decoder_family(
    "deepseek_v3", _read_v3, _write_v3, V3_DEFAULTS, _RULES, ignored_prefixes=(FURTHER_LAYER,)
)
FAMILIES.register("deepseek_v2", DEEPSEEK_V2)
FAMILIES.register("deepseek_v3", DEEPSEEK_V3)
FAMILIES.register("kimi_k2", replace(DEEPSEEK_V3, name="kimi_k2", class_defaults={}, **make_read_only("deepseek_v3")))
