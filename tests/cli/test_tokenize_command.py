"""`vitrail tokenize`, `detokenize` and `codec reconstruct`: pictures as tokens and back, stopped, killed, refused."""

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
from models import test_unified_model as unified
from vitrail.cli import main
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.image_sources import ImageResizeConfig, find_images
from vitrail.codecs.image_tokenization import (
    assign_output_paths,
    build_header,
    count_cropped_images,
    tokenize_images,
)
from vitrail.codecs.quantizers import BSQConfig, GroupedVQConfig, KLConfig
from vitrail.codecs.token_file import TokenFile
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.data.shards import write_shards
from vitrail.errors import ConfigError, DataError
from vitrail.hub import load, save

NET = ConvAutoencoderConfig(widths=(8, 8, 8), layers=1, norm_groups=4, image_size=(16, 24))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Codecs and pictures of many sizes, one of which cannot be read."""
    home = tmp_path_factory.mktemp("tokens")
    for seed, (name, quantizer) in enumerate(
        {
            "bsq": BSQConfig(bits=28),
            "other": BSQConfig(bits=28),
            "vq": GroupedVQConfig(codebook_size=20, dim=6, groups=3),
            "kl": KLConfig(width=4),
        }.items()
    ):
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
def test_round_trip(home, tmp_path, monkeypatch, capsys, codec, fit):
    file = tmp_path / "a.vtok"
    words = ("tokenize", home / "pictures", "--codec", home / codec, "-o", file, "--fit", fit, "--batch-size", 4)
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "11 images" in out
    assert "05 broken.png" in err
    model = load(home / codec)
    with TokenFile(file) as held:
        assert list(held.errors) == ["05 broken.png"]
        for one in held:
            image = Image.open(home / "pictures" / one.name)
            assert one.source_size == (image.height, image.width)
            pixels, size = (
                ImageResizeConfig(how=fit).resolve_size(model).apply(image.convert("RGB"), model.downsample_factor)
            )
            with torch.no_grad():
                assert torch.equal(model.encode(model.to_pixels(pixels[None])).ids[0], one.ids)
            assert one.image_size == size
            if fit == "pad":
                assert size == one.source_size
                assert torch.equal(pixels[:, : size[0], : size[1]].permute(1, 2, 0), torch.tensor(np.array(image)))
            elif fit == "crop":
                assert size == tuple(side // 4 * 4 for side in one.source_size)
            else:
                assert size == (16, 24)
        sizes = {one.name: one.image_size for one in held}
    code, out, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / codec, "-o", tmp_path / "again")
    assert code == 0, err
    assert "11 images" in out
    again = {p.relative_to(tmp_path / "again").as_posix(): Image.open(p) for p in (tmp_path / "again").rglob("*.png")}
    assert {name: (image.height, image.width) for name, image in again.items()} == sizes


def test_codec_of_a_unified_model(home, tmp_path, monkeypatch, capsys):
    """Its codes are those that it reads and draws."""
    made = unified.made()
    save(made, tmp_path / "unified")
    words = ("tokenize", home / "pictures", "--codec", tmp_path / "unified", "-o", tmp_path / "a.vtok")
    assert run(monkeypatch, capsys, *words)[0] == 0
    with TokenFile(tmp_path / "a.vtok") as held:
        for one in held:
            image = Image.open(home / "pictures" / one.name).convert("RGB")
            pixels, _ = (
                ImageResizeConfig(how="cover").resolve_size(made.codec).apply(image, made.codec.downsample_factor)
            )
            assert torch.equal(made.encode_images(made.codec.to_pixels(pixels[None]))[1][0], one.ids)


def test_shards_files_and_folders(home, tmp_path):
    samples = [
        {"__key__": f"s/{i}", "txt": "words", "jpg": Image.new("RGB", (30, 20), (40 * i, 90, 200))} for i in range(5)
    ]
    write_shards([*samples, {"__key__": "s/none", "txt": "no picture"}], tmp_path / "shards", max_samples=3, quiet=True)
    one = home / "pictures" / "00.png"
    pictures = find_images([tmp_path / "shards", home / "pictures", one])
    names = [picture.name for picture in pictures]
    assert names[:3] == ["shard-000000/s/0", "shard-000000/s/1", "shard-000000/s/2"]
    assert "pictures/deep/01.png" in names
    assert names[-1] == "00.png"
    file = tokenize_images(load(home / "bsq"), pictures, tmp_path / "a.vtok", batch_size=4)
    assert file.errors["shard-000001/s/none"] == "has no image, only txt"
    assert len(file) == 5 + 11 + 1
    assert torch.equal(file["00.png"].ids, file["pictures/00.png"].ids)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3])
def test_resumed_run_writes_the_same_bytes(home, tmp_path, after):
    model, pictures = load(home / "bsq"), find_images([home / "pictures"])
    whole = tmp_path / "whole.vtok"
    tokenize_images(model, pictures, whole, batch_size=3)
    calls = []

    def stop(count: int) -> None:
        calls.append(count)
        if len(calls) > after:  # the first call tells what was there
            raise Stopped

    path = tmp_path / "a.vtok"
    with pytest.raises(Stopped):
        tokenize_images(model, pictures, path, batch_size=3, progress=stop)
    assert not path.exists()
    seen = []
    tokenize_images(model, pictures, path, batch_size=3, num_workers=4, progress=seen.append)
    assert seen[0] == 3 * after
    assert sum(seen) == len(pictures)
    assert path.read_bytes() == whole.read_bytes()
    before = path.stat().st_mtime_ns
    assert len(tokenize_images(model, pictures, path, batch_size=3)) == 11  # all is done
    assert path.stat().st_mtime_ns == before


def test_full_disk_is_reported_and_resumable(home, tmp_path):
    model, pictures = load(home / "bsq"), find_images([home / "pictures"])
    path, whole = tmp_path / "a.vtok", tmp_path / "whole.vtok"
    tokenize_images(model, pictures, whole, batch_size=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(DataError, match=r"a\.vtok\.partial cannot be written"):
            tokenize_images(model, pictures, path, batch_size=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tokenize_images(model, pictures, path, batch_size=2)
    assert path.read_bytes() == whole.read_bytes()


def test_undecodable_file_names(home, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    Image.new("RGB", (20, 20), "teal").save(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png"), "PNG")
    assert tokenize_images(load(home / "bsq"), find_images([folder]), tmp_path / "a.vtok").names == ["caf\ufffd.png"]


def test_refused_input_leaves_no_files(home, tmp_path):
    for wrong in ({"num_workers": -1}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            tokenize_images(load(home / "bsq"), find_images([home / "pictures"]), tmp_path / "a.vtok", **wrong)
    assert not list(tmp_path.iterdir())


def test_changed_inputs_do_not_resume(home, tmp_path):
    model, pictures = load(home / "bsq"), find_images([home / "pictures"])
    path = tmp_path / "a.vtok"
    with TokenFileWriter(path, build_header(model, ImageResizeConfig().resolve_size(model), "codec")) as writer:
        writer.add("00.png", torch.zeros(4, 6, dtype=torch.int64), (16, 24))
    with pytest.raises(DataError, match=f"has '00.png' at position 0, but '{pictures[1].name}' was given"):
        tokenize_images(model, pictures[1:], path, batch_size=1)
    tokenize_images(model, pictures, path, batch_size=1).close()
    with pytest.raises(DataError, match="has other images"):
        tokenize_images(model, pictures[1:], path, batch_size=1)
    with pytest.raises(DataError, match="another codec"):
        tokenize_images(load(home / "other"), pictures, path, batch_size=1)


# The command line, which waits before it renames a file, to be killed.
UNFINISHED = """
import pathlib, runpy, time
pathlib.Path.replace = lambda *_: time.sleep(3600)
runpy.run_module("vitrail", run_name="__main__")
"""


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bytes(home, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    random = np.random.default_rng(1)
    for i in range(300):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{i:03}.png")
    words = [
        sys.executable,
        "-m",
        "vitrail",
        "tokenize",
        str(folder),
        "--codec",
        str(home / "bsq"),
        "--batch-size",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "-o", str(tmp_path / "whole")], check=True, env=environment)
    partial = tmp_path / "again.partial"
    for size in (3000, 6000):  # killed twice, each time after more was written
        process = subprocess.Popen(
            [sys.executable, "-c", UNFINISHED, *words[3:], "-o", tmp_path / "again"], env=environment
        )
        while process.poll() is None and not (partial.exists() and partial.stat().st_size > size):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run([*words, "-o", str(tmp_path / "again")], check=True, env=environment)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(home, tmp_path):
    tokenize_images(load(home / "bsq"), find_images([home / "pictures"]), tmp_path / "a.vtok", codec_name="bsq")
    return tmp_path / "a.vtok"


def test_another_codec_is_refused(home, tmp_path, file, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / "other", "-o", tmp_path / "again")
    assert code == 2
    assert "written by another codec: bsq" in err
    assert not (tmp_path / "again").exists()


def test_corrupt_file_is_refused_before_writing(home, tmp_path, file, monkeypatch, capsys):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / "bsq", "-o", tmp_path / "again")
    assert code == 2
    assert "is corrupted" in err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "a/../../b.png", "a\\..\\b.png", "..", "", "a\0b"])
def test_path_traversal_is_refused(name):
    with pytest.raises(DataError, match="leads out"):
        assign_output_paths([name])


def test_outputs_do_not_collide():
    places = assign_output_paths(["a.jpg", "a.webp", "b.png", "c", "d.v1.jpg", "shard-0/s.1"])
    assert [str(place) for place in places.values()] == [
        "a.jpg.png",
        "a.webp.png",
        "b.png",
        "c.png",
        "d.v1.png",
        "shard-0/s.1.png",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tokenize", "nowhere", "--codec", "bsq"), "nowhere does not exist"),
        (("tokenize", "no-{0..9}.tar", "--codec", "bsq"), "no-0.tar matches no shard"),
        (("tokenize", "pictures", "--codec", "kl"), "continuous"),
        (("tokenize", "pictures", "--codec", "judge"), "Detector"),
        (("tokenize", "pictures", "--codec", "nowhere"), "nowhere"),
        (("tokenize", "pictures", "--codec", "bsq", "--image-size", "18"), "18 × 18"),
        (("tokenize", "pictures", "--codec", "bsq", "--fit", "pad", "--image-size", "16"), "--image-size"),
        (("tokenize", "pictures", "--codec", "bsq", "--batch-size", "0"), "batch_size is 0"),
        (("tokenize", "bsq", "--codec", "bsq"), "no images"),
        (("tokenize", "pictures", "pictures", "--codec", "bsq"), "two images"),
        (("detokenize", "pictures/00.png", "--codec", "bsq"), "not a token file"),
    ],
)
def test_invalid_options_are_refused(home, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    code, _, err = run(monkeypatch, capsys, *words, "-o", tmp_path / "a.vtok")
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


def test_codec_in_training_is_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="in training"):
        tokenize_images(load(home / "bsq").train(), find_images([home / "pictures"]), tmp_path / "a.vtok")


def test_image_smaller_than_a_patch(home):
    model = load(home / "bsq")
    tiny = Image.new("RGB", (3, 9), "red")
    with pytest.raises(DataError, match="smaller than a code"):
        ImageResizeConfig(how="crop").apply(tiny, model.downsample_factor)
    pixels, size = ImageResizeConfig(how="pad").apply(tiny, model.downsample_factor)
    assert (tuple(pixels.shape), size) == ((3, 12, 4), (9, 3))
    with pytest.raises(ConfigError, match="does not take a size"):
        ImageResizeConfig(how="crop", size=(16, 16))


# ---- show -------------------------------------------------------------------------------------------------------


def test_show_draws_reconstructions(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "strip.png"
    codecs = ("--codec", home / "bsq", "--codec", home / "kl")
    words = ("codec", "reconstruct", home / "pictures" / "00.png", *codecs, "-o", out)
    code, output, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert output.count(" dB") == 2
    assert "1.7500 bits a pixel" in output
    strip = Image.open(out)
    assert strip.width > 3 * 256
    code, _, err = run(monkeypatch, capsys, *words[:-1], tmp_path / "strip.nothing")
    assert code == 2
    assert ".nothing" in err


@pytest.mark.parametrize(("fit", "cropped"), [("cover", 11), ("pad", 0), ("crop", 11)])
def test_cropped_images_are_counted(home, tmp_path, fit, cropped):
    resize = ImageResizeConfig(how=fit)
    file = tokenize_images(load(home / "bsq"), find_images([home / "pictures"]), tmp_path / "a.vtok", resize=resize)
    sizes = [(tokens.image_size, tokens.source_size) for tokens in file]
    assert fit != "crop" or cropped == sum(size != source for size, source in sizes)
    assert count_cropped_images(file) == cropped
