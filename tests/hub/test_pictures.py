"""How pictures are prepared goes with a model: what we write is what transformers reads, and what came stays."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.encoders import TextConfig, TextTower, ViT, ViTConfig
from vitrail.encoders.presets import TEXTS, VITS
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, pictures, save, to_hf
from vitrail.models.clip import CONTRASTIVE, Contrastive
from vitrail.nn import BlockConfig
from vitrail.processing.preprocessing import FILE, Preprocessing
from vitrail.processing.resolution import Crop, Naive

RNG = np.random.default_rng(0)
PICTURES = [
    Image.fromarray(RNG.integers(0, 256, (61, 43, 3), dtype=np.uint8)),
    Image.fromarray(RNG.integers(0, 256, (30, 97, 3), dtype=np.uint8)),
    Image.fromarray(RNG.integers(0, 256, (50, 50, 4), dtype=np.uint8)),  # with opacity
    Image.fromarray(RNG.integers(0, 256, (20, 33), dtype=np.uint8)),  # grey
]


def small(block: BlockConfig) -> BlockConfig:
    return block.with_(width=16, attention=block.attention.with_(heads=2), mlp=block.mlp.with_(hidden=32))


def tiny(name: str, side: int = 28, patch: int = 7) -> ViTConfig:
    """A preset's tower, made small."""
    preset = VITS[name]
    rotary = None if preset.rotary is None else preset.rotary.with_(head_dim=8)
    return preset.with_(layers=1, image=side, patch=patch, block=small(preset.block), rotary=rotary)


def words(name: str) -> TextConfig:
    preset = TEXTS[name]
    head = 16 if preset.head else 0
    return preset.with_(layers=1, vocab=50, context=8, block=small(preset.block), head=head)


def pair(name: str, text: str) -> Contrastive:
    preset = CONTRASTIVE[name]
    return Contrastive(preset.with_(image=tiny(name), text=words(text), embed=12 if preset.embed else None))


MADE = {
    "clip": lambda: pair("clip-b16", "clip-b"),
    "siglip": lambda: pair("siglip-b16-256", "siglip-b"),
    "clip_vision_model": lambda: ViT(tiny("clip-b16")),
    "siglip_vision_model": lambda: ViT(tiny("siglip-b16-224")),
    "dinov2": lambda: ViT(tiny("dinov2-b14")),
}


def tower(model) -> ViTConfig:
    return model.config.image if isinstance(model, Contrastive) else model.config


def prepared(folder, config) -> torch.Tensor:
    ours = Preprocessing.read(folder, config)
    return torch.stack([ours(picture) for picture in PICTURES])


@pytest.mark.parametrize("family", MADE)
def test_an_export_shows_pictures_as_our_own_folder_does(family, tmp_path):
    from transformers import AutoImageProcessor

    model = MADE[family]()
    save(model, tmp_path / "own")
    assert not (tmp_path / "own" / FILE).exists()
    to_hf(model, tmp_path / "theirs", family=family)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "theirs")
    assert type(processor).__name__ == f"{pictures.PROCESSORS[family]}Pil"
    expected = processor(PICTURES, return_tensors="pt")["pixel_values"]
    own, theirs = (prepared(tmp_path / folder, tower(model)) for folder in ("own", "theirs"))
    assert expected.shape == (4, 3, 28, 28) and expected.min() >= -1 and expected.max() <= 1
    torch.testing.assert_close(own, expected, rtol=0, atol=0)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_what_came_with_a_model_stays_word_for_word(family, tmp_path):
    """From transformers to our own folder and back, twice: the same file, the same pixels."""
    import transformers as hf

    model = MADE[family]()
    to_hf(model, tmp_path / "first")
    if family == "clip":
        processor = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})
    else:
        processor = hf.SiglipImageProcessorPil(size={"height": 28, "width": 28}, image_mean=[0.1] * 3, resample=2)
    processor.save_pretrained(tmp_path / "first")
    said = json.loads((tmp_path / "first" / FILE).read_text())
    expected = processor(PICTURES, return_tensors="pt")["pixel_values"]

    save(from_hf(tmp_path / "first"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "second")
    save(load(tmp_path / "second"), tmp_path / "again")
    for folder in ("own", "second", "again"):
        assert json.loads((tmp_path / folder / FILE).read_text()) == said
        torch.testing.assert_close(prepared(tmp_path / folder, tower(model)), expected, rtol=0, atol=0)

    # Trained here on pictures as ours are, it is ours; and what lay in the folder goes.
    trained = load(tmp_path / "own")
    pictures.forget(trained)
    save(trained, tmp_path / "own")
    assert not (tmp_path / "own" / FILE).exists()
    assert Preprocessing.read(tmp_path / "own", tower(model)) == Preprocessing.own(tower(model))


def test_a_whole_processor_keeps_its_picture_part(tmp_path):
    to_hf(MADE["siglip"](), tmp_path / "theirs")
    part = json.loads((tmp_path / "theirs" / FILE).read_text()) | {"resample": 1}
    (tmp_path / "theirs" / FILE).unlink()
    (tmp_path / "theirs" / "processor_config.json").write_text(json.dumps({"image_processor": part, "x": 1}))
    save(load(tmp_path / "theirs"), tmp_path / "own")
    assert json.loads((tmp_path / "own" / FILE).read_text()) == part


def test_what_nobody_knows_is_not_made_up(tmp_path):
    """A folder of strangers that says nothing: neither ours nor an export claims anything."""
    model = MADE["clip_vision_model"]()
    to_hf(model, tmp_path / "theirs")
    (tmp_path / "theirs" / FILE).unlink()
    to_hf(from_hf(tmp_path / "theirs"), tmp_path / "back")
    assert not (tmp_path / "back" / FILE).exists()
    save(from_hf(tmp_path / "theirs"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "back")
    assert not (tmp_path / "back" / FILE).exists()
    for folder in ("theirs", "own", "back"):
        with pytest.raises(CheckpointError, match="does not say how"):
            Preprocessing.read(tmp_path / folder, model.config)


@pytest.mark.parametrize("said", [{"max_num_patches": 256, "patch_size": 7, "resample": 2}, {"size": {"height": 9}}])
def test_what_we_cannot_follow_is_kept_all_the_same(said, tmp_path):
    to_hf(MADE["siglip"](), tmp_path / "theirs")
    (tmp_path / "theirs" / FILE).write_text(json.dumps(said))
    to_hf(load(tmp_path / "theirs"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / FILE).read_text()) == said


def test_where_nothing_true_can_be_said_nothing_is(tmp_path):
    """SigLIP 2 reads unequal pictures, a tower of one channel no colours, and a text tower none at all."""
    naflex = tiny("siglip-b16-224").with_(order="channels_last", resize="bilinear_antialias")
    grey = tiny("siglip-b16-224").with_(channels=1)
    for n, model in enumerate((ViT(naflex), ViT(grey), TextTower(words("clip-b")))):
        to_hf(model, tmp_path / str(n))
        assert not (tmp_path / str(n) / FILE).exists()


def test_timm_is_told_in_its_own_words(tmp_path):
    config = tiny("eva02-b14", side=28, patch=7)
    to_hf(ViT(config), tmp_path / "made")
    file = tmp_path / "made" / "config.json"
    about = json.loads(file.read_text())
    ours = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
    assert about["pretrained_cfg"].items() >= ours.items() and "timm" not in about
    assert Preprocessing.read(tmp_path / "made", config) == Preprocessing.own(config)
    # Released: no preprocessor_config.json, another mean.
    (tmp_path / "made" / FILE).unlink()
    words = {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27], "interpolation": "bicubic", "crop_pct": 0.9}
    kept = {key: value for key, value in about["pretrained_cfg"].items() if key not in ours}
    file.write_text(json.dumps(about | {"pretrained_cfg": kept | words}))
    save(load(tmp_path / "made"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["pretrained_cfg"] == kept | words
    assert not (tmp_path / "back" / FILE).exists()
    with pytest.raises(CheckpointError, match="does not say how"):
        Preprocessing.read(tmp_path / "own", config)


LEVELS = st.tuples(*[st.floats(0.01, 1.0)] * 3)
POLICIES = st.one_of(
    st.builds(Naive, size=st.just(16), patch=st.just(1), resample=st.sampled_from(["bilinear", "bicubic", "lanczos"])),
    st.builds(Crop, size=st.just(16), edge=st.integers(16, 40), patch=st.just(1), resample=st.just("bilinear")),
)


@settings(max_examples=50)
@given(st.builds(Preprocessing, POLICIES, LEVELS, LEVELS, st.floats(1e-3, 1.0)))
def test_what_is_written_is_what_is_read(tmp_path_factory, preprocessing):
    folder = tmp_path_factory.mktemp("said")
    (folder / FILE).write_text(json.dumps(preprocessing.plain()))
    assert Preprocessing.read(folder, tiny("siglip-b16-224", 16, 8)) == preprocessing
