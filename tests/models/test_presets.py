"""Whole systems by name: tokens and sizes as published, counted without building anything, or on the meta device."""

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
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.presets import CODECS
from vitrail.codecs.tower import CodesTower, CodesTowerConfig
from vitrail.connectors import ConvMergerConfig, ProjectorConfig, QFormerConfig, ResamplerConfig, make_connector
from vitrail.connectors.reduce import VisionZipConfig
from vitrail.encoders import Hybrid, HybridConfig, ViT, ViTConfig
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.errors import ConfigError
from vitrail.hub.families import FAMILIES
from vitrail.models.looking import LookingVLM
from vitrail.models.presets import LOOKING, VLMS, vlm_named
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.resolution import Letterbox, Native
from vitrail.stream import build, words

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


@pytest.mark.parametrize("name", VLMS)
def test_tokens(name):
    config = vlm_named(name)
    cut = config.policy.cut(480, 640)
    assert config.tokens(cut) == TOKENS[name]
    stream = build([words([1]), *config.parts(cut), words([2])], config.rules)
    assert len(stream) == TOKENS[name] + 2
    assert type(config).read(config.plain()) == config


@pytest.mark.parametrize("name", VLMS)
def test_a_picture_leaves_room_for_words(name):
    """Of the shapes that pictures have none takes fewer tokens than what is compared with the context."""
    config = VLMS[name]
    counts = [
        config.tokens(config.policy.cut(*size)) for size in ((480, 640), (30, 2000), (448, 448), (900, 7), (1, 9))
    ]
    assert 0 < config.least <= min(counts) and config.least < config.decoder.context


def test_token_scaling():
    """1,450 tokens are condensed to 256, and to 8 more for every further question."""
    config = VLMS["token-scaling"]
    cut = config.policy.cut(480, 640)
    assert config.given(cut) == 1450 and [config.tokens(cut, k) for k in (1, 2, 5)] == [256, 264, 288]


def test_tokens_of_visionzip():
    """Of LLaVA-1.5's 576 what is said, of LLaVA-NeXT's five views, 2,880 before newlines, five times as many."""
    five = VLMS["llava-next-7b"].policy.cut(672, 672)
    for keep, wanted in {128: 640, 64: 320, 32: 160}.items():
        reduce = VisionZipConfig(keep=keep)
        assert VLMS["llava-next-7b"].with_(reduce=reduce).tokens(five) == wanted
        assert VLMS["llava-1.5-7b"].with_(reduce=reduce).least == keep


def test_tokens_of_llava_next():
    """As transformers counts them; without newlines, which came later, 2,880 at most: five views of 576."""
    config, processor = VLMS["llava-next-7b"], object.__new__(LlavaNextProcessor)
    processor.image_processor = LlavaNextImageProcessorPil()
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    for height, width in ((480, 640), (640, 480), (672, 672), (333, 1000), (2000, 30)):
        cut = config.policy.cut(height, width)
        assert config.tokens(cut) == processor._get_number_of_features(height, width, 336, 336)
        rows = sum(span.size[0] for span in cut.spans if span.newline == "row")
        assert config.tokens(cut) - rows <= 2880 == 5 * 576
    assert config.tokens(config.policy.cut(672, 672)) == 2880 + 48


def test_tokens_of_llava_next_video():
    """Pictures as LLaVA-NeXT's, and of a video a quarter of each frame's patches, as transformers counts them."""
    config, processor = VLMS["llava-next-video-7b"], object.__new__(LlavaNextVideoProcessor)
    processor.patch_size, processor.video_token = 14, "v"
    for frames in (1, 8, 28):
        seen = {"pixel_values_videos": torch.empty(1, frames, 3, 336, 336, dtype=torch.uint8)}
        film = config.policy.film(frames)
        assert config.tokens(film) == config.clip(film).tokens == len(processor.replace_video_token(seen, 0))
    assert config.tokens(config.policy.film(8)) == 8 * 144
    assert config.policy.cut(480, 640) == VLMS["llava-next-7b"].policy.cut(480, 640)
    with torch.device("meta"):  # LLaVA-NeXT's weights, and 64 words more, to read and to say
        next_7b, ours = (size(VLM(VLMS[f"llava-next-{name}"])) for name in ("7b", "video-7b"))
    assert ours == next_7b + 2 * 64 * 4096


def test_tokens_of_llava_onevision():
    """As transformers counts them, beyond nine tiles' worth too; of a video's frame half a tile's rows and columns."""
    config, processor = VLMS["llava-onevision-7b"], object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, "anyres_max_9"
    for height, width in ((480, 640), (384, 384), (3000, 2000), (333, 1000), (2000, 30)):
        wanted = processor._get_number_of_features(height, width, 384, 384)
        assert config.tokens(config.policy.cut(height, width)) == wanted
    assert config.tokens(config.policy.film(32)) == 32 * 14 * 14 + 1 == 6273


@pytest.mark.parametrize("name", VLMS)
def test_sizes(name):
    config = VLMS[name]
    with torch.device("meta"):
        model = VLM(config)
        kinds = {TowersConfig: Towers, PackedViTConfig: PackedViT, ViTConfig: ViT, CodesTowerConfig: CodesTower}
        kinds |= {HybridConfig: Hybrid}
        tower = kinds[type(config.tower)](config.tower)
        stack = [make_connector(config.stack) for _ in config.tower.taps] if config.stack else []
        queries = [make_connector(config.queries)] if config.queries else []
        parts = tower, make_connector(config.connector), *stack, *queries, Decoder(config.decoder)
    vectors = config.newline + config.voco
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
def test_is_what_transformers_builds(name):
    family, config = FAMILIES[FAMILY[name]], vlm_named(name)
    assert family.fits(config)
    about = AutoConfig.for_model(family.name, **family.write(config))
    with torch.device("meta"):
        assert size(AutoModelForImageTextToText.from_config(about)) == size(family.model(config))


@pytest.mark.parametrize("name", RELEASED)
def test_is_what_was_released(name):
    """Qwen's own files say another context for 2.5 than the shapes that the family is tested with."""
    family, about, millions = RELEASED[name]
    config, row = VLMS[name.lower()], FAMILIES[family]
    theirs = row.config(about, Path("config.json"))
    theirs = theirs.with_(decoder=theirs.decoder.with_(context=config.decoder.context))
    assert row.read(row.write(config)) == row.read(row.write(theirs))
    with torch.device("meta"):
        assert round(size(VLM(config)) / 1e6) == millions


def test_those_that_look_are_what_was_released():
    """What transformers takes for granted is the 11B, at tiles of 560, with Llama 3.1's ramp; and Idefics-9B."""
    llama, idefics = FAMILIES["mllama"], FAMILIES["idefics"]
    about = {"vision_config": {"image_size": 560}, "text_config": {"rope_parameters": ROPE}}
    assert llama.read(llama.write(LOOKING["llama-3.2-11b-vision"])) == llama.read(llama.write(llama.read(about)))
    about = {"vision_config": {"embed_dim": 1280}, "perceiver_config": {"qk_layer_norms_perceiver": True}}
    about |= {"additional_vocab_size": 2, "cross_layer_interval": 4, "qk_layer_norms": True, "use_resampler": True}
    assert idefics.read(idefics.write(LOOKING["idefics-9b"])) == idefics.read(idefics.write(idefics.read(about)))


def test_sizes_by_hand():
    """CogVLM's expert is as large as the layers of its text; OpenFlamingo's eight blocks have 512 wide attention."""
    with torch.device("meta"):
        cogvlm, flamingo = VLM(VLMS["cogvlm-17b"]), LookingVLM(LOOKING["openflamingo-9b"])
    expert = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert size(cogvlm.decoder.fusion) == expert
    assert size(cogvlm) / 1e9 == pytest.approx(17.6, abs=0.1)  # as its authors count
    block = 2 * 512 * 4096 + 2 * 512 * 1024 + 2 * 4096 * 4 * 4096
    assert size(flamingo.decoder.fusion) == 8 * (block + 2 * 4096 + 2)  # two norms, two gates


def test_unknown():
    with pytest.raises(ConfigError, match=r"did you mean 'llava-1\.5-7b'"):
        vlm_named("llava1.5-7b")


def test_qlip_is_read_before_its_last_block_behind_it_or_behind_its_quantizer():
    """Three LLaVAs of one encoder: 1,024 features of 784 patches, or the 28 bits of each."""
    before, last, codes = (VLMS[f"llava-1.5-qlip{end}"] for end in ("", "-last", "-codes"))
    codec = CODECS["qlip-l14-392"]
    assert before.tower == last.tower == codes.tower.encoder == codec.net.encoder
    assert (before.layer, last.layer, codes.layer) == (-2, -1, None)
    assert (before.width, last.width, codes.width) == (1024, 1024, 28)
    assert (before.mean, before.std, before.policy.size) == (codec.mean, codec.std, 392)
    with torch.device("meta"):
        sizes = [size(VLM(one)) for one in (before, last, codes)]
        into = size(CodesTower(codes.tower).into)
    assert sizes[0] == sizes[1] == sizes[2] - into + (1024 - 28) * 4096


QUERIES = QFormerConfig(reads=1024, gives=4096)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llava-1.5-7b", {"connector": ProjectorConfig(reads=768, gives=4096)}, "reads = 1024"),
        ("llava-1.5-7b", {"decoder": DECODERS["llama-2-13b"]}, "gives = 5120"),
        ("llava-1.5-7b", {"policy": Letterbox(patch=16)}, "policy.patch = 14"),
        ("llava-1.5-7b", {"policy": Native()}, "native"),
        ("llava-1.5-7b", {"layer": 25}, "no layer 25"),
        ("prismatic-7b", {"layer": -2}, "their own layers"),
        ("deepseek-vl-7b", {"layer": -2}, "their own layers"),
        ("deepseek-vl-7b", {"policy": VLMS["deepseek-vl-1.3b"].policy}, "fine = 1024"),
        ("deepseek-vl-7b", {"connector": VLMS["prismatic-7b"].connector}, "reads = 2048"),
        ("llava-next-7b", {"connector": ResamplerConfig(reads=1024, gives=4096)}, "newlines"),
        ("llava-next-7b", {"connector": QUERIES}, "newlines"),
        ("llava-1.5-qlip-codes", {"layer": -2}, "leave them out"),
        ("llava-1.5-qlip", {"tower": VLMS["llava-1.5-qlip-codes"].tower, "layer": None}, "reads = 28"),
        ("token-scaling", {"queries": None}, "gives = 4096"),
        ("token-scaling", {"connector": ConvMergerConfig(reads=1024, gives=4096, newline=True)}, "gives = 1024"),
        ("internvl3-2b", {"prefix": True}, "lie in many ways"),
        ("internvl3-2b", {"stack": VLMS["internvl3-2b"].connector}, "0 taps"),
        ("llava-1.5-7b", {"decoder": DECODERS["llama-2-7b"].with_(fusion=DeepStackConfig(at=(0, 1)))}, "0 taps"),
        ("llava-1.5-7b", {"decoder": DECODERS["llama-2-7b"].with_(context=128)}, "context to more than 576"),
        ("llava-1.5-7b", {"decoder": DECODERS["llama-2-7b"].with_(context=576)}, "no room for a word"),
        ("token-scaling", {"decoder": DECODERS["llama-2-7b"].with_(context=256)}, "lower queries.first"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_built(name, change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        VLMConfig(**{key: getattr(VLMS[name], key) for key in VLMConfig.__struct_fields__} | change)
    assert caught.value.remedy
