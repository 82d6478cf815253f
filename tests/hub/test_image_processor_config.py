"""Image processor configs: exports match transformers, and loaded configs are kept."""

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
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.quantizers import VQConfig
from vitrail.connectors import ProjectorConfig
from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.encoders import MultiTowerConfig, TextTower, TextTowerConfig, TowerConfig, ViT, ViTConfig
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.image_feature_extractor import find_image_tower
from vitrail.hub import from_hf, image_processor_config, load, save, to_hf
from vitrail.models.contrastive_model import CONTRASTIVE_PRESETS, ContrastiveModel
from vitrail.models.masked_image_model import MaskedImageConfig, MaskedImageModel
from vitrail.models.qlip_model import CodecTrainingConfig, CodecTrainingModel
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.image_preprocessor import PREPROCESSOR_FILE, ImagePreprocessor
from vitrail.processing.resolution_policies import CropPolicy, NaivePolicy

RNG = np.random.default_rng(0)
PICTURES = [
    Image.fromarray(RNG.integers(0, 256, (61, 43, 3), dtype=np.uint8)),
    Image.fromarray(RNG.integers(0, 256, (30, 97, 3), dtype=np.uint8)),
    Image.fromarray(RNG.integers(0, 256, (50, 50, 4), dtype=np.uint8)),  # with opacity
    Image.fromarray(RNG.integers(0, 256, (20, 33), dtype=np.uint8)),  # grey
]


def small(block: BlockConfig) -> BlockConfig:
    return block.replace(
        width=16, attention=block.attention.replace(heads=2), mlp=block.mlp.replace(intermediate_size=32)
    )


def tiny(name: str, side: int = 28, patch: int = 7) -> ViTConfig:
    """A small version of a preset tower."""
    preset = VIT_PRESETS[name]
    rotary = None if preset.rotary is None else preset.rotary.replace(head_dim=8)
    return preset.replace(layers=1, image_size=side, patch_size=patch, block=small(preset.block), rotary=rotary)


def words(name: str) -> TextTowerConfig:
    preset = TEXT_TOWER_PRESETS[name]
    head = 16 if preset.head_width else 0
    return preset.replace(layers=1, vocab_size=50, context_length=8, block=small(preset.block), head_width=head)


def pair(name: str, text: str) -> ContrastiveModel:
    preset = CONTRASTIVE_PRESETS[name]
    return ContrastiveModel(
        preset.replace(image=tiny(name), text=words(text), embed_dim=12 if preset.embed_dim else None)
    )


MADE = {
    "clip": lambda: pair("clip-b16", "clip-b"),
    "siglip": lambda: pair("siglip-b16-256", "siglip-b"),
    "clip_vision_model": lambda: ViT(tiny("clip-b16")),
    "siglip_vision_model": lambda: ViT(tiny("siglip-b16-224")),
    "dinov2": lambda: ViT(tiny("dinov2-b14")),
}


def tower(model) -> ViTConfig:
    return model.config.image if isinstance(model, ContrastiveModel) else model.config


def prepared(folder, config) -> torch.Tensor:
    ours = ImagePreprocessor.from_folder(folder, config)
    return torch.stack([ours(picture) for picture in PICTURES])


@pytest.mark.parametrize("family", MADE)
def test_export_preprocessing_matches_native(family, tmp_path):
    from transformers import AutoImageProcessor

    model = MADE[family]()
    save(model, tmp_path / "own")
    assert not (tmp_path / "own" / PREPROCESSOR_FILE).exists()
    to_hf(model, tmp_path / "theirs", family=family)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "theirs")
    assert type(processor).__name__ == f"{image_processor_config.PROCESSOR_CLASSES[family]}Pil"
    expected = processor(PICTURES, return_tensors="pt")["pixel_values"]
    own, theirs = (prepared(tmp_path / folder, tower(model)) for folder in ("own", "theirs"))
    assert expected.shape == (4, 3, 28, 28) and expected.min() >= -1 and expected.max() <= 1
    torch.testing.assert_close(own, expected, rtol=0, atol=0)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_attached_config_round_trip(family, tmp_path):
    """Two round trips between transformers and native folders keep file and pixels."""
    import transformers as hf

    model = MADE[family]()
    to_hf(model, tmp_path / "first")
    if family == "clip":
        processor = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})
    else:
        processor = hf.SiglipImageProcessorPil(size={"height": 28, "width": 28}, image_mean=[0.1] * 3, resample=2)
    processor.save_pretrained(tmp_path / "first")
    output = json.loads((tmp_path / "first" / PREPROCESSOR_FILE).read_text())
    expected = processor(PICTURES, return_tensors="pt")["pixel_values"]

    save(from_hf(tmp_path / "first"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "second")
    save(load(tmp_path / "second"), tmp_path / "again")
    for folder in ("own", "second", "again"):
        assert json.loads((tmp_path / folder / PREPROCESSOR_FILE).read_text()) == output
        torch.testing.assert_close(prepared(tmp_path / folder, tower(model)), expected, rtol=0, atol=0)

    # Trained here on pictures as ours are, it is ours; and what lay in the folder goes.
    trained = load(tmp_path / "own")
    image_processor_config.fold_normalization(
        trained, find_image_tower(trained), image_processor_config.NATIVE_NORMALIZATION
    )
    save(trained, tmp_path / "own")
    assert not (tmp_path / "own" / PREPROCESSOR_FILE).exists()
    assert ImagePreprocessor.from_folder(tmp_path / "own", tower(model)) == ImagePreprocessor.default(tower(model))


def test_processor_config_keeps_image_part(tmp_path):
    to_hf(MADE["siglip"](), tmp_path / "theirs")
    part = json.loads((tmp_path / "theirs" / PREPROCESSOR_FILE).read_text()) | {"resample": 1}
    (tmp_path / "theirs" / PREPROCESSOR_FILE).unlink()
    (tmp_path / "theirs" / "processor_config.json").write_text(json.dumps({"image_processor": part, "x": 1}))
    save(load(tmp_path / "theirs"), tmp_path / "own")
    assert json.loads((tmp_path / "own" / PREPROCESSOR_FILE).read_text()) == part


def test_unknown_preprocessing_stays_unknown(tmp_path):
    """External folders without a config give native folders and exports without one."""
    model = MADE["clip_vision_model"]()
    to_hf(model, tmp_path / "theirs")
    (tmp_path / "theirs" / PREPROCESSOR_FILE).unlink()
    to_hf(from_hf(tmp_path / "theirs"), tmp_path / "back")
    assert not (tmp_path / "back" / PREPROCESSOR_FILE).exists()
    save(from_hf(tmp_path / "theirs"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "back")
    assert not (tmp_path / "back" / PREPROCESSOR_FILE).exists()
    for folder in ("theirs", "own", "back"):
        with pytest.raises(CheckpointError, match="has no image preprocessor config"):
            ImagePreprocessor.from_folder(tmp_path / folder, model.config)


@pytest.mark.parametrize("output", [{"max_num_patches": 256, "patch_size": 7, "resample": 2}, {"size": {"height": 9}}])
def test_unsupported_preprocessing_is_kept(output, tmp_path):
    to_hf(MADE["siglip"](), tmp_path / "theirs")
    (tmp_path / "theirs" / PREPROCESSOR_FILE).write_text(json.dumps(output))
    to_hf(load(tmp_path / "theirs"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / PREPROCESSOR_FILE).read_text()) == output


def test_no_config_without_matching_processor(tmp_path):
    """Towers with one channel and text towers have no matching image processor."""
    grey = tiny("siglip-b16-224").replace(channels=1)
    for n, model in enumerate((ViT(grey), TextTower(words("clip-b")))):
        to_hf(model, tmp_path / str(n))
        assert not (tmp_path / str(n) / PREPROCESSOR_FILE).exists()


def test_timm_preprocessing(tmp_path):
    config = tiny("eva02-b14", side=28, patch=7)
    to_hf(ViT(config), tmp_path / "made")
    file = tmp_path / "made" / "config.json"
    about = json.loads(file.read_text())
    ours = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
    assert about["pretrained_cfg"].items() >= ours.items() and "timm" not in about
    assert ImagePreprocessor.from_folder(tmp_path / "made", config) == ImagePreprocessor.default(config)
    # Released: no preprocessor_config.json, another mean.
    (tmp_path / "made" / PREPROCESSOR_FILE).unlink()
    words = {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27], "interpolation": "bicubic", "crop_pct": 0.9}
    kept = {key: value for key, value in about["pretrained_cfg"].items() if key not in ours}
    file.write_text(json.dumps(about | {"pretrained_cfg": kept | words}))
    save(load(tmp_path / "made"), tmp_path / "own")
    to_hf(load(tmp_path / "own"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["pretrained_cfg"] == kept | words
    assert not (tmp_path / "back" / PREPROCESSOR_FILE).exists()
    with pytest.raises(CheckpointError, match="has no image preprocessor config"):
        ImagePreprocessor.from_folder(tmp_path / "own", config)


LEVELS = st.tuples(*[st.floats(0.01, 1.0)] * 3)
POLICIES = st.one_of(
    st.builds(
        NaivePolicy,
        image_size=st.just(16),
        patch_size=st.just(1),
        resample=st.sampled_from(["bilinear", "bicubic", "lanczos"]),
    ),
    st.builds(
        CropPolicy,
        image_size=st.just(16),
        shortest_edge=st.integers(16, 40),
        patch_size=st.just(1),
        resample=st.just("bilinear"),
    ),
)


@settings(max_examples=50)
@given(st.builds(ImagePreprocessor, POLICIES, LEVELS, LEVELS, st.floats(1e-3, 1.0)))
def test_written_config_is_read_back(tmp_path_factory, preprocessing):
    folder = tmp_path_factory.mktemp("said")
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(preprocessing.to_processor_config()))
    assert ImagePreprocessor.from_folder(folder, tiny("siglip-b16-224", 16, 8)) == preprocessing


@pytest.mark.parametrize("kind", ["a bias", "positions", "neither"])
def test_folded_normalization_keeps_features(kind):
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=24))
    rotary = RotaryConfig(head_dim=8, layout="2d") if kind == "neither" else None
    positions = "none" if kind == "neither" else "cls_and_patches"
    config = ViTConfig(
        layers=2,
        block=block,
        image_size=28,
        patch_size=7,
        cls_token=True,
        positions=positions,
        rotary=rotary,
        patch_bias=kind == "a bias",
    )
    vit = randomize(ViT(config)).eval()
    x, scale, offset = torch.rand(2, 3, 28, 35), [2.0, 0.5, 3.0], [0.1, -0.4, 0.0]
    shown = x * torch.tensor(scale).view(3, 1, 1) + torch.tensor(offset).view(3, 1, 1)
    expected = vit(shown)
    if kind == "neither":
        with pytest.raises(ConfigError, match="no patch bias and no positions"):
            vit.fold_normalization(scale, offset)
        assert torch.equal(vit(shown), expected)  # as it was
        expected, offset = vit(x * torch.tensor(scale).view(3, 1, 1)), [0.0] * 3
    vit.fold_normalization(scale, offset)
    torch.testing.assert_close(vit(x), expected, rtol=1e-4, atol=1e-5)


def asked(x: np.ndarray, levels: dict) -> torch.Tensor:
    """Normalize (H, W, 3) bytes as the processors of transformers do."""
    mean, std = (torch.tensor(levels[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
    return ((torch.from_numpy(x).permute(2, 0, 1) / 255 - mean) / std)[None]


@pytest.mark.parametrize("output", ["levels", "bytes", "timm", "no levels", "nothing"])
def test_initial_and_teacher_normalization_are_folded(output, tmp_path, capsys):
    """External initial weights and teachers get training pixels in −1 … 1."""
    theirs = Dinov2Model(Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2,
                                      image_size=32, patch_size=8)).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    levels = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    if output == "levels":
        (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps({"size": {"height": 32, "width": 32}, **levels}))
    if output == "bytes":  # not brought to 0 … 1 first
        (tmp_path / PREPROCESSOR_FILE).write_text(
            json.dumps(
                {"size": {"height": 32, "width": 32}, "do_rescale": False}
                | {key: [255 * level for level in levels[key]] for key in levels}
            )
        )
    if output == "no levels":
        levels = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        (tmp_path / PREPROCESSOR_FILE).write_text(
            json.dumps({"size": {"height": 32, "width": 32}, "do_normalize": False})
        )
    if output == "timm":
        about = json.loads((tmp_path / "config.json").read_text())
        timm = {"mean": levels["image_mean"], "std": levels["image_std"]}
        (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": timm}))
    if output == "nothing":
        levels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    shown = augment_images(torch.from_numpy(x).permute(2, 0, 1)[None], NO_AUGMENTATION.replace(image_size=32))
    with torch.no_grad():
        expected = theirs(asked(x, levels)).last_hidden_state[:, 1:]
        config = CodecTrainingConfig(
            codec=CodecConfig(
                net=ConvAutoencoderConfig(widths=(8, 8, 8, 8), latent_channels=8, norm_groups=4, image_size=(32, 32)),
                quantizer=VQConfig(codebook_size=16, dim=8),
            ),
            teacher=from_hf(tmp_path).config,
        )
        taught = CodecTrainingModel(config).eval()
        recipe.load_pretrained_part(taught, "teacher", recipe.PretrainedPartConfig(checkpoint=str(tmp_path), part=""))
        torch.testing.assert_close(
            taught.compute_teacher_features(shown, (4, 4)).flatten(1, 2), expected, rtol=1e-4, atol=1e-4
        )
    assert ("is unknown" in capsys.readouterr().err) == (output == "nothing")


def test_initial_weights_are_evaluated_with_training_normalization(tmp_path):
    to_hf(MADE["clip"](), tmp_path)
    about = json.loads((tmp_path / PREPROCESSOR_FILE).read_text())
    levels = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps(about | levels))
    result = load(tmp_path)
    side = tower(result).image_size
    x = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    smoke = recipe.load_recipe("clip-batch")
    begun = recipe.build_model(
        smoke.replace(model=smoke.model.replace(checkpoint=str(tmp_path), config=None, parts={})), None
    )
    shown = augment_images(torch.from_numpy(x).permute(2, 0, 1)[None], NO_AUGMENTATION.replace(image_size=side))
    with torch.no_grad():
        torch.testing.assert_close(
            begun.encode_image(shown), result.encode_image(asked(x, levels)), rtol=1e-4, atol=1e-5
        )
    save(begun, tmp_path / "ours")
    assert (
        image_processor_config.read_normalization(load(tmp_path / "ours"))
        == image_processor_config.NATIVE_NORMALIZATION
    )


def test_vlm_part_takes_normalization_of_model(tmp_path):
    to_hf(MADE["clip"](), tmp_path)
    about = json.loads((tmp_path / PREPROCESSOR_FILE).read_text())
    levels = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps(about | levels))
    vit = find_image_tower(load(tmp_path)).config
    decoder = DecoderConfig(
        vocab_size=64,
        layers=1,
        context_length=64,
        rotary=RotaryConfig(head_dim=16),
        block=BlockConfig(
            width=32, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
        ),
    )
    own = TowerConfig(vit=vit, mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7))
    both = MultiTowerConfig(towers=(TowerConfig(vit=vit), own), image_size=vit.image_size)
    for eyes, place, norm in ((vit, "tower", (0.4, 0.6)), (both, "tower.towers.1", (0.0, 1.0))):
        connector = ProjectorConfig(in_features=vit.block.width * (1 + (eyes is both)), out_features=32)
        config = VLMConfig(
            tower=eyes,
            connector=connector,
            decoder=decoder,
            policy=NaivePolicy(image_size=vit.image_size, patch_size=vit.patch_size),
            mean=(norm[0],) * 3,
            std=(norm[1],) * 3,
        )
        seeing = VLM(config).eval()
        recipe.load_pretrained_part(seeing, place, recipe.PretrainedPartConfig(checkpoint=str(tmp_path), part="image"))
        started = seeing.get_submodule(place)
        mean, std = (config.mean, config.std) if eyes is vit else (own.mean, own.std)  # two towers have their own
        x = np.random.default_rng(0).integers(0, 256, (vit.image_size, vit.image_size, 3), dtype=np.uint8)
        shown = asked(x, {"image_mean": list(mean), "image_std": list(std)})
        with torch.no_grad():
            expected = find_image_tower(load(tmp_path))(asked(x, levels))
            torch.testing.assert_close(started(shown), expected, rtol=1e-4, atol=1e-4)
    # And a part of such a model, started from, is shown what a tower of ours is.
    save(seeing, tmp_path / "vlm")
    alone = MaskedImageModel(MaskedImageConfig(image=vit.replace(mask_token=True), teacher=vit)).eval()
    recipe.load_pretrained_part(
        alone, "teacher", recipe.PretrainedPartConfig(checkpoint=str(tmp_path / "vlm"), part="tower.towers.1")
    )
    with torch.no_grad():
        plain = asked(x, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
        torch.testing.assert_close(alone.teacher(plain), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="reinitialized position embedding"):
        start = recipe.PretrainedPartConfig(checkpoint=str(tmp_path), part="image", reinitialize=("positions",))
        recipe.load_pretrained_part(alone, "teacher", start)
