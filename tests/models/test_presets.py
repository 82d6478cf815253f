"""Whole systems by name: tokens and sizes as published, counted without building anything, or on the meta device."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaNextProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import DeepStackConfig
from vitrail.backbones.presets import DECODERS
from vitrail.connectors import ConvMergerConfig, ProjectorConfig, QFormerConfig, ResamplerConfig, make_connector
from vitrail.encoders import ViT
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.errors import ConfigError
from vitrail.hub.families import FAMILIES
from vitrail.models.presets import VLMS, vlm_named
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.resolution import Letterbox, Native
from vitrail.stream import build, words

TOKENS = {  # of a picture of 640 × 480
    "llava-1.0": 16**2,
    "llava-1.5-7b": 24**2,
    "llava-1.5-13b": 24**2,
    "llava-next-7b": 24**2 + 36 * (48 + 1),
    "prismatic-7b": 27**2,
    "blip2-opt-2.7b": 32,
    "internvl3-1b": (12 + 1) * 256,
    "internvl3-2b": (12 + 1) * 256,
    "internvl3-8b": (12 + 1) * 256,
    "token-scaling": 1450,
}


def size(*parts) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("name", VLMS)
def test_tokens(name):
    config = vlm_named(name)
    cut = config.policy.cut(480, 640)
    assert config.tokens(cut) == TOKENS[name]
    stream = build([words([1]), config.part(cut), words([2])], config.rules)
    assert len(stream) == TOKENS[name] + 2
    assert type(config).read(config.plain()) == config


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


@pytest.mark.parametrize("name", VLMS)
def test_sizes(name):
    config = VLMS[name]
    with torch.device("meta"):
        model = VLM(config)
        tower = Towers(config.tower) if isinstance(config.tower, TowersConfig) else ViT(config.tower)
        parts = tower, make_connector(config.connector), Decoder(config.decoder)
    newline = config.decoder.block.width if config.newline else 0
    assert size(model) == size(*parts) + newline


FAMILY = {
    "llava-next-7b": "llava_next",
    "blip2-opt-2.7b": "blip-2",
    "internvl3-1b": "internvl",
    "internvl3-2b": "internvl",
    "internvl3-8b": "internvl",
}


@pytest.mark.parametrize("name", FAMILY)
def test_is_what_transformers_builds(name):
    family, config = FAMILIES[FAMILY[name]], VLMS[name]
    assert family.fits(config)
    about = AutoConfig.for_model(family.name, **family.write(config))
    with torch.device("meta"):
        assert size(AutoModelForImageTextToText.from_config(about)) == size(VLM(config))


def test_unknown():
    with pytest.raises(ConfigError, match=r"did you mean 'llava-1\.5-7b'"):
        vlm_named("llava1.5-7b")


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
        ("llava-next-7b", {"connector": ResamplerConfig(reads=1024, gives=4096)}, "newlines"),
        ("llava-next-7b", {"connector": QUERIES}, "newlines"),
        ("token-scaling", {"connector": QUERIES}, "newlines"),
        ("token-scaling", {"connector": ConvMergerConfig(reads=1024, gives=4096, newline=True)}, "newlines"),
        ("internvl3-2b", {"prefix": True}, "lie in many ways"),
        ("internvl3-2b", {"stack": VLMS["internvl3-2b"].connector}, "0 taps"),
        ("llava-1.5-7b", {"decoder": DECODERS["llama-2-7b"].with_(fusion=DeepStackConfig(at=(0, 1)))}, "0 taps"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_built(name, change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        VLMConfig(**{key: getattr(VLMS[name], key) for key in VLMConfig.__struct_fields__} | change)
    assert caught.value.remedy
