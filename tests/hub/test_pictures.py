"""How pictures are prepared goes with a model: what we write is what transformers reads, and what came stays."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

from helpers import randomize
from vitrail import recipe
from vitrail.backbones.decoder import DecoderConfig
from vitrail.codecs.codec import CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.quantizers import VQConfig
from vitrail.connectors import ProjectorConfig
from vitrail.data.views import PLAIN, views
from vitrail.encoders import TextConfig, TextTower, TowerConfig, TowersConfig, ViT, ViTConfig
from vitrail.encoders.presets import TEXTS, VITS
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.viewer import tower_of
from vitrail.hub import from_hf, load, pictures, save, to_hf
from vitrail.models.clip import CONTRASTIVE, Contrastive
from vitrail.models.masked import Masked, MaskedConfig
from vitrail.models.qlip import TaughtCodec, TaughtCodecConfig
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
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
    pictures.read_as(trained, tower_of(trained), pictures.OURS)
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


@pytest.mark.parametrize("kind", ["a bias", "positions", "neither"])
def test_a_tower_reads_other_levels_with_the_same_features(kind):
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=24))
    rotary = RotaryConfig(head_dim=8, layout="2d") if kind == "neither" else None
    positions = "none" if kind == "neither" else "cls_and_patches"
    config = ViTConfig(
        layers=2,
        block=block,
        image=28,
        patch=7,
        cls=True,
        positions=positions,
        rotary=rotary,
        patch_bias=kind == "a bias",
    )
    vit = randomize(ViT(config)).eval()
    x, scale, offset = torch.rand(2, 3, 28, 35), [2.0, 0.5, 3.0], [0.1, -0.4, 0.0]
    shown = x * torch.tensor(scale).view(3, 1, 1) + torch.tensor(offset).view(3, 1, 1)
    expected = vit(shown)
    if kind == "neither":
        with pytest.raises(ConfigError, match="neither a bias nor positions"):
            vit.read_through(scale, offset)
        assert torch.equal(vit(shown), expected)  # as it was
        expected, offset = vit(x * torch.tensor(scale).view(3, 1, 1)), [0.0] * 3
    vit.read_through(scale, offset)
    torch.testing.assert_close(vit(x), expected, rtol=1e-4, atol=1e-5)


def asked(x: np.ndarray, levels: dict) -> torch.Tensor:
    """(H, W, 3) bytes as transformers' processors show them"""
    mean, std = (torch.tensor(levels[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
    return ((torch.from_numpy(x).permute(2, 0, 1) / 255 - mean) / std)[None]


@pytest.mark.parametrize("said", ["levels", "bytes", "timm", "no levels", "nothing"])
def test_what_is_trained_on_is_read_as_what_it_learned_from_was(said, tmp_path, capsys):
    """A teacher, and a start, of strangers' weights: training shows them pixels in −1 … 1."""
    theirs = Dinov2Model(Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2,
                                      image_size=32, patch_size=8)).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    levels = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    if said == "levels":
        (tmp_path / FILE).write_text(json.dumps({"size": {"height": 32, "width": 32}, **levels}))
    if said == "bytes":  # not brought to 0 … 1 first
        (tmp_path / FILE).write_text(json.dumps({"size": {"height": 32, "width": 32}, "do_rescale": False} | {
            key: [255 * level for level in levels[key]] for key in levels
        }))  # fmt: skip
    if said == "no levels":
        levels = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        (tmp_path / FILE).write_text(json.dumps({"size": {"height": 32, "width": 32}, "do_normalize": False}))
    if said == "timm":
        about = json.loads((tmp_path / "config.json").read_text())
        timm = {"mean": levels["image_mean"], "std": levels["image_std"]}
        (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": timm}))
    if said == "nothing":
        levels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    shown = views(torch.from_numpy(x).permute(2, 0, 1)[None], PLAIN.with_(side=32))
    with torch.no_grad():
        expected = theirs(asked(x, levels)).last_hidden_state[:, 1:]
        config = TaughtCodecConfig(
            codec=CodecConfig(
                net=ConvPairConfig(widths=(8, 8, 8, 8), latent=8, groups=4, size=(32, 32)),
                quantizer=VQConfig(codes=16, dim=8),
            ),
            teacher=from_hf(tmp_path).config,
        )
        taught = TaughtCodec(config).eval()
        recipe._start(taught, "teacher", recipe.StartPart(start=str(tmp_path), part=""))
        torch.testing.assert_close(taught.lesson(shown, (4, 4)).flatten(1, 2), expected, rtol=1e-4, atol=1e-4)
    assert ("not said" in capsys.readouterr().err) == (said == "nothing")


def test_a_start_is_evaluated_as_it_is_trained(tmp_path):
    to_hf(MADE["clip"](), tmp_path)
    about = json.loads((tmp_path / FILE).read_text())
    levels = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (tmp_path / FILE).write_text(json.dumps(about | levels))
    told = load(tmp_path)
    side = tower(told).image
    x = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    smoke = recipe.read("clip-batch")
    begun = recipe._model(smoke.with_(model=smoke.model.with_(start=str(tmp_path), config=None, parts={})), None)
    shown = views(torch.from_numpy(x).permute(2, 0, 1)[None], PLAIN.with_(side=side))
    with torch.no_grad():
        torch.testing.assert_close(begun.encode_image(shown), told.encode_image(asked(x, levels)), rtol=1e-4, atol=1e-5)
    save(begun, tmp_path / "ours")
    assert pictures.levels(load(tmp_path / "ours")) == pictures.OURS


def test_a_part_of_a_vision_language_model_reads_what_that_model_shows_it(tmp_path):
    to_hf(MADE["clip"](), tmp_path)
    about = json.loads((tmp_path / FILE).read_text())
    levels = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (tmp_path / FILE).write_text(json.dumps(about | levels))
    vit = tower_of(load(tmp_path)).config
    decoder = DecoderConfig(
        vocab=64, layers=1, context=64, rotary=RotaryConfig(head_dim=16),
        block=BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=32), norm="rms"),
    )  # fmt: skip
    own = TowerConfig(vit=vit, mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7))
    both = TowersConfig(towers=(TowerConfig(vit=vit), own), image=vit.image)
    for eyes, place, norm in ((vit, "tower", (0.4, 0.6)), (both, "tower.towers.1", (0.0, 1.0))):
        connector = ProjectorConfig(reads=vit.block.width * (1 + (eyes is both)), gives=32)
        config = VLMConfig(
            tower=eyes, connector=connector, decoder=decoder, policy=Naive(size=vit.image, patch=vit.patch),
            mean=(norm[0],) * 3, std=(norm[1],) * 3,
        )  # fmt: skip
        seeing = VLM(config).eval()
        recipe._start(seeing, place, recipe.StartPart(start=str(tmp_path), part="image"))
        started = seeing.get_submodule(place)
        mean, std = (config.mean, config.std) if eyes is vit else (own.mean, own.std)  # two towers have their own
        x = np.random.default_rng(0).integers(0, 256, (vit.image, vit.image, 3), dtype=np.uint8)
        shown = asked(x, {"image_mean": list(mean), "image_std": list(std)})
        with torch.no_grad():
            expected = tower_of(load(tmp_path))(asked(x, levels))
            torch.testing.assert_close(started(shown), expected, rtol=1e-4, atol=1e-4)
    # And a part of such a model, started from, is shown what a tower of ours is.
    save(seeing, tmp_path / "vlm")
    alone = Masked(MaskedConfig(image=vit.with_(mask=True), teacher=vit)).eval()
    recipe._start(alone, "teacher", recipe.StartPart(start=str(tmp_path / "vlm"), part="tower.towers.1"))
    with torch.no_grad():
        plain = asked(x, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
        torch.testing.assert_close(alone.teacher(plain), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="positions afresh"):
        start = recipe.StartPart(start=str(tmp_path), part="image", fresh=("positions",))
        recipe._start(alone, "teacher", start)
