"""Presets by name in TOML: systems, parts and changes of them are what Python makes of the same rows."""

import tomllib

import pytest
import torch

from data.scenes.conftest import drawn
from vitrail import hub, recipe
from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.presets import CODECS
from vitrail.connectors import PoolConfig, ProjectorConfig
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders.presets import PACKED, VITS
from vitrail.encoders.towers import TowerConfig
from vitrail.errors import ConfigError
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.named import fill
from vitrail.models.presets import SYSTEMS, VLMS
from vitrail.models.vlm import VLMConfig
from vitrail.processing.resolution import AnyRes, Naive
from vitrail.processing.text import Tokenizer

LLAVA, SCALING, QWEN = (VLMS[name] for name in ("llava-1.5-7b", "token-scaling", "qwen3-vl-2b"))


def read(text: str) -> VLMConfig:
    return VLMConfig.read(tomllib.loads(text))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_by_its_name(name):
    """And what names no preset is left as it was, so that what was trained before goes on."""
    config = SYSTEMS[name]
    assert type(config).read({"preset": name}) == config
    assert fill(config.plain()) == config.plain()


COMBINATIONS = {
    "a part by name, with another beside it": (
        'preset = "llava-1.5-7b"\ntower = "siglip-so400m-384"\npolicy = "siglip-384"\ndecoder = "qwen2.5-7b"',
        lambda: LLAVA.with_(
            tower=VITS["siglip-so400m-384"],
            policy=Naive(size=384, unread=6),
            decoder=DECODERS["qwen2.5-7b"],
            connector=ProjectorConfig(reads=1152, gives=3584),
        ),
    ),
    "a part by name, altered": (
        'preset = "llava-1.5-7b"\ndecoder = { preset = "llama-2-13b", layers = 12 }\nconnector.layers = 3',
        lambda: LLAVA.with_(
            decoder=DECODERS["llama-2-13b"].with_(layers=12),
            connector=ProjectorConfig(reads=1024, gives=5120, layers=3),
        ),
    ),
    "deep": (
        'preset = "llava-1.5-7b"\ntower.block.mlp.activation = "gelu"\ndecoder.rotary.theta = 1e6',
        lambda: LLAVA.with_(
            tower=LLAVA.tower.with_(block=LLAVA.tower.block.with_(mlp=LLAVA.tower.block.mlp.with_(activation="gelu"))),
            decoder=LLAVA.decoder.with_(rotary=LLAVA.decoder.rotary.with_(theta=1e6)),
        ),
    ),
    "another kind takes the place": (
        'preset = "llava-1.5-7b"\nconnector = { kind = "pool", space = 2 }\ndecoder.fusion = "expert"',
        lambda: LLAVA.with_(
            connector=PoolConfig(reads=1024, gives=4096, space=2), decoder=LLAVA.decoder.with_(fusion=ExpertConfig())
        ),
    ),
    "from nothing": (
        'tower = "clip-l14-336"\nconnector = "llava-1.5-7b"\ndecoder = "llama-2-7b"\npolicy = "llava-1.5"\nlayer = -2',
        lambda: LLAVA,
    ),
    "another resolution": (
        'preset = "llava-1.5-7b"\nnewline = true\npolicy = { preset = "llava-next", max_tiles = 4 }',
        lambda: LLAVA.with_(newline=True, policy=AnyRes(max_tiles=4)),
    ),
    "fewer queries": (
        'preset = "token-scaling"\nqueries = { first = 64 }\ndecoder = "llama-2-13b"',
        lambda: SCALING.with_(
            queries=SCALING.queries.with_(first=64, gives=5120),
            decoder=DECODERS["llama-2-13b"],
        ),
    ),
    "codes for a tower": (
        'preset = "llava-1.5-qlip"\ntower = "qlip-b16-256"\npolicy = { size = 256, patch = 16 }',
        lambda: VLMS["llava-1.5-qlip"].with_(
            tower=CODECS["qlip-b16-256"].net.encoder,
            policy=VLMS["llava-1.5-qlip"].policy.with_(size=256, patch=16),
            connector=ProjectorConfig(reads=768, gives=4096),
        ),
    ),
    "without what the preset says": (
        'preset = "llava-1.5-qlip"\nwithout = ["layer"]\ntower = "qlip-l14-392-codes"',
        lambda: VLMS["llava-1.5-qlip-codes"],
    ),
    "DeepStack, its three parts by name": (
        'preset = "qwen3-vl-2b"\ntower = "qwen3-vl-so400m"\ndecoder = { preset = "qwen3-vl-8b", fusion = "deepstack" }',
        lambda: QWEN.with_(
            tower=PACKED["qwen3-vl-so400m"],
            decoder=VLMS["qwen3-vl-8b"].decoder.with_(fusion=DeepStackConfig()),
            connector=QWEN.connector.with_(reads=1152, gives=4096),
            stack=QWEN.stack.with_(reads=1152, gives=4096),
        ),
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_few_lines_are_the_python_config(name):
    text, made = COMBINATIONS[name]
    assert read(text) == made()


def test_towers_side_by_side_by_name():
    text = 'preset = "prismatic-7b"\ntower.towers = [{ vit = "clip-l14-336" }, { vit = "dinov2-l14", layer = -2 }]\n'
    config = read(text + "tower.image = 336\npolicy = { size = 336, unread = 0 }\nconnector.hidden = [8192, 4096]")
    assert config.tower.towers == (
        TowerConfig(vit=VITS["clip-l14-336"]),
        TowerConfig(vit=VITS["dinov2-l14"], layer=-2),
    )
    assert config.connector.reads == 2048


def test_those_that_look():
    changed = LookingVLMConfig.read({"preset": "idefics-9b", "connector": {"latents": 32}, "joined": True})
    idefics = SYSTEMS["idefics-9b"]
    assert changed == idefics.with_(connector=idefics.connector.with_(latents=32), joined=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('preset = "llava1.5-7b"', r"did you mean 'llava-1\.5-7b'"),
        ('preset = "llava-1.5-7b"\ntower = "siglip-so400"', r"tower is 'siglip-so400'.*\n.*siglip-so400m"),
        ('preset = "llava-1.5-7b"\ndecoder = { preset = "qwen3-7b" }', r"decoder is 'qwen3-7b'.*\n.*qwen3"),
        ('preset = "llava-1.5-7b"\ndecoder.fusion = "crossed"', "decoder.fusion is 'crossed'"),
        ('preset = "llava-1.5-7b"\npolicy = "anyress"', "anyres"),
        ('preset = "llava-1.5-7b"\ntower = "vqgan-f16-1024"', "no ViT"),
        ('preset = "llava-1.5-7b"\ntower = "siglip-b16-256"', "policy.patch = 16"),
        ('preset = "llava-1.5-7b"\ntower = "qwen2-vl"\nlayer = 0', "layer and prefix"),
        ('preset = "llava-1.5-7b"\ntower = "qlip-l14-392-codes"', "leave them out"),
        ('preset = "llava-1.5-7b"\nconnector.reads = 768', "reads = 1024"),
        ('preset = "llava-1.5-7b"\ndecoder.context = 128', "context to more than 576"),
        ('preset = "llava-1.5-7b"\ndecoder.layrs = 2', r"layrs.*\n.*layers"),
        ('preset = "llava-1.5-7b"\nwithout = ["layers"]', "did you mean 'layer'"),
        ('preset = "llava-1.5-7b"\nwithout = ["tower"]', "tower"),
        ('without = ["layer"]', "without"),
        ("preset = 7", "no vision-language model"),
        ("tower = 3", "tower"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(text, says):
    with pytest.raises(ConfigError, match=says):
        read(text)


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = """
name = "mine"
says = "a new combination"
tokenizer = { train = 420, specials = ["<image>"] }

[model]
preset = "llava-1.5-7b"
config = { tower = "siglip-so400m-384", policy = "siglip-384", rules = { fill = 1 } }

[sources.scenes]
kind = "scenes"
atlas = "-"
preset = "plain"
side = 56
scene = { vendors = ["left"], names = [], inside = 0.0, word = 0.0 }

[[stages]]
name = "tune"
task = "vlm"
steps = 100
batch = 64
mixture = { weights = { scenes = 1 } }
settings = { questions = 1, kinds = ["what"], length = 48 }
optim = { kind = "adamw", lr = 1e-3 }
"""
SMALL = {
    "model.config.policy": {"preset": "naive", "size": 56},
    "model.config.tower.image": 56,
    "model.config.tower.layers": 2,
    "model.config.tower.block": {"width": 16, "attention": {"heads": 2}, "mlp": {"hidden": 24}},
    "model.config.decoder.vocab": 420,
    "model.config.decoder.layers": 1,
    "model.config.decoder.rotary.head_dim": 16,
    "model.config.decoder.block": {
        "width": 32,
        "attention": {"heads": 2, "kv_heads": 2},
        "mlp": {"hidden": 24},
    },
}


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path / "mine.toml"


def test_a_recipe_names_a_preset_and_is_the_whole_config(mine):
    """What is kept says every width, so that the run goes on if a preset changes."""
    chosen = recipe.read(mine, {"model.config.tower.layers": 12})
    config = chosen.model_config()
    assert chosen.model.kind == "vlm" and config.connector == ProjectorConfig(reads=1152, gives=4096)
    assert config.tower == VITS["siglip-so400m-384"].with_(layers=12) and config.layer == -2
    assert chosen.model.config == config.plain()
    assert recipe.Recipe.read(chosen.plain()) == chosen
    named = recipe.read(mine, {"model.config.tower": "clip-l14", "model.config.policy": "clip"}).model_config()
    assert named.tower == VITS["clip-l14"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.preset": "llava-7b"}, "llava"),
        ({"model.kind": "decoder"}, "leave kind out"),
        ({"model.start": "stories15M"}, "a config or a start"),
        ({"model.config.decoder.context": 128}, "context"),
        ({"model.config.tower": "clip-l15"}, "clip-l14"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(mine, change, says):
    with pytest.raises(ConfigError, match=says):
        recipe.read(mine, change)


def test_a_recipe_that_names_a_preset_trains(mine, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.recipe.open_atlas", lambda name: Atlas.build(drawn()))
    words = Tokenizer.train(["what is it? a ball"] * 3, 420, specials=[recipe.END, "<image>"], eos=recipe.END)
    words.save(tmp_path / "words")
    small = recipe.tiny(recipe.read(mine, {**SMALL, "tokenizer": {"start": str(tmp_path / "words")}}))
    made = recipe.train(small, tmp_path / "out", device="cpu", quiet=True)
    again = hub.load(tmp_path / "out" / "final")
    assert again.config == made.config == small.model_config()
    assert made.config.tower.pool == "attention" and made.config.connector.gives == 32
    assert all(torch.isfinite(p).all() for p in again.parameters())
