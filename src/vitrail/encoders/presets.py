"""Released towers as rows: sizes, families of ViT, towers of language models, text towers, towers together."""

from typing import Any

from vitrail.encoders.packed import PackedViTConfig
from vitrail.encoders.sam import SAMConfig
from vitrail.encoders.text import TextConfig
from vitrail.encoders.tiled import TiledViTConfig
from vitrail.encoders.towers import TowerConfig, TowersConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.nn.mlp import Activation
from vitrail.processing.images import NORMS

SIZES: dict[str, tuple[int, int, int, int]] = {
    #         width  layers  heads  hidden
    "Ti":     ( 192,  12,      3,     768),
    "S":      ( 384,  12,      6,    1536),
    "B":      ( 768,  12,     12,    3072),
    "L":      (1024,  24,     16,    4096),
    "So400M": (1152,  27,     16,    4304),
    "H":      (1280,  32,     16,    5120),
    "g":      (1408,  40,     16,    6144),  # OpenCLIP's and EVA's
    "giant":  (1536,  40,     24,    6144),  # DINOv2's
    "bigG":   (1664,  48,     16,    8192),
}  # fmt: skip


def _block(size: str, activation: Activation = "gelu", **more: Any) -> BlockConfig:
    width, _, heads, hidden = SIZES[size]
    attention = AttentionConfig(heads=heads, bias="all")
    return BlockConfig(width=width, attention=attention, mlp=PlainConfig(hidden=hidden, activation=activation), **more)


def _vit(size: str, patch: int, image: int, block: BlockConfig, **more: Any) -> ViTConfig:
    return ViTConfig(layers=SIZES[size][1], block=block, patch=patch, image=image, **more)


def clip(size: str, patch: int, image: int = 224, activation: Activation = "gelu") -> ViTConfig:
    """OpenAI's have quick_gelu, OpenCLIP's gelu."""
    block = _block(size, activation, eps=1e-5)
    cls = {"cls": True, "positions": "cls_and_patches", "pool": "cls"}
    return _vit(size, patch, image, block, **cls, patch_bias=False, norm_first=True, norm_last="pooled")


def siglip(size: str, patch: int, image: int = 224, **more: Any) -> ViTConfig:
    """SigLIP, and SigLIP 2 of fixed size."""
    return _vit(size, patch, image, _block(size, "gelu_tanh"), pool="attention", **more)


def naflex(size: str, patch: int = 16, image: int = 256) -> ViTConfig:
    """SigLIP 2 for any aspect ratio."""
    return siglip(size, patch, image, order="channels_last", resize="bilinear_antialias")


def dinov2(size: str, patch: int = 14, image: int = 518, registers: int = 0) -> ViTConfig:
    """The giant has SwiGLU, of two thirds the hidden width."""
    block = _block(size, layer_scale=1.0)
    if size == "giant":
        block = block.with_(mlp=GatedConfig(hidden=4096, bias=True))
    cls = {"cls": True, "positions": "cls_and_patches", "pool": "cls"}
    resize = "bicubic_antialias" if registers else "bicubic"
    return _vit(size, patch, image, block, **cls, registers=registers, mask=True, resize=resize)


def eva02(size: str, patch: int = 14, image: int = 224, *, for_clip: bool = False, head: int = 0) -> ViTConfig:
    """Rotary and learned positions, SwiGLU; from B up with a norm inside it, for CLIP one inside attention too."""
    width, _, heads, hidden = SIZES[size]
    inner = None if size in ("Ti", "S") else "layer"
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias="all_but_k", inner_norm="layer" if for_clip else None),
        mlp=GatedConfig(hidden=2 * hidden // 3, bias=True, inner_norm=inner),
    )
    return _vit(
        size,
        patch,
        image,
        block,
        cls=True,
        positions="cls_and_patches",
        resize="bicubic_antialias",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", pairing="adjacent"),
        rotary_span=16,
        pool="cls" if for_clip else "mean",
        norm_last="tokens" if for_clip else "pooled",
        head=head,
    )


def internvit(width: int, layers: int, heads: int, hidden: int, image: int = 448, *, large: bool) -> ViTConfig:
    """The large one has RMS norms, over q and k too, and no bias on these."""
    qk: dict[str, Any] = {"qk_norm": "rms", "qk_norm_over": "heads"} if large else {}
    attention = AttentionConfig(heads=heads, bias="out" if large else "all", **qk)
    norm = "rms" if large else "layer"
    mlp = PlainConfig(hidden=hidden)
    block = BlockConfig(width=width, attention=attention, mlp=mlp, norm=norm, layer_scale=0.1)
    more: dict[str, Any] = {"cls": True, "positions": "cls_and_patches", "norm_last": "none"}
    return ViTConfig(layers=layers, block=block, patch=14, image=image, **more)


VITS: dict[str, ViTConfig] = {
    "clip-b16":            clip("B", 16, activation="quick_gelu"),
    "clip-l14":            clip("L", 14, activation="quick_gelu"),
    "clip-l14-336":        clip("L", 14, 336, activation="quick_gelu"),
    "clip-h14":            clip("H", 14),
    "clip-g14":            clip("g", 14),
    "clip-bigg14":         clip("bigG", 14),
    "siglip-b16-224":      siglip("B", 16),
    "siglip-b16-256":      siglip("B", 16, 256),
    "siglip-l16-384":      siglip("L", 16, 384),
    "siglip-so400m-224":   siglip("So400M", 14),
    "siglip-so400m-384":   siglip("So400M", 14, 384),
    "siglip2-naflex-b16":  naflex("B"),
    "siglip2-naflex-so400m": naflex("So400M"),
    "dinov2-s14":          dinov2("S"),
    "dinov2-b14":          dinov2("B"),
    "dinov2-l14":          dinov2("L"),
    "dinov2-g14":          dinov2("giant"),
    "dinov2-l14-reg":      dinov2("L", registers=4),
    "dinov2-g14-reg":      dinov2("giant", registers=4),
    "eva02-ti14-336":      eva02("Ti", image=336),
    "eva02-s14-336":       eva02("S", image=336),
    "eva02-b14":           eva02("B"),
    "eva02-b14-448":       eva02("B", image=448),
    "eva02-l14":           eva02("L"),
    "eva02-l14-448":       eva02("L", image=448),
    "eva02-l14-clip":      eva02("L", for_clip=True, head=768),
    "internvit-300m":      internvit(1024, 24, 16, 4096, large=False),
    "internvit-6b":        internvit(3200, 45, 25, 12_800, large=True),
}  # fmt: skip
"""SigLIP 2 of fixed size has SigLIP's towers."""


def _qwen2_5(hidden: int) -> PackedViTConfig:
    block = _block("H", norm="rms").with_(mlp=GatedConfig(hidden=hidden, bias=True))
    return PackedViTConfig(layers=32, block=block, window=4, full=(7, 15, 23, 31))


def _qwen3(size: str, taps: tuple[int, ...]) -> PackedViTConfig:
    block, layers = _block(size, "gelu_tanh"), SIZES[size][1]
    return PackedViTConfig(layers=layers, block=block, patch=16, patch_bias=True, positions=48, taps=taps)


PACKED: dict[str, PackedViTConfig] = {
    "qwen2-vl":            PackedViTConfig(layers=32, block=_block("H", "quick_gelu")),
    "qwen2.5-vl":          _qwen2_5(3420),  # 3B and 7B
    "qwen2.5-vl-large":    _qwen2_5(3456),  # 32B and 72B
    "qwen3-vl-l":          _qwen3("L", (6, 12, 18)),  # 2B and 4B
    "qwen3-vl-so400m":     _qwen3("So400M", (9, 17, 25)),  # 8B and up
}  # fmt: skip
"""Qwen's towers: any resolution, video, packed."""

TILED: dict[str, TiledViTConfig] = {
    "llama-3.2-vision": TiledViTConfig(
        layers=32,
        over=8,
        block=BlockConfig(width=1280, attention=AttentionConfig(heads=16), mlp=PlainConfig(hidden=5120), eps=1e-5),
    ),
}


def _sam(size: str, full: tuple[int, ...]) -> SAMConfig:
    return SAMConfig(layers=SIZES[size][1], block=_block(size), full=full)


SAMS: dict[str, SAMConfig] = {
    "sam-b": _sam("B", (2, 5, 8, 11)),
    "sam-l": _sam("L", (5, 11, 17, 23)),
    "sam-h": _sam("H", (7, 15, 23, 31)),
}
"""Segment Anything's image towers."""


def _text(
    width: int, layers: int, heads: int, hidden: int, activation: Activation, eps: float, **more: Any
) -> TextConfig:
    attention, mlp = AttentionConfig(heads=heads, bias="all"), PlainConfig(hidden=hidden, activation=activation)
    return TextConfig(layers=layers, block=BlockConfig(width=width, attention=attention, mlp=mlp, eps=eps), **more)


def _clip_text(width: int, layers: int, heads: int, activation: Activation = "gelu") -> TextConfig:
    return _text(width, layers, heads, 4 * width, activation, 1e-5, vocab=49_408, eos=49_407)


def _siglip_text(size: str, vocab: int = 32_000) -> TextConfig:
    width = SIZES[size][0]
    more = {"vocab": vocab, "context": 64, "causal": False, "pool": "last", "head": width}
    return _text(*SIZES[size], "gelu_tanh", 1e-6, **more)


TEXTS: dict[str, TextConfig] = {
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


def _prismatic(image: int) -> TowersConfig:
    """Both towers one block before the end."""
    siglip_tower = TowerConfig(
        vit=siglip("So400M", 14, image), mean=NORMS["half"].mean, std=NORMS["half"].std, layer=-2
    )
    norm = NORMS["imagenet"]
    dino_tower = TowerConfig(vit=dinov2("L", registers=4), mean=norm.mean, std=norm.std, layer=-2)
    return TowersConfig(towers=(siglip_tower, dino_tower), image=image)


TOWERS: dict[str, TowersConfig] = {
    "prismatic-224": _prismatic(224),
    "prismatic-384": _prismatic(384),
}
