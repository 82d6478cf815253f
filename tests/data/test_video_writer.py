"""Written videos: timestamps, durations, sizes, containers, and a full disk."""

import resource
from fractions import Fraction

import numpy as np
import pytest

from vitrail.data.video_file import open_video
from vitrail.data.video_writer import VideoWriter
from vitrail.errors import DataError

av = pytest.importorskip("av")

PTS = [0, 1, 2, 10, 11, 40, 100]


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".MKV"])
@pytest.mark.parametrize("size", [(32, 48), (33, 48), (31, 47), (1, 1)])
def test_frames_timestamps_and_sizes_are_kept(tmp_path, suffix, size):
    path = tmp_path / "deep" / f"a{suffix}"
    with VideoWriter(path, *size, Fraction(1, 50), Fraction(25)) as writer:
        for number, pts in enumerate(PTS):
            writer.add(np.full((*size, 3), 40 * number, np.uint8), pts, ([*PTS, 150][number + 1]) - pts)
        assert not path.exists()
    video = open_video(path)
    assert (len(video), video.height, video.width) == (7, *size)
    assert video.timestamps == pytest.approx(np.array(PTS) / 50) and video.duration == pytest.approx(3.0)
    frames = video.read_frames(video.timestamps).frames
    assert np.abs(frames.mean((1, 2, 3)) - 40 * np.arange(7)).max() < 4


def test_failed_writing_leaves_no_file(tmp_path):
    frame = np.zeros((32, 48, 3), np.uint8)
    with pytest.raises(KeyError), VideoWriter(tmp_path / "a.mp4", 32, 48, Fraction(1, 25), Fraction(25)) as writer:
        writer.add(frame, 0, 1)
        raise KeyError
    random = np.random.default_rng(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with (
            pytest.raises(DataError, match=r"a\.mp4 cannot be written"),
            VideoWriter(tmp_path / "a.mp4", 64, 64, Fraction(1, 25), Fraction(25)) as writer,
        ):
            for number in range(300):
                writer.add(random.integers(0, 256, (64, 64, 3), dtype=np.uint8), number, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(DataError, match=r"end it in \.mp4, \.mov, \.mkv"):
        VideoWriter(tmp_path / "a.gif", 64, 64, Fraction(1, 25), Fraction(25))
    assert not list(tmp_path.iterdir())
