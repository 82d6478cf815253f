"""Videos: which frames are decoded, their timestamps and orientation, and refused files.

Every frame shows its number in black and white squares, so that a wrong frame is detected.
"""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from vitrail.data.formats import detect_format, open_dataset
from vitrail.data.video_file import VideoFile, open_video
from vitrail.errors import ConfigError, DataError

av = pytest.importorskip("av")

BITS, SIDE = 8, 16
H, W = 48, BITS * SIDE

# codec and container; seeking between keyframes must find the right frame
WAYS = [
    ("libx264", "mp4"),
    ("libx264", "matroska"),
    ("libx264", "mpegts"),
    ("libx264", "flv"),
    ("libvpx-vp9", "webm"),
    ("libvpx", "webm"),
    ("mpeg4", "avi"),
    ("mpeg2video", "mpeg"),
]


def picture(number: int) -> np.ndarray:
    pixels = np.full((H, W, 3), (200, 60, 30), np.uint8)
    for bit in range(BITS):
        pixels[:SIDE, bit * SIDE : (bit + 1) * SIDE] = 255 * (number >> bit & 1)
    return pixels


def numbers(frames: np.ndarray) -> list[int]:
    middle = frames[:, SIDE // 2, SIDE // 2 :: SIDE].mean(-1) > 128  # (T, BITS)
    return (middle @ (1 << np.arange(BITS))).tolist()


def video(
    codec: str = "libx264",
    container: str = "mp4",
    frames: int = 50,
    rate: int = 25,
    ticks: list[int] | None = None,
    rotation: int | None = None,
    sound: bool = False,
    options: dict[str, str] | None = None,
) -> bytes:
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV does not write {codec}")
    # Moving the header to the front needs a real file.
    with tempfile.NamedTemporaryFile() as file:
        _write(file.name, codec, container, frames, rate, ticks, rotation, sound, options or {})
        return Path(file.name).read_bytes()


def _write(name, codec, container, frames, rate, ticks, rotation, sound, options) -> None:
    with av.open(name, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = W, H, "yuv420p"
        stream.codec_context.gop_size = 12
        stream.codec_context.time_base = Fraction(1, rate)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        voice = out.add_stream("aac", rate=8000) if sound else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = (ticks[number] if ticks else number), Fraction(1, rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if voice is not None:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            noise.sample_rate = 8000
            out.mux(voice.encode(noise))
            out.mux(voice.encode(None))


@pytest.fixture(scope="module")
def video_clip() -> VideoFile:
    return open_video(video())


@pytest.mark.parametrize(("codec", "container"), WAYS)
def test_frames_are_decoded_alone_and_together(codec, container):
    video_clip = open_video(video(codec, container))
    assert (len(video_clip), video_clip.height, video_clip.width, video_clip.duration) == (
        50,
        H,
        W,
        pytest.approx(2.0, abs=1e-3),
    )
    assert video_clip.timestamps == pytest.approx(np.arange(50) / 25, abs=1e-3)
    whole = video_clip.read_frames(video_clip.timestamps)
    assert whole.frames.dtype == np.uint8 and whole.frames.shape == (50, H, W, 3)
    assert numbers(whole.frames) == list(range(50)) and whole.timestamps == pytest.approx(video_clip.timestamps)
    for number in (49, 0, 11, 12, 13, 24, 37):
        alone = video_clip.read_frames([video_clip.timestamps[number]])
        assert numbers(alone.frames) == [number] and alone.timestamps == pytest.approx([number / 25], abs=1e-3)
    assert np.abs(whole.frames[:, 32, 60].astype(int) - (200, 60, 30)).max() < 12


@settings(max_examples=40)
@example([1.0399976524001169])
@given(st.lists(st.floats(0, 2), min_size=1, max_size=12))
def test_frame_at_a_time_is_the_last_one_displayed(video_clip, times):
    place = (np.array(times) + 1e-6) * 25  # a time within a microsecond of a frame's timestamp counts as that frame
    assume(np.abs(place - np.round(place)).min() > 1e-7)  # rounding decides exactly on the edge
    clip = video_clip.read_frames(times)
    want = np.minimum(np.floor(place), 49)
    assert numbers(clip.frames) == want.tolist()
    assert clip.timestamps == pytest.approx(want / 25)


def test_sampling_by_count_and_by_rate(video_clip):
    assert numbers(video_clip.sample_frames(count=1).frames) == [25]
    assert numbers(video_clip.sample_frames(count=5).frames) == [5, 15, 25, 35, 45]  # middles of five intervals
    assert numbers(video_clip.sample_frames(fps=5).frames) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert numbers(video_clip.sample_frames(fps=5, start=0.4, end=1.0).frames) == [10, 15, 20]
    assert numbers(video_clip.sample_frames(count=2, start=1, end=2).frames) == [31, 43]
    more = video_clip.sample_frames(fps=50, end=0.1)
    assert numbers(more.frames) == [0, 0, 1, 1, 2] and more.timestamps == pytest.approx([0, 0, 0.04, 0.04, 0.08])
    assert video_clip.sample_frames(count=2, size=(24, 32)).frames.shape == (2, 24, 32, 3)


def test_only_needed_frames_are_decoded(video_clip, monkeypatch):
    """There are twelve frames between keyframes: one frame costs at most those, and the decoder's read-ahead."""
    from vitrail.data import video_file as module

    decoded = []
    run = module._decode_run

    def counted(video_clip, frames, *rest):
        return run(video_clip, (decoded.append(1) or frame for frame in frames), *rest)

    monkeypatch.setattr(module, "_decode_run", counted)
    assert numbers(video_clip.read_frames([1.96]).frames) == [49]  # second frame after a keyframe
    assert len(decoded) <= 12


def test_variable_frame_rate():
    ticks = [0, 1, 2, 10, 11, 40, 41, 42, 43, 100]
    video_clip = open_video(video(frames=10, ticks=ticks, rate=25))
    assert video_clip.timestamps == pytest.approx(np.array(ticks) / 25)
    clip = video_clip.read_frames([0.0, 0.39, 0.4, 1.59, 1.6, 3.99, 4.0])
    assert numbers(clip.frames) == [0, 2, 3, 4, 5, 8, 9]
    assert clip.timestamps == pytest.approx([0, 0.08, 0.4, 0.44, 1.6, 1.72, 4.0])


@pytest.mark.parametrize("angle", [0, 90, 180, -90])
def test_rotated_frames_are_upright(video_clip, angle):
    turned = open_video(video(rotation=angle))
    want = np.rot90(
        video_clip.read_frames([1.0]).frames[0], k=angle // 90
    )  # FFmpeg rotates counter-clockwise, like numpy
    clip = turned.read_frames([1.0])
    assert (turned.height, turned.width) == want.shape[:2]
    assert (clip.frames[0] == want).all()
    small = turned.read_frames([1.0], size=(20, 30)).frames
    assert small.shape == (1, 20, 30, 3)


def test_mirrored_and_oblique_frames(video_clip):
    data = bytearray(video(rotation=0))
    at = data.index(b"tkhd") + 4 + 40  # version 0: the matrix comes after 40 bytes
    assert struct.unpack(">9i", data[at : at + 36])[0] == 1 << 16
    data[at : at + 36] = struct.pack(">9i", -(1 << 16), 0, 0, 0, 1 << 16, 0, W << 16, 0, 1 << 30)
    assert (open_video(bytes(data)).read_frames([1.0]).frames == video_clip.read_frames([1.0]).frames[:, :, ::-1]).all()
    data[at : at + 36] = struct.pack(">9i", 46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)
    with pytest.raises(DataError, match="not a multiple of 90"):
        open_video(bytes(data))


def test_edit_lists_hide_frames():
    data = bytearray(video("mpeg4", options={"use_editlist": "1"}))
    at = data.find(b"elst")
    if at < 0:
        pytest.skip("this PyAV wrote no edit list")
    length, start = struct.unpack(">ii", data[at + 12 : at + 20])
    scale = struct.unpack(">i", data[data.index(b"mdhd") + 16 :][:4])[0]
    data[at + 12 : at + 20] = struct.pack(">ii", length * 15 // 50, start + scale * 30 // 25)  # from frame thirty
    video_clip = open_video(bytes(data))
    assert numbers(video_clip.read_frames([0.0, 0.04, 0.5]).frames) == [30, 31, 42]


def test_stream_starts_at_the_first_keyframe():
    data = video(container="mpegts")
    video_clip = open_video(data[188 * 12 :])  # without the packets of the first keyframe
    assert video_clip.timestamps[0] == 0 and numbers(video_clip.read_frames([0.0, 0.04]).frames) == [12, 13]


def test_audio_is_ignored_and_audio_files_are_refused(video_clip):
    assert numbers(open_video(video(sound=True)).sample_frames(count=5).frames) == [5, 15, 25, 35, 45]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        voice = out.add_stream("aac", rate=8000)
        cover = out.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = W, H, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        noise.sample_rate = 8000
        out.mux(voice.encode(noise))
        out.mux(voice.encode(None))
        out.mux(cover.encode(av.VideoFrame.from_ndarray(picture(0), format="rgb24")))
        out.mux(cover.encode(None))
    with av.open(io.BytesIO(file.getvalue())) as song:
        assert len(song.streams.video) == 1
    with pytest.raises(DataError, match="holds no video"):
        open_video(file.getvalue())


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "avi")])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.85])
def test_truncated_files_are_refused(codec, container, kept):
    faststart = {"movflags": "faststart"} if container == "mp4" else {}  # header first, so that the file can be opened
    data = video(codec, container, options=faststart)
    open_video(data)
    with pytest.raises(DataError, match=r"is cut off|is broken|holds no frame"):
        open_video(data[: int(len(data) * kept)])


def test_missing_frames_at_the_end_are_counted():
    data = video("mpeg4", "avi")
    with pytest.raises(DataError, match=r"is cut off: it has 4\d frames, .* of 50 frames"):
        open_video(data[: int(len(data) * 0.88)])


def test_damaged_frame_is_refused_and_others_are_read():
    data = bytearray(video("mpeg4"))
    with av.open(io.BytesIO(data)) as container:
        packet = bytes(list(container.demux(video=0))[18])
    assert data.count(packet) == 1
    noise = np.random.default_rng(0).integers(0, 256, len(packet) - 8, dtype=np.uint8).tobytes()
    data[data.index(packet) + 8 : data.index(packet) + len(packet)] = noise
    video_clip = open_video(bytes(data))
    assert numbers(video_clip.read_frames([0.4, 1.2]).frames) == [10, 30]
    with pytest.raises(DataError, match=r"the frame at 0\.720 s is damaged"):
        video_clip.read_frames([0.72])


def test_playlists_are_not_followed(tmp_path):
    (tmp_path / "a.ts").write_bytes(video(container="mpegts"))
    open_video(tmp_path / "a.ts")
    plays = {
        "x.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\na.ts\n#EXT-X-ENDLIST\n",
        "x.ffconcat": "ffconcat version 1.0\nfile a.ts\n",
    }
    for name, content in plays.items():
        (tmp_path / name).write_text(content)
        with av.open(str(tmp_path / name)) as container:  # FFmpeg itself follows them
            assert container.streams.video
        with pytest.raises(DataError, match="is broken or not a video"):
            open_video(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is broken or not a video"),
        (b"not a video at all" * 100, "is broken or not a video"),
        (
            b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
            "is broken or not a video",
        ),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is broken or not a video"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    with pytest.raises(DataError, match=message):
        open_video(content)
    (tmp_path / "x.mp4").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_video(tmp_path / "x.mp4")


def test_invalid_paths_are_refused(tmp_path):
    for name in (tmp_path, tmp_path / "lost.mp4", "https://example.org/x.mp4", "concat:a|b", "y" * 5000, "a\0b"):
        with pytest.raises(DataError, match="is no file"):
            open_video(name)


def test_h264_in_avi_is_refused():
    with pytest.raises(DataError, match="has no presentation timestamps"):
        open_video(video("libx264", "avi"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "count or fps"),
        ({"count": 1, "fps": 1}, "count or fps"),
        ({"count": 0}, "count is 0"),
        ({"fps": 0.0}, "fps is 0.0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": 1e15}, "exceed the limit"),
        ({"count": 10**12}, "exceed the limit"),
        ({"count": 1, "start": 3.0}, "within 0 … 2.000 s"),
        ({"count": 1, "start": 1.0, "end": 1.0}, "within 0 …"),
        ({"count": 1, "end": float("nan")}, "within 0 …"),
        ({"count": 1, "size": (0, 4)}, "at least 1"),
    ],
)
def test_invalid_sampling_is_refused(video_clip, options, message):
    with pytest.raises(ConfigError, match=message):
        video_clip.sample_frames(**options)


def test_times_out_of_range_are_refused(video_clip):
    for times in ([-0.1], [2.1], [float("nan")], [], [[0.0]]):
        with pytest.raises(ConfigError, match="give a list within"):
            video_clip.read_frames(times)


def test_video_files_can_be_pickled_and_read_from_folders(tmp_path, video_clip):
    assert numbers(pickle.loads(pickle.dumps(video_clip)).sample_frames(count=1).frames) == [25]
    for name in ("run/a.mp4", "jump/b.mp4"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(video_clip.source)
    (tmp_path / "jump/b.txt").write_text("a jump")
    samples = open_dataset(detect_format(tmp_path), tmp_path)
    assert [(s.id, s.label, s.captions) for s in samples] == [
        ("jump/b.mp4", "jump", ("a jump",)),
        ("run/a.mp4", "run", ()),
    ]
    assert samples[0].open_video().sample_frames(count=2).frames.shape == (2, H, W, 3)
    (tmp_path / "run/a.mp4").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"sample run/a\.mp4: .* is broken"):
        samples[1].open_video()


# ── mutated files ──────────────────────────────────────────────────────────────────────────────────────────────

# A crash of FFmpeg would end the test run. Mutated files are read in a separate process, which prints the file that it
# is about to read.
READER = """
import json, pathlib, sys, collections
from vitrail.data.video_file import open_video
from vitrail.errors import VitrailError
outcomes = collections.Counter()
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    print(path.name, file=sys.stderr, flush=True)
    try:
        clip = open_video(path).sample_frames(count=3, size=(16, 16))
        assert clip.frames.shape == (3, 16, 16, 3)
        outcomes["frames"] += 1
    except VitrailError:
        outcomes["refused"] += 1
print(json.dumps(outcomes))
"""


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.integers(1, 6)):
        at = int(rng.integers(len(changed)))
        match rng.integers(5):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                changed[at : at + 8] = rng.integers(0, 256, 8, dtype=np.uint8).tobytes()
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = rng.integers(0, 256, int(rng.integers(1, 64)), dtype=np.uint8).tobytes()
            case 4:
                del changed[at : at + int(rng.integers(1, 64))]
        if not changed:
            break
    return bytes(changed)


def read_mutated(folder, count: int) -> dict[str, int]:
    rng = np.random.default_rng(0)
    whole = [video(codec, container, frames=15) for codec, container in WAYS]
    whole.append(video(options={"movflags": "faststart"}, frames=15))
    for number in range(count):
        data = whole[number % len(whole)]
        # Headers are a small part of a file but matter most: half of the mutations are in its first or last kilobyte.
        where = rng.integers(4)
        if where == 0:
            data = mutate(data[:1000], rng) + data[1000:]
        elif where == 1:
            data = data[:-1000] + mutate(data[-1000:], rng)
        else:
            data = mutate(data, rng)
        (folder / f"{number:06d}").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", READER, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    last = done.stderr.splitlines()[-30:]
    assert done.returncode == 0, f"the reader died with {done.returncode}: {last}"
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == count
    return outcomes


def test_a_few_mutated_videos(tmp_path):
    outcomes = read_mutated(tmp_path, 60)
    assert outcomes["frames"] and outcomes["refused"]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_two_thousand_mutated_videos(tmp_path):
    outcomes = read_mutated(tmp_path, 2000)
    assert outcomes["frames"] > 100 and outcomes["refused"] > 100
