"""`vitrail tokenize` and `detokenize` of videos: round trip, SIGKILL, options and refused input."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitrail
import worlds
from data.test_video_file import video
from helpers import randomize
from vitrail.cli import main
from vitrail.codecs import (
    CausalVideoCodec,
    CausalVideoCodecConfig,
    Codec,
    CodecConfig,
    ConvAutoencoderConfig,
    CosmosAutoencoderConfig,
    VideoTokenFile,
)
from vitrail.codecs.quantizers import BSQConfig, FSQConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig
from vitrail.codecs.video_tokenization import decode_frames
from vitrail.data.video_file import open_video
from vitrail.hub import load, save
from vitrail.models.genie_model import Genie

NET = CosmosAutoencoderConfig(
    encoder_widths=(8, 8, 12),
    decoder_widths=(8, 8, 12),
    layers=1,
    latent_channels=4,
    image_size=16,
    spatial_factor=4,
    temporal_factor=4,
    patch_size=4,
)
SMALL = ("--segment-frames", 13, "--chunk-frames", 4)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Codecs, and videos: constant rate, a phone's, and a cut one."""
    home = tmp_path_factory.mktemp("videos")
    for name, quantizer in {"dv": FSQConfig(levels=(8, 8, 8, 5, 5, 5)), "cv": IdentityQuantizerConfig(dim=4)}.items():
        torch.manual_seed(0)
        codec = CausalVideoCodec(CausalVideoCodecConfig(net=NET, quantizer=quantizer))
        save(randomize(codec, spread=0.3), home / name)
    net = ConvAutoencoderConfig(widths=(8, 8, 8), layers=1, norm_groups=4, image_size=(16, 24))
    save(Codec(CodecConfig(net=net, quantizer=BSQConfig(bits=8))), home / "images")
    (home / "clip.mp4").write_bytes(video(frames=30))
    ticks = [0, 1, 2, 10, 11, 40, 41, 42, 43, 100]
    (home / "phone.mov").write_bytes(video(frames=10, ticks=ticks, container="mov", rotation=90, sound=True))
    whole = video(container="matroska")
    (home / "cut.mkv").write_bytes(whole[: len(whole) * 6 // 10])
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


def test_round_trip(home, tmp_path, monkeypatch, capsys):
    inputs = [home / name for name in ("clip.mp4", "phone.mov", "cut.mkv")]
    code, out, err = run(monkeypatch, capsys, "tokenize", *inputs, "--codec", home / "dv", "-o", tmp_path / "a.vt")
    assert code == 0, err
    assert "2 videos, 40 frames, 16 bits a code" in out
    assert "clip.mp4: 30 frames, 1.200 s, 25 a second; 48 × 128 pixels, 12 × 32 codes" in out
    assert "on average (variable); 128 × 48 pixels, turned upright, 32 × 12 codes" in out
    assert "--fit pad: kept at their size" in out
    assert "1 cannot be read" in err and "cut.mkv is cut off: it has" in err
    with VideoTokenFile(tmp_path / "a.vt") as file:
        assert file.settings.segment_frames == 121 and file.header.name == "dv"
    words = ("detokenize", tmp_path / "a.vt", "--codec", home / "dv", "-o", tmp_path / "again")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "2 videos, 40 frames" in out
    for source, again in (("clip.mp4", "clip.mp4"), ("phone.mov", "phone.mp4")):
        before, after = open_video(home / source), open_video(tmp_path / "again" / again)
        assert (len(after), after.height, after.width) == (len(before), before.height, before.width)
        assert after.timestamps == pytest.approx(before.timestamps)


def test_parts_rates_and_latents(home, tmp_path, monkeypatch, capsys):
    words = ("tokenize", home / "clip.mp4", "--codec", home / "cv", "-o", tmp_path / "a.vt", *SMALL)
    code, out, err = run(monkeypatch, capsys, *words, "--start", 0.2, "--end", 1, "--fps", 10)
    assert code == 0, err
    assert "1 video, 8 frames, 4 float32 a code" in out and "0.800 s, 10 a second" in out
    words = ("detokenize", tmp_path / "a.vt", "--codec", home / "cv", "-o", tmp_path / "part.mkv")
    code, out, err = run(monkeypatch, capsys, *words, "--start", 0.3, "--end", 0.5)
    assert code == 0, err
    assert len(open_video(tmp_path / "part.mkv")) == 2
    with VideoTokenFile(tmp_path / "a.vt") as file:
        frames = list(decode_frames(load(home / "cv"), file[0], 0.3, 0.5))
    assert len(frames) == 2 and not np.array_equal(*frames)


def test_codec_of_a_world_model(home, tmp_path, monkeypatch, capsys):
    """Genie and its codec alone have the same identity. Every frame has its own ids."""
    world = Genie(worlds.genie_config())
    save(world, tmp_path / "world")
    save(world.codec, tmp_path / "codec")
    words = ("tokenize", home / "clip.mp4", "--codec", tmp_path / "world", "-o", tmp_path / "a.vt")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "1 video, 30 frames" in out
    with vitrail.tokenize_videos(home / "clip.mp4", tmp_path / "codec", tmp_path / "b.vt") as file:
        assert file[0].num_latent_frames == 30
    words = ("detokenize", tmp_path / "b.vt", "--codec", tmp_path / "world", "-o", tmp_path / "again.mov")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert len(open_video(tmp_path / "again.mov")) == 30


def test_cover_crops_to_a_square(home, tmp_path, monkeypatch, capsys):
    words = ("tokenize", home / "clip.mp4", "--codec", home / "dv", "-o", tmp_path / "a.vt", "--image-size", 20)
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "48 × 128 → 20 × 20 pixels, 5 × 5 codes" in out and "--fit cover: resized to cover" in out


# A process that kills itself when half of a given segment is written: no other process has to wait for that moment.
KILLED = """
import os, signal, sys
from vitrail.cli import main
from vitrail.codecs.token_file_writer import RecordWriter

put, last, records = RecordWriter._put, int(sys.argv[1]), 0

def put_half(self, data):
    global records
    records += 1
    if records == last:
        put(self, data[: len(data) // 2])
        self.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, data)

RecordWriter._put = put_half
sys.argv = ["vitrail", *sys.argv[2:]]
main()
"""


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bytes(home, tmp_path, monkeypatch, capsys):
    words = ["tokenize", home / "clip.mp4", home / "phone.mov", "--codec", home / "dv", *SMALL, "-o"]
    words = list(map(str, words))
    assert run(monkeypatch, capsys, *words, tmp_path / "whole.vt")[0] == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    again, partial = tmp_path / "again.vt", tmp_path / "again.vt.partial"
    sizes = [0]
    # Records: the header, clip.mp4, its segments of 13, 13 and 4 frames, phone.mov, its segment. A second process
    # starts behind those that are complete.
    for record in (4, 2):
        command = [sys.executable, "-c", KILLED, str(record), *words, str(again)]
        killed = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not again.exists()
        sizes.append(partial.stat().st_size)
    assert sizes[0] < sizes[1] < sizes[2]
    assert run(monkeypatch, capsys, *words, again)[0] == 0
    assert again.read_bytes() == (tmp_path / "whole.vt").read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tokenize", "cut.mkv", "--codec", "dv"), "cut.mkv is cut off"),
        (("tokenize", "nowhere.mp4", "--codec", "dv"), "nowhere.mp4 does not exist"),
        (("tokenize", "clip.mp4", "--codec", "images"), "clip.mp4 is a video, but images encodes images"),
        (("tokenize", "clip.mp4", "--codec", "images", "--fps", "5"), "--fps needs a video codec"),
        (("tokenize", "clip.mp4", "--codec", "dv", "--fit", "pad", "--image-size", "16"), "--image-size needs"),
        (("tokenize", "clip.mp4", "--codec", "dv", "--image-size", "18"), "18 × 18"),
        (("tokenize", "clip.mp4", "--codec", "dv", "--segment-frames", "12"), "use segments of 13 frames"),
        (("tokenize", "clip.mp4", "--codec", "dv", "--start", "2"), "lasts 1.200 s"),
        (("tokenize", "clip.mp4", "--codec", "dv", "--fps", "-1"), "fps"),
        (("detokenize", "clip.mp4", "--codec", "dv"), "not a token file"),
        (("detokenize", "none.vt", "--codec", "dv"), "none.vt is not a file"),
    ],
)
def test_invalid_options_are_refused(home, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    code, _, err = run(monkeypatch, capsys, *words, "-o", tmp_path / "a.vt")
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


def test_detokenizing_is_refused(home, tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.vt"
    assert run(monkeypatch, capsys, "tokenize", home / "clip.mp4", "--codec", home / "dv", "-o", file)[0] == 0
    data = bytearray(file.read_bytes())
    for codec, message in (("cv", "written by another codec: dv"), ("images", "is no video codec")):
        code, _, err = run(monkeypatch, capsys, "detokenize", file, "--codec", home / codec, "-o", tmp_path / "b.mp4")
        assert code == 2 and message in err
    words = ("detokenize", file, "--codec", home / "dv", "-o", tmp_path / "b.mp4")
    code, _, err = run(monkeypatch, capsys, *words, "--start", 5)
    assert code == 2 and "give times within 0 … 1.200 s" in err
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and "is corrupted" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.vt"]
