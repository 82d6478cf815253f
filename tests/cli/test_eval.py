"""`vitrail eval` on towers of all kinds, on exports, at several widths, in several languages; and what it writes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from evals.test_asking import ROWS, Toy
from evals.test_suites_models import own, tokenizer
from hub.test_pictures import pair, tiny
from vitrail import hub
from vitrail.cli.eval import app
from vitrail.data.collection import collection
from vitrail.data.pictures import READERS, About
from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evals.contrastive import Embedder
from vitrail.evals.suites import sets
from vitrail.evals.viewer import Viewer, bend, tower_of, trim
from vitrail.models.clip import Contrastive
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainConfig
from vitrail.processing.preprocessing import FILE, Preprocessing

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=32))
CONV = ConvConfig(image=16, widths=(8, 16), blocks=(1, 1), groups=4)
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
    """A model that says which of its parts is the tower to keep."""

    def __init__(self, image: nn.Module, teacher: nn.Module):
        super().__init__()
        self.image, self.teacher = image, teacher

    @property
    def tower(self) -> nn.Module:
        return self.teacher


def test_a_tower_is_found_wherever_it_is(tmp_path):
    vit, conv = ViT(ViTConfig(layers=1, block=BLOCK, image=16, patch=8, pool="mean")), Conv(CONV)
    assert tower_of(vit) is vit and tower_of(conv) is conv
    assert tower_of(Held(vit, conv)) is conv
    both = own(tmp_path)
    assert tower_of(both) is both.image
    for blind in (both.text, nn.Linear(2, 2)):
        assert tower_of(blind) is None
        with pytest.raises(CheckpointError, match="no picture tower"):
            Viewer(blind, Preprocessing.own(CONV))


def test_features_are_what_is_pooled_or_the_mean_of_patches():
    torch.manual_seed(0)
    bare = ViT(ViTConfig(layers=1, block=BLOCK, image=16, patch=8, cls=True, positions="cls_and_patches")).eval()
    pooled, conv = ViT(bare.config.with_(pool="cls")).eval(), Conv(CONV).eval()
    ours = Preprocessing.own(bare.config)
    pixels = torch.stack([ours(TALL), ours(WIDE)])
    for model, expected in (
        (bare, bare(pixels).mean(1)),  # without the CLS token
        (pooled, pooled.pool(pixels)),
        (conv, conv.pool(pixels)),
        (Held(pooled, conv), conv.pool(pixels)),
    ):
        found = Viewer(model, ours, batch=1).features([TALL, WIDE])
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def test_probe_reads_towers_alone(tmp_path, classes, capsys):
    """Ours and an export give the same scores, with neither tokenizer nor text."""
    torch.manual_seed(0)
    tower = ViT(tiny("siglip-b16-224", 16, 8))
    hub.save(tower, tmp_path / "own")
    hub.to_hf(tower, tmp_path / "theirs")
    hub.save(ViT(tower.config.with_(pool="none")), tmp_path / "bare")
    for name in ("own", "theirs", "bare"):
        run(tmp_path / name, "probe", "--data", classes, "--out", tmp_path / f"{name}.json")
    assert "linear probe, top-1" in capsys.readouterr().out
    own_, theirs, bare = (written(tmp_path / f"{name}.json") for name in ("own", "theirs", "bare"))
    assert own_["scores"] == theirs["scores"] and own_["features"] == bare["features"] == 16
    assert own_["scores"][0]["of"] == 20 and own_["trained_on"] == 20 and own_["penalty"] > 0
    assert {"1", "0.1", "0.01"} <= own_["penalties_tried"].keys() and own_["limit"] is None
    assert bare["scores"][0]["value"] == 1  # colours are easy


def test_a_tower_alone_may_be_shown_another_size(tmp_path, classes):
    """DINOv2 is made for 518 pixels, and its folder says 224."""
    tower = ViT(tiny("dinov2-b14", 32, 8))
    hub.to_hf(tower, tmp_path / "theirs", family="dinov2")
    about = written(tmp_path / "theirs" / FILE) | {
        "size": {"shortest_edge": 18}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}
    }  # fmt: skip
    (tmp_path / "theirs" / FILE).write_text(json.dumps(about))
    run(tmp_path / "theirs", "probe", "--data", classes, "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["pictures_prepared"]["crop_size"] == {"height": 16, "width": 16}
    with pytest.raises(CheckpointError, match="the tower is for 32"):
        Preprocessing.read(tmp_path / "theirs", tower.config)


def test_suites_read_models_with_a_convolutional_tower(tmp_path, classes):
    torch.manual_seed(0)
    conv = Contrastive(own(tmp_path / "vit").config.with_(image=CONV))
    hub.save(conv, tmp_path / "conv", tokenizer())
    embedder = Embedder(conv, Preprocessing.own(CONV), tokenizer(), batch=1)
    assert embedder.side == 16 and embedder.images([TALL, WIDE]).shape == (2, 24)
    assert embedder.features([TALL, WIDE]).shape == (2, CONV.pooled)
    for suite in ("zeroshot", "probe"):
        run(tmp_path / "conv", suite, "--data", classes, "--out", tmp_path / "scores.json")
        assert written(tmp_path / "scores.json")["scores"][0]["of"] == 20


# ---- an export, and what is written -----------------------------------------------------------------------------


def test_an_export_scores_as_the_folder_it_was_made_of(tmp_path, toy):
    """A CLIP-shaped model of ours, by our own folder and by its Hugging Face one."""
    made = tokenizer()
    config = pair("clip-b16", "clip-b").config
    text = config.text.with_(vocab=made.size, context=48, eos=made.eos, pool="eos")
    torch.manual_seed(0)
    model = Contrastive(config.with_(text=text))
    hub.save(model, tmp_path / "own", tokenizer())
    hub.to_hf(model, tmp_path / "theirs", tokenizer=tokenizer())
    for name in ("own", "theirs"):
        run(tmp_path / name, "retrieval", "--data", "toy", "--out", tmp_path / f"{name}.json")
    own_, theirs = (written(tmp_path / f"{name}.json") for name in ("own", "theirs"))
    assert own_["scores"] == theirs["scores"] and own_["pictures_prepared"] == theirs["pictures_prepared"]


def test_retrieval_writes_what_was_asked_and_found(tmp_path, toy, capsys):
    own(tmp_path / "ckpt")
    out = tmp_path / "scores.json"
    options = ("--language", "de", "--without", "flags", "--without", "objects", "--width", 8, "--width", 24)
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", *options, "--by-category", "--out", out)
    printed = capsys.readouterr().out
    assert "8 pictures and 6 captions; pictures asked for: 5" in printed
    assert "left out: 1 of flags, 1 of objects, 1 without a text" in printed
    found = written(out)
    settings = {"data": "toy", "language": "de", "without": ["flags", "objects"], "widths": [8, 24], "limit": None}
    settings |= {"texts": "names", "by_category": True, "all_languages": False, "pictures": 8, "captions": 6}
    settings |= {"asked": 5, "left_out": {"flags": 1, "objects": 1, "no text": 1}}
    assert found.items() >= settings.items()
    names = [(score["name"], score["part"]) for score in found["scores"]]
    assert ("text→image, recall@1", {"width": 8}) in names
    assert ("image→text, recall@1", {"width": 24, "category": "people"}) in names
    assert len(set(map(str, names))) == len(names)
    for score in found["scores"]:
        low, high = score["interval"]
        assert low <= score["value"] <= high and score["of"] and "chance" in score["beside"]
        assert ", ".join([score["name"], *(f"{k} {v}" for k, v in score["part"].items())]) in printed


def test_bent_pictures_keep_black_white_and_opacity(tmp_path):
    picture = np.array([[[0, 128, 255, 7], [64, 64, 64, 255]]], dtype=np.uint8)
    (dark,) = bend([picture], 0.5)
    assert dark().tolist() == [[[0, round(255 * (128 / 255) ** np.exp(0.5)), 255, 7], [26, 26, 26, 255]]]
    assert bend([lambda: picture], 0.0)[0]().tolist() == picture.tolist()
    with pytest.raises(DataError, match="darker"):
        bend([tmp_path / "ant.png"], 0.5)[0]()
    with pytest.raises(ConfigError, match="gamma"):
        bend([picture], 3.0)


def test_trimmed_pictures_are_those_of_a_trimmed_collection(tmp_path, monkeypatch):
    """What training sees and what retrieval looks at, of a drawing with margins and of one without opacity."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    drawing = np.zeros((50, 50, 4), np.uint8)
    drawing[3:30, 15:35] = (200, 30, 0, 255)
    Image.fromarray(drawing).save(folder / "ant.png")
    Image.fromarray(TALL).resize((16, 16)).save(folder / "bee.png")
    model, seen = own(tmp_path / "ckpt"), []
    side = model.config.image.image
    look = Embedder.images
    monkeypatch.setattr(Embedder, "images", lambda self, some: (seen.extend(p() for p in some), look(self, some))[1])
    run(tmp_path / "ckpt", "retrieval", "--data", folder, "--trim", "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["trim"] is True
    kept = collection(str(folder), side, trim=True).pixels.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(seen[0], kept[0]) and not np.array_equal(seen[0], collection(str(folder), side).pixels[0])
    assert np.abs(seen[1].astype(float) - kept[1]).mean() < 8  # opaque: resized there and back
    run(tmp_path / "ckpt", "retrieval", "--data", folder, "--out", tmp_path / "scores.json")
    assert written(tmp_path / "scores.json")["trim"] is False
    with pytest.raises(DataError, match="trimmed"):
        trim([folder / "ant.png"], side)[0]()


def test_all_languages_and_keywords_from_the_command_line(tmp_path, toy, capsys):
    own(tmp_path / "ckpt")
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", "--all-languages", "--out", tmp_path / "scores.json")
    printed = capsys.readouterr().out
    assert "3 languages" in printed and "fr 3" in printed and "text→image, recall@1, language de" in printed
    assert written(tmp_path / "scores.json")["languages"]["de"]["asked"] == 7
    run(tmp_path / "ckpt", "retrieval", "--data", "toy", "--texts", "keywords")
    printed = capsys.readouterr().out
    assert "8 names and 5 phrases" in printed and "keywords→name, recall@1" in printed and len(ROWS) == 8


def test_zeroshot_at_several_widths(tmp_path, classes, capsys):
    """The full width says what no width says, and the first numbers alone what a model with only them would."""
    model = own(tmp_path / "ckpt").eval()
    for name, options in (("plain", ()), ("wide", ("--width", 24)), ("both", ("--width", 5, "--width", 24))):
        run(tmp_path / "ckpt", "zeroshot", "--data", classes, *options, "--out", tmp_path / f"{name}.json")
    assert "by prompt, top-1, width 5" in capsys.readouterr().out
    plain, wide, both = (written(tmp_path / f"{name}.json") for name in ("plain", "wide", "both"))
    bare = [{key: value for key, value in score.items() if key != "part"} for score in wide["scores"]]
    assert bare == plain["scores"] and both["scores"][-len(bare) :] == wide["scores"]
    assert both["widths"] == [5, 24] and both["part"] == "test"
    with torch.no_grad():  # a model that has only five numbers
        small = Contrastive(model.config.with_(embed=5))
        small.load_state_dict(model.state_dict() | {
            f"{side}_projection.weight": getattr(model, f"{side}_projection").weight[:5] for side in ("image", "text")
        })  # fmt: skip
    hub.save(small, tmp_path / "small", tokenizer())
    run(tmp_path / "small", "zeroshot", "--data", classes, "--out", tmp_path / "small.json")
    assert [s["value"] for s in written(tmp_path / "small.json")["scores"]] == [
        s["value"] for s in both["scores"] if s["part"] == {"width": 5}
    ]


def test_options_that_cannot_be_are_refused(tmp_path, classes, toy):
    own(tmp_path / "ckpt")
    for match, words in (
        ("give 1 … 24", ("zeroshot", "--data", classes, "--width", 25)),
        ("give 1 … 24", ("retrieval", "--data", "toy", "--width", 0)),
        ("did you mean 'de'", ("retrieval", "--data", "toy", "--language", "dee")),
        ("did you mean 'flags'", ("retrieval", "--data", "toy", "--without", "flag")),
    ):
        with pytest.raises(ConfigError, match=match):
            run(tmp_path / "ckpt", *words)
    with pytest.raises(CheckpointError, match="is a TextTower, which has no picture tower"):
        hub.save(own(tmp_path / "other").text, tmp_path / "text")
        run(tmp_path / "text", "probe", "--data", classes)


# ---- what cannot be tested fairly -------------------------------------------------------------------------------


def test_a_probe_is_not_tested_on_what_it_learned_from(classes, tmp_path):
    hub.save(Conv(CONV), tmp_path / "tower")
    run("probe", tmp_path / "tower", "--data", classes, "--device", "cpu")
    with pytest.raises(DataError, match="train and test"):
        run("probe", tmp_path / "tower", "--data", classes / "train", "--device", "cpu")


def test_names_are_alike_whatever_their_case_and_the_nameless_are_not_asked_for():
    names = ["Tux", "tux", " ", "Owl"]
    about = [About(f"a/{n}", "a", str(n), name) for n, name in enumerate(names)]
    gallery = sets.Album("some", [TALL] * 4, about).gallery()
    assert gallery.captions == ["Tux", "Owl"] and gallery.shown.tolist() == [0, 0, sets.NOTHING, 1]


@pytest.mark.parametrize(
    ("said", "why"),
    [({"resample": [3]}, "resample"), ({"rescale_factor": "a"}, "rescale"), ({"image_std": [1, 0, 1]}, "std")],
)
def test_what_a_folder_says_of_pictures_must_make_sense(said, why, tmp_path):
    usual = {"size": 16, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    (tmp_path / FILE).write_text(json.dumps(usual | said))
    with pytest.raises(CheckpointError, match=why):
        Preprocessing.read(tmp_path, CONV)


def test_a_model_saved_over_another_is_not_shown_pictures_as_that_one_was(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    other = {"image_processor": {"size": 16, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(other))
    hub.save(Conv(CONV), tmp_path)
    assert Preprocessing.read(tmp_path, CONV) == Preprocessing.own(CONV)
