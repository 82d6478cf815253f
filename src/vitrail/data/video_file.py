"""Video files as frames with timestamps, through PyAV. Only the requested frames are decoded.

A file is first read packet by packet without decoding, so timestamps are known and not computed from a frame rate.
Variable frame rates work. Pixels are assumed to be square; interlaced frames are not deinterlaced.

Shapes: F frames of the file, T requested frames, H and W pixels after rotation.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vitrail.errors import ConfigError, DataError
from vitrail.processing.image_loading import MAX_PIXELS

if TYPE_CHECKING:
    from fractions import Fraction

# Containers that store all data themselves. Others (playlists, concat, capture devices) would open files and addresses.
CONTAINER_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,gif,asf"
MAX_BYTES = 2 << 30  # bytes of one clip
MAX_FRAMES = 10_000_000  # two days at 60 a second
_REMUX = "convert it to another container, such as MP4: ffmpeg -fflags +genpts -i OLD -c copy NEW.mp4"
_CORNER = 1 << 16  # 1.0 in the fixed-point numbers of a display matrix

Orientation = tuple[bool, bool, bool]  # transpose, then flip left-right, then flip top-bottom


class VideoClip(NamedTuple):
    """Frames, and their timestamps in seconds from the file's first frame."""

    frames: np.ndarray  # (T, H, W, 3) uint8, RGB, upright
    timestamps: np.ndarray  # (T,) float64


@dataclass(frozen=True, eq=False)
class VideoFile:
    """Index of a video: its timestamps and keyframes. It holds no open file, so it can be sent to other processes."""

    source: Path | bytes
    name: str
    height: int
    width: int
    duration: float
    pts: np.ndarray  # (F,) int64 presentation timestamps, in display order
    keyframe_pts: np.ndarray  # timestamps of keyframes
    time_base: Fraction  # seconds of one unit of `pts`
    orientation: Orientation

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def timestamps(self) -> np.ndarray:
        """Timestamp of each frame in seconds, (F,)."""
        return (self.pts - self.pts[0]) * float(self.time_base)

    def sample_frames(
        self,
        *,
        count: int | None = None,
        fps: float | None = None,
        start: float = 0.0,
        end: float | None = None,
        size: tuple[int, int] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> VideoClip:
        """Decode frames between `start` and `end` seconds: `count` of them, or `fps` a second.

        `count` frames lie at the middle of equal intervals. `fps` frames begin at `start`. Frames repeat if more are
        requested than the file has; their timestamps show it. `size` (height, width) resizes the frames.
        """
        end = self.duration if end is None else end
        if not 0 <= start < end <= self.duration + 1e-6:
            raise ConfigError(
                f"{self.name}: {start} … {end} s is out of range", f"give times within 0 … {self.duration:.3f} s"
            )
        if (count is None) == (fps is None):
            raise ConfigError("a clip needs either count or fps", "give exactly one of the two")
        if count is not None:
            if count < 1:
                raise ConfigError(f"count is {count}", "give at least 1 frame")
            self._check_size(count, size, max_bytes)
            return self.read_frames(
                start + (np.arange(count) + 0.5) * ((end - start) / count), size=size, max_bytes=max_bytes
            )
        if fps is None or not 0 < fps < float("inf"):
            raise ConfigError(f"fps is {fps}", "give a number above 0")
        n = max(1, int(np.ceil((end - start) * fps - 1e-6)))
        self._check_size(n, size, max_bytes)
        return self.read_frames(start + np.arange(n) / fps, size=size, max_bytes=max_bytes)

    def read_frames(
        self, times: Sequence[float] | np.ndarray, *, size: tuple[int, int] | None = None, max_bytes: int = MAX_BYTES
    ) -> VideoClip:
        """Decode the frame displayed at each of the given seconds, in the given order."""
        seconds_wanted = np.asarray(times, dtype=np.float64)
        if (
            seconds_wanted.ndim != 1
            or not len(seconds_wanted)
            or not np.all((seconds_wanted >= 0) & (seconds_wanted <= self.duration + 1e-6))
        ):
            raise ConfigError(
                f"{self.name}: times {times!s:.80} are out of range", f"give a list within 0 … {self.duration:.3f}"
            )
        self._check_size(len(seconds_wanted), size, max_bytes)
        frame_numbers = np.searchsorted(self.timestamps, seconds_wanted + 1e-6, side="right") - 1  # frame numbers, (T,)
        height, width = size or (self.height, self.width)
        frames = np.empty((len(seconds_wanted), height, width, 3), np.uint8)
        seconds = np.empty(len(seconds_wanted))
        for number, tick, pixels in _decode_frames(self, np.unique(frame_numbers), size):
            where = frame_numbers == number
            frames[where], seconds[where] = pixels, float((tick - int(self.pts[0])) * self.time_base)
        return VideoClip(frames, seconds)

    def iterate_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Decode the frames of ascending numbers in one pass, one (H, W, 3) at a time. Numbers may repeat."""
        if not len(numbers):
            return
        if numbers[0] < 0 or numbers[-1] >= len(self) or np.any(np.diff(numbers) < 0):
            raise ConfigError(
                f"{self.name}: frame numbers are out of range", f"give ascending numbers below {len(self)}"
            )
        key_count = int(np.searchsorted(self.keyframe_pts, self.pts[numbers[0]], side="right"))
        for _, _, pixels in _decode_runs(self, [(key_count, [int(number) for number in numbers])], None):
            yield pixels

    def _check_size(self, count: int, size: tuple[int, int] | None, max_bytes: int) -> None:
        height, width = size or (self.height, self.width)
        if height < 1 or width < 1:
            raise ConfigError(f"size is {height}×{width} pixels", "give at least 1 for both sides")
        if count * height * width * 3 > max_bytes:
            raise ConfigError(
                f"{count:,} frames of {height}×{width} pixels exceed the limit of {max_bytes:,} bytes",
                "request fewer frames, give size=(height, width), or raise max_bytes",
            )


def open_video(source: str | os.PathLike[str] | bytes) -> VideoFile:
    """Index a video file, or the bytes of one. Only its first frame is decoded."""
    if not isinstance(source, bytes):
        source = Path(source)
        if not os.path.isfile(source):  # noqa: PTH113 (Path's own raises where a name is too long)
            raise DataError(f"{source!s:.200} is no file", "check the path; download the file if this is an address")
    name = f"video of {len(source):,} bytes" if isinstance(source, bytes) else str(source)
    with _open_stream(source, name) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise DataError(f"{name} holds no frame", "copy, download or export it again")
        codec = stream.codec_context
        if container.format.name == "avi" and codec.name in ("h264", "hevc") and codec.has_b_frames:
            # AVI stores frames in decoding order, without presentation timestamps.
            raise DataError(f"{name}: {codec.name} in AVI has no presentation timestamps", _REMUX)
        orientation = _read_orientation(first, name)
        height, width = first.height, first.width
    with _open_stream(source, name) as (container, stream):
        packets = _read_packets(container, stream, name)
        keys = np.array(sorted(packet.tick for packet in packets if packet.key), dtype=np.int64)
        if container.format.name == "mpeg":  # the timestamps of a program stream are estimated from earlier packets
            keys = keys[:1]
        first_key = keys[0] if len(keys) else -np.inf  # no frame can be decoded before the first keyframe
        displayed = [packet for packet in packets if packet.shown and packet.tick >= first_key]
        if not displayed:
            raise DataError(f"{name} holds no frame", "copy, download or export it again")
        ticks = np.unique(np.array([packet.tick for packet in displayed], dtype=np.int64))
        length = int(ticks[-1] - ticks[0])
        end = int(ticks[-1]) + (max(displayed).length or length // max(1, len(ticks) - 1) or 1)
        _check_complete(container, stream, len(packets), end, name)
        if orientation[0]:
            height, width = width, height
        return VideoFile(
            source=source,
            name=name,
            height=height,
            width=width,
            duration=float((end - int(ticks[0])) * stream.time_base),
            pts=ticks,
            keyframe_pts=keys,
            time_base=stream.time_base,
            orientation=orientation,
        )


@contextmanager
def _open_stream(source: Path | bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """Open the container and its first video stream. Errors of PyAV become `DataError`."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise DataError("videos need PyAV", "pip install 'vitrail[video]'") from error
    try:
        with av.open(
            io.BytesIO(source) if isinstance(source, bytes) else f"file:{source}",
            metadata_errors="replace",
            options={"format_whitelist": CONTAINER_FORMATS, "protocol_whitelist": "file"},
        ) as container:
            covers = av.stream.Disposition.attached_pic  # cover art of an audio file
            streams = [stream for stream in container.streams.video if not stream.disposition & covers]
            if not streams:
                raise DataError(f"{name} holds no video", "give a file with a video stream, not audio alone")
            stream = streams[0]
            context = stream.codec_context
            if context is None:
                raise DataError(f"{name} uses a codec that FFmpeg does not support", "convert it, for example to H.264")
            if context.width * context.height > MAX_PIXELS:
                raise DataError(f"{name} has frames of {context.height:,}×{context.width:,} pixels", "resize it")
            context.options = {"max_pixels": str(MAX_PIXELS)}  # the stream may claim a larger size later
            yield container, stream
    except (FFmpegError, OSError, ValueError, ArithmeticError, MemoryError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} is broken or not a video: {reason}", "copy, download or export it again") from error


class _Packet(NamedTuple):
    tick: int
    length: int
    key: bool
    shown: bool


def _read_packets(container: Any, stream: Any, name: str) -> list[_Packet]:
    """Read timestamp, duration and flags of every packet."""
    packets = []
    for packet in tqdm(container.demux(stream), desc=name, delay=2, leave=False, disable=None, unit="frames"):
        if not packet.size:  # end of the stream
            continue
        if packet.pts is None:
            raise DataError(f"frame {len(packets)} of {name} has no timestamp", _REMUX)
        # Frames removed by an edit list are not displayed, but other frames may depend on them.
        packets.append(_Packet(packet.pts, packet.duration or 0, packet.is_keyframe, not packet.is_discard))
        if len(packets) > MAX_FRAMES:
            raise DataError(f"{name} has more than {MAX_FRAMES:,} frames", "split it first")
    return packets


def _check_complete(container: Any, stream: Any, frames: int, end: int, name: str) -> None:
    """Raise `DataError` if the file ends before its stated duration or frame count."""
    tick = stream.time_base
    start = min(stream.start_time or 0, 0)
    stated = None
    if stream.duration is not None:
        stated = float(stream.duration * tick)
    elif "DURATION" in stream.metadata:  # Matroska: 00:00:05.000000000
        hours, minutes, seconds = stream.metadata["DURATION"].split(":")
        stated = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    elif container.duration is not None and len(container.streams) == 1:
        stated = container.duration / 1_000_000
    actual = float((end - start) * tick)
    slack = 0.1 + 2 * actual / frames
    # an MP4 edit list may remove frames
    has_fewer_frames = stream.frames > frames and "mp4" not in container.format.name
    if has_fewer_frames or (stated is not None and actual < stated - slack):
        claims = f"{stream.frames:,} frames" if has_fewer_frames else f"{stated:.2f} s"
        raise DataError(
            f"{name} is cut off: it has {frames:,} frames, {actual:.2f} s of {claims}", "copy or download it again"
        )


def _decode_frames(
    file: VideoFile, numbers: np.ndarray, size: tuple[int, int] | None
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Decode frames by ascending numbers, as (number, timestamp, pixels (H, W, 3)). One run starts at each keyframe
    needed."""
    runs = groupby(
        numbers.tolist(), lambda number: int(np.searchsorted(file.keyframe_pts, file.pts[number], side="right"))
    )
    yield from _decode_runs(file, ((key_count, list(group)) for key_count, group in runs), size)


def _decode_runs(
    file: VideoFile, runs: Iterable[tuple[int, list[int]]], size: tuple[int, int] | None
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Decode runs of frames, each given as the number of keyframes up to its first frame, and its frame numbers."""
    with _open_stream(file.source, file.name) as (container, stream):
        for key_count, missing in runs:
            if key_count:
                container.seek(int(file.keyframe_pts[key_count - 1]), stream=stream)
                missing = yield from _decode_run(file, container.decode(stream), missing, size)
            if missing:  # a container without exact seeking is decoded from its start
                with _open_stream(file.source, file.name) as (reopened, same_stream):
                    missing = yield from _decode_run(file, reopened.decode(same_stream), missing, size)
            if missing:
                raise DataError(f"{file.name} has no frame at {file.timestamps[missing[0]]:.3f} s", "export it again")


def _decode_run(
    file: VideoFile, frames: Iterator[Any], numbers: list[int], size: tuple[int, int] | None
) -> Generator[tuple[int, int, np.ndarray], None, list[int]]:
    """Yield the newest frame at or before each requested timestamp. Return the numbers that lie before every frame.

    Usually this is the frame of that timestamp. Some codecs (VP8) have packets without a frame: then it is the frame
    still displayed, with its own timestamp.
    """
    current, position = None, 0
    for frame in chain(frames, (None,)):
        if frame is not None and (frame.pts is None or (current is not None and frame.pts < current.pts)):
            raise DataError(f"{file.name}: its timestamps are not increasing", _REMUX)
        while position < len(numbers) and (frame is None or frame.pts > file.pts[numbers[position]]):
            if current is None:
                return numbers[position:]
            yield numbers[position], current.pts, _to_rgb(current, file, size)
            position += 1
        if position == len(numbers):
            break
        current = frame
    return []


def _to_rgb(frame: Any, file: VideoFile, size: tuple[int, int] | None) -> np.ndarray:
    """Convert a frame to RGB (H, W, 3), rotated upright."""
    swap, mirror, flip = file.orientation
    height, width = size or (file.height, file.width)
    if frame.is_corrupt:
        raise DataError(
            f"{file.name}: the frame at {float((frame.pts - int(file.pts[0])) * file.time_base):.3f} s is damaged",
            "copy, download or export it again",
        )
    coded = (width, height) if swap else (height, width)
    if size is None and (frame.height, frame.width) != coded:
        raise DataError(
            f"{file.name} changes its size to {frame.height}×{frame.width} pixels", "give size=(height, width)"
        )
    pixels = frame.to_ndarray(format="rgb24", height=coded[0], width=coded[1])
    if swap:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if flip else 1, :: -1 if mirror else 1]


def _read_orientation(frame: Any, name: str) -> Orientation:
    """Return the transform that turns a frame upright, from its display matrix: x' = a·x + c·y, y' = b·x + d·y."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return False, False, False
    a, b, _, c, d, *_ = (np.frombuffer(bytes(data), np.int32) / _CORNER).round(3).tolist()
    if (b, c) == (0, 0) and a and d:
        return False, a < 0, d < 0
    if (a, d) == (0, 0) and b and c:
        return True, c < 0, b < 0
    raise DataError(f"{name} has a rotation that is not a multiple of 90°: {a, b, c, d}", "export it upright")
