"""Token files of videos: any frame count, seeking, resuming after any cut, and detection of corruption."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs.token_file import TokenFile, TokenFileHeader, VideoTokenSettings, read_token_file_header
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.codecs.video_token_file import (
    LATENT_DTYPES,
    VideoRecord,
    VideoTokenFile,
    VideoTokenFileWriter,
    pack_steps,
)
from vitrail.errors import ConfigError, DataError


def make_header(k=4, segments=3, sizes=(64_000,), groups=False, dtype=None, multiple=1, **more) -> TokenFileHeader:
    video = VideoTokenSettings(
        temporal_factor=k,
        frame_multiple=k * multiple,
        segment_frames=1 + k * multiple * (segments - 1),
        chunk_frames=k * multiple,
        latent_dtype=dtype,
        latent_width=0 if dtype is None else 3,
    )
    fields = {"model": "a" * 64, "name": "codec", "factor": 8, "fit": {"how": "pad", "size": None}}
    return TokenFileHeader(**fields | {"sizes": () if dtype else sizes, "groups": groups, "video": video} | more)


def make_record(name: str, num_frames: int, grid=(2, 3), seed=0) -> VideoRecord:
    steps = np.random.default_rng(seed).integers(1, 50, num_frames)
    return VideoRecord(
        name=name,
        num_frames=num_frames,
        time_base=(1, 100),
        pts_steps=pack_steps(steps),
        grid=grid,
        image_size=(grid[0] * 8 - 1, grid[1] * 8),
        source_size=(50, 70),
        orientation=(True, False, True),
        source_digest=bytes(32),
    )


def make_segments(record: VideoRecord, header: TokenFileHeader, seed=0) -> list[torch.Tensor]:
    """Random tokens of each segment. The number of latent frames is computed one frame at a time."""
    video, random = header.video, torch.Generator().manual_seed(seed)
    assert video is not None
    segments, frames = [], list(range(record.num_frames))
    while frames:
        own, frames = frames[: video.segment_frames], frames[video.segment_frames :]
        while (len(own) - 1) % video.frame_multiple:
            own.append(own[-1])
        latents = len({math.ceil(number / video.temporal_factor) for number in range(len(own))})
        shape = (latents, *record.grid)
        if video.latent_dtype:
            tokens = torch.randn(*shape, 3, generator=random).to(LATENT_DTYPES[video.latent_dtype])
        else:
            parts = [torch.randint(0, size, shape, generator=random) for size in header.sizes]
            parts[0].view(-1)[0] = header.sizes[0] - 1  # the largest is always there
            tokens = torch.stack(parts, -1) if header.groups else parts[0]
        segments.append(tokens)
    return segments


def write_videos(path, header, records, faults=()) -> bytes:
    with VideoTokenFileWriter(path, header) as writer:
        for name, reason in faults:
            if name not in writer.completed_names:
                writer.skip(name, reason)
        for record in records:
            if record.name in writer.completed_names:
                continue
            for tokens in make_segments(record, header)[writer.start_video(record) :]:
                writer.add_segment(tokens)
                writer.flush()
        writer.finish()
    return path.read_bytes()


# ---- whole ------------------------------------------------------------------------------------------------------


@given(
    k=st.integers(1, 8),
    segments=st.integers(1, 4),
    counts=st.lists(st.integers(1, 40), max_size=3),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=3),
    dtype=st.sampled_from([None, None, *LATENT_DTYPES]),
    multiple=st.integers(1, 3),
)
@settings(max_examples=60)
def test_tokens_of_any_frame_count_round_trip(tmp_path_factory, k, segments, counts, grid, sizes, dtype, multiple):
    path = tmp_path_factory.mktemp("round") / "a.vt"
    header = make_header(k, segments, tuple(sizes), len(sizes) > 1 and dtype is None, dtype, multiple)
    records = [make_record(f"{number} é.mp4", count, grid, number) for number, count in enumerate(counts)]
    write_videos(path, header, records, faults=[("bad.mp4", "is broken")])
    with VideoTokenFile(path, codec_identity=header.model) as file:
        file.verify_digest()
        assert (file.header, file.names, file.errors) == (
            header,
            [record.name for record in records],
            {"bad.mp4": "is broken"},
        )
        for record, video in zip(records, file, strict=True):
            assert (len(video), video.record) == (record.num_frames, record)
            expected = torch.cat(make_segments(record, header))
            whole = video.read()
            assert whole.tokens.dtype == expected.dtype and torch.equal(whole.tokens, expected)
            assert whole.latent_frames == range(len(expected)) == range(video.num_latent_frames)
            steps = np.random.default_rng(int(record.name[0])).integers(1, 50, record.num_frames)
            assert np.allclose(video.timestamps, np.r_[0, np.cumsum(steps)[:-1]] / 100)
            assert video.duration == pytest.approx(steps.sum() / 100)


@given(
    k=st.integers(1, 5),
    segments=st.integers(1, 4),
    count=st.integers(1, 40),
    multiple=st.integers(1, 2),
    data=st.data(),
)
@settings(max_examples=60)
def test_seeking_equals_slicing(tmp_path_factory, k, segments, count, multiple, data):
    path, header = tmp_path_factory.mktemp("seek") / "a.vt", make_header(k, segments, multiple=multiple)
    record = make_record("a.mp4", count)
    write_videos(path, header, [record])
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    with VideoTokenFile(path) as file:
        video = file["a.mp4"]
        # Each frame, with the number of its latent frame: a list that needs no arithmetic of segments.
        latent_frames, number = [], -1
        for frame in range(count):
            within = frame % header.video.segment_frames
            number += within == 0 or (within - 1) % k == 0
            latent_frames.append(number)
        ends = np.append(video.timestamps, video.duration)
        part, whole = video.read(ends[first], ends[last + 1]), video.read()
        assert part.frames == range(first, last + 1)
        stop = len(whole.tokens) if last == count - 1 else latent_frames[last] + 1
        assert part.latent_frames == range(latent_frames[first], stop)
        assert torch.equal(part.tokens, whole.tokens[part.latent_frames.start : part.latent_frames.stop])
        assert np.array_equal(part.timestamps, whole.timestamps[first : last + 1])


def test_file_size_is_close_to_the_packed_bits(tmp_path):
    header = make_header(8, 16)
    written = write_videos(tmp_path / "a.vt", header, [make_record("a.mp4", 121 * 20, (10, 10))])
    packed = 20 * 16 * 100 * 16 / 8
    assert packed < len(written) < packed * 1.1 + 1000


# ---- resumed ----------------------------------------------------------------------------------------------------


@given(cut=st.floats(0, 1))
@settings(max_examples=60)
def test_resuming_after_any_cut_writes_the_same_bytes(tmp_path_factory, cut):
    folder, header = tmp_path_factory.mktemp("resume"), make_header()
    records = [make_record(f"{count}.mp4", count) for count in (21, 1, 30)]
    whole = write_videos(folder / "whole.vt", header, records, faults=[("bad.mp4", "is broken")])
    (folder / "a.vt.partial").write_bytes(whole[: int(cut * len(whole))])
    assert write_videos(folder / "a.vt", header, records, faults=[("bad.mp4", "is broken")]) == whole
    assert not (folder / "a.vt.partial").exists()


def test_another_video_does_not_resume(tmp_path):
    header, record = make_header(), make_record("a.mp4", 30)
    with VideoTokenFileWriter(tmp_path / "a.vt", header) as writer:
        writer.start_video(record)
        writer.add_segment(make_segments(record, header)[0])
    with VideoTokenFileWriter(tmp_path / "a.vt", header) as writer:
        with pytest.raises(DataError, match=r"interrupted in 'a\.mp4', which is another video now"):
            writer.start_video(make_record("a.mp4", 30, seed=1))
        for change in (writer.start_video, lambda other: writer.skip(other.name, "is broken")):
            with pytest.raises(DataError, match=r"interrupted in 'a\.mp4', but 'b\.mp4' comes next"):
                change(make_record("b.mp4", 30))
        assert writer.start_video(record) == 1
    with pytest.raises(DataError, match="was started with another segment_frames: 9, not 13"):
        VideoTokenFileWriter(tmp_path / "a.vt", make_header(segments=4))


def test_skipped_video_leaves_no_segments(tmp_path):
    header, records = make_header(), [make_record(f"{count}.mp4", count) for count in (5, 30)]
    with VideoTokenFileWriter(tmp_path / "a.vt", header) as writer:
        for record in records:
            writer.start_video(record)
            writer.add_segment(make_segments(record, header)[0])
        writer.skip("30.mp4", "is damaged")
        writer.finish()
    with VideoTokenFileWriter(tmp_path / "b.vt", header) as writer:
        writer.start_video(records[0])
        writer.add_segment(make_segments(records[0], header)[0])
        writer.skip("30.mp4", "is damaged")
        writer.finish()
    assert (tmp_path / "a.vt").read_bytes() == (tmp_path / "b.vt").read_bytes()
    with VideoTokenFile(tmp_path / "a.vt") as file:
        file.verify_digest()
        assert (file.names, file.errors) == (["5.mp4"], {"30.mp4": "is damaged"})


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_changed_byte_is_detected(tmp_path, dtype):
    header, path = make_header(2, 2, dtype=dtype), tmp_path / "changed.vt"
    record = make_record("a.mp4", 5, (1, 2))
    whole = write_videos(tmp_path / "whole.vt", header, [record], faults=[("bad.mp4", "is empty")])
    tokens = torch.cat(make_segments(record, header))
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"changed\.vt"), VideoTokenFile(path) as file:
            # A part that is not changed reads as before; the digest covers all.
            video = file["a.mp4"]
            if torch.equal(video.read().tokens, tokens):
                file.verify_digest()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"changed\.vt"):
            VideoTokenFile(path)


def test_files_of_images_and_videos_are_told_apart(tmp_path):
    header = make_header()
    write_videos(tmp_path / "a.vt", header, [make_record("a.mp4", 5)])
    with pytest.raises(DataError, match="does not hold images"):
        TokenFile(tmp_path / "a.vt")
    assert read_token_file_header(tmp_path / "a.vt") == header
    with TokenFileWriter(tmp_path / "b.vtok", header.replace(video=None)) as writer:
        writer.add("a.png", torch.zeros(2, 3, dtype=torch.int64), (16, 24))
        writer.finish()
    with pytest.raises(DataError, match="does not hold videos"):
        VideoTokenFile(tmp_path / "b.vtok")
    with pytest.raises(ConfigError, match="no settings of videos"):
        VideoTokenFileWriter(tmp_path / "c.vt", header.replace(video=None))


def test_invalid_segments_are_refused(tmp_path):
    header, record = make_header(), make_record("a.mp4", 10)
    with VideoTokenFileWriter(tmp_path / "a.vt", header) as writer:
        with pytest.raises(ConfigError, match="no video is started"):
            writer.add_segment(torch.zeros(3, 2, 3, dtype=torch.int64))
        with pytest.raises(DataError, match="do not match"):
            writer.start_video(make_record("b.mp4", 10, (0, 3)))
        writer.start_video(record)
        for wrong in (
            torch.zeros(2, 2, 3, dtype=torch.int64),
            torch.zeros(3, 2, 3),
            torch.full((3, 2, 3), 64_000),
            torch.full((3, 2, 3), -1),
        ):
            with pytest.raises(DataError, match=r"a\.mp4: (tokens|ids) are"):
                writer.add_segment(wrong)
        with pytest.raises(ConfigError, match="has 0 segments only"):
            writer.finish()
        for tokens in make_segments(record, header):
            writer.add_segment(tokens)
        with pytest.raises(DataError, match="two videos have the name"):
            writer.start_video(record)
        writer.finish()
    with VideoTokenFile(tmp_path / "a.vt") as file:
        video = file[-1]
        for start, end in ((-1.0, None), (1.0, 1.0), (99.0, None), (0.001, 0.002)):
            with pytest.raises(ConfigError, match=r"a\.mp4"):
                video.read(start, end)
        with pytest.raises(ConfigError, match="no segment 2"):
            video.read_segment(2)
        with pytest.raises(DataError, match=r"no video 'b\.mp4'"):
            file["b.mp4"]
        with pytest.raises(IndexError):
            file[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_frames": 12}, "use segments of 13 frames"),
        ({"chunk_frames": 6}, "multiple of 4"),
        ({"frame_multiple": 6}, "use a multiple"),
        ({"latent_dtype": "float16"}, "give both or none"),
        ({"start": 3.0, "end": 2.0}, "after the start"),
        ({"start": float("nan")}, "start"),
        ({"end": float("inf")}, "finite"),
        ({"fps": 1e9}, r"give 0\.001 … 1,000"),
        ({"fps": float("nan")}, "fps"),
    ],
)
def test_invalid_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        VideoTokenSettings(
            **{"temporal_factor": 4, "frame_multiple": 4, "segment_frames": 9, "chunk_frames": 4} | fields
        )
