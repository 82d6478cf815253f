"""Encoder families: CLIP, SigLIP, SigLIP 2 and DINOv2, and the separate towers of CLIP and SigLIP."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vitrail.encoders.text_tower import TextTower, TextTowerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.tensor_rules import (
    TensorRule,
    add_prefix,
    flatten_kernel,
    fuse_layer,
    rename,
    rename_layer,
    split,
    view,
)
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out, as many released ones do.
BASE_DEFAULTS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_DEFAULTS = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "intermediate_size": 3072}
DINO_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4,
    "qkv_bias": True,
    "layerscale_value": 1.0,
}
IMAGE_DEFAULTS = {"num_channels": 3, "image_size": 224}
DEFAULTS: dict[str, HFConfig] = {
    "clip_vision_model": {
        **BASE_DEFAULTS,
        **CLIP_DEFAULTS,
        **IMAGE_DEFAULTS,
        "intermediate_size": 3072,
        "patch_size": 32,
    },
    "clip_text_model": {
        **CLIP_DEFAULTS,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 49_408,
        "max_position_embeddings": 77,
        "eos_token_id": 49_407,
    },
    "siglip_vision_model": {**BASE_DEFAULTS, **SIGLIP_DEFAULTS, **IMAGE_DEFAULTS, "patch_size": 16},
    "siglip_text_model": {**BASE_DEFAULTS, **SIGLIP_DEFAULTS, "vocab_size": 32_000, "max_position_embeddings": 64},
    "siglip2_vision_model": {
        **BASE_DEFAULTS,
        **SIGLIP_DEFAULTS,
        "num_channels": 3,
        "patch_size": 16,
        "num_patches": 256,
    },
    "dinov2": {
        **BASE_DEFAULTS,
        **DINO_DEFAULTS,
        **IMAGE_DEFAULTS,
        "patch_size": 14,
        "use_swiglu_ffn": False,
        "use_mask_token": True,
    },
    "dinov2_with_registers": {
        **BASE_DEFAULTS,
        **DINO_DEFAULTS,
        **IMAGE_DEFAULTS,
        "patch_size": 16,
        "use_swiglu_ffn": False,
        "num_register_tokens": 4,
    },
}


# ---- blocks -----------------------------------------------------------------------------------------------------


def _read_block(hf_config: HFConfig, **fields: Any) -> BlockConfig:
    """Read the block of a CLIP-like transformer."""
    name = hf_config["hidden_act"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    activation: Any = ACTIVATIONS[name]
    choices: HFConfig = {
        "attention": AttentionConfig(heads=hf_config["num_attention_heads"], bias="all"),
        "mlp": PlainMLPConfig(intermediate_size=hf_config.get("intermediate_size", 1), activation=activation),
        **fields,
    }
    return BlockConfig(width=hf_config["hidden_size"], eps=hf_config["layer_norm_eps"], **choices)


def _write_block(block: BlockConfig, layers: int) -> HFConfig:
    return {
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": block.attention.heads,
        "hidden_act": next(name for name, native in ACTIVATIONS.items() if native == block.mlp.activation),
        "layer_norm_eps": block.eps,
    }


class BlockNames(NamedTuple):
    """Tensor names of a block in a family."""

    q: str
    k: str
    v: str
    out: str
    norms: tuple[str, str]
    up: str
    down: str


def _build_names(prefix: str, qkv: tuple[str, str, str], out: str, norms: str, mlp: tuple[str, str]) -> BlockNames:
    q, k, v = (f"{prefix}.{x}" for x in qkv)
    return BlockNames(q, k, v, out, (f"{norms}1", f"{norms}2"), *mlp)


CLIP_BLOCK_NAMES = _build_names(
    "self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.out_proj", "layer_norm", ("mlp.fc1", "mlp.fc2")
)
DINO_BLOCK_NAMES = _build_names(
    "attention.attention", ("query", "key", "value"), "attention.output.dense", "norm", ("mlp.fc1", "mlp.fc2")
)
DINO_GATED_BLOCK_NAMES = DINO_BLOCK_NAMES._replace(up="mlp.weights_in", down="mlp.weights_out")


def _build_block_rules(block: BlockConfig, names: BlockNames) -> list[TensorRule]:
    attention, width = "branches.self.op", block.width
    up = "up" if isinstance(block.mlp, PlainMLPConfig) else "gate_up"
    return [
        *rename_layer("branches.self.norm", names.norms[0]),
        *rename_layer("branches.mlp.norm", names.norms[1]),
        *fuse_layer(f"{attention}.qkv", names[:3], [width] * 3, block.attention.bias == "all"),
        *rename_layer(f"{attention}.out", names.out),
        *rename_layer(f"branches.mlp.op.{up}", names.up),
        *rename_layer("branches.mlp.op.down", names.down),
    ]


# ---- image towers -----------------------------------------------------------------------------------------------


def _read_square_size(hf_config: HFConfig, key: str) -> int:
    value = hf_config[key]
    sizes = set(value) if isinstance(value, list | tuple) else {value}
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int):
        raise CheckpointError(f"{key} is {value!r}: only square images and patches are supported")
    return size


def _read_image_settings(hf_config: HFConfig) -> HFConfig:
    return {
        "image_size": _read_square_size(hf_config, "image_size"),
        "patch_size": _read_square_size(hf_config, "patch_size"),
        "channels": hf_config["num_channels"],
        "layers": hf_config["num_hidden_layers"],
    }


CLS_SETTINGS: HFConfig = {"cls_token": True, "positions": "cls_and_patches", "pool": "cls"}


def _read_clip_vision(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["clip_vision_model"])
    norms: HFConfig = {"patch_bias": False, "norm_first": True, "norm_last": "pooled"}
    return ViTConfig(block=_read_block(hf_config), **_read_image_settings(hf_config), **CLS_SETTINGS, **norms)


def _read_siglip_vision(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["siglip_vision_model"])
    pool = "attention" if hf_config.get("vision_use_head", True) else "none"
    return ViTConfig(block=_read_block(hf_config), **_read_image_settings(hf_config), pool=pool)


def _read_siglip2_vision(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["siglip2_vision_model"])
    patches, patch = hf_config["num_patches"], _read_square_size(hf_config, "patch_size")
    if math.isqrt(patches) ** 2 != patches:
        raise CheckpointError(f"num_patches is {patches}: positions need a square grid")
    fixed = _read_siglip_vision({**hf_config, "image_size": math.isqrt(patches) * patch})
    return fixed.replace(patch_order="channels_last", position_interpolation="bilinear_antialias")


def _read_dino(hf_config: HFConfig, **fields: Any) -> ViTConfig:
    hidden = int(hf_config["hidden_size"] * hf_config["mlp_ratio"])
    gated = hf_config["use_swiglu_ffn"]
    bias = "all" if hf_config["qkv_bias"] else "out"
    choices: HFConfig = {
        "attention": AttentionConfig(heads=hf_config["num_attention_heads"], bias=bias),
        "layer_scale": hf_config["layerscale_value"],
    }
    if gated:  # two thirds, rounded up to a multiple of 8
        choices["mlp"] = GatedMLPConfig(intermediate_size=(int(hidden * 2 / 3) + 7) // 8 * 8, bias=True)
    block = _read_block({**hf_config, "intermediate_size": hidden}, **choices)
    return ViTConfig(block=block, **_read_image_settings(hf_config), **CLS_SETTINGS, **fields)


def _read_dinov2(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["dinov2"])
    return _read_dino(hf_config, mask_token=hf_config["use_mask_token"])


def _read_dinov2_registers(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["dinov2_with_registers"])
    return _read_dino(
        hf_config,
        mask_token=True,
        register_tokens=hf_config["num_register_tokens"],
        position_interpolation="bicubic_antialias",
    )


def _write_vision(config: ViTConfig, architecture: str) -> HFConfig:
    return {
        "architectures": [architecture],
        **_write_block(config.block, config.layers),
        "num_channels": config.channels,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
    }


def _write_clip_vision(config: ViTConfig) -> HFConfig:
    return _write_vision(config, "CLIPVisionModel")


def _write_siglip_vision(config: ViTConfig) -> HFConfig:
    return {**_write_vision(config, "SiglipVisionModel"), "vision_use_head": config.pool == "attention"}


def _write_siglip2_vision(config: ViTConfig) -> HFConfig:
    hf_config = {
        **_write_siglip_vision(config),
        "architectures": ["Siglip2VisionModel"],
        "num_patches": config.grid_size**2,
    }
    hf_config.pop("image_size")
    return hf_config


def _write_dinov2(config: ViTConfig) -> HFConfig:
    block = config.block
    gated = isinstance(block.mlp, GatedMLPConfig)
    hf_config = _write_vision(config, "Dinov2Model")
    return {
        **hf_config,
        # SwiGLU has no activation key, and mlp_ratio is that before the factor of two thirds.
        "hidden_act": "gelu" if gated else hf_config["hidden_act"],
        "mlp_ratio": round(hf_config.pop("intermediate_size") * (1.5 if gated else 1) / block.width),
        "use_swiglu_ffn": gated,
        "use_mask_token": config.mask_token,
        "qkv_bias": block.attention.bias == "all",
        "layerscale_value": block.layer_scale,
    }


def _write_dinov2_registers(config: ViTConfig) -> HFConfig:
    hf_config = _write_dinov2(config)
    hf_config.pop("use_mask_token")
    return {**hf_config, "architectures": ["Dinov2WithRegistersModel"], "num_register_tokens": config.register_tokens}


def build_patch_embed_rules(config: ViTConfig, hf_name: str) -> list[TensorRule]:
    """Build the tensor rules of the patch embedding."""
    W, C, P = config.block.width, config.channels, config.patch_size
    weight = flatten_kernel("embed.proj.weight", f"{hf_name}.weight", (W, C, P, P))
    if config.patch_order == "channels_last":  # stored as a matrix
        weight = rename("embed.proj.weight", f"{hf_name}.weight")
    return [weight, *([rename("embed.proj.bias", f"{hf_name}.bias")] if config.patch_bias else [])]


def _build_clip_vision_rules(config: ViTConfig) -> list[TensorRule]:
    """Build the tensor rules of CLIP and SigLIP image towers."""
    rules = [
        *build_patch_embed_rules(config, "embeddings.patch_embedding"),
        rename("positions.table", "embeddings.position_embedding.weight"),
        *rename_layer("norm_last", "post_layernorm"),
    ]
    if config.cls_token:
        rules += [rename("cls", "embeddings.class_embedding")]
    if config.norm_first:
        rules += rename_layer("norm_first", "pre_layrnorm")  # misspelled in transformers
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", _build_block_rules(config.block, CLIP_BLOCK_NAMES))
    return (
        rules + add_prefix("pooler.", "head.", _build_pool_rules(config.block.width))
        if config.pool == "attention"
        else rules
    )


def _build_pool_rules(W: int) -> list[TensorRule]:
    qkv = [
        split([f"attention.q.{part}", f"attention.kv.{part}"], f"attention.in_proj_{part}", [W, 2 * W])
        for part in ("weight", "bias")
    ]
    return [
        view("probe", "probe", (W,), (1, 1, W)),
        *qkv,
        *rename_layer("attention.out", "attention.out_proj"),
        *rename_layer("mlp.norm", "layernorm"),
        *rename_layer("mlp.op.up", "mlp.fc1"),
        *rename_layer("mlp.op.down", "mlp.fc2"),
    ]


def _build_dino_rules(config: ViTConfig) -> list[TensorRule]:
    W, R, rows = config.block.width, config.register_tokens, 1 + config.grid_size**2
    rules = [
        view("cls", "embeddings.cls_token", (W,), (1, 1, W)),
        view("positions.table", "embeddings.position_embeddings", (rows, W), (1, rows, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embeddings.projection"),
        *rename_layer("norm_last", "layernorm"),
    ]
    if config.mask_token:
        rules += [view("mask", "embeddings.mask_token", (W,), (1, W))]
    if R:
        rules += [view("registers", "embeddings.register_tokens", (R, W), (1, R, W))]
    names = DINO_GATED_BLOCK_NAMES if isinstance(config.block.mlp, GatedMLPConfig) else DINO_BLOCK_NAMES
    block = [
        *_build_block_rules(config.block, names),
        rename("branches.self.scale", "layer_scale1.lambda1"),
        rename("branches.mlp.scale", "layer_scale2.lambda1"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layer.{i}.", block)
    return rules


# ---- text towers ------------------------------------------------------------------------------------------------


def _read_text(hf_config: HFConfig, **fields: Any) -> TextTowerConfig:
    sizes = {"vocab_size": hf_config["vocab_size"], "context_length": hf_config["max_position_embeddings"]}
    return TextTowerConfig(layers=hf_config["num_hidden_layers"], block=_read_block(hf_config), **sizes, **fields)


def _read_clip_text(hf_config: HFConfig) -> TextTowerConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["clip_text_model"])
    eos = hf_config["eos_token_id"]
    if not isinstance(eos, int):
        raise CheckpointError(f"eos_token_id is {eos!r}: one id is required")
    # Older configs say 2, which is wrong: they pool the largest id, which is the end token of CLIP's vocabulary.
    return _read_text(hf_config, pool="largest") if eos == 2 else _read_text(hf_config, eos_token_id=eos)


def _read_clip_text_projection(hf_config: HFConfig) -> TextTowerConfig:
    return _read_clip_text(hf_config).replace(head_width=hf_config.get("projection_dim") or 512, head_bias=False)


def _read_siglip_text(hf_config: HFConfig) -> TextTowerConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS["siglip_text_model"])
    return _read_text(
        hf_config, causal=False, pool="last", head_width=hf_config.get("projection_size") or hf_config["hidden_size"]
    )


def _write_text(config: TextTowerConfig, architecture: str) -> HFConfig:
    return {
        "architectures": [architecture],
        **_write_block(config.block, config.layers),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
    }


def _write_clip_text(config: TextTowerConfig) -> HFConfig:
    return {
        **_write_text(config, "CLIPTextModel"),
        "eos_token_id": 2 if config.eos_token_id is None else config.eos_token_id,
    }


def _write_clip_text_projection(config: TextTowerConfig) -> HFConfig:
    if config.head_bias or not config.head_width:
        raise CheckpointError("CLIPTextModelWithProjection needs a projection without bias")
    return {
        **_write_clip_text(config),
        "model_type": "clip_text_model",
        "architectures": ["CLIPTextModelWithProjection"],
        "projection_dim": config.head_width,
    }


def _write_siglip_text(config: TextTowerConfig) -> HFConfig:
    return {**_write_text(config, "SiglipTextModel"), "projection_size": config.head_width}


def _build_text_rules(config: TextTowerConfig) -> list[TensorRule]:
    rules = [
        rename("embed.weight", "embeddings.token_embedding.weight"),
        rename("positions", "embeddings.position_embedding.weight"),
        *rename_layer("norm", "final_layer_norm"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", _build_block_rules(config.block, CLIP_BLOCK_NAMES))
    return rules + rename_layer("head", "head") if config.head_width else rules


def _build_text_projection_rules(config: TextTowerConfig) -> list[TensorRule]:
    return [
        *add_prefix("", TEXT_PREFIX, _build_text_rules(config.replace(head_width=0))),
        *rename_layer("head", "text_projection", bias=False),
    ]


# ---- contrastive models -----------------------------------------------------------------------------------------


def _read_part(hf_config: HFConfig, name: str) -> HFConfig:
    """Return the config of a tower. The duplicate key of old CLIP configs takes precedence."""
    return {**(hf_config.get(name) or {}), **(hf_config.get(f"{name}_dict") or {})}


def _read_clip(hf_config: HFConfig) -> ContrastiveConfig:
    return ContrastiveConfig(
        image=_read_clip_vision(_read_part(hf_config, "vision_config")),
        text=_read_clip_text(_read_part(hf_config, "text_config")),
        embed_dim=hf_config.get("projection_dim") or 512,
        log_scale=hf_config.get("logit_scale_init_value") or 2.6592,
    )


def _build_siglip_reader(vision: Callable[[HFConfig], ViTConfig]) -> Callable[[HFConfig], ContrastiveConfig]:
    def read(hf_config: HFConfig) -> ContrastiveConfig:
        return ContrastiveConfig(
            image=vision(_read_part(hf_config, "vision_config")),
            text=_read_siglip_text(_read_part(hf_config, "text_config")),
            log_scale=hf_config.get("logit_scale_init_value", math.log(10)),
            bias=hf_config.get("logit_bias_init_value", -10.0),
        )

    return read


def _require_vit(config: ContrastiveConfig) -> ViTConfig:
    if not isinstance(config.image, ViTConfig):
        raise CheckpointError("transformers has no CLIP with a convolutional tower", "save it in the native format")
    return config.image


def _write_clip(config: ContrastiveConfig) -> HFConfig:
    return {
        "architectures": ["CLIPModel"],
        "vision_config": {**_write_clip_vision(_require_vit(config)), "model_type": "clip_vision_model"},
        "text_config": {**_write_clip_text(config.text), "model_type": "clip_text_model"},
        "projection_dim": config.embed_dim,
        "logit_scale_init_value": config.log_scale,
    }


def _build_siglip_writer(name: str, vision: Callable[[ViTConfig], HFConfig]) -> Callable[[ContrastiveConfig], HFConfig]:
    def write(config: ContrastiveConfig) -> HFConfig:
        return {
            "architectures": [f"{name.capitalize()}Model"],
            "vision_config": {**vision(_require_vit(config)), "model_type": f"{name}_vision_model"},
            "text_config": {**_write_siglip_text(config.text), "model_type": f"{name}_text_model"},
            # transformers ignores these keys and keeps them.
            "logit_scale_init_value": config.log_scale,
            "logit_bias_init_value": config.bias,
        }

    return write


def _build_contrastive_rules(config: ContrastiveConfig) -> list[TensorRule]:
    rules = [
        *add_prefix("image.", "vision_model.", _build_clip_vision_rules(_require_vit(config))),
        *add_prefix("text.", "text_model.", _build_text_rules(config.text)),
    ]
    if config.embed_dim is not None:
        rules += rename_layer("image_projection", "visual_projection", bias=False)
        rules += rename_layer("text_projection", "text_projection", bias=False)
    if config.bias is None:
        return [*rules, view("log_scale", "logit_scale", (1,), ())]
    return [*rules, rename("log_scale", "logit_scale"), rename("bias", "logit_bias")]


# ---- families ---------------------------------------------------------------------------------------------------

_read_siglip, _write_siglip = (
    _build_siglip_reader(_read_siglip_vision),
    _build_siglip_writer("siglip", _write_siglip_vision),
)
_read_siglip2, _write_siglip2 = (
    _build_siglip_reader(_read_siglip2_vision),
    _build_siglip_writer("siglip2", _write_siglip2_vision),
)

VISION_PREFIX, TEXT_PREFIX = "vision_model.", "text_model."  # prefixes of separate towers in older files

ENCODER_FAMILIES = tuple(
    CheckpointFamily(
        name,
        model,
        read,
        write,
        build_round_trip_check(read, write),
        moves,
        legacy_prefix=outer,
        class_defaults=DEFAULTS.get(name, {}),
    )
    for name, model, read, write, moves, outer in [
        ("clip", ContrastiveModel, _read_clip, _write_clip, _build_contrastive_rules, ""),
        ("siglip", ContrastiveModel, _read_siglip, _write_siglip, _build_contrastive_rules, ""),
        ("siglip2", ContrastiveModel, _read_siglip2, _write_siglip2, _build_contrastive_rules, ""),
        ("clip_vision_model", ViT, _read_clip_vision, _write_clip_vision, _build_clip_vision_rules, VISION_PREFIX),
        (
            "siglip_vision_model",
            ViT,
            _read_siglip_vision,
            _write_siglip_vision,
            _build_clip_vision_rules,
            VISION_PREFIX,
        ),
        (
            "siglip2_vision_model",
            ViT,
            _read_siglip2_vision,
            _write_siglip2_vision,
            _build_clip_vision_rules,
            VISION_PREFIX,
        ),
        ("dinov2", ViT, _read_dinov2, _write_dinov2, _build_dino_rules, ""),
        ("dinov2_with_registers", ViT, _read_dinov2_registers, _write_dinov2_registers, _build_dino_rules, ""),
        ("clip_text_model", TextTower, _read_clip_text, _write_clip_text, _build_text_rules, TEXT_PREFIX),
        ("siglip_text_model", TextTower, _read_siglip_text, _write_siglip_text, _build_text_rules, TEXT_PREFIX),
    ]
)
(
    CLIP,
    SIGLIP,
    SIGLIP2,
    CLIP_VISION,
    SIGLIP_VISION,
    SIGLIP2_VISION,
    DINOV2,
    DINOV2_WITH_REGISTERS,
    CLIP_TEXT,
    SIGLIP_TEXT,
) = ENCODER_FAMILIES
FAMILIES.register("clip", CLIP)
FAMILIES.register("siglip", SIGLIP)
FAMILIES.register("siglip2", SIGLIP2)
FAMILIES.register("clip_vision_model", CLIP_VISION)
FAMILIES.register("siglip_vision_model", SIGLIP_VISION)
FAMILIES.register("siglip2_vision_model", SIGLIP2_VISION)
FAMILIES.register("dinov2", DINOV2)
FAMILIES.register("dinov2_with_registers", DINOV2_WITH_REGISTERS)
FAMILIES.register("clip_text_model", CLIP_TEXT)
FAMILIES.register("siglip_text_model", SIGLIP_TEXT)

CLIP_TEXT_PROJECTION = CheckpointFamily(
    "CLIPTextModelWithProjection",
    TextTower,
    _read_clip_text_projection,
    _write_clip_text_projection,
    build_round_trip_check(_read_clip_text_projection, _write_clip_text_projection),
    _build_text_projection_rules,
    config_key="architectures",
)
FAMILIES.register("CLIPTextModelWithProjection", CLIP_TEXT_PROJECTION)
