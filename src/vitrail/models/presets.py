"""Whole systems by name: a tower, a connector, a decoder and how pictures are fitted, a row each.

What a row says is what was published, but for this:

    llava-1.0      Vicuna v0 is a LLaMA 1, which has the shape of Llama 2 and half its context
    token-scaling  its nine tiles and their convolution before a decoder; of the queries that are fused with the
                   question there, `connectors.presets` has the shape
"""

from typing import Any, cast

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.presets import DECODERS
from vitrail.connectors import AnyConnectorConfig, ConvMergerConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.presets import PRESETS as CONNECTORS
from vitrail.encoders.presets import SIZES, TOWERS, VITS
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, nearest
from vitrail.models.vlm import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, RotaryConfig
from vitrail.processing.anyres import HD9, AnyRes
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import PRESETS as POLICIES
from vitrail.processing.resolution import AnyPolicy, Crop, Naive
from vitrail.processing.tiles import Tiles
from vitrail.stream import Rules


def _connector(name: str) -> AnyConnectorConfig:
    return cast(AnyConnectorConfig, CONNECTORS[name])


def _llava(tower: str, connector: str, decoder: str, policy: AnyPolicy, **more: Any) -> VLMConfig:
    """Features of CLIP's last block but one."""
    return VLMConfig(
        tower=VITS[tower], connector=_connector(connector), decoder=DECODERS[decoder], policy=policy, layer=-2, **more
    )


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


def _prismatic(decoder: str) -> VLMConfig:
    """SigLIP beside DINOv2, each with its own mean and deviation, so that pixels reach them between 0 and 1."""
    tower, words = TOWERS["prismatic-384"], DECODERS[decoder]
    connector = ProjectorConfig(reads=tower.width, gives=words.block.width, layers=3, hidden=(4 * tower.width, 4096))
    policy = Naive(size=384, unread=6)
    return VLMConfig(
        tower=tower, connector=connector, decoder=words, policy=policy, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    )


def _token_scaling(decoder: str) -> VLMConfig:
    tower, words = VITS["clip-l14-336"], DECODERS[decoder]
    connector = ConvMergerConfig(reads=tower.block.width, gives=words.block.width)
    return VLMConfig(tower=tower, connector=connector, decoder=words, policy=HD9(), layer=-2, newline=True)


# fmt: off
VLMS: dict[str, VLMConfig] = {
    "llava-1.0":      _llava("clip-l14",     "llava-7b",      "llama-2-7b",  Crop(size=224)),
    "llava-1.5-7b":   _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  cast(AnyPolicy, POLICIES["llava-1.5"])),
    "llava-1.5-13b":  _llava("clip-l14-336", "llava-1.5-13b", "llama-2-13b", cast(AnyPolicy, POLICIES["llava-1.5"])),
    "llava-next-7b":  _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  AnyRes(), newline=True),
    "prismatic-7b":   _prismatic("llama-2-7b"),
    "blip2-opt-2.7b": _blip2(2560, 32, 32, "blip2-opt-2.7b"),
    "internvl3-1b":   _internvl3("qwen2.5-0.5b"),
    "internvl3-2b":   _internvl3("qwen2.5-1.5b"),
    "internvl3-8b":   _internvl3("qwen2.5-7b"),
    "token-scaling":  _token_scaling("llama-2-7b"),
}
# fmt: on


def vlm_named(name: str) -> VLMConfig:
    if name not in VLMS:
        raise ConfigError(f"no vision-language model is called {name!r}", nearest(name, VLMS))
    return VLMS[name]
