"""Whole systems by name: a tower, a connector, a decoder and how pictures are fitted, a row each.

What a row says is what was published, but for this:

    llava-1.0      Vicuna v0 is a LLaMA 1, which has the shape of Llama 2 and half its context
    token-scaling  heads and MLPs of the transformer that fuses queries with the question were not published: Llama's
    cogvlm-17b     EVA-CLIP-E has a norm at the end of each branch, here at its start; the MLP has a gate beside its
                   widest layer and a norm; two learned marks stand around the picture, whose tokens share one position
    llava-1.5-qlip  the paper names LLaVA-1.5's recipe and QLIP's encoder, and no more: pictures are padded as LLaVA-1.5
                   does, to QLIP's 392. Features are read before the last block, behind it, where the quantizer reads
                   them (`-last`), or behind the quantizer (`-codes`)
    openflamingo-9b  the first release, with LLaMA 1; its gated blocks have layer norms, here they have the decoder's
"""

from typing import Any, cast

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossConfig, DeepStackConfig, ExpertConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.presets import CODECS
from vitrail.codecs.tower import CodesTowerConfig
from vitrail.codecs.vit import ViTPairConfig
from vitrail.connectors import AnyConnectorConfig, ConvMergerConfig, FusedConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.presets import PRESETS as CONNECTORS
from vitrail.connectors.reduce import VisionZipConfig, VisPrunerConfig
from vitrail.encoders.hybrid import HybridConfig
from vitrail.encoders.presets import PACKED, SAMS, SIZES, TILED, TOWERS, VITS
from vitrail.encoders.towers import TowerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, nearest
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.vlm import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.processing.anyres import HD9, AnyRes
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import PRESETS as POLICIES
from vitrail.processing.resolution import AnyPolicy, Crop, Framed, Letterbox, Naive, Native
from vitrail.processing.tiles import Tiles
from vitrail.stream import Rules


def _connector(name: str) -> AnyConnectorConfig:
    return cast(AnyConnectorConfig, CONNECTORS[name])


def _llava(tower: str, connector: str, decoder: str, policy: AnyPolicy, **more: Any) -> VLMConfig:
    """Features of CLIP's last block but one."""
    return VLMConfig(
        tower=VITS[tower], connector=_connector(connector), decoder=DECODERS[decoder], policy=policy, layer=-2, **more
    )


def _llava_qlip(codec: str, decoder: str, layer: int | None) -> VLMConfig:
    """LLaVA-1.5 with a codec's encoder as its tower, or, of no layer, with the codes that it gives."""
    released, words = CODECS[codec], DECODERS[decoder]
    tower = encoder_of(codec) if layer is not None else codes_of(codec)
    width = tower.width if isinstance(tower, CodesTowerConfig) else tower.block.width
    connector = ProjectorConfig(reads=width, gives=words.block.width)
    policy = Letterbox(size=tower.image, patch=tower.patch)
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=words,
        policy=policy,
        mean=released.mean,
        std=released.std,
        layer=layer,
    )


def encoder_of(codec: str) -> ViTConfig:
    """A codec's encoder, which is a tower like any other."""
    net = CODECS[codec].net
    if not isinstance(net, ViTPairConfig):
        ours = [name for name, one in CODECS.items() if isinstance(one.net, ViTPairConfig)]
        raise ConfigError(f"the encoder of {codec!r} is no ViT, and cannot be a tower", f"use {', '.join(ours)}")
    return net.encoder


def codes_of(codec: str) -> CodesTowerConfig:
    """What a codec's quantizer leaves of a picture, as a tower."""
    one = CODECS[codec]
    return CodesTowerConfig(encoder=encoder_of(codec), quantizer=one.quantizer, into=one.into)


def _blip2(width: int, layers: int, heads: int, connector: str) -> VLMConfig:
    """EVA-CLIP's giant without its last block, CLS read along, before an OPT."""
    W, _, H, hidden = SIZES["g"]
    block = BlockConfig(width=W, attention=AttentionConfig(heads=H, bias="all"), mlp=PlainConfig(hidden=hidden))
    tower = ViTConfig(layers=39, block=block, patch=14, image=224, cls=True, positions="cls_and_patches")
    return VLMConfig(
        tower=tower,
        connector=_connector(connector),
        decoder=_opt(width, layers, heads),
        policy=Naive(size=224),
        prefix=True,
        rules=Rules(fill=50_265),
    )


def _opt(width: int, layers: int, heads: int) -> DecoderConfig:
    mlp = PlainConfig(hidden=4 * width, activation="relu")
    return DecoderConfig(
        vocab=50_304,
        layers=layers,
        block=BlockConfig(width=width, attention=AttentionConfig(heads=heads, bias="all"), mlp=mlp, eps=1e-5),
        rotary=RotaryConfig(head_dim=width // heads, dim=0),
        learned=2048 + 2,
        tied=True,
    )


def _internvl3(decoder: str) -> VLMConfig:
    """InternViT-300M over at most twelve tiles, and a Qwen2.5 with words of its own, its head apart."""
    words = DECODERS[decoder].with_(vocab=151_674, tied=False, context=32_768)
    tower, width, norm = VITS["internvit-300m"], words.block.width, NORMS["imagenet"]
    connector = MergerConfig(reads=tower.block.width, gives=width, hidden=width, norm_at="after", eps=1e-5)
    rules = Rules(fill=151_667)
    return VLMConfig(
        tower=tower, connector=connector, decoder=words, policy=Tiles(), mean=norm.mean, std=norm.std, rules=rules
    )


def _next_video(tower: str, connector: str, decoder: str) -> VLMConfig:
    """LLaVA-NeXT that reads a frame as means of 2 × 2 patches; of the words that were added, one is for a video."""
    config = _llava(tower, connector, decoder, AnyRes(pool=2), newline=True)
    words = config.decoder.with_(vocab=32_064)
    return config.with_(decoder=words, rules=Rules(fill=32_001), marks={"video": 32_000})


def _onevision(decoder: str, vocab: int) -> VLMConfig:
    """SigLIP-so400m without its last block, over tiles of 384 bound to nine of them, and a Qwen2."""
    words, norm = DECODERS[decoder].with_(vocab=vocab, context=32_768), NORMS["half"]
    tower = VITS["siglip-so400m-384"]
    return VLMConfig(
        tower=tower.with_(layers=tower.layers - 1, pool="none"),
        connector=ProjectorConfig(reads=tower.block.width, gives=words.block.width),
        decoder=words,
        policy=cast(AnyPolicy, POLICIES["llava-onevision"]),
        mean=norm.mean,
        std=norm.std,
        layer=-1,
        newline=True,
        rules=Rules(fill=151_646),
        marks={"video": 151_647},
    )


def _fewer(**more: Any) -> VLMConfig:
    """LLaVA-1.5-7B with fewer tokens of a picture, or with one that stands for it."""
    return _llava("clip-l14-336", "llava-1.5-7b", "llama-2-7b", cast(AnyPolicy, POLICIES["llava-1.5"]), **more)


def _prismatic(decoder: str) -> VLMConfig:
    """SigLIP beside DINOv2, each with its own mean and deviation, so that pixels reach them between 0 and 1."""
    tower, words = TOWERS["prismatic-384"], DECODERS[decoder]
    connector = ProjectorConfig(reads=tower.width, gives=words.block.width, layers=3, hidden=(4 * tower.width, 4096))
    policy = Naive(size=384, unread=6)
    return VLMConfig(
        tower=tower, connector=connector, decoder=words, policy=policy, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    )


def _deepseek_vl(width: int, layers: int, heads: int, hidden: int, *, fine: bool) -> VLMConfig:
    """SigLIP without its pool, with a plain GELU; the larger model has SAM beside it, at 1,024 pixels."""
    attention = AttentionConfig(heads=heads, kv_heads=heads)
    words = DecoderConfig(
        vocab=102_400,
        layers=layers,
        block=BlockConfig(width=width, attention=attention, mlp=GatedConfig(hidden=hidden), norm="rms"),
        rotary=RotaryConfig(head_dim=width // heads),
        context=16_384,
    )
    siglip, half, clip, rules = VITS["siglip-l16-384"], NORMS["half"], NORMS["clip"], Rules(fill=100_015)
    siglip = siglip.with_(pool="none", block=siglip.block.with_(mlp=PlainConfig(hidden=4096)))
    if not fine:
        connector = ProjectorConfig(reads=siglip.block.width, gives=width)
        return VLMConfig(
            tower=siglip, connector=connector, decoder=words, policy=Framed(), mean=half.mean, std=half.std, rules=rules
        )
    tower = HybridConfig(low=TowerConfig(vit=siglip), high=SAMS["sam-b"], mean=clip.mean, std=clip.std)
    connector = ProjectorConfig(reads=tower.width, gives=width, apart=(tower.fine, siglip.block.width))
    policy = Framed(fine=tower.image, fill=(122, 116, 104))
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=words,
        policy=policy,
        mean=(0.0, 0.0, 0.0),  # each tower has its own
        std=(1.0, 1.0, 1.0),
        rules=rules,
    )


def _token_scaling(decoder: str) -> VLMConfig:
    tower, words = VITS["clip-l14-336"], DECODERS[decoder]
    connector = ConvMergerConfig(reads=tower.block.width, gives=tower.block.width, newline=True)
    queries = cast(FusedConfig, CONNECTORS["fused-256"]).with_(vocab=words.vocab, gives=words.block.width)
    return VLMConfig(tower=tower, connector=connector, queries=queries, decoder=words, policy=HD9(), layer=-2)


# ---- Qwen -------------------------------------------------------------------------------------------------------

PICTURE = 151_655
MARKS = {"video": 151_656, "vision_start": 151_652, "vision_end": 151_653}


def _qwen2(tower: str, words: DecoderConfig, positions: str, context: int) -> VLMConfig:
    """Qwen2-VL and 2.5: pictures of 4 to 16,384 tokens; the shapes of Qwen2.5, which are Qwen2's."""
    turned = words.rotary.with_(layout="mrope", sections=(16, 24, 24))
    policy = Native(max_pixels=28 * 28 * 16_384)
    return _qwen(tower, words.with_(rotary=turned, context=context), positions, policy, "clip")


def _qwen3(tower: str, decoder: str) -> VLMConfig:
    """Qwen3-VL: features of three depths are added after the first layers."""
    words = DECODERS[decoder]
    turned = words.rotary.with_(layout="mrope_interleaved", sections=(24, 20, 20), theta=5e6)
    words = words.with_(rotary=turned, context=262_144, fusion=DeepStackConfig())
    return _qwen(tower, words, "qwen3-vl", cast(Native, POLICIES["qwen3-vl"]), "half")


def _qwen(tower: str, words: DecoderConfig, positions: str, policy: Native, norm: str) -> VLMConfig:
    eyes, (mean, std) = PACKED[tower], NORMS[norm]
    merger = MergerConfig(reads=eyes.block.width, gives=words.block.width, norm=eyes.block.norm, order="blocks")
    return VLMConfig(
        tower=eyes,
        connector=merger,
        decoder=words,
        policy=policy,
        mean=mean,
        std=std,
        stack=merger.with_(norm_at="after") if eyes.taps else None,
        rules=Rules(positions=positions, vocab=words.vocab, fill=PICTURE),
        marks=MARKS,
    )


def _qwen_3b() -> DecoderConfig:
    """Qwen2.5-3B."""
    small = DECODERS["qwen2.5-1.5b"]
    attention = small.block.attention.with_(heads=16, kv_heads=2)
    return small.with_(
        layers=36, block=small.block.with_(width=2048, attention=attention, mlp=GatedConfig(hidden=11_008))
    )


# ---- weights or blocks of their own for pictures ----------------------------------------------------------------


def _cogvlm(decoder: str) -> VLMConfig:
    """EVA-CLIP-E without its last block, and a visual expert in every layer of a Vicuna."""
    block = BlockConfig(width=1792, attention=AttentionConfig(heads=16, bias="all"), mlp=PlainConfig(hidden=15_360))
    more: dict[str, Any] = {"cls": True, "positions": "cls_and_patches", "norm_last": "none"}
    words = DECODERS[decoder].with_(context=2048, fusion=ExpertConfig())
    return VLMConfig(
        tower=ViTConfig(layers=63, block=block, patch=14, image=490, **more),
        connector=ProjectorConfig(reads=1792, gives=words.block.width, layers=3, hidden=(4096, 11_008), bias=False),
        decoder=words,
        policy=Naive(size=490),
    )


def _llama_vision(decoder: str) -> LookingVLMConfig:
    tower, words = TILED["llama-3.2-vision"], DECODERS[decoder]
    attention = words.block.attention.with_(qk_norm="rms")
    fusion = CrossConfig(at=tuple(range(3, 40, 5)), where="inserted", attention=attention, blind="skip")
    return LookingVLMConfig(
        tower=tower,
        connector=ProjectorConfig(reads=tower.width, gives=words.block.width, layers=1),
        decoder=words.with_(fusion=fusion, extra=8),
        mark=128_256,
        joined=True,
    )


def _llama_1(decoder: str, added: int, fusion: CrossConfig) -> DecoderConfig:
    """Llama 2's shape with LLaMA 1's context and epsilon, and a few added words."""
    words = DECODERS[decoder]
    attention = words.block.attention.with_(eps=1e-6)
    block = words.block.with_(eps=1e-6, attention=attention)
    return words.with_(vocab=words.vocab + added, block=block, context=2048, fusion=fusion)


def _idefics(decoder: str) -> LookingVLMConfig:
    tower, heads = VITS["clip-h14"], DECODERS[decoder].block.attention
    attention = heads.with_(qk_norm="rms", eps=1e-6)
    fusion = CrossConfig(at=tuple(range(0, 32, 4)), context_width=tower.block.width, attention=attention)
    return LookingVLMConfig(
        tower=tower,
        connector=_connector("idefics-9b"),
        decoder=_llama_1(decoder, 2, fusion),
        mark=32_001,
        prefix=True,
    )


def _openflamingo(decoder: str) -> LookingVLMConfig:
    """The open copy of Flamingo: eight narrow heads look at the last picture, before every fourth layer."""
    fusion = CrossConfig(
        at=tuple(range(3, 32, 4)),
        context_width=1024,
        attention=AttentionConfig(heads=8, head_dim=64),
        mlp=PlainConfig(hidden=4 * 4096, bias=False),
    )
    return LookingVLMConfig(
        tower=VITS["clip-l14"],
        connector=_connector("openflamingo-9b"),
        decoder=_llama_1(decoder, 3, fusion),
        mark=32_001,
    )


# fmt: off
VLMS: dict[str, VLMConfig] = {
    "llava-1.0":      _llava("clip-l14",     "llava-7b",      "llama-2-7b",  Crop(size=224)),
    "llava-1.5-7b":   _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  cast(AnyPolicy, POLICIES["llava-1.5"])),
    "llava-1.5-vispruner-64": _fewer(reduce=VisPrunerConfig(keep=64)),
    "llava-1.5-visionzip-64": _fewer(reduce=VisionZipConfig(keep=64)),
    "voco-llama-7b":  _fewer(voco=1),
    "llava-1.5-13b":  _llava("clip-l14-336", "llava-1.5-13b", "llama-2-13b", cast(AnyPolicy, POLICIES["llava-1.5"])),
    "llava-1.5-qlip":       _llava_qlip("qlip-l14-392", "llama-2-7b", layer=-2),
    "llava-1.5-qlip-last":  _llava_qlip("qlip-l14-392", "llama-2-7b", layer=-1),
    "llava-1.5-qlip-codes": _llava_qlip("qlip-l14-392", "llama-2-7b", layer=None),
    "llava-next-7b":  _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  AnyRes(), newline=True),
    "llava-next-video-7b":  _next_video("clip-l14-336", "llava-1.5-7b", "llama-2-7b"),
    "llava-onevision-0.5b": _onevision("qwen2.5-0.5b", 152_000),
    "llava-onevision-7b":   _onevision("qwen2.5-7b", 152_128),
    "prismatic-7b":   _prismatic("llama-2-7b"),
    "deepseek-vl-1.3b": _deepseek_vl(2048, 24, 16, 5632, fine=False),
    "deepseek-vl-7b":   _deepseek_vl(4096, 30, 32, 11_008, fine=True),
    "blip2-opt-2.7b": _blip2(2560, 32, 32, "blip2-opt-2.7b"),
    "internvl3-1b":   _internvl3("qwen2.5-0.5b"),
    "internvl3-2b":   _internvl3("qwen2.5-1.5b"),
    "internvl3-8b":   _internvl3("qwen2.5-7b"),
    "token-scaling":  _token_scaling("llama-2-7b"),
    "qwen2-vl-2b":    _qwen2("qwen2-vl",   DECODERS["qwen2.5-1.5b"], "qwen2-vl",   32_768),
    "qwen2-vl-7b":    _qwen2("qwen2-vl",   DECODERS["qwen2.5-7b"],   "qwen2-vl",   32_768),
    "qwen2.5-vl-3b":  _qwen2("qwen2.5-vl", _qwen_3b(),               "qwen2.5-vl", 128_000),
    "qwen2.5-vl-7b":  _qwen2("qwen2.5-vl", DECODERS["qwen2.5-7b"],   "qwen2.5-vl", 128_000),
    "qwen3-vl-2b":      _qwen3("qwen3-vl-l",      "qwen3-1.7b"),
    "qwen3-vl-4b":      _qwen3("qwen3-vl-l",      "qwen3-4b"),
    "qwen3-vl-8b":      _qwen3("qwen3-vl-so400m", "qwen3-8b"),
    "qwen3-vl-32b":     _qwen3("qwen3-vl-so400m", "qwen3-32b"),
    "qwen3-vl-30b-a3b": _qwen3("qwen3-vl-so400m", "qwen3-30b-a3b"),
    "qwen3-vl-235b-a22b": _qwen3("qwen3-vl-so400m", "qwen3-235b-a22b"),
    "cogvlm-17b":     _cogvlm("llama-2-7b"),
}
"""Their pictures are tokens of the stream."""

LOOKING: dict[str, LookingVLMConfig] = {
    "llama-3.2-11b-vision": _llama_vision("llama-3.1-8b"),
    "idefics-9b":           _idefics("llama-2-7b"),
    "openflamingo-9b":      _openflamingo("llama-2-7b"),
}
"""Their pictures are looked at from beside it."""
# fmt: on

SYSTEMS: dict[str, VLMConfig | LookingVLMConfig] = {**VLMS, **LOOKING}


def vlm_named(name: str) -> VLMConfig | LookingVLMConfig:
    if name not in SYSTEMS:
        raise ConfigError(f"no vision-language model is called {name!r}", nearest(name, SYSTEMS))
    return SYSTEMS[name]
