"""Presets of released towers: ViTs, packed and tiled ViTs, SAM, text towers and tower ensembles."""

from typing import Any

from vitrail.encoders.multi_tower import MultiTowerConfig, TowerConfig
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.sam import SAMConfig
from vitrail.encoders.text_tower import TextTowerConfig
from vitrail.encoders.tiled_vit import TiledViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.nn.mlp import Activation
from vitrail.processing.image_loading import NORMALIZATIONS

VIT_SIZES: dict[str, tuple[int, int, int, int]] = {
    #         width  layers  heads  hidden
    "Ti":     ( 192,  12,      3,     768),
    "S":      ( 384,  12,      6,    1536),
    "B":      ( 768,  12,     12,    3072),
    "L":      (1024,  24,     16,    4096),
    "So400M": (1152,  27,     16,    4304),
    "H":      (1280,  32,     16,    5120),
    "g":      (1408,  40,     16,    6144),  # OpenCLIP and EVA
    "giant":  (1536,  40,     24,    6144),  # DINOv2
    "bigG":   (1664,  48,     16,    8192),
}  # fmt: skip


def _block(size: str, activation: Activation = "gelu", **fields: Any) -> BlockConfig:
    width, _, heads, hidden = VIT_SIZES[size]
    attention = AttentionConfig(heads=heads, bias="all")
    return BlockConfig(
        width=width, attention=attention, mlp=PlainMLPConfig(intermediate_size=hidden, activation=activation), **fields
    )


def _vit(size: str, patch: int, image: int, block: BlockConfig, **fields: Any) -> ViTConfig:
    return ViTConfig(layers=VIT_SIZES[size][1], block=block, patch_size=patch, image_size=image, **fields)


def clip_vit_config(size: str, patch_size: int, image_size: int = 224, activation: Activation = "gelu") -> ViTConfig:
    """CLIP. OpenAI's towers have quick_gelu, OpenCLIP's gelu."""
    block = _block(size, activation, eps=1e-5)
    cls = {"cls_token": True, "positions": "cls_and_patches", "pool": "cls"}
    return _vit(size, patch_size, image_size, block, **cls, patch_bias=False, norm_first=True, norm_last="pooled")


def siglip_vit_config(size: str, patch_size: int, image_size: int = 224, **fields: Any) -> ViTConfig:
    """SigLIP, and SigLIP 2 with fixed image size."""
    return _vit(size, patch_size, image_size, _block(size, "gelu_tanh"), pool="attention", **fields)


def naflex_vit_config(size: str, patch_size: int = 16, image_size: int = 256) -> ViTConfig:
    """SigLIP 2 NaFlex, for any aspect ratio."""
    return siglip_vit_config(
        size, patch_size, image_size, patch_order="channels_last", position_interpolation="bilinear_antialias"
    )


def dinov2_vit_config(size: str, patch_size: int = 14, image_size: int = 518, register_tokens: int = 0) -> ViTConfig:
    """DINOv2. The giant size has SwiGLU with two thirds of the intermediate size."""
    block = _block(size, layer_scale=1.0)
    if size == "giant":
        block = block.replace(mlp=GatedMLPConfig(intermediate_size=4096, bias=True))
    cls = {"cls_token": True, "positions": "cls_and_patches", "pool": "cls"}
    resize = "bicubic_antialias" if register_tokens else "bicubic"
    return _vit(
        size,
        patch_size,
        image_size,
        block,
        **cls,
        register_tokens=register_tokens,
        mask_token=True,
        position_interpolation=resize,
    )


def dinov3_vit_config(size: str, patch_size: int = 16, image_size: int = 224, register_tokens: int = 4) -> ViTConfig:
    """DINOv3: rotary positions of patch centers, and no bias of k."""
    width, _, heads, hidden = VIT_SIZES[size]
    attention = AttentionConfig(heads=heads, bias="all_but_k")
    mlp = PlainMLPConfig(intermediate_size=hidden)
    return _vit(
        size,
        patch_size,
        image_size,
        BlockConfig(width=width, attention=attention, mlp=mlp, eps=1e-5, layer_scale=1.0),
        cls_token=True,
        register_tokens=register_tokens,
        mask_token=True,
        positions="none",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", theta=100.0),
        rotary_centered=True,
        pool="cls",
    )


def aimv2_vit_config(size: str, intermediate_size: int, patch_size: int = 14, image_size: int = 224) -> ViTConfig:
    """AIMv2: RMS norms and SwiGLU without biases. Released towers have no pooling."""
    width, heads = VIT_SIZES[size][0], 8
    mlp = GatedMLPConfig(intermediate_size=intermediate_size)
    block = BlockConfig(width=width, attention=AttentionConfig(heads=heads), mlp=mlp, norm="rms", eps=1e-5)
    return _vit(size, patch_size, image_size, block, norm_patches=True)


def eva02_vit_config(
    size: str, patch_size: int = 14, image_size: int = 224, *, for_clip: bool = False, head_width: int = 0
) -> ViTConfig:
    """EVA-02: rotary and learned positions, SwiGLU. From size B on, the MLP has an inner norm.

    With `for_clip`, attention has an inner norm too.
    """
    width, _, heads, hidden = VIT_SIZES[size]
    inner = None if size in ("Ti", "S") else "layer"
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias="all_but_k", inner_norm="layer" if for_clip else None),
        mlp=GatedMLPConfig(intermediate_size=2 * hidden // 3, bias=True, inner_norm=inner),
    )
    return _vit(
        size,
        patch_size,
        image_size,
        block,
        cls_token=True,
        positions="cls_and_patches",
        position_interpolation="bicubic_antialias",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", pairing="adjacent"),
        rotary_span=16,
        pool="cls" if for_clip else "mean",
        norm_last="tokens" if for_clip else "pooled",
        head_width=head_width,
    )


def internvit_config(
    width: int, layers: int, heads: int, intermediate_size: int, image_size: int = 448, *, large: bool
) -> ViTConfig:
    """InternViT. The large version has RMS norms, q/k norms, and no qkv bias."""
    qk: dict[str, Any] = {"qk_norm": "rms", "qk_norm_over": "heads"} if large else {}
    attention = AttentionConfig(heads=heads, bias="out" if large else "all", **qk)
    norm = "rms" if large else "layer"
    mlp = PlainMLPConfig(intermediate_size=intermediate_size)
    block = BlockConfig(width=width, attention=attention, mlp=mlp, norm=norm, layer_scale=0.1)
    more: dict[str, Any] = {"cls_token": True, "positions": "cls_and_patches", "norm_last": "none"}
    return ViTConfig(layers=layers, block=block, patch_size=14, image_size=image_size, **more)


VIT_PRESETS: dict[str, ViTConfig] = {
    "clip-b16":            clip_vit_config("B", 16, activation="quick_gelu"),
    "clip-l14":            clip_vit_config("L", 14, activation="quick_gelu"),
    "clip-l14-336":        clip_vit_config("L", 14, 336, activation="quick_gelu"),
    "clip-h14":            clip_vit_config("H", 14),
    "clip-g14":            clip_vit_config("g", 14),
    "clip-bigg14":         clip_vit_config("bigG", 14),
    "siglip-b16-224":      siglip_vit_config("B", 16),
    "siglip-b16-256":      siglip_vit_config("B", 16, 256),
    "siglip-l16-384":      siglip_vit_config("L", 16, 384),
    "siglip-so400m-224":   siglip_vit_config("So400M", 14),
    "siglip-so400m-384":   siglip_vit_config("So400M", 14, 384),
    "siglip2-naflex-b16":  naflex_vit_config("B"),
    "siglip2-naflex-so400m": naflex_vit_config("So400M"),
    "dinov2-s14":          dinov2_vit_config("S"),
    "dinov2-b14":          dinov2_vit_config("B"),
    "dinov2-l14":          dinov2_vit_config("L"),
    "dinov2-g14":          dinov2_vit_config("giant"),
    "dinov2-l14-reg":      dinov2_vit_config("L", register_tokens=4),
    "dinov2-g14-reg":      dinov2_vit_config("giant", register_tokens=4),
    "dinov3-s16":          dinov3_vit_config("S"),
    "dinov3-b16":          dinov3_vit_config("B"),
    "dinov3-l16":          dinov3_vit_config("L"),
    "aimv2-l14-224":       aimv2_vit_config("L", 2816),
    "eva02-ti14-336":      eva02_vit_config("Ti", image_size=336),
    "eva02-s14-336":       eva02_vit_config("S", image_size=336),
    "eva02-b14":           eva02_vit_config("B"),
    "eva02-b14-448":       eva02_vit_config("B", image_size=448),
    "eva02-l14":           eva02_vit_config("L"),
    "eva02-l14-448":       eva02_vit_config("L", image_size=448),
    "eva02-l14-clip":      eva02_vit_config("L", for_clip=True, head_width=768),
    "internvit-300m":      internvit_config(1024, 24, 16, 4096, large=False),
    "internvit-6b":        internvit_config(3200, 45, 25, 12_800, large=True),
}  # fmt: skip
"""SigLIP 2 with fixed image size has the towers of SigLIP."""


def _qwen2_5(intermediate_size: int) -> PackedViTConfig:
    block = _block("H", norm="rms").replace(mlp=GatedMLPConfig(intermediate_size=intermediate_size, bias=True))
    return PackedViTConfig(layers=32, block=block, window_size=4, full_attention_layers=(7, 15, 23, 31))


def _qwen3(size: str, taps: tuple[int, ...]) -> PackedViTConfig:
    block, layers = _block(size, "gelu_tanh"), VIT_SIZES[size][1]
    return PackedViTConfig(
        layers=layers, block=block, patch_size=16, patch_bias=True, position_grid_size=48, feature_layers=taps
    )


PACKED_VIT_PRESETS: dict[str, PackedViTConfig] = {
    "qwen2-vl":            PackedViTConfig(layers=32, block=_block("H", "quick_gelu")),
    "qwen2.5-vl":          _qwen2_5(3420),  # 3B and 7B
    "qwen2.5-vl-large":    _qwen2_5(3456),  # 32B and 72B
    "qwen3-vl-l":          _qwen3("L", (6, 12, 18)),  # 2B and 4B
    "qwen3-vl-so400m":     _qwen3("So400M", (9, 17, 25)),  # 8B and up
}  # fmt: skip
"""Qwen's packed vision towers for images and videos of any resolution."""

TILED_VIT_PRESETS: dict[str, TiledViTConfig] = {
    "llama-3.2-vision": TiledViTConfig(
        layers=32,
        global_layers=8,
        block=BlockConfig(
            width=1280, attention=AttentionConfig(heads=16), mlp=PlainMLPConfig(intermediate_size=5120), eps=1e-5
        ),
    ),
}


def _sam(size: str, full: tuple[int, ...]) -> SAMConfig:
    return SAMConfig(layers=VIT_SIZES[size][1], block=_block(size), full_attention_layers=full)


SAM_PRESETS: dict[str, SAMConfig] = {
    "sam-b": _sam("B", (2, 5, 8, 11)),
    "sam-l": _sam("L", (5, 11, 17, 23)),
    "sam-h": _sam("H", (7, 15, 23, 31)),
}
"""Image encoders of Segment Anything."""


def _text(
    width: int, layers: int, heads: int, hidden: int, activation: Activation, eps: float, **fields: Any
) -> TextTowerConfig:
    attention = AttentionConfig(heads=heads, bias="all")
    mlp = PlainMLPConfig(intermediate_size=hidden, activation=activation)
    return TextTowerConfig(
        layers=layers, block=BlockConfig(width=width, attention=attention, mlp=mlp, eps=eps), **fields
    )


def _clip_text(width: int, layers: int, heads: int, activation: Activation = "gelu") -> TextTowerConfig:
    return _text(width, layers, heads, 4 * width, activation, 1e-5, vocab_size=49_408, eos_token_id=49_407)


def _siglip_text(size: str, vocab: int = 32_000) -> TextTowerConfig:
    width = VIT_SIZES[size][0]
    fields = {"vocab_size": vocab, "context_length": 64, "causal": False, "pool": "last", "head_width": width}
    return _text(*VIT_SIZES[size], "gelu_tanh", 1e-6, **fields)


TEXT_TOWER_PRESETS: dict[str, TextTowerConfig] = {
    #                               width  layers  heads
    "clip-b":            _clip_text( 512,   12,      8, "quick_gelu"),
    "clip-l":            _clip_text( 768,   12,     12, "quick_gelu"),
    "clip-h":            _clip_text(1024,   24,     16),  # and g
    "clip-bigg":         _clip_text(1280,   32,     20),
    "siglip-b":          _siglip_text("B"),
    "siglip-l":          _siglip_text("L"),
    "siglip-so400m":     _siglip_text("So400M"),
    "siglip2-b":         _siglip_text("B", 256_000),
    "siglip2-so400m":    _siglip_text("So400M", 256_000),
}  # fmt: skip


def _prismatic(image: int) -> MultiTowerConfig:
    """Prismatic: SigLIP and DINOv2, features of the last block but one."""
    siglip_tower = TowerConfig(
        vit=siglip_vit_config("So400M", 14, image),
        mean=NORMALIZATIONS["half"].mean,
        std=NORMALIZATIONS["half"].std,
        layer=-2,
    )
    norm = NORMALIZATIONS["imagenet"]
    dino_tower = TowerConfig(vit=dinov2_vit_config("L", register_tokens=4), mean=norm.mean, std=norm.std, layer=-2)
    return MultiTowerConfig(towers=(siglip_tower, dino_tower), image_size=image)


MULTI_TOWER_PRESETS: dict[str, MultiTowerConfig] = {
    "prismatic-224": _prismatic(224),
    "prismatic-384": _prismatic(384),
}
