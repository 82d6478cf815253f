"""Configs of published vision-language models: tower, connector, decoder and resolution policy.

Rows follow the publications, with these exceptions:

    llava-1.0      Vicuna v0 is a LLaMA 1, which has the shape of Llama 2 and half its context
    token-scaling  heads and MLPs of the query transformer were not published; these are Llama's
    cogvlm-17b     EVA-CLIP-E has a norm at the end of each branch, here at its start; the MLP connector has a gate and
                   a
                   norm; two learned tokens enclose the image, whose tokens share one position
    llava-1.5-qlip  the paper names LLaVA-1.5's recipe and QLIP's encoder only: images are padded as in LLaVA-1.5, to
                   QLIP's 392 pixels. Features are taken before the last block, after it (`-last`), or after the
                   quantizer (`-codes`)
    openflamingo-9b  first release, with LLaMA 1; its gated blocks have layer norms, here the decoder's norms
"""

from typing import Any, cast

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, DeepStackConfig, VisualExpertConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.codec_tower import CodecTowerConfig
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.connectors import AnyConnectorConfig, ConvMergerConfig, FusedQueryConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.feature_reduction import VisionZipConfig, VisPrunerConfig
from vitrail.connectors.presets import CONNECTOR_PRESETS as CONNECTORS
from vitrail.encoders.hybrid_tower import HybridTowerConfig
from vitrail.encoders.multi_tower import TowerConfig
from vitrail.encoders.presets import (
    MULTI_TOWER_PRESETS,
    PACKED_VIT_PRESETS,
    SAM_PRESETS,
    TILED_VIT_PRESETS,
    VIT_PRESETS,
    VIT_SIZES,
)
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, suggest_name
from vitrail.models.cross_attention_vlm import CrossAttentionVLMConfig
from vitrail.models.vlm import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.anyres import AnyResPolicy, HD9Policy
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.resolution_policies import PRESETS as POLICIES
from vitrail.processing.resolution_policies import (
    AnyResolutionPolicy,
    CropPolicy,
    FramedPolicy,
    LetterboxPolicy,
    NaivePolicy,
    NativePolicy,
)
from vitrail.stream import StreamRules


def _connector(name: str) -> AnyConnectorConfig:
    return cast(AnyConnectorConfig, CONNECTORS[name])


def _llava(tower: str, connector: str, decoder: str, policy: AnyResolutionPolicy, **fields: Any) -> VLMConfig:
    """LLaVA, with the features of CLIP's last block but one."""
    return VLMConfig(
        tower=VIT_PRESETS[tower],
        connector=_connector(connector),
        decoder=DECODER_PRESETS[decoder],
        policy=policy,
        vision_feature_layer=-2,
        **fields,
    )


def _llava_qlip(codec: str, decoder: str, layer: int | None) -> VLMConfig:
    """LLaVA-1.5 with a codec's encoder as tower; without a layer, with the codec's codes as features."""
    released, language_model = CODEC_PRESETS[codec], DECODER_PRESETS[decoder]
    tower = get_codec_encoder_config(codec) if layer is not None else get_codec_tower_config(codec)
    width = tower.width if isinstance(tower, CodecTowerConfig) else tower.block.width
    connector = ProjectorConfig(in_features=width, out_features=language_model.block.width)
    policy = LetterboxPolicy(image_size=tower.image_size, patch_size=tower.patch_size)
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=language_model,
        policy=policy,
        mean=released.mean,
        std=released.std,
        vision_feature_layer=layer,
    )


def get_codec_encoder_config(codec: str) -> ViTConfig:
    """Return the config of a codec's encoder as a vision tower."""
    net = CODEC_PRESETS[codec].net
    if not isinstance(net, ViTAutoencoderConfig):
        names = [name for name, one in CODEC_PRESETS.items() if isinstance(one.net, ViTAutoencoderConfig)]
        raise ConfigError(f"the encoder of {codec!r} is not a ViT, so it cannot be a tower", f"use {', '.join(names)}")
    return net.encoder


def get_codec_tower_config(codec: str) -> CodecTowerConfig:
    """Return the config of a tower that outputs a codec's codes."""
    one = CODEC_PRESETS[codec]
    return CodecTowerConfig(encoder=get_codec_encoder_config(codec), quantizer=one.quantizer, pre_quant=one.pre_quant)


def _blip2(width: int, layers: int, heads: int, connector: str) -> VLMConfig:
    """BLIP-2: EVA-CLIP's giant without its last block, with CLS, and an OPT."""
    W, _, H, hidden = VIT_SIZES["g"]
    block = BlockConfig(
        width=W, attention=AttentionConfig(heads=H, bias="all"), mlp=PlainMLPConfig(intermediate_size=hidden)
    )
    tower = ViTConfig(
        layers=39, block=block, patch_size=14, image_size=224, cls_token=True, positions="cls_and_patches"
    )
    return VLMConfig(
        tower=tower,
        connector=_connector(connector),
        decoder=_opt(width, layers, heads),
        policy=NaivePolicy(image_size=224),
        keep_prefix_tokens=True,
        rules=StreamRules(fill_id=50_265),
    )


def _opt(width: int, layers: int, heads: int) -> DecoderConfig:
    mlp = PlainMLPConfig(intermediate_size=4 * width, activation="relu")
    return DecoderConfig(
        vocab_size=50_304,
        layers=layers,
        block=BlockConfig(width=width, attention=AttentionConfig(heads=heads, bias="all"), mlp=mlp, eps=1e-5),
        rotary=RotaryConfig(head_dim=width // heads, rotary_dim=0),
        learned_positions=2048 + 2,
        tie_word_embeddings=True,
    )


def _internvl3(decoder: str) -> VLMConfig:
    """InternVL3: InternViT-300M over at most twelve tiles, and a Qwen2.5 with its own vocabulary and output head."""
    language_model = DECODER_PRESETS[decoder].replace(
        vocab_size=151_674, tie_word_embeddings=False, context_length=32_768
    )
    tower, width, norm = VIT_PRESETS["internvit-300m"], language_model.block.width, NORMALIZATIONS["imagenet"]
    connector = MergerConfig(
        in_features=tower.block.width, out_features=width, intermediate_size=width, norm_position="after", eps=1e-5
    )
    rules = StreamRules(fill_id=151_667)
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=language_model,
        policy=TilesPolicy(),
        mean=norm.mean,
        std=norm.std,
        rules=rules,
    )


def _llava_next_video(tower: str, connector: str, decoder: str) -> VLMConfig:
    """LLaVA-NeXT-Video: pools a frame over 2 × 2 patches; one of the added tokens marks a video."""
    config = _llava(tower, connector, decoder, AnyResPolicy(video_pool_size=2), newline=True)
    language_model = config.decoder.replace(vocab_size=32_064)
    return config.replace(decoder=language_model, rules=StreamRules(fill_id=32_001), vision_token_ids={"video": 32_000})


def _llava_onevision(decoder: str, vocab: int) -> VLMConfig:
    """LLaVA-OneVision: SigLIP-so400m without its last block, at most nine tiles of 384 pixels, and a Qwen2."""
    language_model = DECODER_PRESETS[decoder].replace(vocab_size=vocab, context_length=32_768)
    norm = NORMALIZATIONS["half"]
    tower = VIT_PRESETS["siglip-so400m-384"]
    return VLMConfig(
        tower=tower.replace(layers=tower.layers - 1, pool="none"),
        connector=ProjectorConfig(in_features=tower.block.width, out_features=language_model.block.width),
        decoder=language_model,
        policy=POLICIES["llava-onevision"],
        mean=norm.mean,
        std=norm.std,
        vision_feature_layer=-1,
        newline=True,
        rules=StreamRules(fill_id=151_646),
        vision_token_ids={"video": 151_647},
    )


def _llava_with_fewer_tokens(**fields: Any) -> VLMConfig:
    """LLaVA-1.5-7B with reduced visual tokens, or with VoCo tokens."""
    return _llava("clip-l14-336", "llava-1.5-7b", "llama-2-7b", POLICIES["llava-1.5"], **fields)


def _prismatic(decoder: str) -> VLMConfig:
    """Prismatic: SigLIP and DINOv2, each with its own normalization, so the model passes pixels in 0 … 1."""
    tower, language_model = MULTI_TOWER_PRESETS["prismatic-384"], DECODER_PRESETS[decoder]
    connector = ProjectorConfig(
        in_features=tower.width, out_features=language_model.block.width, layers=3, hidden_sizes=(4 * tower.width, 4096)
    )
    policy = NaivePolicy(image_size=384, unread_pixels=6)
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=language_model,
        policy=policy,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )


def _deepseek_vl(width: int, layers: int, heads: int, hidden: int, *, fine: bool) -> VLMConfig:
    """DeepSeek-VL: SigLIP without its pool, with a plain GELU; the larger model adds SAM at 1,024 pixels."""
    attention = AttentionConfig(heads=heads, kv_heads=heads)
    language_model = DecoderConfig(
        vocab_size=102_400,
        layers=layers,
        block=BlockConfig(width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=hidden), norm="rms"),
        rotary=RotaryConfig(head_dim=width // heads),
        context_length=16_384,
    )
    siglip = VIT_PRESETS["siglip-l16-384"]
    half = NORMALIZATIONS["half"]
    clip = NORMALIZATIONS["clip"]
    rules = StreamRules(fill_id=100_015)
    siglip = siglip.replace(pool="none", block=siglip.block.replace(mlp=PlainMLPConfig(intermediate_size=4096)))
    if not fine:
        connector = ProjectorConfig(in_features=siglip.block.width, out_features=width)
        return VLMConfig(
            tower=siglip,
            connector=connector,
            decoder=language_model,
            policy=FramedPolicy(),
            mean=half.mean,
            std=half.std,
            rules=rules,
        )
    tower = HybridTowerConfig(low=TowerConfig(vit=siglip), high=SAM_PRESETS["sam-b"], mean=clip.mean, std=clip.std)
    connector = ProjectorConfig(
        in_features=tower.width, out_features=width, split_widths=(tower.high_width, siglip.block.width)
    )
    policy = FramedPolicy(high_res_size=tower.image_size, fill_colour=(122, 116, 104))
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=language_model,
        policy=policy,
        mean=(0.0, 0.0, 0.0),  # each tower normalizes pixels itself
        std=(1.0, 1.0, 1.0),
        rules=rules,
    )


def _token_scaling(decoder: str) -> VLMConfig:
    tower, language_model = VIT_PRESETS["clip-l14-336"], DECODER_PRESETS[decoder]
    connector = ConvMergerConfig(in_features=tower.block.width, out_features=tower.block.width, newline=True)
    queries = cast(FusedQueryConfig, CONNECTORS["fused-256"]).replace(
        vocab_size=language_model.vocab_size, out_features=language_model.block.width
    )
    return VLMConfig(
        tower=tower,
        connector=connector,
        queries=queries,
        decoder=language_model,
        policy=HD9Policy(),
        vision_feature_layer=-2,
    )


# ---- Qwen -------------------------------------------------------------------------------------------------------

QWEN_IMAGE_TOKEN_ID = 151_655
QWEN_VISION_TOKEN_IDS = {"video": 151_656, "vision_start": 151_652, "vision_end": 151_653}


def _qwen2(tower: str, decoder: DecoderConfig, positions: str, context: int) -> VLMConfig:
    """Qwen2-VL and Qwen2.5-VL: images of 4 to 16,384 tokens; the decoder shapes of Qwen2.5 are those of Qwen2."""
    rotary = decoder.rotary.replace(layout="mrope", sections=(16, 24, 24))
    policy = NativePolicy(max_pixels=28 * 28 * 16_384)
    return _qwen(tower, decoder.replace(rotary=rotary, context_length=context), positions, policy, "clip")


def _qwen3(tower: str, decoder: str) -> VLMConfig:
    """Qwen3-VL: features of three tower layers are added after the first decoder layers."""
    language_model = DECODER_PRESETS[decoder]
    rotary = language_model.rotary.replace(layout="mrope_interleaved", sections=(24, 20, 20), theta=5e6)
    language_model = language_model.replace(rotary=rotary, context_length=262_144, fusion=DeepStackConfig())
    return _qwen(tower, language_model, "qwen3-vl", cast(NativePolicy, POLICIES["qwen3-vl"]), "half")


def _qwen(tower: str, decoder: DecoderConfig, positions: str, policy: NativePolicy, norm: str) -> VLMConfig:
    vision_tower, (mean, std) = PACKED_VIT_PRESETS[tower], NORMALIZATIONS[norm]
    merger = MergerConfig(
        in_features=vision_tower.block.width,
        out_features=decoder.block.width,
        norm=vision_tower.block.norm,
        order="blocks",
    )
    return VLMConfig(
        tower=vision_tower,
        connector=merger,
        decoder=decoder,
        policy=policy,
        mean=mean,
        std=std,
        stack=merger.replace(norm_position="after") if vision_tower.feature_layers else None,
        rules=StreamRules(positions=positions, vocab_size=decoder.vocab_size, fill_id=QWEN_IMAGE_TOKEN_ID),
        vision_token_ids=QWEN_VISION_TOKEN_IDS,
    )


def _qwen_3b() -> DecoderConfig:
    """Qwen2.5-3B."""
    small = DECODER_PRESETS["qwen2.5-1.5b"]
    attention = small.block.attention.replace(heads=16, kv_heads=2)
    return small.replace(
        layers=36,
        block=small.block.replace(width=2048, attention=attention, mlp=GatedMLPConfig(intermediate_size=11_008)),
    )


# ---- visual experts and cross-attention -------------------------------------------------------------------------


def _cogvlm(decoder: str) -> VLMConfig:
    """CogVLM: EVA-CLIP-E without its last block, and a visual expert in every layer of a Vicuna."""
    block = BlockConfig(
        width=1792, attention=AttentionConfig(heads=16, bias="all"), mlp=PlainMLPConfig(intermediate_size=15_360)
    )
    more: dict[str, Any] = {"cls_token": True, "positions": "cls_and_patches", "norm_last": "none"}
    language_model = DECODER_PRESETS[decoder].replace(context_length=2048, fusion=VisualExpertConfig())
    return VLMConfig(
        tower=ViTConfig(layers=63, block=block, patch_size=14, image_size=490, **more),
        connector=ProjectorConfig(
            in_features=1792, out_features=language_model.block.width, layers=3, hidden_sizes=(4096, 11_008), bias=False
        ),
        decoder=language_model,
        policy=NaivePolicy(image_size=490),
    )


def _llama_vision(decoder: str) -> CrossAttentionVLMConfig:
    tower, language_model = TILED_VIT_PRESETS["llama-3.2-vision"], DECODER_PRESETS[decoder]
    attention = language_model.block.attention.replace(qk_norm="rms")
    fusion = CrossAttentionFusionConfig(
        layer_indices=tuple(range(3, 40, 5)), placement="inserted", attention=attention, without_image="skip"
    )
    return CrossAttentionVLMConfig(
        tower=tower,
        connector=ProjectorConfig(in_features=tower.width, out_features=language_model.block.width, layers=1),
        decoder=language_model.replace(fusion=fusion, extra_embeddings=8),
        image_token_id=128_256,
        join_adjacent=True,
    )


def _llama_1(decoder: str, added: int, fusion: CrossAttentionFusionConfig) -> DecoderConfig:
    """Llama 2's shape with LLaMA 1's context length and epsilon, and a few added tokens."""
    language_model = DECODER_PRESETS[decoder]
    attention = language_model.block.attention.replace(eps=1e-6)
    block = language_model.block.replace(eps=1e-6, attention=attention)
    return language_model.replace(
        vocab_size=language_model.vocab_size + added, block=block, context_length=2048, fusion=fusion
    )


def _idefics(decoder: str) -> CrossAttentionVLMConfig:
    tower, heads = VIT_PRESETS["clip-h14"], DECODER_PRESETS[decoder].block.attention
    attention = heads.replace(qk_norm="rms", eps=1e-6)
    fusion = CrossAttentionFusionConfig(
        layer_indices=tuple(range(0, 32, 4)), context_width=tower.block.width, attention=attention
    )
    return CrossAttentionVLMConfig(
        tower=tower,
        connector=_connector("idefics-9b"),
        decoder=_llama_1(decoder, 2, fusion),
        image_token_id=32_001,
        keep_prefix_tokens=True,
    )


def _openflamingo(decoder: str) -> CrossAttentionVLMConfig:
    """OpenFlamingo: eight narrow heads attend to the last image before every fourth layer."""
    fusion = CrossAttentionFusionConfig(
        layer_indices=tuple(range(3, 32, 4)),
        context_width=1024,
        attention=AttentionConfig(heads=8, head_dim=64),
        mlp=PlainMLPConfig(intermediate_size=4 * 4096, bias=False),
    )
    return CrossAttentionVLMConfig(
        tower=VIT_PRESETS["clip-l14"],
        connector=_connector("openflamingo-9b"),
        decoder=_llama_1(decoder, 3, fusion),
        image_token_id=32_001,
    )


# fmt: off
VLM_PRESETS: dict[str, VLMConfig] = {
    "llava-1.0":      _llava("clip-l14",     "llava-7b",      "llama-2-7b",  CropPolicy(image_size=224)),
    "llava-1.5-7b":   _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  POLICIES["llava-1.5"]),
    "llava-1.5-vispruner-64": _llava_with_fewer_tokens(feature_reduction=VisPrunerConfig(keep=64)),
    "llava-1.5-visionzip-64": _llava_with_fewer_tokens(feature_reduction=VisionZipConfig(keep=64)),
    "voco-llama-7b":  _llava_with_fewer_tokens(voco_tokens=1),
    "llava-1.5-13b":  _llava("clip-l14-336", "llava-1.5-13b", "llama-2-13b", POLICIES["llava-1.5"]),
    "llava-1.5-qlip":       _llava_qlip("qlip-l14-392", "llama-2-7b", layer=-2),
    "llava-1.5-qlip-last":  _llava_qlip("qlip-l14-392", "llama-2-7b", layer=-1),
    "llava-1.5-qlip-codes": _llava_qlip("qlip-l14-392", "llama-2-7b", layer=None),
    "llava-next-7b":  _llava("clip-l14-336", "llava-1.5-7b",  "llama-2-7b",  AnyResPolicy(), newline=True),
    "llava-next-video-7b":  _llava_next_video("clip-l14-336", "llava-1.5-7b", "llama-2-7b"),
    "llava-onevision-0.5b": _llava_onevision("qwen2.5-0.5b", 152_000),
    "llava-onevision-7b":   _llava_onevision("qwen2.5-7b", 152_128),
    "prismatic-7b":   _prismatic("llama-2-7b"),
    "deepseek-vl-1.3b": _deepseek_vl(2048, 24, 16, 5632, fine=False),
    "deepseek-vl-7b":   _deepseek_vl(4096, 30, 32, 11_008, fine=True),
    "blip2-opt-2.7b": _blip2(2560, 32, 32, "blip2-opt-2.7b"),
    "internvl3-1b":   _internvl3("qwen2.5-0.5b"),
    "internvl3-2b":   _internvl3("qwen2.5-1.5b"),
    "internvl3-8b":   _internvl3("qwen2.5-7b"),
    "token-scaling":  _token_scaling("llama-2-7b"),
    "qwen2-vl-2b":    _qwen2("qwen2-vl",   DECODER_PRESETS["qwen2.5-1.5b"], "qwen2-vl",   32_768),
    "qwen2-vl-7b":    _qwen2("qwen2-vl",   DECODER_PRESETS["qwen2.5-7b"],   "qwen2-vl",   32_768),
    "qwen2.5-vl-3b":  _qwen2("qwen2.5-vl", _qwen_3b(),               "qwen2.5-vl", 128_000),
    "qwen2.5-vl-7b":  _qwen2("qwen2.5-vl", DECODER_PRESETS["qwen2.5-7b"],   "qwen2.5-vl", 128_000),
    "qwen3-vl-2b":      _qwen3("qwen3-vl-l",      "qwen3-1.7b"),
    "qwen3-vl-4b":      _qwen3("qwen3-vl-l",      "qwen3-4b"),
    "qwen3-vl-8b":      _qwen3("qwen3-vl-so400m", "qwen3-8b"),
    "qwen3-vl-32b":     _qwen3("qwen3-vl-so400m", "qwen3-32b"),
    "qwen3-vl-30b-a3b": _qwen3("qwen3-vl-so400m", "qwen3-30b-a3b"),
    "qwen3-vl-235b-a22b": _qwen3("qwen3-vl-so400m", "qwen3-235b-a22b"),
    "cogvlm-17b":     _cogvlm("llama-2-7b"),
}
"""Models whose images are tokens of the stream."""

CROSS_ATTENTION_VLM_PRESETS: dict[str, CrossAttentionVLMConfig] = {
    "llama-3.2-11b-vision": _llama_vision("llama-3.1-8b"),
    "idefics-9b":           _idefics("llama-2-7b"),
    "openflamingo-9b":      _openflamingo("llama-2-7b"),
}
"""Models with cross-attention to image features."""
# fmt: on

ALL_VLM_PRESETS: dict[str, VLMConfig | CrossAttentionVLMConfig] = {**VLM_PRESETS, **CROSS_ATTENTION_VLM_PRESETS}


def get_vlm_config(name: str) -> VLMConfig | CrossAttentionVLMConfig:
    if name not in ALL_VLM_PRESETS:
        raise ConfigError(f"there is no vision-language model {name!r}", suggest_name(name, ALL_VLM_PRESETS))
    return ALL_VLM_PRESETS[name]
