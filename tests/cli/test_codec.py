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
from vitrail.cli.codec import called
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.quantizers import BSQConfig, KLConfig
from vitrail.errors import DataError
from vitrail.evals.suites.reconstruction import CODED, FILED
from vitrail.hub import save
from vitrail.show.strip import AMPLIFIED, difference

NET = ConvPairConfig(widths=(8, 8, 8), layers=1, groups=4, size=(16, 16))


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


def test_codecs_and_formats_in_one_table(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = ("bsq", "kl", "--data", "pictures", "--side", 32, "--limit", 6, "--baseline", "jpeg", "--baseline", "webp")
    more = ("--quality", 10, "--quality", 90, "--sheet", "--lpips", "none", "--batch", 4)
    table, plot = tmp_path / "t.json", tmp_path / "rates.svg"
    code, out, err = run(monkeypatch, capsys, *words, *more, "-o", table, "--plot", plot)
    assert code == 0, err
    assert "no LPIPS: not asked for" in out
    assert "kl has no bits a pixel: codes are continuous" in out
    found = json.loads(table.read_text(), parse_constant=lambda name: pytest.fail(name))
    names = [one["name"] for one in found["rows"]]
    formats = [f"{kind} q{q}" for name in ("jpeg", "webp") for kind in (name, f"{name} sheet") for q in (10, 90)]
    assert names == [*formats, "bsq", "kl"]
    assert all(name in out for name in names)
    assert all((one["pictures"], one["pixels"]) == (6, 6 * 1024) for one in found["rows"])
    bsq, kl = found["rows"][-2:]
    assert bsq["scores"][CODED]["value"] == 28 / 16
    assert bsq["scores"][FILED]["value"] > 28 / 16
    assert CODED not in kl["scores"]
    assert found["origin"]["command"].startswith("vitrail codec compare bsq kl --data pictures")
    assert (found["side"], found["limit"], found["batch"]) == (32, 6, 4)
    ET.fromstring(plot.read_text())


def test_a_look_says_what_is_continuous_and_shows_differences_as_large_as_it_says(home, tmp_path, monkeypatch, capsys):
    """Not that it takes no bits."""
    picture = home / "pictures" / "cats" / "0.png"
    look = ["vitrail", "codec", "look", picture, "--codec", home / "kl", "--side", 32, "-o", tmp_path / "s.png"]
    monkeypatch.setattr(sys, "argv", list(map(str, look)))
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "continuous  kl" in capsys.readouterr().out
    a, b = (Image.new("RGB", (2, 2), (level,) * 3) for level in (100, 110))
    assert difference(a, b).getpixel((0, 0)) == (round(127.5 + 10 * AMPLIFIED),) * 3


def test_absolute_paths_are_shown_by_what_differs(home, tmp_path, monkeypatch, capsys):
    """A table that is shared tells nobody's folders."""
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = (home / "bsq", home / "kl", "--data", "pictures", "--side", 32, "--limit", 2, "--lpips", "none")
    code, out, err = run(monkeypatch, capsys, *words, "-o", table)
    assert code == 0, err
    assert [one["name"] for one in json.loads(table.read_text())["rows"]] == ["bsq", "kl"]
    assert str(home) not in table.read_text() and str(home) not in out
    assert called(["/a/x/final", "/a/y/final", "out/x", "owner/name"]) == {
        "/a/x/final": "x/final",
        "/a/y/final": "y/final",
        "out/x": "out/x",
        "owner/name": "owner/name",
    }
    assert called(["/a/x"]) == {"/a/x": "x"}
    assert called(["/a", "/a/x"]) == {"/a": "a", "/a/x": "a/x"}


def test_rows_that_were_measured_outlive_a_stop(home, tmp_path, monkeypatch, capsys):
    def stop(self, coded):
        raise DataError("the power went", "")

    monkeypatch.setattr("vitrail.evals.coders.CodecCoder.decode", stop)
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = ("bsq", "--data", "pictures", "--baseline", "jpeg", "--quality", 50, "--lpips", "none", "-o", table)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code != 0 and "the power went" in err
    assert [one["name"] for one in json.loads(table.read_text())["rows"]] == ["jpeg q50"]


def test_colour_at_both_resolutions(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = ("--data", "pictures", "--baseline", "jpeg", "--baseline", "webp", "--quality", 50, "--lpips", "none")
    table = tmp_path / "t.json"
    code, _, err = run(monkeypatch, capsys, *words, "--chroma", "4:2:0", "--chroma", "4:4:4", "-o", table)
    assert code == 0, err
    names = [one["name"] for one in json.loads(table.read_text())["rows"]]
    assert names == ["jpeg q50", "jpeg 4:4:4 q50", "webp q50"]


def test_weights_out_of_reach_are_said(home, tmp_path, monkeypatch, capsys):
    def refuse(*words):
        raise DataError("lpips cannot be fetched", "go online")

    monkeypatch.setattr("vitrail.hub.lpips.load_lpips", refuse)
    monkeypatch.setattr("vitrail.hub.resnet50.load_resnet50", refuse)
    monkeypatch.chdir(home)
    table = tmp_path / "t.json"
    words = ("--data", "pictures", "--baseline", "jpeg", "--quality", 50, "--frechet", "-o", table)
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "no LPIPS-alexnet: lpips cannot be fetched" in out
    (row,) = json.loads(table.read_text())["rows"]
    assert set(row["missing"]) == {"LPIPS-alexnet", "FD-ResNet50"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--data", "pictures"), "nothing to compare"),
        (("bsq", "--data", "pictures", "--plot", "rates.nothing"), ".nothing"),
        (("judge", "--data", "pictures"), "Detector"),
        (("nowhere", "--data", "pictures"), "nowhere"),
        (("bsq", "--data", "nowhere"), "nowhere"),
        (("--baseline", "gif", "--data", "pictures"), "no baseline 'gif'"),
        (("--baseline", "jpeg", "--data", "plain"), "never end"),
        (("--baseline", "jpeg", "--data", "pictures", "--quality", "101"), "quality 101"),
        (("--baseline", "jpeg", "--data", "pictures", "--batch", "0"), "batches of 0"),
        (("--baseline", "jpeg", "--data", "pictures", "--reader", "bsq"), "not a contrastive model"),
        (("--baseline", "jpeg", "--data", "pictures", "--probe", "100"), "needs a reader"),
        (("--baseline", "jpeg", "--data", "pictures", "--reader", "bsq", "--probe", "9"), "no folders train and test"),
        (("--baseline", "jpeg", "--data", "pictures", "--reader", "bsq", "--probe", "9", "--part", "train"), "--part"),
    ],
)
def test_what_cannot_be_is_said(home, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(home)
    code, _, err = run(monkeypatch, capsys, *words, "--lpips", "none", "-o", tmp_path / "t.json")
    assert code == 2
    assert says in err
    assert not list(tmp_path.iterdir())
