"""Records of videos in token files: one that describes the video, then its segments.

A segment is coded independently of those before it. So any part of a video can be read and decoded alone, and an
interrupted writer resumes after the last complete segment. The timestamp of every frame is stored.

Shapes: F frames, t latent frames, h, w codes of a frame, G id groups of a code, d width of a latent.
"""

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.token_file import (
    ImageSize,
    TokenFileHeader,
    TokenFileReader,
    VideoTokenSettings,
    is_size_covered,
    pack_groups,
    unpack_groups,
)
from vitrail.codecs.token_file_writer import RecordWriter
from vitrail.data.video_file import MAX_FRAMES
from vitrail.errors import ConfigError, DataError

LATENT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class VideoRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag="video", frozen=True):
    """Description of a video. That of an unreadable video has only a name and an error.

    num_frames     frames, without those that repeat the last one to complete a latent frame
    time_base      seconds of a unit of time: numerator and denominator
    pts_steps      zlib of int64: units of time that each frame is displayed
    grid           codes of a frame: rows and columns
    image_size     height and width of decoded frames
    source_size    height and width of the frames of the source, upright
    orientation    how the source's frames were turned upright: transposed, then flipped left-right and top-bottom
    source_digest  SHA-256 of the source
    """

    name: str
    error: str | None = None
    num_frames: int = 0
    time_base: tuple[int, int] = (0, 1)
    pts_steps: bytes = b""
    grid: ImageSize = (0, 0)
    image_size: ImageSize = (0, 0)
    source_size: ImageSize = (0, 0)
    orientation: tuple[bool, bool, bool] = (False, False, False)
    source_digest: bytes = b""


class SegmentRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag="segment", frozen=True):
    """Tokens of a segment: packed ids, or the bytes of latents."""

    name: str
    number: int
    data: bytes


class VideoTokens(NamedTuple):
    """Tokens of some frames of a video.

    `frames` and `latent_frames` are counted from the start of the video. Latent frames may cover more than `frames`.
    """

    tokens: Tensor  # int64 ids (t, h, w) or (t, h, w, G), or latents (t, h, w, d)
    frames: range
    latent_frames: range
    timestamps: np.ndarray  # seconds, one for each of `frames`


# ---- frame arithmetic -------------------------------------------------------------------------------------------


def count_segments(num_frames: int, settings: VideoTokenSettings) -> int:
    return -(-num_frames // settings.segment_frames)


def count_segment_frames(num_frames: int, number: int, settings: VideoTokenSettings) -> int:
    """Count the frames of a segment; the last may be shorter."""
    return min(settings.segment_frames, num_frames - number * settings.segment_frames)


def pad_frame_count(num_frames: int, settings: VideoTokenSettings) -> int:
    """Count the frames of a segment with the repetitions of the last frame that complete it."""
    return 1 + -(-(num_frames - 1) // settings.frame_multiple) * settings.frame_multiple


def count_latent_frames(num_frames: int, settings: VideoTokenSettings) -> int:
    """Count the latent frames of a segment."""
    return 1 + (pad_frame_count(num_frames, settings) - 1) // settings.temporal_factor


# ---- reading ----------------------------------------------------------------------------------------------------


class VideoTokenFile(TokenFileReader, Sequence["TokenizedVideo"]):
    """Read-only sequence of the videos of a token file, by index or name."""

    media = "videos"

    @property
    def settings(self) -> VideoTokenSettings:
        assert self.header.video is not None  # the reader has checked this
        return self.header.video

    def __len__(self) -> int:
        return len(self._index.names)

    def __getitem__(self, key: int | str) -> "TokenizedVideo":  # type: ignore[override]
        if isinstance(key, str):
            if key not in self._index_by_name:
                raise DataError(f"{self.path} has no video {key!r}", "choose one of `names`")
            key = self._index_by_name[key]
        if not -len(self) <= key < len(self):
            raise IndexError(key)
        return TokenizedVideo(self, range(len(self))[key])

    def _is_index_valid(self) -> bool:
        first = [*self._index.first_records, len(self._offsets)]
        rising = all(a < b for a, b in pairwise(first))
        return len(first) == len(self) + 1 and first[0] == 0 and rising

    def _read_video(self, number: int) -> tuple[VideoRecord, np.ndarray]:
        """Read the description of a video, and the display time of each frame."""
        first, name = self._index.first_records[number], self._index.names[number]
        culprit = f"record {first} ({name!r})"
        data = self._read_record_data(first, culprit)
        try:
            record = msgspec.msgpack.decode(data, type=VideoRecord)
            steps = unpack_steps(record)
        except (msgspec.DecodeError, ValueError, zlib.error):
            raise self._corruption_error(culprit) from None
        ends = [*self._index.first_records[1:], len(self._offsets)]
        num_segments = ends[number] - first - 1
        fits = is_size_covered(record.image_size, record.grid, self.header.factor) and min(record.time_base) > 0
        if record.name != name or not fits or num_segments != count_segments(record.num_frames, self.settings):
            raise self._corruption_error(culprit)
        return record, steps

    def _read_segment(self, video: VideoRecord, first_record: int, number: int) -> Tensor:
        culprit = f"record {first_record + 1 + number} ({video.name!r}, segment {number})"
        data = self._read_record_data(first_record + 1 + number, culprit)
        frames = count_latent_frames(count_segment_frames(video.num_frames, number, self.settings), self.settings)
        try:
            record = msgspec.msgpack.decode(data, type=SegmentRecord)
            tokens = unpack_tokens(record.data, (frames, *video.grid), self.header)
        except (msgspec.DecodeError, ValueError, RuntimeError, DataError):
            raise self._corruption_error(culprit) from None
        if (record.name, record.number) != (video.name, number) or tokens is None:
            raise self._corruption_error(culprit)
        return tokens


class TokenizedVideo:
    """A video of a token file. Tokens are read when `read` or `read_segment` is called."""

    def __init__(self, file: VideoTokenFile, number: int):
        self.file, self._first_record = file, file._index.first_records[number]
        self.record, self._steps = file._read_video(number)
        self.name, self.num_frames, self.grid = self.record.name, self.record.num_frames, self.record.grid
        self.image_size, self.source_size = self.record.image_size, self.record.source_size

    def __len__(self) -> int:
        return self.num_frames

    @property
    def time_base(self) -> Fraction:
        """Seconds of a unit of `pts`."""
        return Fraction(*self.record.time_base)

    @cached_property
    def pts(self) -> np.ndarray:
        """Presentation timestamp of each frame and the end of the last one, int64 (F + 1,), from 0."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._steps)])

    @property
    def timestamps(self) -> np.ndarray:
        """Timestamp of each frame in seconds from the first frame, (F,)."""
        return self.pts[:-1] * float(self.time_base)

    @property
    def duration(self) -> float:
        return float(int(self.pts[-1]) * self.time_base)

    @property
    def frame_rate(self) -> Fraction:
        """Average frames a second."""
        return Fraction(self.num_frames) / (int(self.pts[-1]) * self.time_base)

    @property
    def has_constant_rate(self) -> bool:
        """Whether all frames but the last are displayed for the same time, to a unit of time."""
        return self.num_frames < 3 or int(np.ptp(self._steps[:-1])) <= 1

    @property
    def num_segments(self) -> int:
        return count_segments(self.num_frames, self.file.settings)

    @property
    def num_latent_frames(self) -> int:
        last = count_segment_frames(self.num_frames, self.num_segments - 1, self.file.settings)
        return (self.num_segments - 1) * self._full + count_latent_frames(last, self.file.settings)

    @property
    def _full(self) -> int:
        """Latent frames of a whole segment."""
        return count_latent_frames(self.file.settings.segment_frames, self.file.settings)

    def find_frames(self, start: float = 0.0, end: float | None = None) -> range:
        """Find the frames whose timestamps are at least `start` and below `end`, in seconds from the first frame."""
        if not 0 <= start < (self.duration if end is None else end):
            raise ConfigError(
                f"{self.name}: {start} … {end} s is out of range", f"give times within 0 … {self.duration:.3f} s"
            )
        first, stop = find_interval(self.timestamps, start, end)
        if first == stop:
            raise ConfigError(
                f"{self.name} has no frame in {start} … {end} s", f"give longer times within 0 … {self.duration:.3f} s"
            )
        return range(first, stop)

    def read_segment(self, number: int) -> Tensor:
        """Read the tokens of a segment."""
        if not 0 <= number < self.num_segments:
            raise ConfigError(f"{self.name} has no segment {number}", f"give 0 … {self.num_segments - 1}")
        return self.file._read_segment(self.record, self._first_record, number)

    def read(self, start: float = 0.0, end: float | None = None) -> VideoTokens:
        """Read the tokens of the latent frames that cover the frames from `start` until before `end`, in seconds."""
        frames = self.find_frames(start, end)
        first, stop = self._find_latent_frame(frames[0]), self._find_latent_frame(frames[-1]) + 1
        if frames.stop == self.num_frames:  # CogVideoX may have a last latent frame of repeated frames only
            stop = self.num_latent_frames
        segments = range(first // self._full, (stop - 1) // self._full + 1)
        tokens = torch.cat([self.read_segment(number) for number in segments])
        skipped = segments[0] * self._full
        return VideoTokens(
            tokens[first - skipped : stop - skipped],
            frames,
            range(first, stop),
            self.timestamps[frames.start : frames.stop],
        )

    def _find_latent_frame(self, frame: int) -> int:
        segment, within = divmod(frame, self.file.settings.segment_frames)
        return segment * self._full + -(-within // self.file.settings.temporal_factor)


def find_interval(timestamps: np.ndarray, start: float, end: float | None) -> tuple[int, int]:
    """Find the first of sorted timestamps that is at least `start`, and the first that is at least `end`."""
    times = timestamps + 1e-6  # a timestamp is not exact
    return int(np.searchsorted(times, start)), len(times) if end is None else int(np.searchsorted(times, end))


# ---- records as bytes -------------------------------------------------------------------------------------------


def pack_steps(steps: np.ndarray) -> bytes:
    return zlib.compress(steps.astype("<i8").tobytes())


def unpack_steps(record: VideoRecord) -> np.ndarray:
    """Unpack the display time of each frame; raises `ValueError` if they do not match the number of frames."""
    if not 0 < record.num_frames <= MAX_FRAMES:
        raise ValueError("the number of frames is out of range")
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(record.pts_steps, 8 * record.num_frames + 1)
    steps = np.frombuffer(data, "<i8")
    if len(steps) != record.num_frames or not unpacker.eof or steps.min() < 1 or steps.max() > 2**62 // len(steps):
        raise ValueError("the timestamps do not match the number of frames")
    return steps


def pack_tokens(tokens: Tensor, header: TokenFileHeader) -> bytes:
    """Pack ids, or copy the bytes of latents."""
    assert header.video is not None
    if header.video.latent_dtype is None:
        return pack_groups(tokens, header)
    return tokens.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def unpack_tokens(data: bytes, shape: tuple[int, int, int], header: TokenFileHeader) -> Tensor | None:
    """Invert `pack_tokens`; None if the header does not allow them."""
    assert header.video is not None
    if header.video.latent_dtype is None:
        return unpack_groups(data, shape, header)
    dtype, full_shape = LATENT_DTYPES[header.video.latent_dtype], (*shape, header.video.latent_width)
    if len(data) != math.prod(full_shape) * dtype.itemsize:
        return None
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(full_shape)


# ---- writing ----------------------------------------------------------------------------------------------------


class VideoTokenFileWriter(RecordWriter[VideoRecord | SegmentRecord]):
    """Write videos in order: `start_video`, then `add_segment` for each segment. Then call `finish`.

    A writer that is left early keeps complete segments. `start_video` of the next writer returns how many it has.
    """

    media, record_type = "videos", VideoRecord | SegmentRecord

    def __init__(self, path: str | Path, header: TokenFileHeader):
        if header.video is None:
            raise ConfigError("the header has no settings of videos", "give `video`, or use `TokenFileWriter`")
        self.settings = header.video
        self._video: VideoRecord | None = None  # the video whose segments are being written
        self._video_start, self._num_segments = 0, 0
        super().__init__(path, header)

    @property
    def names(self) -> list[str]:
        """Names of the videos with tokens, the one being written included."""
        return self._index.names

    @property
    def errors(self) -> list[tuple[str, str]]:
        return self._index.errors

    def start_video(self, record: VideoRecord) -> int:
        """Start a video, or continue it. Return the number of segments that the file has already."""
        unpack_steps(record)
        if self._video is not None:
            if record != self._video:
                raise self._order_error(record.name)
            return self._num_segments
        if not is_size_covered(record.image_size, record.grid, self.header.factor):
            raise DataError(
                f"{record.name}: frames of {record.image_size} do not match {record.grid} codes", "check the sizes"
            )
        self._check_name(record.name)
        self._write(record)
        return 0

    def add_segment(self, tokens: Tensor) -> None:
        """Add the next segment: ids int64 (t, h, w) or (t, h, w, G), or latents (t, h, w, d)."""
        if self._video is None:
            raise ConfigError("no video is started, or it has all its segments", "call start_video first")
        frames = count_segment_frames(self._video.num_frames, self._num_segments, self.settings)
        shape: tuple[int, ...] = (count_latent_frames(frames, self.settings), *self._video.grid)
        dtype = torch.int64
        if self.settings.latent_dtype is not None:
            dtype, shape = LATENT_DTYPES[self.settings.latent_dtype], (*shape, self.settings.latent_width)
        elif self.header.groups:
            shape = (*shape, len(self.header.sizes))
        tokens = tokens.detach().cpu()
        if tokens.dtype != dtype or tokens.shape != shape:
            raise DataError(
                f"{self._video.name}: tokens are {tokens.dtype} {tuple(tokens.shape)}",
                f"give {dtype} tokens of shape {shape}",
            )
        if dtype == torch.int64:
            self.check_ids(self._video.name, tokens)
        self._write(SegmentRecord(self._video.name, self._num_segments, pack_tokens(tokens, self.header)))

    def skip(self, name: str, reason: str) -> None:
        """Record a video that cannot be read. If it is being written, its segments are removed."""
        if self._video is not None:
            if self._video.name != name:
                raise self._order_error(name)
            with self._writing():
                self.file.flush()
                self._truncate(self._video_start)
            del self._offsets[self._index.first_records.pop() :]
            self._known.discard(self._index.names.pop())
            self._video = None
        self._check_name(name)
        self._write(VideoRecord(name, reason))

    def finish(self) -> Path:
        if self._video is not None:
            raise ConfigError(f"{self._video.name} has {self._num_segments} segments only", "add all its segments")
        return super().finish()

    def _order_error(self, name: str) -> DataError:
        assert self._video is not None
        now = "which is another video now" if name == self._video.name else f"but {name!r} comes next"
        return DataError(
            f"{self.partial_path} was interrupted in {self._video.name!r}, {now}",
            "give the same videos as before, or remove the file",
        )

    def _remember(self, start: int, body: VideoRecord | SegmentRecord) -> None:
        if isinstance(body, SegmentRecord):
            assert self._video is not None
            self._offsets.append(start)
            self._num_segments += 1
            if self._num_segments == count_segments(self._video.num_frames, self.settings):
                self.completed_names.append(self._video.name)
                self._video = None
            return
        self._known.add(body.name)
        if body.error is not None:
            self.completed_names.append(body.name)
            self._index.errors.append((body.name, body.error))
            return
        self._index.first_records.append(len(self._offsets))
        self._offsets.append(start)
        self._index.names.append(body.name)
        self._video, self._video_start, self._num_segments = body, start, 0
