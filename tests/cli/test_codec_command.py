"""`vitrail codec compare`: a table, its JSON and its plot, and what cannot be compared."""

import json
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from vitrail.cli import main
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.quantizers import BSQConfig, KLConfig
from vitrail.errors import DataError
from vitrail.evals.codec_comparison_options import shorten_names
from vitrail.evals.suites.codec_benchmark import CODED_BPP, FILE_BPP
from vitrail.hub import save
from vitrail.plots.reconstruction_strip import DIFFERENCE_GAIN, draw_difference

NET = ConvAutoencoderConfig(widths=(8, 8, 8), layers=1, norm_groups=4, image_size=(16, 16))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("codecs")
    for name, quantizer in {"bsq": BSQConfig(bits=28), "kl": KLConfig(width=4)}.items():
        torch.manual_seed(0)
        save(randomize(Codec(CodecConfig(net=NET, quantizer=quantizer))), home / name)
    chance = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (home / "pictures" / kind).mkdir(parents=True)
        for i in range(4):
            small = Image.fromarray(chance.integers(0, 256, (5, 5, 3), dtype=np.uint8))
            small.resize((40, 36), Image.Resampling.BICUBIC).save(home / "pictures" / kind / f"{i}.png")
    return home


def run(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vitrail", "codec", "compare", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_compare_writes_one_table(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = (
        "bsq",
        "kl",
        "--data",
        "pictures",
        "--image-size",
        32,
        "--limit",
        6,
        "--baseline",
        "jpeg",
        "--baseline",
        "webp",
    )
    more = ("--quality", 10, "--quality", 90, "--image-sheets", "--lpips", "none", "--batch-size", 4)
    table, plot = tmp_path / "t.json", tmp_path / "rates.svg"
    code, out, err = run(monkeypatch, capsys, *words, *more, "-o", table, "--plot", plot)
    assert code == 0, err
    assert "LPIPS is not measured: not requested" in out
    assert "kl: bits a pixel is not measured: codes are continuous" in out
    found = json.loads(table.read_text(), parse_constant=lambda name: pytest.fail(name))
    names = [one["name"] for one in found["rows"]]
    formats = [f"{kind} q{q}" for name in ("jpeg", "webp") for kind in (name, f"{name} sheet") for q in (10, 90)]
    assert names == [*formats, "bsq", "kl"]
    assert all(name in out for name in names)
    assert all((one["num_images"], one["num_pixels"]) == (6, 6 * 1024) for one in found["rows"])
    bsq, kl = found["rows"][-2:]
    assert bsq["scores"][CODED_BPP]["value"] == 28 / 16
    assert bsq["scores"][FILE_BPP]["value"] > 28 / 16
    assert CODED_BPP not in kl["scores"]
    assert found["origin"]["command"].startswith("vitrail codec compare bsq kl --data pictures")
    assert (found["image_size"], found["limit"], found["batch_size"]) == (32, 6, 4)
    ET.fromstring(plot.read_text())


def test_show_marks_continuous_codecs_and_scales_differences(home, tmp_path, monkeypatch, capsys):
    """Not that it takes no bits."""
    picture = home / "pictures" / "cats" / "0.png"
    out = tmp_path / "s.png"
    look = ["vitrail", "codec", "reconstruct", picture, "--codec", home / "kl", "--image-size", 32, "-o", out]
    monkeypatch.setattr(sys, "argv", list(map(str, look)))
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "continuous  kl" in capsys.readouterr().out
    a, b = (Image.new("RGB", (2, 2), (level,) * 3) for level in (100, 110))
    assert draw_difference(a, b).getpixel((0, 0)) == (round(127.5 + 10 * DIFFERENCE_GAIN),) * 3


def test_absolute_paths_are_shortened_to_relative_paths(home, tmp_path, monkeypatch, capsys):
    """A table that is shared tells nobody's folders."""
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = (home / "bsq", home / "kl", "--data", "pictures", "--image-size", 32, "--limit", 2, "--lpips", "none")
    code, out, err = run(monkeypatch, capsys, *words, "-o", table)
    assert code == 0, err
    assert [one["name"] for one in json.loads(table.read_text())["rows"]] == ["bsq", "kl"]
    assert str(home) not in table.read_text() and str(home) not in out
    assert shorten_names(["/a/x/final", "/a/y/final", "out/x", "owner/name"]) == {
        "/a/x/final": "x/final",
        "/a/y/final": "y/final",
        "out/x": "out/x",
        "owner/name": "owner/name",
    }
    assert shorten_names(["/a/x"]) == {"/a/x": "x"}
    assert shorten_names(["/a", "/a/x"]) == {"/a": "a", "/a/x": "a/x"}


def test_finished_rows_survive_an_interruption(home, tmp_path, monkeypatch, capsys):
    def stop(self, coded):
        raise DataError("the power went", "")

    monkeypatch.setattr("vitrail.evals.image_coder.CodecCoder.decode", stop)
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = ("bsq", "--data", "pictures", "--baseline", "jpeg", "--quality", 50, "--lpips", "none", "-o", table)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code != 0 and "the power went" in err
    assert [one["name"] for one in json.loads(table.read_text())["rows"]] == ["jpeg q50"]


def test_both_chroma_subsamplings(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = ("--data", "pictures", "--baseline", "jpeg", "--baseline", "webp", "--quality", 50, "--lpips", "none")
    table = tmp_path / "t.json"
    code, _, err = run(
        monkeypatch, capsys, *words, "--chroma-subsampling", "4:2:0", "--chroma-subsampling", "4:4:4", "-o", table
    )
    assert code == 0, err
    names = [one["name"] for one in json.loads(table.read_text())["rows"]]
    assert names == ["jpeg q50", "jpeg 4:4:4 q50", "webp q50"]


def test_missing_metric_weights_are_reported(home, tmp_path, monkeypatch, capsys):
    def refuse(*words):
        raise DataError("lpips cannot be fetched", "go online")

    monkeypatch.setattr("vitrail.hub.lpips_weights.load_lpips", refuse)
    monkeypatch.setattr("vitrail.hub.resnet50_weights.load_resnet50", refuse)
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = ("--data", "pictures", "--baseline", "jpeg", "--quality", 50, "--frechet", "-o", table)
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "LPIPS-alexnet is not measured: lpips cannot be fetched" in out
    (row,) = json.loads(table.read_text())["rows"]
    assert set(row["missing_scores"]) == {"LPIPS-alexnet", "FD-ResNet50"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "pictures"), "nothing to compare"),
        (("bsq", "--data", "pictures", "--plot", "rates.nothing"), ".nothing"),
        (("judge", "--data", "pictures"), "Detector"),
        (("nowhere", "--data", "pictures"), "nowhere"),
        (("bsq", "--data", "nowhere"), "nowhere"),
        (("--baseline", "gif", "--data", "pictures"), "unknown image format 'gif'"),
        (("--baseline", "jpeg", "--data", "plain"), "are unlimited"),
        (("--baseline", "jpeg", "--data", "pictures", "--quality", "101"), "quality 101"),
        (("--baseline", "jpeg", "--data", "pictures", "--batch-size", "0"), "batch size 0"),
        (("--baseline", "jpeg", "--data", "pictures", "--recognizer", "bsq"), "not a contrastive model"),
        (("--baseline", "jpeg", "--data", "pictures", "--probe-images", "100"), "needs the features of a recognizer"),
        (
            ("--baseline", "jpeg", "--data", "pictures", "--recognizer", "bsq", "--probe-images", "9"),
            "no folders train and test",
        ),
        (
            (
                "--baseline",
                "jpeg",
                "--data",
                "pictures",
                "--recognizer",
                "bsq",
                "--probe-images",
                "9",
                "--split",
                "train",
            ),
            "--split",
        ),
    ],
)
def test_invalid_options_are_refused(home, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    code, _, err = run(monkeypatch, capsys, *words, "--lpips", "none", "-o", tmp_path / "t.json")
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())
