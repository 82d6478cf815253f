"""`vitrail tokenize`, `detokenize` and `codec look`: pictures as tokens and back, stopped, killed, refused."""

import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from models import test_unified as unified
from vitrail.cli import main
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.container import TokenFile
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.fit import Fit, find_pictures
from vitrail.codecs.quantizers import BSQConfig, GroupedVQConfig, KLConfig
from vitrail.codecs.tokens import header_of, places_for, tokenize
from vitrail.codecs.writer import TokenWriter
from vitrail.data.shards import write_shards
from vitrail.errors import ConfigError, DataError
from vitrail.hub import load, save

NET = ConvPairConfig(widths=(8, 8, 8), layers=1, groups=4, size=(16, 24))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Codecs and pictures of many sizes, one of which cannot be read."""
    home = tmp_path_factory.mktemp("tokens")
    for seed, (name, quantizer) in enumerate(
        {"bsq": BSQConfig(bits=28), "other": BSQConfig(bits=28), "vq": GroupedVQConfig(codes=20, dim=6, groups=3),
         "kl": KLConfig(width=4)}.items()
    ):  # fmt: skip
        torch.manual_seed(seed)
        save(randomize(Codec(CodecConfig(net=NET, quantizer=quantizer)), seed), home / name)
    random = np.random.default_rng(0)
    for i in range(11):
        folder = home / "pictures" / ("deep" if i % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (9 + 3 * i, 40 - 2 * i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    (home / "pictures" / "05 broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    (home / "pictures" / "notes.txt").write_text("not a picture")
    return home


def run(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


@pytest.mark.parametrize("codec", ["bsq", "vq"])
@pytest.mark.parametrize("fit", ["cover", "pad", "crop"])
def test_there_and_back(home, tmp_path, monkeypatch, capsys, codec, fit):
    file = tmp_path / "a.vtok"
    words = ("tokenize", home / "pictures", "--codec", home / codec, "-o", file, "--fit", fit, "--batch", 4)
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "11 pictures" in out
    assert "05 broken.png" in err
    model = load(home / codec)
    with TokenFile(file) as held:
        assert list(held.faults) == ["05 broken.png"]
        for one in held:
            image = Image.open(home / "pictures" / one.name)
            assert one.source == (image.height, image.width)
            pixels, size = Fit(how=fit).whole(model).apply(image.convert("RGB"), model.factor)
            with torch.no_grad():
                assert torch.equal(model.encode(model.pixels(pixels[None])).ids[0], one.ids)
            assert one.size == size
            if fit == "pad":
                assert size == one.source
                assert torch.equal(pixels[:, : size[0], : size[1]].permute(1, 2, 0), torch.tensor(np.array(image)))
            elif fit == "crop":
                assert size == tuple(side // 4 * 4 for side in one.source)
            else:
                assert size == (16, 24)
        sizes = {one.name: one.size for one in held}
    code, out, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / codec, "-o", tmp_path / "again")
    assert code == 0, err
    assert "11 pictures" in out
    again = {p.relative_to(tmp_path / "again").as_posix(): Image.open(p) for p in (tmp_path / "again").rglob("*.png")}
    assert {name: (image.height, image.width) for name, image in again.items()} == sizes


def test_by_the_codec_of_a_model_that_draws(home, tmp_path, monkeypatch, capsys):
    """Its codes are those that it reads and draws."""
    made = unified.made()
    save(made, tmp_path / "unified")
    words = ("tokenize", home / "pictures", "--codec", tmp_path / "unified", "-o", tmp_path / "a.vtok")
    assert run(monkeypatch, capsys, *words)[0] == 0
    with TokenFile(tmp_path / "a.vtok") as held:
        for one in held:
            image = Image.open(home / "pictures" / one.name).convert("RGB")
            pixels, _ = Fit(how="cover").whole(made.codec).apply(image, made.codec.factor)
            assert torch.equal(made.look(made.codec.pixels(pixels[None]))[1][0], one.ids)


def test_shards_and_files_and_folders_together(home, tmp_path):
    samples = [
        {"__key__": f"s/{i}", "txt": "words", "jpg": Image.new("RGB", (30, 20), (40 * i, 90, 200))} for i in range(5)
    ]
    write_shards([*samples, {"__key__": "s/none", "txt": "no picture"}], tmp_path / "shards", count=3, quiet=True)
    one = home / "pictures" / "00.png"
    pictures = find_pictures([tmp_path / "shards", home / "pictures", one])
    names = [picture.name for picture in pictures]
    assert names[:3] == ["shard-000000/s/0", "shard-000000/s/1", "shard-000000/s/2"]
    assert "pictures/deep/01.png" in names
    assert names[-1] == "00.png"
    file = tokenize(load(home / "bsq"), pictures, tmp_path / "a.vtok", batch=4)
    assert file.faults["shard-000001/s/none"] == "has no picture, only txt"
    assert len(file) == 5 + 11 + 1
    assert torch.equal(file["00.png"].ids, file["pictures/00.png"].ids)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3])
def test_stopped_it_goes_on_to_the_same_bytes(home, tmp_path, after):
    model, pictures = load(home / "bsq"), find_pictures([home / "pictures"])
    whole = tmp_path / "whole.vtok"
    tokenize(model, pictures, whole, batch=3)
    calls = []

    def stop(count: int) -> None:
        calls.append(count)
        if len(calls) > after:  # the first call tells what was there
            raise Stopped

    path = tmp_path / "a.vtok"
    with pytest.raises(Stopped):
        tokenize(model, pictures, path, batch=3, progress=stop)
    assert not path.exists()
    seen = []
    tokenize(model, pictures, path, batch=3, workers=4, progress=seen.append)
    assert seen[0] == 3 * after
    assert sum(seen) == len(pictures)
    assert path.read_bytes() == whole.read_bytes()
    before = path.stat().st_mtime_ns
    assert len(tokenize(model, pictures, path, batch=3)) == 11  # all is done
    assert path.stat().st_mtime_ns == before


def test_a_full_disk_is_said_and_gone_on_from(home, tmp_path):
    model, pictures = load(home / "bsq"), find_pictures([home / "pictures"])
    path, whole = tmp_path / "a.vtok", tmp_path / "whole.vtok"
    tokenize(model, pictures, whole, batch=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(DataError, match=r"a\.vtok\.partial cannot be written"):
            tokenize(model, pictures, path, batch=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tokenize(model, pictures, path, batch=2)
    assert path.read_bytes() == whole.read_bytes()


def test_names_that_are_no_text(home, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    Image.new("RGB", (20, 20), "teal").save(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png"), "PNG")
    assert tokenize(load(home / "bsq"), find_pictures([folder]), tmp_path / "a.vtok").names == ["caf\ufffd.png"]


def test_what_is_refused_leaves_nothing_behind(home, tmp_path):
    for wrong in ({"workers": -1}, {"batch": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            tokenize(load(home / "bsq"), find_pictures([home / "pictures"]), tmp_path / "a.vtok", **wrong)
    assert not list(tmp_path.iterdir())


def test_other_pictures_do_not_go_on(home, tmp_path):
    model, pictures = load(home / "bsq"), find_pictures([home / "pictures"])
    path = tmp_path / "a.vtok"
    with TokenWriter(path, header_of(model, Fit().whole(model), "codec")) as writer:
        writer.add("00.png", torch.zeros(4, 6, dtype=torch.int64), (16, 24))
    with pytest.raises(DataError, match=f"was begun with '00.png' where '{pictures[1].name}' is now"):
        tokenize(model, pictures[1:], path, batch=1)
    tokenize(model, pictures, path, batch=1).close()
    with pytest.raises(DataError, match="holds other pictures"):
        tokenize(model, pictures[1:], path, batch=1)
    with pytest.raises(DataError, match="another codec"):
        tokenize(load(home / "other"), pictures, path, batch=1)


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_bytes(home, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    random = np.random.default_rng(1)
    for i in range(300):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{i:03}.png")
    words = [sys.executable, "-m", "vitrail.cli", "tokenize", str(folder), "--codec", str(home / "bsq"), "--batch", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "-o", str(tmp_path / "whole")], check=True, env=environment)
    partial = tmp_path / "again.partial"
    kills = 0
    for most in (2, 2, None):  # killed twice, each time after some more was written
        process = subprocess.Popen([*words, "-o", str(tmp_path / "again")], env=environment)
        before = partial.stat().st_size if partial.exists() else 0
        while most and process.poll() is None:
            if partial.exists() and partial.stat().st_size > before + 3000:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        assert process.wait() in (0, -signal.SIGKILL)
    assert kills
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(home, tmp_path):
    tokenize(load(home / "bsq"), find_pictures([home / "pictures"]), tmp_path / "a.vtok", name="bsq")
    return tmp_path / "a.vtok"


def test_another_codec_is_refused(home, tmp_path, file, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / "other", "-o", tmp_path / "again")
    assert code == 2
    assert "made by another codec: bsq" in err
    assert not (tmp_path / "again").exists()


def test_an_altered_file_is_refused_before_anything_is_written(home, tmp_path, file, monkeypatch, capsys):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / "bsq", "-o", tmp_path / "again")
    assert code == 2
    assert "altered" in err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "a/../../b.png", "a\\..\\b.png", "..", "", "a\0b"])
def test_a_name_that_leads_out_is_refused(name):
    with pytest.raises(DataError, match="leads out"):
        places_for([name])


def test_places_are_apart():
    places = places_for(["a.jpg", "a.webp", "b.png", "c", "d.v1.jpg", "shard-0/s.1"])
    assert [str(place) for place in places.values()] == [
        "a.jpg.png",
        "a.webp.png",
        "b.png",
        "c.png",
        "d.v1.png",
        "shard-0/s.1.png",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tokenize", "nowhere", "--codec", "bsq"), "nowhere does not exist"),
        (("tokenize", "no-{0..9}.tar", "--codec", "bsq"), "no-0.tar names no shard"),
        (("tokenize", "pictures", "--codec", "kl"), "continuous"),
        (("tokenize", "pictures", "--codec", "judge"), "Detector"),
        (("tokenize", "pictures", "--codec", "nowhere"), "nowhere"),
        (("tokenize", "pictures", "--codec", "bsq", "--side", "18"), "18 × 18"),
        (("tokenize", "pictures", "--codec", "bsq", "--fit", "pad", "--side", "16"), "--side"),
        (("tokenize", "pictures", "--codec", "bsq", "--batch", "0"), "batches of 0"),
        (("tokenize", "bsq", "--codec", "bsq"), "no pictures"),
        (("tokenize", "pictures", "pictures", "--codec", "bsq"), "two pictures"),
        (("detokenize", "pictures/00.png", "--codec", "bsq"), "no file of tokens"),
    ],
)
def test_what_cannot_be_is_said(home, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(home)
    code, _, err = run(monkeypatch, capsys, *words, "-o", tmp_path / "a.vtok")
    assert code == 2
    assert says in err
    assert not list(tmp_path.iterdir())


def test_a_codec_in_training_is_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="in training"):
        tokenize(load(home / "bsq").train(), find_pictures([home / "pictures"]), tmp_path / "a.vtok")


def test_a_picture_smaller_than_a_code(home):
    model = load(home / "bsq")
    tiny = Image.new("RGB", (3, 9), "red")
    with pytest.raises(DataError, match="less than a code"):
        Fit(how="crop").apply(tiny, model.factor)
    pixels, size = Fit(how="pad").apply(tiny, model.factor)
    assert (tuple(pixels.shape), size) == ((3, 12, 4), (9, 3))
    with pytest.raises(ConfigError, match="leaves pictures"):
        Fit(how="crop", size=(16, 16))


# ---- look -------------------------------------------------------------------------------------------------------


def test_a_strip_shows_what_codecs_keep(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "strip.png"
    words = ("codec", "look", home / "pictures" / "00.png", "--codec", home / "bsq", "--codec", home / "kl", "-o", out)
    code, said, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert said.count(" dB") == 2
    assert "1.7500 bits a pixel" in said
    strip = Image.open(out)
    assert strip.width > 3 * 256
    code, _, err = run(monkeypatch, capsys, *words[:-1], tmp_path / "strip.nothing")
    assert code == 2
    assert ".nothing" in err
