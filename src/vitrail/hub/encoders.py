"""Encoder families: CLIP, SigLIP, SigLIP 2, DINOv2 and their towers alone; EVA-02 in timm's layout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.family import ACTIVATIONS, Family, round_trip
from vitrail.hub.maps import Move, fuse_layer, layer, rename, reshape, split, under, view
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig

About = dict[str, Any]

# What transformers takes for granted where a config.json leaves it out, as many released ones do.
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "intermediate_size": 3072}
DINO = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "mlp_ratio": 4, "qkv_bias": True, "layerscale_value": 1.0}
PIXELS = {"num_channels": 3, "image_size": 224}
DEFAULTS: dict[str, About] = {
    "clip_vision_model": {**BASE, **CLIP, **PIXELS, "intermediate_size": 3072, "patch_size": 32},
    "clip_text_model": {
        **CLIP,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 49_408,
        "max_position_embeddings": 77,
        "eos_token_id": 49_407,
    },
    "siglip_vision_model": {**BASE, **SIGLIP, **PIXELS, "patch_size": 16},
    "siglip_text_model": {**BASE, **SIGLIP, "vocab_size": 32_000, "max_position_embeddings": 64},
    "siglip2_vision_model": {**BASE, **SIGLIP, "num_channels": 3, "patch_size": 16, "num_patches": 256},
    "dinov2": {**BASE, **DINO, **PIXELS, "patch_size": 14, "use_swiglu_ffn": False, "use_mask_token": True},
    "dinov2_with_registers": {
        **BASE,
        **DINO,
        **PIXELS,
        "patch_size": 16,
        "use_swiglu_ffn": False,
        "num_register_tokens": 4,
    },
}


def _whole(about: About, kind: str) -> About:
    return {**DEFAULTS[kind], **{key: value for key, value in about.items() if value is not None}}


# ---- blocks -----------------------------------------------------------------------------------------------------


def _read_block(about: About, **more: Any) -> BlockConfig:
    """A block of CLIP's kind."""
    name = about["hidden_act"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    choices: About = {
        "attention": AttentionConfig(heads=about["num_attention_heads"], bias="all"),
        "mlp": PlainConfig(hidden=about.get("intermediate_size", 1), activation=ACTIVATIONS[name]),  # pyrefly: ignore
        **more,
    }
    return BlockConfig(width=about["hidden_size"], eps=about["layer_norm_eps"], **choices)


def _write_block(block: BlockConfig, layers: int) -> About:
    return {
        "hidden_size": block.width,
        "intermediate_size": block.mlp.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": block.attention.heads,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == block.mlp.activation),
        "layer_norm_eps": block.eps,
    }


class Names(NamedTuple):
    """How a family calls the parts of a block."""

    q: str
    k: str
    v: str
    out: str
    norms: tuple[str, str]
    up: str
    down: str


def _names(prefix: str, qkv: tuple[str, str, str], out: str, norms: str, mlp: tuple[str, str]) -> Names:
    q, k, v = (f"{prefix}.{x}" for x in qkv)
    return Names(q, k, v, out, (f"{norms}1", f"{norms}2"), *mlp)


CLIP_BLOCK = _names(
    "self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.out_proj", "layer_norm", ("mlp.fc1", "mlp.fc2")
)
DINO_BLOCK = _names(
    "attention.attention", ("query", "key", "value"), "attention.output.dense", "norm", ("mlp.fc1", "mlp.fc2")
)
DINO_GATED = DINO_BLOCK._replace(up="mlp.weights_in", down="mlp.weights_out")


def _block_moves(block: BlockConfig, names: Names) -> list[Move]:
    attention, width = "branches.self.op", block.width
    up = "up" if isinstance(block.mlp, PlainConfig) else "gate_up"
    return [
        *layer("branches.self.norm", names.norms[0]),
        *layer("branches.mlp.norm", names.norms[1]),
        *fuse_layer(f"{attention}.qkv", names[:3], [width] * 3, block.attention.bias == "all"),
        *layer(f"{attention}.out", names.out),
        *layer(f"branches.mlp.op.{up}", names.up),
        *layer("branches.mlp.op.down", names.down),
    ]


# ---- image towers -----------------------------------------------------------------------------------------------


def _side(about: About, key: str) -> int:
    value = about[key]
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1 or not isinstance(side := sides.pop(), int):
        raise CheckpointError(f"{key} is {value!r}: only squares are built")
    return side


def _pixels(about: About) -> About:
    return {
        "image": _side(about, "image_size"),
        "patch": _side(about, "patch_size"),
        "channels": about["num_channels"],
        "layers": about["num_hidden_layers"],
    }


CLS: About = {"cls": True, "positions": "cls_and_patches", "pool": "cls"}


def _read_clip_vision(about: About) -> ViTConfig:
    about = _whole(about, "clip_vision_model")
    norms: About = {"patch_bias": False, "norm_first": True, "norm_last": "pooled"}
    return ViTConfig(block=_read_block(about), **_pixels(about), **CLS, **norms)


def _read_siglip_vision(about: About) -> ViTConfig:
    about = _whole(about, "siglip_vision_model")
    pool = "attention" if about.get("vision_use_head", True) else "none"
    return ViTConfig(block=_read_block(about), **_pixels(about), pool=pool)


def _read_siglip2_vision(about: About) -> ViTConfig:
    about = _whole(about, "siglip2_vision_model")
    patches, patch = about["num_patches"], _side(about, "patch_size")
    if math.isqrt(patches) ** 2 != patches:
        raise CheckpointError(f"num_patches is {patches}: positions are learned on a square grid")
    fixed = _read_siglip_vision({**about, "image_size": math.isqrt(patches) * patch})
    return fixed.with_(order="channels_last", resize="bilinear_antialias")


def _read_dino(about: About, **more: Any) -> ViTConfig:
    hidden = int(about["hidden_size"] * about["mlp_ratio"])
    gated = about["use_swiglu_ffn"]
    bias = "all" if about["qkv_bias"] else "out"
    choices: About = {
        "attention": AttentionConfig(heads=about["num_attention_heads"], bias=bias),
        "layer_scale": about["layerscale_value"],
    }
    if gated:  # two thirds, in whole eights
        choices["mlp"] = GatedConfig(hidden=(int(hidden * 2 / 3) + 7) // 8 * 8, bias=True)
    block = _read_block({**about, "intermediate_size": hidden}, **choices)
    return ViTConfig(block=block, **_pixels(about), **CLS, **more)


def _read_dinov2(about: About) -> ViTConfig:
    about = _whole(about, "dinov2")
    return _read_dino(about, mask=about["use_mask_token"])


def _read_dinov2_with_registers(about: About) -> ViTConfig:
    about = _whole(about, "dinov2_with_registers")
    return _read_dino(about, mask=True, registers=about["num_register_tokens"], resize="bicubic_antialias")


def _write_vision(config: ViTConfig, architecture: str) -> About:
    return {
        "architectures": [architecture],
        **_write_block(config.block, config.layers),
        "num_channels": config.channels,
        "image_size": config.image,
        "patch_size": config.patch,
    }


def _write_clip_vision(config: ViTConfig) -> About:
    return _write_vision(config, "CLIPVisionModel")


def _write_siglip_vision(config: ViTConfig) -> About:
    return {**_write_vision(config, "SiglipVisionModel"), "vision_use_head": config.pool == "attention"}


def _write_siglip2_vision(config: ViTConfig) -> About:
    about = {**_write_siglip_vision(config), "architectures": ["Siglip2VisionModel"], "num_patches": config.side**2}
    about.pop("image_size")
    return about


def _write_dinov2(config: ViTConfig) -> About:
    block = config.block
    gated = isinstance(block.mlp, GatedConfig)
    about = _write_vision(config, "Dinov2Model")
    return {
        **about,
        # SwiGLU's activation is not said, and its ratio counts before two thirds are taken.
        "hidden_act": "gelu" if gated else about["hidden_act"],
        "mlp_ratio": round(about.pop("intermediate_size") * (1.5 if gated else 1) / block.width),
        "use_swiglu_ffn": gated,
        "use_mask_token": config.mask,
        "qkv_bias": block.attention.bias == "all",
        "layerscale_value": block.layer_scale,
    }


def _write_dinov2_with_registers(config: ViTConfig) -> About:
    about = _write_dinov2(config)
    about.pop("use_mask_token")
    return {**about, "architectures": ["Dinov2WithRegistersModel"], "num_register_tokens": config.registers}


def patch_moves(config: ViTConfig, theirs: str) -> list[Move]:
    W, C, P = config.block.width, config.channels, config.patch
    weight = reshape("embed.proj.weight", f"{theirs}.weight", (W, C, P, P))
    if config.order == "channels_last":  # already a matrix
        weight = rename("embed.proj.weight", f"{theirs}.weight")
    return [weight, *([rename("embed.proj.bias", f"{theirs}.bias")] if config.patch_bias else [])]


def _clip_vision_moves(config: ViTConfig) -> list[Move]:
    """CLIP's and SigLIP's: the config says which parts there are."""
    moves = [
        *patch_moves(config, "embeddings.patch_embedding"),
        rename("positions.table", "embeddings.position_embedding.weight"),
        *layer("norm_last", "post_layernorm"),
    ]
    if config.cls:
        moves += [rename("cls", "embeddings.class_embedding")]
    if config.norm_first:
        moves += layer("norm_first", "pre_layrnorm")  # so spelt
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"encoder.layers.{i}.", _block_moves(config.block, CLIP_BLOCK))
    return moves + under("pooler.", "head.", _pool_moves(config.block.width)) if config.pool == "attention" else moves


def _pool_moves(W: int) -> list[Move]:
    qkv = [
        split([f"attention.q.{part}", f"attention.kv.{part}"], f"attention.in_proj_{part}", [W, 2 * W])
        for part in ("weight", "bias")
    ]
    return [
        view("probe", "probe", (W,), (1, 1, W)),
        *qkv,
        *layer("attention.out", "attention.out_proj"),
        *layer("mlp.norm", "layernorm"),
        *layer("mlp.op.up", "mlp.fc1"),
        *layer("mlp.op.down", "mlp.fc2"),
    ]


def _dino_moves(config: ViTConfig) -> list[Move]:
    W, R, rows = config.block.width, config.registers, 1 + config.side**2
    moves = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        view("positions.table", "embeddings.position_embeddings", (rows, W), (1, rows, W)),
        *patch_moves(config, "embeddings.patch_embeddings.projection"),
        *layer("norm_last", "layernorm"),
    ]
    if config.mask:
        moves += [view("mask", "embeddings.mask_token", (W,), (1, W))]
    if R:
        moves += [view("registers", "embeddings.register_tokens", (R, W), (1, R, W))]
    names = DINO_GATED if isinstance(config.block.mlp, GatedConfig) else DINO_BLOCK
    one = [
        *_block_moves(config.block, names),
        rename("branches.self.scale", "layer_scale1.lambda1"),
        rename("branches.mlp.scale", "layer_scale2.lambda1"),
    ]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"encoder.layer.{i}.", one)
    return moves


# ---- text towers ------------------------------------------------------------------------------------------------


def _read_text(about: About, **more: Any) -> TextConfig:
    sizes = {"vocab": about["vocab_size"], "context": about["max_position_embeddings"]}
    return TextConfig(layers=about["num_hidden_layers"], block=_read_block(about), **sizes, **more)


def _read_clip_text(about: About) -> TextConfig:
    about = _whole(about, "clip_text_model")
    eos = about["eos_token_id"]
    if not isinstance(eos, int):
        raise CheckpointError(f"eos_token_id is {eos!r}: one id is expected")
    # Older configs say 2, which was never the end token: they are read by the rule of CLIP's own vocabulary.
    return _read_text(about, pool="largest") if eos == 2 else _read_text(about, eos=eos)


def _read_siglip_text(about: About) -> TextConfig:
    about = _whole(about, "siglip_text_model")
    return _read_text(about, causal=False, pool="last", head=about.get("projection_size") or about["hidden_size"])


def _write_text(config: TextConfig, architecture: str) -> About:
    return {
        "architectures": [architecture],
        **_write_block(config.block, config.layers),
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
    }


def _write_clip_text(config: TextConfig) -> About:
    return {**_write_text(config, "CLIPTextModel"), "eos_token_id": 2 if config.eos is None else config.eos}


def _write_siglip_text(config: TextConfig) -> About:
    return {**_write_text(config, "SiglipTextModel"), "projection_size": config.head}


def _text_moves(config: TextConfig) -> list[Move]:
    moves = [
        rename("embed.weight", "embeddings.token_embedding.weight"),
        rename("positions", "embeddings.position_embedding.weight"),
        *layer("norm", "final_layer_norm"),
    ]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"encoder.layers.{i}.", _block_moves(config.block, CLIP_BLOCK))
    return moves + layer("head", "head") if config.head else moves


# ---- both together ----------------------------------------------------------------------------------------------


def _part(about: About, name: str) -> About:
    """A tower's config; what the doubled key of old CLIP configs says goes before."""
    return {**(about.get(name) or {}), **(about.get(f"{name}_dict") or {})}


def _read_clip(about: About) -> ContrastiveConfig:
    return ContrastiveConfig(
        image=_read_clip_vision(_part(about, "vision_config")),
        text=_read_clip_text(_part(about, "text_config")),
        embed=about.get("projection_dim") or 512,
        log_scale=about.get("logit_scale_init_value") or 2.6592,
    )


def _siglip_reader(vision: Callable[[About], ViTConfig]) -> Callable[[About], ContrastiveConfig]:
    def read(about: About) -> ContrastiveConfig:
        return ContrastiveConfig(
            image=vision(_part(about, "vision_config")),
            text=_read_siglip_text(_part(about, "text_config")),
            log_scale=about.get("logit_scale_init_value", math.log(10)),
            bias=about.get("logit_bias_init_value", -10.0),
        )

    return read


def _vit(config: ContrastiveConfig) -> ViTConfig:
    if not isinstance(config.image, ViTConfig):
        raise CheckpointError("transformers has no CLIP with a convolutional tower", "keep it in our own format")
    return config.image


def _write_clip(config: ContrastiveConfig) -> About:
    return {
        "architectures": ["CLIPModel"],
        "vision_config": {**_write_clip_vision(_vit(config)), "model_type": "clip_vision_model"},
        "text_config": {**_write_clip_text(config.text), "model_type": "clip_text_model"},
        "projection_dim": config.embed,
        "logit_scale_init_value": config.log_scale,
    }


def _siglip_writer(name: str, vision: Callable[[ViTConfig], About]) -> Callable[[ContrastiveConfig], About]:
    def write(config: ContrastiveConfig) -> About:
        return {
            "architectures": [f"{name.capitalize()}Model"],
            "vision_config": {**vision(_vit(config)), "model_type": f"{name}_vision_model"},
            "text_config": {**_write_siglip_text(config.text), "model_type": f"{name}_text_model"},
            # transformers does not know these, and keeps them.
            "logit_scale_init_value": config.log_scale,
            "logit_bias_init_value": config.bias,
        }

    return write


def _contrastive_moves(config: ContrastiveConfig) -> list[Move]:
    moves = [
        *under("image.", "vision_model.", _clip_vision_moves(_vit(config))),
        *under("text.", "text_model.", _text_moves(config.text)),
    ]
    if config.embed is not None:
        moves += layer("image_projection", "visual_projection", bias=False)
        moves += layer("text_projection", "text_projection", bias=False)
    if config.bias is None:
        return [*moves, view("log_scale", "logit_scale", (1,), ())]
    return [*moves, rename("log_scale", "logit_scale"), rename("bias", "logit_bias")]


# ---- rows -------------------------------------------------------------------------------------------------------

_read_siglip, _write_siglip = _siglip_reader(_read_siglip_vision), _siglip_writer("siglip", _write_siglip_vision)
_read_siglip2, _write_siglip2 = _siglip_reader(_read_siglip2_vision), _siglip_writer("siglip2", _write_siglip2_vision)

IMAGE, WORDS = "vision_model.", "text_model."  # older files have these before every name of a tower alone

ENCODERS = tuple(
    Family(name, model, read, write, round_trip(read, write), moves, outer=outer)
    for name, model, read, write, moves, outer in [
        ("clip",                  Contrastive, _read_clip, _write_clip, _contrastive_moves, ""),
        ("siglip",                Contrastive, _read_siglip, _write_siglip, _contrastive_moves, ""),
        ("siglip2",               Contrastive, _read_siglip2, _write_siglip2, _contrastive_moves, ""),
        ("clip_vision_model",     ViT, _read_clip_vision, _write_clip_vision, _clip_vision_moves, IMAGE),
        ("siglip_vision_model",   ViT, _read_siglip_vision, _write_siglip_vision, _clip_vision_moves, IMAGE),
        ("siglip2_vision_model",  ViT, _read_siglip2_vision, _write_siglip2_vision, _clip_vision_moves, IMAGE),
        ("dinov2",                ViT, _read_dinov2, _write_dinov2, _dino_moves, ""),
        ("dinov2_with_registers", ViT, _read_dinov2_with_registers, _write_dinov2_with_registers, _dino_moves, ""),
        ("clip_text_model",       TextTower, _read_clip_text, _write_clip_text, _text_moves, WORDS),
        ("siglip_text_model",     TextTower, _read_siglip_text, _write_siglip_text, _text_moves, WORDS),
    ]
)  # fmt: skip

ENCODER_MODELS: dict[str, tuple[type, type]] = {
    "vit": (ViTConfig, ViT),
    "conv": (ConvConfig, Conv),
    "text": (TextConfig, TextTower),
    "towers": (TowersConfig, Towers),
    "contrastive": (ContrastiveConfig, Contrastive),
}
