"""VLM presets: token counts and parameter counts as published, without building weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlavaNextProcessor,
    LlavaNextVideoProcessor,
    LlavaOnevisionProcessor,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from hub.test_mllama import ROPE
from hub.test_qwen_vl_shapes import RELEASED
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import DeepStackConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.codec_tower import CodecTower, CodecTowerConfig
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.connectors import ConvMergerConfig, ProjectorConfig, QFormerConfig, ResamplerConfig, make_connector
from vitrail.connectors.feature_reduction import VisionZipConfig
from vitrail.encoders import HybridTower, HybridTowerConfig, ViT, ViTConfig
from vitrail.encoders.multi_tower import MultiTower, MultiTowerConfig
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.errors import ConfigError
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.presets import CROSS_ATTENTION_VLM_PRESETS, VLM_PRESETS, get_vlm_config
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.resolution_policies import LetterboxPolicy, NativePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, text_part

TOKENS = {  # of a picture of 640 × 480
    "llava-1.0": 16**2,
    "llava-1.5-7b": 24**2,
    "llava-1.5-vispruner-64": 64,
    "llava-1.5-visionzip-64": 64,
    "voco-llama-7b": 24**2 + 1,
    "llava-1.5-13b": 24**2,
    "llava-1.5-qlip": 28**2,
    "llava-1.5-qlip-last": 28**2,
    "llava-1.5-qlip-codes": 28**2,
    "llava-next-7b": 24**2 + 36 * (48 + 1),
    "llava-next-video-7b": 24**2 + 36 * (48 + 1),
    "llava-onevision-0.5b": 27**2 + 40 * (54 + 1),
    "llava-onevision-7b": 27**2 + 40 * (54 + 1),
    "prismatic-7b": 27**2,
    "deepseek-vl-1.3b": 24**2,
    "deepseek-vl-7b": 24**2,
    "blip2-opt-2.7b": 32,
    "internvl3-1b": (12 + 1) * 256,
    "internvl3-2b": (12 + 1) * 256,
    "internvl3-8b": (12 + 1) * 256,
    "token-scaling": 256,
    "qwen2-vl-2b": 17 * 23,
    "qwen2-vl-7b": 17 * 23,
    "qwen2.5-vl-3b": 17 * 23,
    "qwen2.5-vl-7b": 17 * 23,
    "qwen3-vl-2b": 15 * 20,
    "qwen3-vl-4b": 15 * 20,
    "qwen3-vl-8b": 15 * 20,
    "qwen3-vl-32b": 15 * 20,
    "qwen3-vl-30b-a3b": 15 * 20,
    "qwen3-vl-235b-a22b": 15 * 20,
    "cogvlm-17b": 35**2,
}


def size(*parts) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("name", VLM_PRESETS)
def test_tokens(name):
    config = get_vlm_config(name)
    cut = config.policy.layout(480, 640)
    assert config.count_tokens(cut) == TOKENS[name]
    stream = build_stream([text_part([1]), *config.make_parts(cut), text_part([2])], config.rules)
    assert len(stream) == TOKENS[name] + 2
    assert type(config).from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", VLM_PRESETS)
def test_context_has_room_for_text(name):
    """No image size has fewer tokens than the count that is compared with the context length."""
    config = VLM_PRESETS[name]
    counts = [
        config.count_tokens(config.policy.layout(*size))
        for size in ((480, 640), (30, 2000), (448, 448), (900, 7), (1, 9))
    ]
    assert 0 < config.min_image_tokens <= min(counts) and config.min_image_tokens < config.decoder.context_length


def test_token_scaling():
    """1,450 tokens are condensed to 256, and to 8 more for each later question."""
    config = VLM_PRESETS["token-scaling"]
    cut = config.policy.layout(480, 640)
    assert config.count_connector_tokens(cut) == 1450 and [config.count_tokens(cut, k) for k in (1, 2, 5)] == [
        256,
        264,
        288,
    ]


def test_tokens_of_visionzip():
    """As configured for LLaVA-1.5's 576 tokens; five times as many for LLaVA-NeXT's five views."""
    five = VLM_PRESETS["llava-next-7b"].policy.layout(672, 672)
    for keep, wanted in {128: 640, 64: 320, 32: 160}.items():
        reduce = VisionZipConfig(keep=keep)
        assert VLM_PRESETS["llava-next-7b"].replace(feature_reduction=reduce).count_tokens(five) == wanted
        assert VLM_PRESETS["llava-1.5-7b"].replace(feature_reduction=reduce).min_image_tokens == keep


def test_tokens_of_llava_next():
    """As transformers counts them; without newlines at most 2,880: five views of 576."""
    config, processor = VLM_PRESETS["llava-next-7b"], object.__new__(LlavaNextProcessor)
    processor.image_processor = LlavaNextImageProcessorPil()
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    for height, width in ((480, 640), (640, 480), (672, 672), (333, 1000), (2000, 30)):
        cut = config.policy.layout(height, width)
        assert config.count_tokens(cut) == processor._get_number_of_features(height, width, 336, 336)
        rows = sum(span.size[0] for span in cut.spans if span.newline == "row")
        assert config.count_tokens(cut) - rows <= 2880 == 5 * 576
    assert config.count_tokens(config.policy.layout(672, 672)) == 2880 + 48


def test_tokens_of_llava_next_video():
    """Images as in LLaVA-NeXT; a video frame has a quarter of its patches."""
    config, processor = VLM_PRESETS["llava-next-video-7b"], object.__new__(LlavaNextVideoProcessor)
    processor.patch_size, processor.video_token = 14, "v"
    for frames in (1, 8, 28):
        seen = {"pixel_values_videos": torch.empty(1, frames, 3, 336, 336, dtype=torch.uint8)}
        video = config.policy.layout_video(frames)
        assert (
            config.count_tokens(video)
            == config.make_video_part(video).num_tokens
            == len(processor.replace_video_token(seen, 0))
        )
    assert config.count_tokens(config.policy.layout_video(8)) == 8 * 144
    assert config.policy.layout(480, 640) == VLM_PRESETS["llava-next-7b"].policy.layout(480, 640)
    with torch.device("meta"):  # LLaVA-NeXT's weights, and 64 words more, to read and to say
        next_7b, ours = (size(VLM(VLM_PRESETS[f"llava-next-{name}"])) for name in ("7b", "video-7b"))
    assert ours == next_7b + 2 * 64 * 4096


def test_tokens_of_llava_onevision():
    """As transformers counts them, also beyond nine tiles; a video frame has half the rows and columns of a tile."""
    config, processor = VLM_PRESETS["llava-onevision-7b"], object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, "anyres_max_9"
    for height, width in ((480, 640), (384, 384), (3000, 2000), (333, 1000), (2000, 30)):
        wanted = processor._get_number_of_features(height, width, 384, 384)
        assert config.count_tokens(config.policy.layout(height, width)) == wanted
    assert config.count_tokens(config.policy.layout_video(32)) == 32 * 14 * 14 + 1 == 6273


@pytest.mark.parametrize("name", VLM_PRESETS)
def test_parameter_counts(name):
    config = VLM_PRESETS[name]
    with torch.device("meta"):
        model = VLM(config)
        kinds = {MultiTowerConfig: MultiTower, PackedViTConfig: PackedViT, ViTConfig: ViT, CodecTowerConfig: CodecTower}
        kinds |= {HybridTowerConfig: HybridTower}
        tower = kinds[type(config.tower)](config.tower)
        stack = [make_connector(config.stack) for _ in config.tower.feature_layers] if config.stack else []
        queries = [make_connector(config.queries)] if config.queries else []
        parts = tower, make_connector(config.connector), *stack, *queries, Decoder(config.decoder)
    vectors = config.newline + config.voco_tokens
    assert size(model) == size(*parts) + vectors * config.decoder.block.width


FAMILY = {
    "llava-1.5-7b": "llava",
    "llava-1.5-13b": "llava",
    "llava-next-7b": "llava_next",
    "llava-next-video-7b": "llava_next_video",
    "llava-onevision-0.5b": "llava_onevision",
    "llava-onevision-7b": "llava_onevision",
    "deepseek-vl-1.3b": "deepseek_vl",
    "deepseek-vl-7b": "deepseek_vl_hybrid",
    "blip2-opt-2.7b": "blip-2",
    "internvl3-1b": "internvl",
    "internvl3-2b": "internvl",
    "internvl3-8b": "internvl",
    **{name.lower(): family for name, (family, *_) in RELEASED.items()},
    "llama-3.2-11b-vision": "mllama",
    "idefics-9b": "idefics",
}


@pytest.mark.parametrize("name", FAMILY)
def test_matches_transformers_parameter_counts(name):
    family, config = FAMILIES[FAMILY[name]], get_vlm_config(name)
    assert family.supports(config)
    about = AutoConfig.for_model(family.name, **family.to_hf_config(config))
    with torch.device("meta"):
        assert size(AutoModelForImageTextToText.from_config(about)) == size(family.model_class(config))


@pytest.mark.parametrize("name", RELEASED)
def test_matches_released_configs(name):
    """Qwen's released 2.5 configs have another context length than the shapes that the family is tested with."""
    family, about, millions = RELEASED[name]
    config, row = VLM_PRESETS[name.lower()], FAMILIES[family]
    theirs = row.read_config(about, Path("config.json"))
    theirs = theirs.replace(decoder=theirs.decoder.replace(context_length=config.decoder.context_length))
    assert row.from_hf_config(row.to_hf_config(config)) == row.from_hf_config(row.to_hf_config(theirs))
    with torch.device("meta"):
        assert round(size(VLM(config)) / 1e6) == millions


def test_cross_attention_vlms_match_released_configs():
    """The defaults of transformers: the 11B model with tiles of 560 and Llama 3.1's rotary scaling, and Idefics-9B."""
    llama, idefics = FAMILIES["mllama"], FAMILIES["idefics"]
    about = {"vision_config": {"image_size": 560}, "text_config": {"rope_parameters": ROPE}}
    assert llama.from_hf_config(
        llama.to_hf_config(CROSS_ATTENTION_VLM_PRESETS["llama-3.2-11b-vision"])
    ) == llama.from_hf_config(llama.to_hf_config(llama.from_hf_config(about)))
    about = {"vision_config": {"embed_dim": 1280}, "perceiver_config": {"qk_layer_norms_perceiver": True}}
    about |= {"additional_vocab_size": 2, "cross_layer_interval": 4, "qk_layer_norms": True, "use_resampler": True}
    assert idefics.from_hf_config(
        idefics.to_hf_config(CROSS_ATTENTION_VLM_PRESETS["idefics-9b"])
    ) == idefics.from_hf_config(idefics.to_hf_config(idefics.from_hf_config(about)))


def test_parameter_counts_by_formula():
    """CogVLM's expert is as large as the text layers; OpenFlamingo's eight blocks have attention of width 512."""
    with torch.device("meta"):
        cogvlm, flamingo = (
            VLM(VLM_PRESETS["cogvlm-17b"]),
            CrossAttentionVLM(CROSS_ATTENTION_VLM_PRESETS["openflamingo-9b"]),
        )
    expert = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert size(cogvlm.decoder.fusion) == expert
    assert size(cogvlm) / 1e9 == pytest.approx(17.6, abs=0.1)  # as its authors count
    block = 2 * 512 * 4096 + 2 * 512 * 1024 + 2 * 4096 * 4 * 4096
    assert size(flamingo.decoder.fusion) == 8 * (block + 2 * 4096 + 2)  # two norms, two gates


def test_unknown_preset_raises():
    with pytest.raises(ConfigError, match=r"did you mean 'llava-1\.5-7b'"):
        get_vlm_config("llava1.5-7b")


def test_qlip_feature_layers():
    """Three LLaVAs with one encoder: 1,024 features of 784 patches, or 28 bits each."""
    before, last, codes = (VLM_PRESETS[f"llava-1.5-qlip{end}"] for end in ("", "-last", "-codes"))
    codec = CODEC_PRESETS["qlip-l14-392"]
    assert before.tower == last.tower == codes.tower.encoder == codec.net.encoder
    assert (before.vision_feature_layer, last.vision_feature_layer, codes.vision_feature_layer) == (-2, -1, None)
    assert (before.width, last.width, codes.width) == (1024, 1024, 28)
    assert (before.mean, before.std, before.policy.image_size) == (codec.mean, codec.std, 392)
    with torch.device("meta"):
        sizes = [size(VLM(one)) for one in (before, last, codes)]
        into = size(CodecTower(codes.tower).pre_quant_proj)
    assert sizes[0] == sizes[1] == sizes[2] - into + (1024 - 28) * 4096


QUERIES = QFormerConfig(in_features=1024, out_features=4096)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava-1.5-7b", {"connector": ProjectorConfig(in_features=768, out_features=4096)}, "in_features = 1024"),
        ("llava-1.5-7b", {"decoder": DECODER_PRESETS["llama-2-13b"]}, "out_features = 5120"),
        ("llava-1.5-7b", {"policy": LetterboxPolicy(patch_size=16)}, "policy.patch_size = 14"),
        ("llava-1.5-7b", {"policy": NativePolicy()}, "native"),
        ("llava-1.5-7b", {"vision_feature_layer": 25}, "no layer 25"),
        ("prismatic-7b", {"vision_feature_layer": -2}, "layer of each tower"),
        ("deepseek-vl-7b", {"vision_feature_layer": -2}, "layer of each tower"),
        ("deepseek-vl-7b", {"policy": VLM_PRESETS["deepseek-vl-1.3b"].policy}, "high_res_size = 1024"),
        ("deepseek-vl-7b", {"connector": VLM_PRESETS["prismatic-7b"].connector}, "in_features = 2048"),
        ("llava-next-7b", {"connector": ResamplerConfig(in_features=1024, out_features=4096)}, "newlines"),
        ("llava-next-7b", {"connector": QUERIES}, "newlines"),
        ("llava-1.5-qlip-codes", {"vision_feature_layer": -2}, "remove them"),
        (
            "llava-1.5-qlip",
            {"tower": VLM_PRESETS["llava-1.5-qlip-codes"].tower, "vision_feature_layer": None},
            "in_features = 28",
        ),
        ("token-scaling", {"queries": None}, "out_features = 4096"),
        (
            "token-scaling",
            {"connector": ConvMergerConfig(in_features=1024, out_features=4096, newline=True)},
            "out_features = 1024",
        ),
        ("internvl3-2b", {"keep_prefix_tokens": True}, "a grid is needed"),
        ("internvl3-2b", {"stack": VLM_PRESETS["internvl3-2b"].connector}, "0 feature layers"),
        (
            "llava-1.5-7b",
            {"decoder": DECODER_PRESETS["llama-2-7b"].replace(fusion=DeepStackConfig(layer_indices=(0, 1)))},
            "0 feature layers",
        ),
        (
            "llava-1.5-7b",
            {"decoder": DECODER_PRESETS["llama-2-7b"].replace(context_length=128)},
            "context_length to more than 576",
        ),
        (
            "llava-1.5-7b",
            {"decoder": DECODER_PRESETS["llama-2-7b"].replace(context_length=576)},
            "fills the decoder's context",
        ),
        (
            "token-scaling",
            {"decoder": DECODER_PRESETS["llama-2-7b"].replace(context_length=256)},
            "lower queries.first",
        ),
    ],
)
def test_invalid_configs_raise_before_building(name, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        VLMConfig(**{key: getattr(VLM_PRESETS[name], key) for key in VLMConfig.__struct_fields__} | change)
    assert caught.value.remedy
