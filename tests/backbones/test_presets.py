"""The presets against the published parameter counts and against transformers' models of the same config."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.registry import FAMILIES

# As the model cards' safetensors count them, tied heads once. Qwen3-0.6B and -1.7B store their tied head a second
# time, so their cards say 752M and 2.03B.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

# Without embedding and head, in billions, as Qwen's cards round it.
WITHOUT_EMBEDDINGS = {
    "qwen2.5-0.5b": 0.36,
    "qwen2.5-1.5b": 1.31,
    "qwen2.5-7b": 6.53,
    "qwen2.5-72b": 70.0,
    "qwen3-0.6b": 0.44,
    "qwen3-1.7b": 1.4,
    "qwen3-4b": 3.6,
    "qwen3-8b": 6.95,
    "qwen3-14b": 13.2,
    "qwen3-32b": 31.2,
    "qwen3-30b-a3b": 29.9,
    "qwen3-235b-a22b": 234.0,
}


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def built(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(DECODER_PRESETS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    assert count(built(name)) == PUBLISHED[name]


def test_every_released_model_has_its_count():
    assert set(DECODER_PRESETS) - set(PUBLISHED) == {"stories15m", "perf-1.1b"}


@pytest.mark.parametrize(("name", "billions"), WITHOUT_EMBEDDINGS.items())
def test_counts_without_embeddings(name, billions):
    model = built(name)
    tables = count(model.embed) + (0 if model.head is None else count(model.head))
    assert (count(model) - tables) / 1e9 == pytest.approx(billions, rel=0.01)


def test_stories15m_fills_its_file():
    """A llama2.c file: a header of seven integers, the weights, and tables of cos and sin for 256 positions."""
    config = DECODER_PRESETS["stories15m"]
    tables = 2 * config.context_length * config.rotary.head_dim // 2
    assert 28 + 4 * (count(built("stories15m")) + tables) == 60_816_028


def test_the_measured_shape():
    config, block = DECODER_PRESETS["perf-1.1b"], DECODER_PRESETS["perf-1.1b"].block
    assert (block.width, config.layers, block.mlp.intermediate_size, config.vocab_size) == (2048, 16, 8192, 32_768)
    assert (block.attention.heads, block.attention.num_kv_heads) == (32, 8)
    assert round(count(built("perf-1.1b")) / 1e9, 1) == 1.1


@pytest.mark.parametrize("name", DECODER_PRESETS)
def test_transformers_builds_the_same(name):
    config = DECODER_PRESETS[name]
    family = next(row for row in FAMILIES.values() if row.model_class is Decoder and row.supports(config))
    about = family.to_hf_config(config)
    explicit = config.block.attention.replace(head_dim=config.rotary.head_dim)  # which config.json always tells
    assert family.from_hf_config(about) == config.replace(block=config.block.replace(attention=explicit))
    theirs = AutoConfig.for_model(family.name, **about)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(theirs)
    assert count(reference) == count(built(name))
