"""Preset expansion in TOML equals the same configs in Python."""

import tomllib

import pytest
import torch

from data.scenes.conftest import drawn
from vitrail import hub, recipe
from vitrail.backbones.fusion import DeepStackConfig, VisualExpertConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.connectors import PoolConnectorConfig, ProjectorConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.encoders.multi_tower import TowerConfig
from vitrail.encoders.presets import PACKED_VIT_PRESETS, VIT_PRESETS
from vitrail.errors import ConfigError
from vitrail.models.cross_attention_vlm import CrossAttentionVLMConfig
from vitrail.models.preset_expansion import expand_presets
from vitrail.models.presets import ALL_VLM_PRESETS, VLM_PRESETS
from vitrail.models.vlm import VLMConfig
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe.recipe_building import END_OF_TEXT

LLAVA, SCALING, QWEN = (VLM_PRESETS[name] for name in ("llava-1.5-7b", "token-scaling", "qwen3-vl-2b"))


def read(text: str) -> VLMConfig:
    return VLMConfig.from_dict(tomllib.loads(text))


@pytest.mark.parametrize("name", ALL_VLM_PRESETS)
def test_preset_of_a_model(name):
    """Data without presets is unchanged, so that earlier runs can resume."""
    config = ALL_VLM_PRESETS[name]
    assert type(config).from_dict({"preset": name}) == config
    assert expand_presets(config.to_dict()) == config.to_dict()


COMBINATIONS = {
    "a part by name, with another beside it": (
        'preset = "llava-1.5-7b"\ntower = "siglip-so400m-384"\npolicy = "siglip-384"\ndecoder = "qwen2.5-7b"',
        lambda: LLAVA.replace(
            tower=VIT_PRESETS["siglip-so400m-384"],
            policy=NaivePolicy(image_size=384, unread_pixels=6),
            decoder=DECODER_PRESETS["qwen2.5-7b"],
            connector=ProjectorConfig(in_features=1152, out_features=3584),
        ),
    ),
    "a part by name, altered": (
        'preset = "llava-1.5-7b"\ndecoder = { preset = "llama-2-13b", layers = 12 }\nconnector.layers = 3',
        lambda: LLAVA.replace(
            decoder=DECODER_PRESETS["llama-2-13b"].replace(layers=12),
            connector=ProjectorConfig(in_features=1024, out_features=5120, layers=3),
        ),
    ),
    "deep": (
        'preset = "llava-1.5-7b"\ntower.block.mlp.activation = "gelu"\ndecoder.rotary.theta = 1e6',
        lambda: LLAVA.replace(
            tower=LLAVA.tower.replace(
                block=LLAVA.tower.block.replace(mlp=LLAVA.tower.block.mlp.replace(activation="gelu"))
            ),
            decoder=LLAVA.decoder.replace(rotary=LLAVA.decoder.rotary.replace(theta=1e6)),
        ),
    ),
    "another kind takes the place": (
        'preset = "llava-1.5-7b"\nconnector = { kind = "pool", spatial_window = 2 }\ndecoder.fusion = "expert"',
        lambda: LLAVA.replace(
            connector=PoolConnectorConfig(in_features=1024, out_features=4096, spatial_window=2),
            decoder=LLAVA.decoder.replace(fusion=VisualExpertConfig()),
        ),
    ),
    "from nothing": (
        'tower = "clip-l14-336"\nconnector = "llava-1.5-7b"\ndecoder = "llama-2-7b"\npolicy = "llava-1.5"\n'
        "vision_feature_layer = -2",
        lambda: LLAVA,
    ),
    "another resolution": (
        'preset = "llava-1.5-7b"\nnewline = true\npolicy = { preset = "llava-next", max_tiles = 4 }',
        lambda: LLAVA.replace(newline=True, policy=AnyResPolicy(max_tiles=4)),
    ),
    "fewer queries": (
        'preset = "token-scaling"\nqueries = { first_queries = 64 }\ndecoder = "llama-2-13b"',
        lambda: SCALING.replace(
            queries=SCALING.queries.replace(first_queries=64, out_features=5120),
            decoder=DECODER_PRESETS["llama-2-13b"],
        ),
    ),
    "codes for a tower": (
        'preset = "llava-1.5-qlip"\ntower = "qlip-b16-256"\npolicy = { image_size = 256, patch_size = 16 }',
        lambda: VLM_PRESETS["llava-1.5-qlip"].replace(
            tower=CODEC_PRESETS["qlip-b16-256"].net.encoder,
            policy=VLM_PRESETS["llava-1.5-qlip"].policy.replace(image_size=256, patch_size=16),
            connector=ProjectorConfig(in_features=768, out_features=4096),
        ),
    ),
    "without what the preset says": (
        'preset = "llava-1.5-qlip"\nwithout = ["vision_feature_layer"]\ntower = "qlip-l14-392-codes"',
        lambda: VLM_PRESETS["llava-1.5-qlip-codes"],
    ),
    "DeepStack, its three parts by name": (
        'preset = "qwen3-vl-2b"\ntower = "qwen3-vl-so400m"\ndecoder = { preset = "qwen3-vl-8b", fusion = "deepstack" }',
        lambda: QWEN.replace(
            tower=PACKED_VIT_PRESETS["qwen3-vl-so400m"],
            decoder=VLM_PRESETS["qwen3-vl-8b"].decoder.replace(fusion=DeepStackConfig()),
            connector=QWEN.connector.replace(in_features=1152, out_features=4096),
            stack=QWEN.stack.replace(in_features=1152, out_features=4096),
        ),
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_overrides_match_python_config(name):
    text, made = COMBINATIONS[name]
    assert read(text) == made()


def test_preset_of_multiple_towers():
    text = 'preset = "prismatic-7b"\ntower.towers = [{ vit = "clip-l14-336" }, { vit = "dinov2-l14", layer = -2 }]\n'
    config = read(
        text
        + "tower.image_size = 336\npolicy = { image_size = 336, unread_pixels = 0 }\n"
        + "connector.hidden_sizes = [8192, 4096]"
    )
    assert config.tower.towers == (
        TowerConfig(vit=VIT_PRESETS["clip-l14-336"]),
        TowerConfig(vit=VIT_PRESETS["dinov2-l14"], layer=-2),
    )
    assert config.connector.in_features == 2048


def test_presets_with_cross_attention():
    changed = CrossAttentionVLMConfig.from_dict(
        {"preset": "idefics-9b", "connector": {"num_latents": 32}, "join_adjacent": True}
    )
    idefics = ALL_VLM_PRESETS["idefics-9b"]
    assert changed == idefics.replace(connector=idefics.connector.replace(num_latents=32), join_adjacent=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('preset = "llava1.5-7b"', r"did you mean 'llava-1\.5-7b'"),
        ('preset = "llava-1.5-7b"\ntower = "siglip-so400"', r"tower is 'siglip-so400'.*\n.*siglip-so400m"),
        ('preset = "llava-1.5-7b"\ndecoder = { preset = "qwen3-7b" }', r"decoder is 'qwen3-7b'.*\n.*qwen3"),
        ('preset = "llava-1.5-7b"\ndecoder.fusion = "crossed"', "decoder.fusion is 'crossed'"),
        ('preset = "llava-1.5-7b"\npolicy = "anyress"', "anyres"),
        ('preset = "llava-1.5-7b"\ntower = "vqgan-f16-1024"', "not a ViT"),
        ('preset = "llava-1.5-7b"\ntower = "siglip-b16-256"', "policy.patch_size = 16"),
        (
            'preset = "llava-1.5-7b"\ntower = "qwen2-vl"\nvision_feature_layer = 0',
            "vision_feature_layer and keep_prefix_tokens",
        ),
        ('preset = "llava-1.5-7b"\ntower = "qlip-l14-392-codes"', "remove them"),
        ('preset = "llava-1.5-7b"\nconnector.in_features = 768', "in_features = 1024"),
        ('preset = "llava-1.5-7b"\ndecoder.context_length = 128', "context_length to more than 576"),
        ('preset = "llava-1.5-7b"\ndecoder.layrs = 2', r"layrs.*\n.*layers"),
        ('preset = "llava-1.5-7b"\nwithout = ["vision_layer"]', "did you mean 'vision_feature_layer'"),
        ('preset = "llava-1.5-7b"\nwithout = ["tower"]', "tower"),
        ('without = ["vision_feature_layer"]', "without"),
        ("preset = 7", "no vision-language model"),
        ("tower = 3", "tower"),
    ],
)
def test_errors_name_the_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = """
name = "mine"
description = "a new combination"
tokenizer = { vocab_size = 420, special_tokens = ["<image>"] }

[model]
preset = "llava-1.5-7b"
config = { tower = "siglip-so400m-384", policy = "siglip-384", rules = { fill_id = 1 } }

[sources.scenes]
kind = "scenes"
atlas = "-"
preset = "plain"
image_size = 56
scene = { vendors = ["left"], things = [], inside_probability = 0.0, word_probability = 0.0 }

[[stages]]
name = "tune"
task = "vlm"
steps = 100
batch_size = 64
mixture = { weights = { scenes = 1 } }
settings = { num_questions = 1, question_kinds = ["what"], max_length = 48 }
optim = { kind = "adamw", lr = 1e-3 }
"""
SMALL = {
    "model.config.policy": {"preset": "naive", "image_size": 56},
    "model.config.tower.image_size": 56,
    "model.config.tower.layers": 2,
    "model.config.tower.block": {"width": 16, "attention": {"heads": 2}, "mlp": {"intermediate_size": 24}},
    "model.config.decoder.vocab_size": 420,
    "model.config.decoder.layers": 1,
    "model.config.decoder.rotary.head_dim": 16,
    "model.config.decoder.block": {
        "width": 32,
        "attention": {"heads": 2, "kv_heads": 2},
        "mlp": {"intermediate_size": 24},
    },
}


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path / "mine.toml"


def test_recipe_preset_is_expanded(mine):
    """Saved recipes have all values, so a run can resume after a preset changes."""
    chosen = recipe.load_recipe(mine, {"model.config.tower.layers": 12})
    config = chosen.build_model_config()
    assert chosen.model.kind == "vlm" and config.connector == ProjectorConfig(in_features=1152, out_features=4096)
    assert config.tower == VIT_PRESETS["siglip-so400m-384"].replace(layers=12) and config.vision_feature_layer == -2
    assert chosen.model.config == config.to_dict()
    assert recipe.Recipe.from_dict(chosen.to_dict()) == chosen
    named = recipe.load_recipe(
        mine, {"model.config.tower": "clip-l14", "model.config.policy": "clip"}
    ).build_model_config()
    assert named.tower == VIT_PRESETS["clip-l14"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.preset": "llava-7b"}, "llava"),
        ({"model.kind": "decoder"}, "remove kind"),
        ({"model.checkpoint": "stories15M"}, "a config or a checkpoint"),
        ({"model.config.decoder.context_length": 128}, "context"),
        ({"model.config.tower": "clip-l15"}, "clip-l14"),
    ],
)
def test_invalid_recipes_raise(mine, change, message):
    with pytest.raises(ConfigError, match=message):
        recipe.load_recipe(mine, change)


def test_recipe_with_preset_trains(mine, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: Atlas.build(drawn()))
    words = Tokenizer.train(["what is it? a ball"] * 3, 420, special_tokens=[END_OF_TEXT, "<image>"], eos=END_OF_TEXT)
    words.save(tmp_path / "words")
    small = recipe.shrink_recipe(
        recipe.load_recipe(mine, {**SMALL, "tokenizer": {"checkpoint": str(tmp_path / "words")}})
    )
    made = recipe.train_recipe(small, tmp_path / "out", device="cpu", quiet=True)
    again = hub.load(tmp_path / "out" / "final")
    assert again.config == made.config == small.build_model_config()
    assert made.config.tower.pool == "attention" and made.config.connector.out_features == 32
    assert all(torch.isfinite(p).all() for p in again.parameters())
