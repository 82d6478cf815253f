"""Videos to tokens and back: files of other programs, exact frame counts, seeking, resuming and refused files.

PyAV alone decodes the reference frames.
"""

import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from data.test_video_file import H, W, video
from helpers import randomize
from vitrail.codecs import (
    CausalVideoCodec,
    CausalVideoCodecConfig,
    CogVideoXAutoencoderConfig,
    CosmosAutoencoderConfig,
    VideoCodec,
    VideoCodecConfig,
    VideoTokenFile,
    WanAutoencoderConfig,
    detokenize_videos,
    find_videos,
    tokenize_videos,
    video_tokenization,
)
from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.codecs.quantizers import FSQConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig
from vitrail.codecs.video_token_file import count_segment_frames
from vitrail.codecs.video_tokenization import decode_frames, plan_chunks
from vitrail.data import video_file
from vitrail.data.video_file import open_video
from vitrail.errors import ConfigError, DataError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, SpaceTimeConfig

av = pytest.importorskip("av")

TICKS = [0, 1, 2, 10, 11, 40, 41, 42, 43, 100, 101, 103, 150, 151, 152, 153, 180, 181, 190, 200]  # at 25 a second
SMALL = {"segment_frames": 13, "chunk_frames": 4}
NET = {"encoder_widths": (8, 8, 12), "decoder_widths": (8, 8, 12), "layers": 1, "latent_channels": 4, "image_size": 16}
COSMOS = NET | {"spatial_factor": 4, "temporal_factor": 4, "patch_size": 4}
WIDE = COSMOS | {"spatial_factor": 8, "encoder_widths": (4, 4, 8), "decoder_widths": (4, 4, 8)}
WAN = {"width": 4, "multipliers": (1, 2, 2), "layers": 1, "latent_channels": 4, "temporal_steps": (True, True)}


COGVIDEOX = {"widths": (4, 4, 8), "layers": 1, "latent_channels": 4, "temporal_factor": 4, "norm_groups": 2}
NETS = {"multipliers": WanAutoencoderConfig, "norm_groups": CogVideoXAutoencoderConfig}


def make_codec(net: dict, discrete: bool = True, seed: int = 0) -> CausalVideoCodec:
    torch.manual_seed(seed)
    config_class = next((NETS[key] for key in NETS if key in net), CosmosAutoencoderConfig)
    config = CausalVideoCodecConfig(
        net=config_class(**net),
        quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5)) if discrete else IdentityQuantizerConfig(dim=4),
    )
    return randomize(CausalVideoCodec(config), seed, spread=0.3).eval()


def make_genie_codec() -> VideoCodec:
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=24))
    transformer = SpaceTimeConfig(layers=2, block=block, context_frames=3)
    config = VideoCodecConfig(
        image_size=16, patch_size=16, encoder=transformer, decoder=transformer, quantizer=FSQConfig(levels=(5, 5, 5))
    )
    return randomize(VideoCodec(config)).eval()


@pytest.fixture(scope="module")
def codec():
    return make_codec(COSMOS)  # 4 × 4 pixels, 4 frames


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video(frames=30))
    return path


def write(path, data: bytes):
    path.write_bytes(data)
    return path


def ten_bit_video(path, codec_name="libx265", frames=17):
    """A 10-bit gradient that moves."""
    if codec_name not in av.codecs_available:
        pytest.skip(f"this PyAV does not write {codec_name}")
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec_name, rate=24, options={"x265-params": "log-level=none"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p10le"
        for number in range(frames):
            ramp = (np.arange(64) * 256 + number * 512).astype(np.uint16)
            pixels = np.broadcast_to(ramp[None, :, None], (32, 64, 3))
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb48le")
            out.mux(stream.encode(frame.reformat(format="yuv420p10le")))
        out.mux(stream.encode(None))
    return path


def reference_frames(path, turns: int = 0) -> np.ndarray:
    """All frames by PyAV, (T, H, W, 3), turned counter-clockwise by quarters."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack([np.rot90(frame, turns) for frame in frames])


def reference_times(path) -> np.ndarray:
    with av.open(str(path)) as container:
        times = np.array([frame.time for frame in container.decode(video=0)])
    return times - times[0]


@torch.no_grad()
def reference_tokens(codec, frames: np.ndarray, file: VideoTokenFile) -> torch.Tensor:
    """Encode each segment of padded frames, (T, 3, H, W), in the chunks of the file."""
    tokens, size = [], file.settings.segment_frames
    for start in range(0, len(frames), size):
        part = list(frames[start : start + size])
        while (len(part) - 1) % file.settings.frame_multiple:
            part.append(part[-1])
        pixels, cache, step = codec.to_pixels(torch.from_numpy(np.stack(part)))[None], codec.make_cache(), 0
        while step < len(part):
            stop = step + file.settings.chunk_frames + (step == 0)
            output = codec.encode(pixels[:, step:stop], cache)
            tokens.append(output.codes[0] if output.ids is None else output.ids[0])
            step = stop
    return torch.cat(tokens)


# ---- files of other programs ------------------------------------------------------------------------------------

PROGRAMS = {
    "h264.mp4": (lambda path: write(path, video(frames=30)), 30, 0, True),
    "one.mp4": (lambda path: write(path, video(frames=1)), 1, 0, True),
    "vfr.mp4": (lambda path: write(path, video(frames=20, ticks=TICKS)), 20, 0, False),
    "vfr.mkv": (lambda path: write(path, video(frames=20, ticks=TICKS, container="matroska")), 20, 0, False),
    "phone.mov": (
        lambda path: write(path, video(frames=20, ticks=TICKS, container="mov", rotation=90, sound=True)),
        20,
        1,
        False,
    ),
    "turned.mp4": (lambda path: write(path, video(frames=14, rotation=180)), 14, 2, True),
    "vp9.webm": (lambda path: write(path, video("libvpx-vp9", "webm", frames=18)), 18, 0, True),
    "ten-bit.mp4": (ten_bit_video, 17, 0, True),
    "ten-bit.mkv": (lambda path: ten_bit_video(path, "libx264"), 17, 0, True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_of_other_programs_round_trip(codec, tmp_path, name):
    make, count, turns, constant = PROGRAMS[name]
    path = make(tmp_path / name)
    frames, times = reference_frames(path, turns), reference_times(path)
    with tokenize_videos(codec, find_videos([path]), tmp_path / "a.vt", **SMALL) as file:
        stored = file[name]
        assert len(frames) == len(stored) == count
        assert stored.source_size == stored.image_size == frames.shape[1:3]
        assert stored.timestamps == pytest.approx(times, abs=1e-6)
        assert stored.has_constant_rate == constant and any(stored.record.orientation) == bool(turns)
        assert torch.equal(stored.read().tokens, reference_tokens(codec, frames.transpose(0, 3, 1, 2), file))
        (again,) = detokenize_videos(codec, file, tmp_path / "again.mp4")
    decoded = open_video(again)
    assert (len(decoded), decoded.height, decoded.width) == frames.shape[:3]
    assert decoded.timestamps == pytest.approx(times, abs=1e-6)
    assert decoded.duration == pytest.approx(open_video(path).duration, abs=1e-3)
    with av.open(str(again)) as container:
        assert sum(1 for _ in container.decode(video=0)) == count


@pytest.mark.parametrize("frames", range(1, 28, 3))
def test_every_frame_count_comes_back(codec, tmp_path, frames):
    path = write(tmp_path / "a.mp4", video(frames=frames))
    with tokenize_videos(codec, find_videos([path]), tmp_path / "a.vt", **SMALL) as file:
        assert len(list(decode_frames(codec, file[0]))) == len(file[0]) == frames


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6, 12, 13])
def test_chunks_cover_a_segment_and_only_the_last_is_padded(codec, clip, tmp_path, num_frames):
    with tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL) as file:
        chunks = plan_chunks(num_frames, file.settings)
        assert sum(own for own, _ in chunks) == num_frames
        assert [sum(chunk) for chunk in chunks] == [*([5] if num_frames > 1 else [1]), *[4] * (len(chunks) - 1)]
        assert all(padding == 0 for _, padding in chunks[:-1])
        assert sum(count_segment_frames(30, number, file.settings) for number in range(3)) == 30


# ---- codecs -----------------------------------------------------------------------------------------------------


def make_half_precision_codec():
    return make_codec(WAN, discrete=False).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(lambda: make_codec(COSMOS, discrete=False), "float32"), (make_half_precision_codec, "bfloat16")],
    ids=["cosmos", "wan"],
)
def test_latents_are_stored_exactly(clip, tmp_path, make, dtype):
    codec = make()
    with tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL, end=0.6) as file:
        assert (file.settings.latent_dtype, file.header.sizes) == (dtype, ())
        frames = reference_frames(clip)[:15].transpose(0, 3, 1, 2)
        tokens = file[0].read().tokens
        assert tokens.dtype == getattr(torch, dtype)
        assert torch.equal(tokens, reference_tokens(codec, frames, file))
        assert len(list(decode_frames(codec, file[0]))) == 15


@torch.no_grad()
def test_codec_of_a_world_model(clip, tmp_path):
    """Encoding frame by frame and in chunks gives the same ids."""
    genie = make_genie_codec()
    with tokenize_videos(genie, find_videos([clip]), tmp_path / "a.vt", segment_frames=10, chunk_frames=3) as file:
        frames, stored = reference_frames(clip).transpose(0, 3, 1, 2), file[0]
        assert stored.num_latent_frames == stored.num_frames == 30 and stored.num_segments == 3
        expected = []
        for start in range(0, 30, 10):
            pixels, cache = genie.to_pixels(torch.from_numpy(frames[start : start + 10]))[None], genie.make_cache()
            for t in range(10):
                expected.append(genie.encode(pixels[:, t : t + 1], cache.encoder).ids[0])
                cache.encoder.commit()
        assert torch.equal(stored.read().tokens, torch.cat(expected))
        assert len(list(decode_frames(genie, stored))) == 30


@pytest.mark.parametrize("frames", [1, 2, 5, 9, 10, 14, 17, 18, 26, 30])
def test_chunks_of_cogvideox(tmp_path, frames):
    """It decodes 2 latent frames to 5 or 8 frames, so segments are filled to 1 + 8·n frames."""
    codec = make_codec(COGVIDEOX, discrete=False)
    path = write(tmp_path / "a.mp4", video(frames=frames))
    with tokenize_videos(codec, find_videos([path]), tmp_path / "a.vt", segment_frames=17) as file:
        assert (file.settings.frame_multiple, file.settings.chunk_frames) == (8, 8)
        whole = file[0].read()
        assert torch.equal(whole.tokens, reference_tokens(codec, reference_frames(path).transpose(0, 3, 1, 2), file))
        decoded = list(decode_frames(codec, file[0]))
        assert len(decoded) == frames
        with torch.no_grad():  # the first segment, all at once
            pixels = codec.decode(file[0].read_segment(0)[None])
        once = codec.to_uint8(pixels[0]).permute(0, 2, 3, 1).numpy()[: min(frames, 17)]
        assert np.abs(np.stack(decoded[:17]).astype(int) - once).max() <= 1


# ---- parts and sizes --------------------------------------------------------------------------------------------


def test_decoded_parts_equal_slices(codec, clip, tmp_path):
    with tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL) as file:
        stored = file[0]
        whole = np.stack(list(decode_frames(codec, stored)))
        for first, stop in ((0, 1), (12, 13), (13, 14), (5, 27), (14, 20), (29, 30)):
            part = np.stack(list(decode_frames(codec, stored, first / 25, stop / 25)))
            assert np.array_equal(part, whole[first:stop])
        (path,) = detokenize_videos(codec, file, tmp_path / "part.mp4", start=0.4, end=0.8)
    part = open_video(path)
    assert part.timestamps == pytest.approx(np.arange(10) / 25) and part.duration == pytest.approx(0.4)


def test_start_end_and_rate_select_frames(codec, tmp_path):
    path = write(tmp_path / "vfr.mp4", video(frames=20, ticks=TICKS))
    frames = reference_frames(path).transpose(0, 3, 1, 2)
    with tokenize_videos(codec, find_videos([path]), tmp_path / "a.vt", **SMALL, start=0.4, end=4.0) as file:
        assert file[0].timestamps == pytest.approx(np.array([10, 11, 40, 41, 42, 43]) / 25 - 0.4)
        assert file[0].duration == pytest.approx(100 / 25 - 0.4)
        assert torch.equal(file[0].read().tokens, reference_tokens(codec, frames[3:9], file))
    with tokenize_videos(codec, find_videos([path]), tmp_path / "b.vt", **SMALL, fps=2, end=4.0) as file:
        shown = [sum(tick <= 12.5 * number for tick in TICKS) - 1 for number in range(8)]
        assert (file[0].frame_rate, file[0].duration, file[0].has_constant_rate) == (2, 4.0, True)
        assert torch.equal(file[0].read().tokens, reference_tokens(codec, frames[shown], file))


@pytest.mark.parametrize("how", ["pad", "crop", "cover"])
def test_sizes_that_do_not_divide(tmp_path, how):
    codec = make_codec(WIDE)  # 8 × 8 pixels
    path = ten_bit_video(tmp_path / "a.mkv", "libx264", frames=3)
    turned = write(tmp_path / "b.mkv", video(frames=3))
    resize, sizes = ImageResizeConfig(how=how), {"pad": (48, 128), "crop": (48, 128), "cover": (16, 16)}
    videos = find_videos([path, turned])
    with tokenize_videos(codec, videos, tmp_path / "a.vt", resize=resize, segment_frames=9) as file:
        assert file[1].image_size == sizes[how]
        pixels = [resize.resolve_size(codec).apply(Image.fromarray(frame), 8)[0] for frame in reference_frames(turned)]
        assert torch.equal(file[1].read().tokens, reference_tokens(codec, torch.stack(pixels).numpy(), file))


@pytest.mark.parametrize(("how", "size"), [("pad", (H - 3, W - 5)), ("crop", (H - 4, W - 8))])
def test_odd_sizes_come_back(codec, tmp_path, how, size):
    """A padded video comes back in its size, also if that is odd."""
    path = tmp_path / "odd.mkv"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = W - 5, H - 3, "yuv444p"
        for number in range(7):
            pixels = np.full((H - 3, W - 5, 3), 30 * number, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    resize = ImageResizeConfig(how=how)
    with tokenize_videos(codec, find_videos([path]), tmp_path / "a.vt", resize=resize, **SMALL) as file:
        assert (file[0].source_size, file[0].image_size, file[0].grid) == (
            (45, 123),
            size,
            (size[0] // -4 * -1, -(-size[1] // 4)),
        )
        (again,) = detokenize_videos(codec, file, tmp_path / "again.mp4")
    decoded = open_video(again)
    assert (len(decoded), decoded.height, decoded.width) == (7, *size)


# ---- resumed ----------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [0, 5, 13, 20, 31, 40])
def test_resumed_run_writes_the_same_bytes(codec, clip, tmp_path, monkeypatch, after):
    other = write(tmp_path / "other.mp4", video(frames=20, ticks=TICKS, rotation=90))
    videos = find_videos([clip, other])
    tokenize_videos(codec, videos, tmp_path / "whole.vt", **SMALL).close()
    done = 0

    def stop(name, count, total):
        nonlocal done
        done += count
        if done > after:
            raise Stopped

    path = tmp_path / "a.vt"
    with pytest.raises(Stopped):
        tokenize_videos(codec, videos, path, **SMALL, progress=stop)
    assert not path.exists()
    encoded = []
    encode = video_tokenization._encode_chunk
    monkeypatch.setattr(
        video_tokenization, "_encode_chunk", lambda *given: (encoded.append(given[1].shape[1]), encode(*given))[1]
    )
    with tokenize_videos(codec, videos, path, **SMALL) as file:
        assert path.read_bytes() == (tmp_path / "whole.vt").read_bytes()
        assert file.names == ["clip.mp4", "other.mp4"]
    kept = {0: 0, 5: 0, 13: 13, 20: 13, 31: 30, 40: 30}[after]  # whole segments: of 13, 13 and 4 frames, then 13 and 7
    assert sum(encoded) == {0: 13 + 13 + 5, 13: 13 + 5, 30: 0}[kept] + 13 + 9
    encoded.clear()
    tokenize_videos(codec, videos, path, **SMALL).close()
    assert not encoded
    with pytest.raises(DataError, match="other videos or settings"):
        tokenize_videos(codec, videos[:1], path, **SMALL)
    with pytest.raises(DataError, match="other videos or settings"):
        tokenize_videos(codec, videos, path, segment_frames=17, chunk_frames=4)


def test_replaced_source_does_not_resume(codec, clip, tmp_path):
    def stop(name, count, total):
        if count == 4:
            raise Stopped

    with pytest.raises(Stopped):
        tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL, progress=stop)
    clip.write_bytes(video(frames=30, rotation=180))
    with pytest.raises(DataError, match="which is another video now"):
        tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL)


def test_memory_is_bounded_by_a_segment(codec, clip, tmp_path, monkeypatch):
    """No more frames exist at a time than a chunk has, and those that the decoder reads ahead."""
    alive, most = set(), 0
    convert = video_file._to_rgb

    def counted(*given):
        nonlocal most
        pixels = convert(*given).copy()
        alive.add(id(pixels))
        weakref.finalize(pixels, alive.discard, id(pixels))
        most = max(most, len(alive))
        return pixels

    monkeypatch.setattr(video_file, "_to_rgb", counted)
    tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL).close()
    assert 1 <= most <= 6


# ---- refused ----------------------------------------------------------------------------------------------------


def sound_only(path):
    with av.open(str(path), "w") as out:
        voice = out.add_stream("aac", rate=8000)
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        noise.sample_rate = 8000
        out.mux(voice.encode(noise))
        out.mux(voice.encode(None))
    return path


def damaged(path):
    """A file whose frame 18 of 50 is noise."""
    data = bytearray(video("mpeg4"))
    path.write_bytes(data)
    with av.open(str(path)) as container:
        packet = bytes(list(container.demux(video=0))[18])
    at, size = data.index(packet), len(packet)
    data[at + 8 : at + size] = np.random.default_rng(0).integers(0, 256, size - 8, dtype=np.uint8).tobytes()
    return write(path, bytes(data))


def truncated(path, container="matroska", kept=0.6):
    data = video(container=container, options={"movflags": "faststart"} if container == "mp4" else {})
    return write(path, data[: int(len(data) * kept)])


BROKEN = {
    "sound.mp4": (sound_only, "holds no video"),
    "empty.mp4": (lambda path: write(path, b""), "is broken or not a video"),
    "noise.mp4": (lambda path: write(path, np.random.default_rng(0).bytes(5000)), "is broken or not a video"),
    "cut.mkv": (truncated, r"is cut off: it has \d+ frames, .* of 2\.00 s"),
    "cut.mp4": (lambda path: truncated(path, "mp4"), r"is cut off|is broken"),
    "noindex.mp4": (lambda path: write(path, video()[:-1500]), "is broken or not a video"),
    "damaged.mp4": (damaged, r"the frame at 0\.720 s is damaged; 18 of 50 frames were read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_or_listed(codec, clip, tmp_path, name):
    make, message = BROKEN[name]
    path, out = make(tmp_path / name), tmp_path / "a.vt"
    with pytest.raises(DataError, match=message) as error:
        tokenize_videos(codec, find_videos([path]), out, **SMALL)
    assert name in error.value.problem and error.value.remedy
    assert not out.exists() and not (tmp_path / "a.vt.partial").exists()
    with tokenize_videos(codec, find_videos([path, clip]), out, **SMALL) as file:  # one of two
        assert file.names == ["clip.mp4"] and list(file.errors) == [name]
        assert file.errors[name] == error.value.problem
        file.verify_digest()
        assert len(list(decode_frames(codec, file[0]))) == 30


def test_all_videos_broken(codec, tmp_path):
    paths = [write(tmp_path / f"{number}.mp4", b"nothing") for number in range(2)]
    with pytest.raises(DataError, match=r"none of 2 videos can be read; 0\.mp4: .* is broken"):
        tokenize_videos(codec, find_videos(paths), tmp_path / "a.vt")
    assert not (tmp_path / "a.vt.partial").exists()


def test_invalid_arguments_are_refused(codec, clip, tmp_path):
    for options, message in (
        ({"start": 9.0}, "lasts 1.200 s"),
        ({"start": 0.41, "end": 0.42}, "has no frame"),
        ({"segment_frames": 12}, "use segments of 13"),
        ({"chunk_frames": 3}, "multiple of 4"),
        ({"fps": 0.0}, "fps"),
        ({"start": -1.0}, "start"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **options)
    with pytest.raises(ConfigError, match="in training"):
        tokenize_videos(make_codec(COSMOS).train(), find_videos([clip]), tmp_path / "a.vt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip.mp4"]


def test_detokenizing_is_refused(codec, clip, tmp_path):
    folder = tmp_path / "clips"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.mp4", "deep/b.mkv"):
        (folder / name).write_bytes(clip.read_bytes())
    with tokenize_videos(codec, find_videos([folder]), tmp_path / "a.vt", **SMALL, end=0.2) as file:
        assert file.names == ["a.mp4", "deep/b.mkv"]
        with pytest.raises(DataError, match="has 2 videos"):
            detokenize_videos(codec, file, tmp_path / "out.mp4")
        other = make_codec(COSMOS, seed=1)
        with pytest.raises(DataError, match="written by another codec"):
            detokenize_videos(other, file, tmp_path / "out")
        paths = detokenize_videos(codec, file, tmp_path / "out")
        assert [str(path.relative_to(tmp_path / "out")) for path in paths] == ["a.mp4", "deep/b.mp4"]
    with tokenize_videos(codec, find_videos([clip]), tmp_path / "b.vt", **SMALL, end=0.2) as file:
        with pytest.raises(DataError, match="is not a name of a video"):
            detokenize_videos(codec, file, tmp_path / "out.txt")
        with pytest.raises(DataError, match="cannot be written"):
            detokenize_videos(codec, file, clip / "out.mp4")
    with pytest.raises(DataError, match="two videos have the name"):
        find_videos([clip, clip])
    with pytest.raises(DataError, match="does not exist"):
        find_videos([tmp_path / "none.mp4"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no videos"):
        find_videos([tmp_path / "empty"])


def test_time_base_of_the_source_is_kept(codec, clip, tmp_path):
    with tokenize_videos(codec, find_videos([clip]), tmp_path / "a.vt", **SMALL) as file:
        assert file[0].time_base == open_video(clip).time_base and file[0].frame_rate == Fraction(25)
