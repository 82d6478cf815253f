"""Idefics, the open reproduction of Flamingo: CLIP's tower, a Perceiver resampler, and a Llama with gated
cross-attention blocks before its layers.

Its vocabulary is that of Llama with a few added tokens in separate tables: <fake_token_around_image>, then <image>.
"""

from typing import Any

from vitrail.backbones.fusion import CrossAttentionFusionConfig
from vitrail.connectors import ResamplerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.decoder_families import LLAMA, build_decoder_rules
from vitrail.hub.encoder_families import CLIP_VISION
from vitrail.hub.mllama import OMITTED_KEYS, build_cross_attention_rules, normalize_mllama_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, rename, rename_layer, view
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, CrossAttentionVLMConfig
from vitrail.processing import image_processors
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]


# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "vocab_size": 32_000,
    "additional_vocab_size": 0,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "alpha_type": "float",
    "tie_word_embeddings": False,
    "cross_layer_interval": 1,
    "qk_layer_norms": False,
    "use_resampler": False,
    "max_position_embeddings": 2048,
}
VISION_DEFAULTS: HFConfig = {
    "embed_dim": 768,
    "image_size": 224,
    "intermediate_size": 5120,
    "patch_size": 14,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
PERCEIVER_DEFAULTS: HFConfig = {
    "resampler_n_latents": 64,
    "resampler_depth": 6,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "qk_layer_norms_perceiver": False,
}
GATE_TYPES: dict[str, Any] = {"float": True, "vector": "channels"}


def _read_config(hf_config: HFConfig) -> CrossAttentionVLMConfig:
    vision, perceiver = (
        fill_defaults(hf_config.get("vision_config") or {}, VISION_DEFAULTS),
        fill_defaults(hf_config.get("perceiver_config") or {}, PERCEIVER_DEFAULTS),
    )
    hf_config = fill_defaults(hf_config, DEFAULTS)
    reject_settings(hf_config, dropout="it is not supported")
    num_added, interval, layers = (
        hf_config[key] for key in ("additional_vocab_size", "cross_layer_interval", "num_hidden_layers")
    )
    image_token_id = hf_config.get("image_token_id", hf_config["vocab_size"] + 1)
    if num_added < 2 or image_token_id != hf_config["vocab_size"] + 1:
        raise CheckpointError(
            f"additional_vocab_size is {num_added} and image_token_id is {image_token_id}: "
            "<image> must be the second added token",
            "use a config like that of the released checkpoints",
        )
    if interval < 1 or layers % interval:
        raise CheckpointError(f"cross_layer_interval {interval} does not divide the number of layers, {layers}")
    if hf_config["alpha_type"] not in GATE_TYPES:
        raise CheckpointError(f"alpha_type is {hf_config['alpha_type']!r}", f"known: {', '.join(GATE_TYPES)}")
    decoder = LLAMA.from_hf_config(
        hf_config | {"vocab_size": hf_config["vocab_size"] + num_added, "num_key_value_heads": None}
    )
    tower = CLIP_VISION.from_hf_config({"hidden_size": vision["embed_dim"], **vision})  # some files use that key
    width, attention = tower.block.width, decoder.block.attention
    fusion = CrossAttentionFusionConfig(
        layer_indices=tuple(range(0, layers, interval)),
        context_width=width,
        attention=attention.replace(qk_norm="rms" if hf_config["qk_layer_norms"] else None, eps=decoder.block.eps),
        gated=GATE_TYPES[hf_config["alpha_type"]],
    )
    resampler = ResamplerConfig(
        in_features=width,
        out_features=width,
        num_latents=perceiver["resampler_n_latents"],
        layers=perceiver["resampler_depth"],
        heads=perceiver["resampler_n_heads"],
        head_dim=perceiver["resampler_head_dim"],
        intermediate_size=4 * width,
        activation="relu",
        qk_norm="layer" if perceiver["qk_layer_norms_perceiver"] else None,
    )
    return CrossAttentionVLMConfig(
        tower=tower,
        connector=resampler if hf_config["use_resampler"] else None,
        decoder=decoder.replace(fusion=fusion),
        image_token_id=image_token_id,
        keep_prefix_tokens=True,
        policy=NaivePolicy(
            image_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=tower.image_size % tower.patch_size
        ),
    )


def _write_config(config: CrossAttentionVLMConfig) -> HFConfig:
    tower, resampler, cross, decoder = config.tower, config.connector, config.cross_attention, config.decoder
    if not isinstance(tower, ViTConfig) or not (resampler is None or isinstance(resampler, ResamplerConfig)):
        raise ConfigError("Idefics needs a ViT, and optionally a resampler")
    if config.image_token_id < 2:
        raise ConfigError(f"image_token_id {config.image_token_id} leaves no vocabulary before the added tokens")
    vision = CLIP_VISION.to_hf_config(tower)
    hf_config = LLAMA.to_hf_config(decoder) | {
        "vocab_size": config.image_token_id - 1,
        "additional_vocab_size": _count_added_tokens(config),
        "image_token_id": config.image_token_id,  # not used by transformers
        "cross_layer_interval": decoder.layers // len(cross.layer_indices),
        "qk_layer_norms": cross.block_config(decoder.block).attention.qk_norm is not None,
        "alpha_type": "vector" if cross.gated == "channels" else "float",
        "use_resampler": resampler is not None,
        "vision_config": {
            "model_type": "idefics_vision",
            "embed_dim": vision.pop("hidden_size"),
            **{key: value for key, value in vision.items() if key in VISION_DEFAULTS},
        },
    }
    if resampler is not None:
        hf_config["perceiver_config"] = {
            "use_resampler": True,
            "resampler_n_latents": resampler.num_latents,
            "resampler_depth": resampler.layers,
            "resampler_n_heads": resampler.heads,
            "resampler_head_dim": resampler.block_config().attention.resolve_head_dim(resampler.in_features),
            "qk_layer_norms_perceiver": resampler.qk_norm is not None,
        }
    omitted = (*OMITTED_KEYS, "num_key_value_heads")
    return {
        "architectures": ["IdeficsForVisionText2Text"],
        **{key: value for key, value in hf_config.items() if key not in omitted},
    }


def _count_added_tokens(config: CrossAttentionVLMConfig) -> int:
    """Count the added tokens, which start one id before the image token."""
    return config.decoder.vocab_size - (config.image_token_id - 1)


def _build_rules(config: CrossAttentionVLMConfig) -> list[TensorRule]:
    decoder, cross, W = config.decoder, config.cross_attention, config.decoder.block.width
    sizes = [config.image_token_id - 1, _count_added_tokens(config)]
    embed = ["model.embed_tokens.weight", "model.embed_tokens.additional_embedding.weight"]
    text_rules = [
        rule for rule in build_decoder_rules(decoder) if rule.native not in (("embed.weight",), ("head.weight",))
    ]
    text_rules += [fuse("embed.weight", embed, sizes)]
    if not decoder.tie_word_embeddings:
        text_rules += [fuse("head.weight", ["lm_head.weight", "lm_head.additional_fc.weight"], sizes)]
    block_rules = build_cross_attention_rules(cross.block_config(decoder.block), ("q_layer_norm", "k_layer_norm"))
    for native, hf in (("cross", "alpha_cross_attn"), ("mlp", "alpha_dense")):
        shapes = ((W,), (1, 1, W)) if cross.gated == "channels" else ((1,), (1,))
        block_rules += [view(f"branches.{native}.gate", hf, *shapes)]
    for n in range(len(cross.layer_indices)):
        text_rules += add_prefix(f"fusion.blocks.{n}.", f"model.gated_cross_attn_layers.{n}.", block_rules)
    rules = [
        *add_prefix("tower.", "model.vision_model.", CLIP_VISION.tensor_rules(config.tower)),
        *add_prefix("decoder.", "", text_rules),
    ]
    if isinstance(config.connector, ResamplerConfig):
        rules += add_prefix("connector.", "model.perceiver_resampler.", _build_resampler_rules(config.connector))
    return rules


def _build_resampler_rules(config: ResamplerConfig) -> list[TensorRule]:
    op, rows = "branches.joint.op", config.heads * config.block_config().attention.resolve_head_dim(config.in_features)
    block_rules = [
        *rename_layer("branches.joint.context_norm", "0.context_layer_norm"),
        *rename_layer("branches.joint.norm", "0.latents_layer_norm"),
        *rename_layer(f"{op}.q", "0.q_proj", False),
        *fuse_layer(f"{op}.kv", ["0.k_proj", "0.v_proj"], [rows, rows], False),
        *rename_layer(f"{op}.out", "0.output_proj", False),
        *rename_layer("branches.mlp.norm", "1.ln"),
        *rename_layer("branches.mlp.op.up", "1.fc", False),
        *rename_layer("branches.mlp.op.down", "1.c_proj", False),
    ]
    if config.qk_norm is not None:
        block_rules += [
            *rename_layer(f"{op}.q_norm", "0.q_layer_norm"),
            *rename_layer(f"{op}.k_norm", "0.k_layer_norm"),
        ]
    rules = [rename("latents", "latents"), *rename_layer("norm", "layer_norm")]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"blocks.{i}.", block_rules)
    return rules


def _normalize_config(config: CrossAttentionVLMConfig) -> CrossAttentionVLMConfig:
    """Return the equivalent config with all defaults filled in."""
    connector = config.connector
    if isinstance(connector, ResamplerConfig):
        block = connector.block_config()
        connector = connector.replace(
            head_dim=block.attention.resolve_head_dim(connector.in_features),
            intermediate_size=block.mlp.intermediate_size,
        )
    return normalize_mllama_config(config).replace(connector=connector)


DUPLICATE_TENSORS = (  # tied, but stored anyway
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.additional_fc.weight", "model.embed_tokens.additional_embedding.weight"),
)

IDEFICS = CheckpointFamily(
    "idefics",
    CrossAttentionVLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, _normalize_config, image_processors.IDEFICS),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    image_processor=image_processors.IDEFICS,
    chat_config=ChatConfig(
        "IdeficsProcessor",
        "idefics",
        end_of_turn="<end_of_utterance>",
        fixed_image_token="<image>",
        takes_chat_template=False,
        requires_pad_token=True,
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS, "perceiver_config": PERCEIVER_DEFAULTS},
)
FAMILIES.register("idefics", IDEFICS)
