"""`vitrail eval` on towers of all kinds, on exports, at several widths, in several languages; and what it writes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from evals.test_collection_retrieval import ROWS, Toy
from evals.test_suites_models import own, tokenizer
from hub.test_image_processor_config import pair, tiny
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.data.image_collection import load_collection
from vitrail.data.image_readers import READERS, ImageRecord
from vitrail.encoders.conv_tower import ConvTower, ConvTowerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor, adjust_gamma, find_image_tower, trim_images
from vitrail.evals.suites import image_collections
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.processing.image_preprocessor import PREPROCESSOR_FILE, ImagePreprocessor

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
CONV = ConvTowerConfig(image_size=16, widths=(8, 16), blocks=(1, 1), norm_groups=4)
TALL = np.random.default_rng(0).integers(0, 256, (40, 23, 3), dtype=np.uint8)
WIDE = np.random.default_rng(1).integers(0, 256, (17, 64, 3), dtype=np.uint8)


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


def written(file) -> dict:
    return json.loads(file.read_text())


@pytest.fixture
def classes(tmp_path):
    """Ten pictures of each of two colours, in train and in test."""
    for part, seed in (("train", 0), ("test", 1)):
        for c, name in enumerate(("red", "green")):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for n in range(10):
                noise = np.random.default_rng([seed, c, n]).integers(0, 60, (20, 24, 3))
                noise[..., c] += 180
                Image.fromarray(noise.astype(np.uint8)).save(tmp_path / "data" / part / name / f"{n}.png")
    return tmp_path / "data"


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(READERS, "toy", lambda root: Toy())


# ---- towers -----------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """Model that names the tower to export."""

    def __init__(self, image: nn.Module, teacher: nn.Module):
        super().__init__()
        self.image, self.teacher = image, teacher

    @property
    def tower(self) -> nn.Module:
        return self.teacher


def test_image_tower_is_found_in_every_model(tmp_path):
    vit, conv = ViT(ViTConfig(layers=1, block=BLOCK, image_size=16, patch_size=8, pool="mean")), ConvTower(CONV)
    assert find_image_tower(vit) is vit and find_image_tower(conv) is conv
    assert find_image_tower(Held(vit, conv)) is conv
    both = own(tmp_path)
    assert find_image_tower(both) is both.image
    for blind in (both.text, nn.Linear(2, 2)):
        assert find_image_tower(blind) is None
        with pytest.raises(CheckpointError, match=f"{type(blind).__name__} has no image tower"):
            ImageFeatureExtractor(blind, ImagePreprocessor.default(CONV))


def test_features_are_pooled_or_patch_means():
    torch.manual_seed(0)
    bare = ViT(
        ViTConfig(layers=1, block=BLOCK, image_size=16, patch_size=8, cls_token=True, positions="cls_and_patches")
    ).eval()
    pooled, conv = ViT(bare.config.replace(pool="cls")).eval(), ConvTower(CONV).eval()
    ours = ImagePreprocessor.default(bare.config)
    pixels = torch.stack([ours(TALL), ours(WIDE)])
    for model, expected in (
        (bare, bare(pixels).mean(1)),  # without the CLS token
        (pooled, pooled.forward_pooled(pixels)),
        (conv, conv.forward_pooled(pixels)),
        (Held(pooled, conv), conv.forward_pooled(pixels)),
    ):
        found = ImageFeatureExtractor(model, ours, batch_size=1).extract_features([TALL, WIDE])
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def test_probe_supports_bare_towers(tmp_path, classes, capsys):
    """Ours and an export give the same scores, with neither tokenizer nor text."""
    torch.manual_seed(0)
    tower = ViT(tiny("siglip-b16-224", 16, 8))
    hub.save(tower, tmp_path / "own")
    hub.to_hf(tower, tmp_path / "theirs")
    hub.save(ViT(tower.config.replace(pool="none")), tmp_path / "bare")
    for name in ("own", "theirs", "bare"):
        run(tmp_path / name, "probe", "--data", classes, "--out", tmp_path / f"{name}.json")
    assert "linear probe, top-1" in capsys.readouterr().out
    own_, theirs, bare = (written(tmp_path / f"{name}.json") for name in ("own", "theirs", "bare"))
    assert own_["scores"] == theirs["scores"] and own_["features"] == bare["features"] == 16
    assert own_["scores"][0]["count"] == 20 and own_["trained_on"] == 20 and own_["penalty"] > 0
    assert {"1", "0.1", "0.01"} <= own_["penalties_tried"].keys() and own_["limit"] is None
    assert bare["scores"][0]["value"] == 1  # colours are easy


def test_bare_tower_supports_another_image_size(tmp_path, classes):
    """DINOv2's tower has 518 pixels, and its processor 224."""
    tower = ViT(tiny("dinov2-b14", 32, 8))
    hub.to_hf(tower, tmp_path / "theirs", family="dinov2")
    about = written(tmp_path / "theirs" / PREPROCESSOR_FILE) | {
        "size": {"shortest_edge": 18}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}
    }  # fmt: skip
    (tmp_path / "theirs" / PREPROCESSOR_FILE).write_text(json.dumps(about))
    run(tmp_path / "theirs", "probe", "--data", classes, "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["pictures_prepared"]["crop_size"] == {"height": 16, "width": 16}
    with pytest.raises(CheckpointError, match="the preprocessor makes images of"):
        ImagePreprocessor.from_folder(tmp_path / "theirs", tower.config)


def test_suites_support_convolutional_towers(tmp_path, classes):
    torch.manual_seed(0)
    conv = ContrastiveModel(own(tmp_path / "vit").config.replace(image=CONV))
    hub.save(conv, tmp_path / "conv", tokenizer())
    embedder = ContrastiveEmbedder(conv, ImagePreprocessor.default(CONV), tokenizer(), batch_size=1)
    assert embedder.image_size == 16 and embedder.embed_images([TALL, WIDE]).shape == (2, 24)
    assert embedder.extract_features([TALL, WIDE]).shape == (2, CONV.pooled_width)
    for suite in ("zeroshot", "probe"):
        run(tmp_path / "conv", suite, "--data", classes, "--out", tmp_path / "scores.json")
        assert written(tmp_path / "scores.json")["scores"][0]["count"] == 20


# ---- an export, and what is written -----------------------------------------------------------------------------


def test_exported_model_has_equal_scores(tmp_path, toy):
    """A CLIP-shaped model of ours, by our own folder and by its Hugging Face one."""
    made = tokenizer()
    config = pair("clip-b16", "clip-b").config
    text = config.text.replace(
        vocab_size=made.vocab_size, context_length=48, eos_token_id=made.eos_token_id, pool="eos"
    )
    torch.manual_seed(0)
    model = ContrastiveModel(config.replace(text=text))
    hub.save(model, tmp_path / "own", tokenizer())
    hub.to_hf(model, tmp_path / "theirs", tokenizer=tokenizer())
    for name in ("own", "theirs"):
        run(tmp_path / name, "retrieval", "--data", "toy", "--out", tmp_path / f"{name}.json")
    own_, theirs = (written(tmp_path / f"{name}.json") for name in ("own", "theirs"))
    assert own_["scores"] == theirs["scores"] and own_["pictures_prepared"] == theirs["pictures_prepared"]


def test_retrieval_writes_settings_and_scores(tmp_path, toy, capsys):
    own(tmp_path / "ckpt")
    out = tmp_path / "scores.json"
    options = ("--language", "de", "--exclude-category", "flags", "--exclude-category", "objects")
    options += ("--matryoshka-width", 8, "--matryoshka-width", 24)
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", *options, "--by-category", "--out", out)
    printed = capsys.readouterr().out
    assert "8 images and 6 captions; queried images: 5" in printed
    assert "excluded: 1 of flags, 1 of objects, 1 without a text" in printed
    found = written(out)
    settings = {
        "data": "toy",
        "language": "de",
        "exclude_category": ["flags", "objects"],
        "matryoshka_width": [8, 24],
        "limit": None,
    }
    settings |= {"texts": "names", "by_category": True, "all_languages": False, "images": 8, "captions": 6}
    settings |= {"queries": 5, "excluded": {"flags": 1, "objects": 1, "no text": 1}}
    assert found.items() >= settings.items()
    names = [(score["name"], score["subset"]) for score in found["scores"]]
    assert ("text→image, recall@1", {"width": 8}) in names
    assert ("image→text, recall@1", {"width": 24, "category": "people"}) in names
    assert len(set(map(str, names))) == len(names)
    for score in found["scores"]:
        low, high = score["interval"]
        assert low <= score["value"] <= high and score["count"] and "chance" in score["baselines"]
        assert ", ".join([score["name"], *(f"{k} {v}" for k, v in score["subset"].items())]) in printed


def test_gamma_keeps_black_white_and_opacity(tmp_path):
    picture = np.array([[[0, 128, 255, 7], [64, 64, 64, 255]]], dtype=np.uint8)
    (dark,) = adjust_gamma([picture], 0.5)
    assert dark().tolist() == [[[0, round(255 * (128 / 255) ** np.exp(0.5)), 255, 7], [26, 26, 26, 255]]]
    assert adjust_gamma([lambda: picture], 0.0)[0]().tolist() == picture.tolist()
    with pytest.raises(DataError, match="gamma applies only to images of a"):
        adjust_gamma([tmp_path / "ant.png"], 0.5)[0]()
    with pytest.raises(ConfigError, match="gamma"):
        adjust_gamma([picture], 3.0)


def test_trimmed_images_equal_those_of_a_trimmed_collection(tmp_path, monkeypatch):
    """Training and retrieval read the same pixels of a drawing with margins and of one without opacity."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    drawing = np.zeros((50, 50, 4), np.uint8)
    drawing[3:30, 15:35] = (200, 30, 0, 255)
    Image.fromarray(drawing).save(folder / "ant.png")
    Image.fromarray(TALL).resize((16, 16)).save(folder / "bee.png")
    model, seen = own(tmp_path / "ckpt"), []
    side = model.config.image.image_size
    look = ContrastiveEmbedder.embed_images
    monkeypatch.setattr(
        ContrastiveEmbedder, "embed_images", lambda self, some: (seen.extend(p() for p in some), look(self, some))[1]
    )
    run(tmp_path / "ckpt", "retrieval", "--data", folder, "--trim", "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["trim"] is True
    kept = load_collection(str(folder), side, trim=True).pixels.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(seen[0], kept[0]) and not np.array_equal(
        seen[0], load_collection(str(folder), side).pixels[0]
    )
    assert np.abs(seen[1].astype(float) - kept[1]).mean() < 8  # opaque: resized there and back
    run(tmp_path / "ckpt", "retrieval", "--data", folder, "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["trim"] is False
    with pytest.raises(DataError, match="trimmed"):
        trim_images([folder / "ant.png"], side)[0]()


def test_retrieval_in_all_languages_and_by_keywords(tmp_path, toy, capsys):
    own(tmp_path / "ckpt")
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", "--all-languages", "--out", tmp_path / "scores.json")
    printed = capsys.readouterr().out
    assert "3 languages" in printed and "fr 3" in printed and "text→image, recall@1, language de" in printed
    assert written(tmp_path / "scores.json")["languages"]["de"]["queries"] == 7
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", "--texts", "keywords")
    printed = capsys.readouterr().out
    assert "8 names and 5 phrases" in printed and "keywords→name, recall@1" in printed and len(ROWS) == 8


def test_zeroshot_at_several_widths(tmp_path, classes, capsys):
    """The full width equals no width; a smaller width equals a model with only the first features."""
    model = own(tmp_path / "ckpt").eval()
    for name, options in (
        ("plain", ()),
        ("wide", ("--matryoshka-width", 24)),
        ("both", ("--matryoshka-width", 5, "--matryoshka-width", 24)),
    ):
        run(tmp_path / "ckpt", "zeroshot", "--data", classes, *options, "--out", tmp_path / f"{name}.json")
    assert "by prompt, top-1, width 5" in capsys.readouterr().out
    plain, wide, both = (written(tmp_path / f"{name}.json") for name in ("plain", "wide", "both"))
    bare = [{key: value for key, value in score.items() if key != "subset"} for score in wide["scores"]]
    assert bare == plain["scores"] and both["scores"][-len(bare) :] == wide["scores"]
    assert both["matryoshka_width"] == [5, 24] and both["split"] == "test"
    with torch.no_grad():  # a model that has only five numbers
        small = ContrastiveModel(model.config.replace(embed_dim=5))
        small.load_state_dict(model.state_dict() | {
            f"{side}_projection.weight": getattr(model, f"{side}_projection").weight[:5] for side in ("image", "text")
        })  # fmt: skip
    hub.save(small, tmp_path / "small", tokenizer())
    run(tmp_path / "small", "zeroshot", "--data", classes, "--out", tmp_path / "small.json")
    assert [s["value"] for s in written(tmp_path / "small.json")["scores"]] == [
        s["value"] for s in both["scores"] if s["subset"] == {"width": 5}
    ]


def test_invalid_options_are_refused(tmp_path, classes, toy):
    own(tmp_path / "ckpt")
    for match, words in (
        ("is outside the embedding width", ("zeroshot", "--data", classes, "--matryoshka-width", 25)),
        ("is outside the embedding width", ("retrieval", "--data", "toy", "--matryoshka-width", 0)),
        ("did you mean 'de'", ("retrieval", "--data", "toy", "--language", "dee")),
        ("did you mean 'flags'", ("retrieval", "--data", "toy", "--exclude-category", "flag")),
    ):
        with pytest.raises(ConfigError, match=match):
            run(tmp_path / "ckpt", *words)
    with pytest.raises(CheckpointError, match="is a TextTower, which has no image tower"):
        hub.save(own(tmp_path / "other").text, tmp_path / "text")
        run(tmp_path / "text", "probe", "--data", classes)


# ---- what cannot be tested fairly -------------------------------------------------------------------------------


def test_probe_uses_disjoint_splits(classes, tmp_path):
    hub.save(ConvTower(CONV), tmp_path / "tower")
    run("probe", tmp_path / "tower", "--data", classes, "--device", "cpu")
    with pytest.raises(DataError, match="train and test"):
        run("probe", tmp_path / "tower", "--data", classes / "train", "--device", "cpu")


def test_names_are_case_insensitive_and_unnamed_images_are_skipped():
    names = ["Tux", "tux", " ", "Owl"]
    about = [ImageRecord(f"a/{n}", "a", str(n), name) for n, name in enumerate(names)]
    gallery = image_collections.ImageCollection("some", [TALL] * 4, about).gallery()
    assert gallery.captions == ["Tux", "Owl"] and gallery.image_ids.tolist() == [0, 0, image_collections.NO_MATCH, 1]


@pytest.mark.parametrize(
    ("output", "why"),
    [({"resample": [3]}, "resample"), ({"rescale_factor": "a"}, "rescale"), ({"image_std": [1, 0, 1]}, "std")],
)
def test_invalid_preprocessor_config_is_refused(output, why, tmp_path):
    usual = {"size": 16, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps(usual | output))
    with pytest.raises(CheckpointError, match=why):
        ImagePreprocessor.from_folder(tmp_path, CONV)


def test_overwritten_model_does_not_keep_old_preprocessing(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    other = {"image_processor": {"size": 16, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(other))
    hub.save(ConvTower(CONV), tmp_path)
    assert ImagePreprocessor.from_folder(tmp_path, CONV) == ImagePreprocessor.default(CONV)
