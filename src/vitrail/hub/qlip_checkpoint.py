"""Published checkpoints of QLIP (`QLIPModel`): the tokenizer is a `Codec`, the two towers are a `ContrastiveModel`
model.

The encoder is the ViT of EVA-02. Codes are made from its patches before the last norm; contrastive features are its CLS
token after that norm. Both models read the same file and ignore the tensors of the other.
"""

from pathlib import Path
from typing import Any, cast

import torch

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.quantizers import BSQConfig
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, require_key
from vitrail.hub.config_schema import check_config_schema
from vitrail.hub.encoder_families import (
    _build_text_rules,
    _read_clip_text,
    _require_vit,
    _write_clip_text,
    build_patch_embed_rules,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, rename, rename_layer, view
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of the published configuration for keys that a config.json leaves out.
TOWER_DEFAULTS: HFConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), True),
    **dict.fromkeys(("subln", "swiglu", "rope"), False),
}
ROTARY_SPAN = 16  # patches


def _read_tower_settings(hf_config: HFConfig, key: str) -> HFConfig:
    settings = hf_config.get(key) or {}
    check_config_schema({"vision_config": settings})
    return {**TOWER_DEFAULTS, **{name: value for name, value in settings.items() if value is not None}}


# ---- blocks and towers ------------------------------------------------------------------------------------------


def _read_block(hf_config: HFConfig) -> BlockConfig:
    biases = tuple(hf_config[f"{name}_bias"] for name in "qkv")
    if biases not in ((True, True, True), (True, False, True)):
        raise CheckpointError(f"q_bias, k_bias, v_bias are {biases}", "all biases, or all but that of k, are supported")
    inner, eps, hidden = (
        "layer" if hf_config["subln"] else None,
        hf_config["layer_norm_eps"],
        hf_config["intermediate_size"],
    )
    if hf_config["swiglu"]:
        mlp: Any = GatedMLPConfig(intermediate_size=hidden, bias=True, inner_norm=inner, eps=eps)
    elif inner or hf_config["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(f"subln with hidden_act {hf_config['hidden_act']!r}", "inner norms need SwiGLU")
    else:
        mlp = PlainMLPConfig(intermediate_size=hidden, activation=ACTIVATIONS[hf_config["hidden_act"]])  # pyrefly: ignore
    attention = AttentionConfig(
        heads=hf_config["num_attention_heads"], bias="all" if biases[1] else "all_but_k", inner_norm=inner, eps=eps
    )
    return BlockConfig(width=hf_config["hidden_size"], attention=attention, mlp=mlp, eps=eps)


def _read_tower(hf_config: HFConfig, **fields: Any) -> ViTConfig:
    block = _read_block(hf_config)
    rotary = RotaryConfig(head_dim=block.width // block.attention.heads, layout="2d", pairing="adjacent")
    rotary_settings: HFConfig = {"rotary": rotary, "rotary_span": ROTARY_SPAN} if hf_config["rope"] else {}
    return ViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=block,
        position_interpolation="bicubic_antialias",
        **rotary_settings,
        **fields,
    )


def _read_vision(hf_config: HFConfig) -> ViTConfig:
    settings = _read_tower_settings(hf_config, "vision_config")
    has_bias = hf_config.get("vision_projection_bias", True)
    return _read_tower(
        settings,
        image_size=settings["image_size"],
        patch_size=settings["patch_size"],
        channels=settings["num_channels"],
        cls_token=True,
        positions="cls_and_patches",
        pool="cls",
        norm_last="pooled",
        head_width=(hf_config.get("projection_dim") or 512) if has_bias else 0,
    )


def _write_tower(config: ViTConfig, image: int, patch: int, channels: int) -> HFConfig:
    block, mlp = config.block, config.block.mlp
    is_gated = isinstance(mlp, GatedMLPConfig)
    return {
        "hidden_size": block.width,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_channels": channels,
        "image_size": image,
        "patch_size": patch,
        "hidden_act": next(name for name, native in ACTIVATIONS.items() if native == mlp.activation),
        "layer_norm_eps": block.eps,
        "q_bias": True,
        "k_bias": block.attention.bias == "all",
        "v_bias": True,
        "subln": block.attention.inner_norm is not None,
        "swiglu": is_gated,
        "rope": config.rotary is not None,
    }


def _build_block_rules(block: BlockConfig) -> list[TensorRule]:
    attention, mlp, W, hidden = "branches.self.op", "branches.mlp.op", block.width, block.mlp.intermediate_size
    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    rules = [
        *rename_layer("branches.self.norm", "layer_norm1"),
        *rename_layer("branches.mlp.norm", "layer_norm2"),
        *rename_layer(f"{attention}.out", "self_attn.out_proj"),
    ]
    if block.attention.bias == "all":
        rules += fuse_layer(f"{attention}.qkv", qkv, [W] * 3)
    else:
        rules += [fuse(f"{attention}.qkv.weight", [f"{name}.weight" for name in qkv], [W] * 3)]
        rules += [rename(f"{attention}.{x}_bias", f"self_attn.{x}_proj.bias") for x in "qv"]
    if block.attention.inner_norm:
        rules += rename_layer(f"{attention}.inner_norm", "self_attn.inner_attn_ln")
    if not isinstance(block.mlp, GatedMLPConfig):
        return [*rules, *rename_layer(f"{mlp}.up", "mlp.fc1"), *rename_layer(f"{mlp}.down", "mlp.fc2")]
    rules += [*fuse_layer(f"{mlp}.gate_up", ["mlp.w1", "mlp.w2"], [hidden] * 2), *rename_layer(f"{mlp}.down", "mlp.w3")]
    return rules + rename_layer(f"{mlp}.norm", "mlp.ffn_ln") if block.mlp.inner_norm else rules


def _build_blocks_rules(config: ViTConfig) -> list[TensorRule]:
    block_rules = _build_block_rules(config.block)
    return [
        move for i in range(config.layers) for move in add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", block_rules)
    ]


def _build_vision_rules(config: ViTConfig) -> list[TensorRule]:
    rules = [
        rename("cls", "embeddings.class_embedding"),
        rename("positions.table", "embeddings.position_embedding.weight"),
        *build_patch_embed_rules(config, "embeddings.patch_embedding"),
        *rename_layer("norm_last", "post_layernorm"),
        *_build_blocks_rules(config),
    ]
    return add_prefix("", "vision_model.", rules) + (
        rename_layer("head", "visual_projection") if config.head_width else []
    )


# ---- the tokenizer ----------------------------------------------------------------------------------------------


def _read_config(hf_config: HFConfig) -> CodecConfig:
    vision, decoder_settings = (
        _read_tower_settings(hf_config, "vision_config"),
        _read_tower_settings(hf_config, "decoder_config"),
    )
    quantizer_kind = vision.get("quantizer"), vision.get("quantizer_embed_type"), vision.get("quantizer_l2_norm")
    if quantizer_kind != ("bsq", "mlp", True):
        raise CheckpointError(
            f"quantizer, embed_type and l2_norm are {quantizer_kind}", "only bsq with mlp and l2_norm is supported"
        )
    quantizer = require_key(vision, "quantizer_cfg")
    if not quantizer.get("l2_norm", True):
        raise CheckpointError("quantizer_cfg.l2_norm is false: codes must be normalized")
    encoder, width = _read_vision(hf_config), decoder_settings["hidden_size"]
    if (vision.get("hidden_size_post_q") or vision["hidden_size"]) != width:
        raise CheckpointError(f"hidden_size_post_q differs from the width {width} of the decoder")
    decoder = _read_tower(
        decoder_settings,
        image_size=decoder_settings["image_size"] // decoder_settings["patch_size"],
        patch_size=1,
        channels=width,
    )
    if decoder.grid_size != encoder.grid_size or decoder_settings["patch_size"] != encoder.patch_size:
        raise CheckpointError("encoder and decoder differ in patch size or image size")
    norm = NORMALIZATIONS["clip"]
    return CodecConfig(
        net=ViTAutoencoderConfig(
            encoder=encoder, decoder=decoder, intermediate_size=decoder_settings["intermediate_size"]
        ),
        quantizer=BSQConfig(bits=require_key(quantizer, "embed_dim")),
        pre_quant="mlp",
        post_quant="mlp",
        mean=norm.mean,
        std=norm.std,
    )


def _write_config(config: CodecConfig) -> HFConfig:
    net, norm = config.net, NORMALIZATIONS["clip"]
    if not isinstance(net, ViTAutoencoderConfig) or not isinstance(config.quantizer, BSQConfig):
        raise CheckpointError("QLIP needs two ViTs and BSQ")
    if (config.mean, config.std) != norm:
        raise CheckpointError("QLIP needs the mean and std of CLIP")
    image, patch, channels = net.encoder.image_size, net.encoder.patch_size, net.encoder.channels
    return {
        "architectures": ["QLIPModel"],
        "model_type": "clip",
        "vision_config": {
            **_write_tower(net.encoder, image, patch, channels),
            "quantizer": "bsq",
            "quantizer_embed_type": "mlp",
            "quantizer_l2_norm": True,
            "quantizer_cfg": {
                "embed_dim": config.quantizer.bits,
                "group_size": 1,
                "input_format": "blc",
                "l2_norm": True,
            },
            "hidden_size_post_q": net.decoder.block.width,
        },
        "decoder_config": _write_tower(net.decoder, image, patch, channels),
        "projection_dim": net.encoder.head_width or 512,
        "vision_projection_bias": bool(net.encoder.head_width),
    }


def _build_rules(config: CodecConfig) -> list[TensorRule]:
    net = config.net
    assert isinstance(net, ViTAutoencoderConfig)
    N, W = net.decoder.grid_size**2, net.decoder.block.width
    decoder_rules = [
        view("body.positions.table", "position_embeddings", (N, W), (1, N, W)),
        *rename_layer("body.norm_last", "norm"),
        *add_prefix("body.", "", _build_blocks_rules(net.decoder)),
        *rename_layer("hidden.0", "ffn.0"),
        *rename_layer("last", "conv_out"),
    ]
    bridges = {
        "pre_quant_proj.0": "quant_embed.c_fc",
        "pre_quant_proj.2": "quant_embed.c_proj",
        "post_quant_proj.0": "quant_embed_post.c_fc",
    }
    # The patch embedding of the decoder is the second linear layer after the codes.
    bridges["decoder.body.embed.proj"] = "quant_embed_post.c_proj"
    return [
        *add_prefix("encoder.", "", _build_vision_rules(net.encoder)),
        *(move for native, hf in bridges.items() for move in rename_layer(native, f"vision_model.{hf}")),
        *add_prefix("decoder.", "vision_decoder.", decoder_rules),
    ]


# ---- the towers -------------------------------------------------------------------------------------------------


def _read_towers(hf_config: HFConfig) -> ContrastiveConfig:
    text_settings = hf_config.get("text_config") or {}
    bias_keys = ("subln", "swiglu", "rope"), ("q_bias", "k_bias", "v_bias")
    if any(text_settings.get(key) for key in bias_keys[0]) or not all(
        text_settings.get(key, True) for key in bias_keys[1]
    ):
        raise CheckpointError(
            "the text tower has subln, swiglu, rope or a missing bias", "only the text tower of CLIP is supported"
        )
    image = _read_vision(hf_config)
    if not image.head_width or hf_config.get("text_projection_bias"):
        raise CheckpointError("QLIP needs a bias in the image projection and none in the text projection")
    text = _read_clip_text({"hidden_act": "gelu", **text_settings}).replace(head_width=image.head_width)
    return ContrastiveConfig(image=image, text=text, log_scale=hf_config.get("logit_scale_init_value") or 2.6592)


def _write_towers(config: ContrastiveConfig) -> HFConfig:
    image = _require_vit(config)
    return {
        "architectures": ["QLIPModel"],
        "model_type": "clip",
        "vision_config": _write_tower(image, image.image_size, image.patch_size, image.channels),
        "text_config": _write_clip_text(config.text.replace(head_width=0)),
        "projection_dim": image.head_width,
        "vision_projection_bias": True,
        "text_projection_bias": False,
        "logit_scale_init_value": config.log_scale,
    }


def _build_towers_rules(config: ContrastiveConfig) -> list[TensorRule]:
    return [
        *add_prefix("image.", "", _build_vision_rules(_require_vit(config))),
        *add_prefix("text.", "text_model.", _build_text_rules(config.text.replace(head_width=0))),
        _build_zero_bias_rule("text.head", "text_projection"),
        view("log_scale", "logit_scale", (1,), ()),
    ]


def _build_zero_bias_rule(native: str, hf: str) -> TensorRule:
    """Build the rule of a native layer with a bias that QLIP lacks: it must be zero to be written."""

    def push(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors[1].is_meta and tensors[1].count_nonzero():
            raise CheckpointError(
                f"{native}.bias is not zero, but QLIP has no bias", "train without it to export to this format"
            )
        return tensors[:1]

    return TensorRule(
        (f"{native}.weight", f"{native}.bias"),
        (f"{hf}.weight",),
        lambda tensors: [tensors[0], tensors[0].new_zeros(len(tensors[0]))],
        push,
    )


# ---- families ---------------------------------------------------------------------------------------------------


TEXT_PREFIXES = ("text_model.", "text_projection.", "logit_scale")
CODEC_PREFIXES = ("vision_decoder.", "vision_model.quant_embed.", "vision_model.quant_embed_post.")

QLIP, QLIP_TOWERS = (
    CheckpointFamily(
        "QLIPModel",
        model,
        read,
        write,
        build_round_trip_check(read, write),
        moves,
        (".position_ids", ".rope.freqs_cos", ".rope.freqs_sin"),
        config_key="architectures",
        ignored_prefixes=ignored_prefixes,
    )
    for model, read, write, moves, ignored_prefixes in [
        (Codec, _read_config, _write_config, _build_rules, TEXT_PREFIXES),
        (ContrastiveModel, _read_towers, _write_towers, _build_towers_rules, CODEC_PREFIXES),
    ]
)
FAMILIES.register("QLIPModel", QLIP)


def load_contrastive_towers(
    path_or_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> ContrastiveModel:
    """Load the contrastive towers of a QLIP checkpoint; `hub.load` loads its codec."""
    from vitrail.hub.checkpoint_info import HF_CONFIG_FILE, CheckpointInfo, resolve_path
    from vitrail.hub.pretrained import build_model
    from vitrail.hub.safetensors_files import SafetensorsWeights, read_json

    path = resolve_path(path_or_id)
    file = path / HF_CONFIG_FILE
    config = QLIP_TOWERS.read_config(read_json(file), file)
    found = CheckpointInfo(path, ContrastiveModel, config, QLIP_TOWERS, lambda: SafetensorsWeights(path))
    return cast(ContrastiveModel, build_model(found, dtype, device))
