"""Video files as frames and their times, through PyAV; only what was asked for is decoded.

F frames of the file, T frames asked for, H, W upright pixels. A file is first walked packet by packet without decoding,
so its frames' times are known and not computed from a rate: variable frame rates need no care. Pixels are taken as
square, and interlaced frames as they are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vitrail.errors import ConfigError, DataError
from vitrail.processing.images import MAX_PIXELS

if TYPE_CHECKING:
    from fractions import Fraction

# Containers that hold their own bytes: others (playlists, concat, capture devices) would open files and addresses.
FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,gif,asf"
MAX_BYTES = 2 << 30  # of one clip
MAX_FRAMES = 10_000_000  # two days at 60 a second
_REMUX = "put it into another container, say MP4: ffmpeg -fflags +genpts -i OLD -c copy NEW.mp4"
_CORNER = 1 << 16  # one, in the fixed point of a display matrix

Orientation = tuple[bool, bool, bool]  # swap the axes, then flip left-right, then top-bottom


class Clip(NamedTuple):
    """Frames, and the seconds at which the file shows them, counted from its first frame."""

    frames: np.ndarray  # (T, H, W, 3) uint8, RGB, upright
    seconds: np.ndarray  # (T,) float64


@dataclass(frozen=True, eq=False)
class Film:
    """A video's table of contents. It holds no open file, so it goes to other processes as it is."""

    source: Path | bytes
    name: str
    height: int
    width: int
    duration: float  # seconds
    ticks: np.ndarray  # (F,) int64, the file's own times, in the order shown
    keys: np.ndarray  # ticks of frames that need no other
    tick: Fraction  # seconds
    orientation: Orientation

    def __len__(self) -> int:
        return len(self.ticks)

    @property
    def seconds(self) -> np.ndarray:
        """When each frame is shown, (F,)."""
        return (self.ticks - self.ticks[0]) * float(self.tick)

    def sample(
        self,
        *,
        count: int | None = None,
        fps: float | None = None,
        start: float = 0.0,
        end: float | None = None,
        size: tuple[int, int] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Clip:
        """Frames between `start` and `end` seconds: `count` of them, or `fps` a second.

        `count` frames are those shown in the middle of as many equal stretches; `fps` begins at `start`. Where more
        are asked for than the file has, frames repeat, and their seconds say so. `size` (height, width) scales them.
        """
        end = self.duration if end is None else end
        if not 0 <= start < end <= self.duration + 1e-6:
            raise ConfigError(f"{start} … {end} s of {self.name}", f"it has 0 … {self.duration:.3f} s")
        if (count is None) == (fps is None):
            raise ConfigError("a clip is sampled by count or by fps", "give one of the two")
        if count is not None:
            if count < 1:
                raise ConfigError(f"{count} frames", "give at least 1")
            self._fits(count, size, max_bytes)
            return self.at(start + (np.arange(count) + 0.5) * ((end - start) / count), size=size, max_bytes=max_bytes)
        if fps is None or not 0 < fps < float("inf"):
            raise ConfigError(f"{fps} frames a second", "give a number above 0")
        n = max(1, int(np.ceil((end - start) * fps - 1e-6)))
        self._fits(n, size, max_bytes)
        return self.at(start + np.arange(n) / fps, size=size, max_bytes=max_bytes)

    def at(
        self, times: Sequence[float] | np.ndarray, *, size: tuple[int, int] | None = None, max_bytes: int = MAX_BYTES
    ) -> Clip:
        """The frame shown at each of the given seconds, in the order given."""
        wanted = np.asarray(times, dtype=np.float64)
        if wanted.ndim != 1 or not len(wanted) or not np.all((wanted >= 0) & (wanted <= self.duration + 1e-6)):
            raise ConfigError(
                f"{self.name} at the seconds {times!s:.80}", f"give a list within 0 … {self.duration:.3f}"
            )
        self._fits(len(wanted), size, max_bytes)
        shown = np.searchsorted(self.seconds, wanted + 1e-6, side="right") - 1  # numbers of frames, (T,)
        height, width = size or (self.height, self.width)
        frames = np.empty((len(wanted), height, width, 3), np.uint8)
        seconds = np.empty(len(wanted))
        for number, tick, pixels in _decode(self, np.unique(shown), size):
            where = shown == number
            frames[where], seconds[where] = pixels, float((tick - int(self.ticks[0])) * self.tick)
        return Clip(frames, seconds)

    def _fits(self, count: int, size: tuple[int, int] | None, max_bytes: int) -> None:
        height, width = size or (self.height, self.width)
        if height < 1 or width < 1:
            raise ConfigError(f"frames of {height}×{width} pixels", "both sides must be at least 1")
        if count * height * width * 3 > max_bytes:
            raise ConfigError(
                f"{count:,} frames of {height}×{width} pixels are over the limit of {max_bytes:,} bytes",
                "ask for fewer, give size=(height, width), or raise max_bytes",
            )


def open_video(source: str | os.PathLike[str] | bytes) -> Film:
    """Walk through a video file, or the bytes of one, without decoding more than its first frame."""
    if not isinstance(source, bytes):
        source = Path(source)
        if not os.path.isfile(source):  # noqa: PTH113 (Path's own raises where a name is too long)
            raise DataError(f"{source!s:.200} is no file", "check the spelling; download what is an address")
    name = f"video of {len(source):,} bytes" if isinstance(source, bytes) else str(source)
    with _opened(source, name) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise DataError(f"{name} holds no frame", "copy, download or export it again")
        codec = stream.codec_context
        if container.format.name == "avi" and codec.name in ("h264", "hevc") and codec.has_b_frames:
            # AVI numbers frames as they are stored, which is not as they are shown.
            raise DataError(f"{name}: {codec.name} in AVI does not say when frames are shown", _REMUX)
        orientation = _orientation(first, name)
        height, width = first.height, first.width
    with _opened(source, name) as (container, stream):
        packets = _walk(container, stream, name)
        keys = np.array(sorted(packet.tick for packet in packets if packet.key), dtype=np.int64)
        if container.format.name == "mpeg":  # a program stream's times are guessed from the packets before
            keys = keys[:1]
        since = keys[0] if len(keys) else -np.inf  # nothing can be shown before the first key
        shown = [packet for packet in packets if packet.shown and packet.tick >= since]
        if not shown:
            raise DataError(f"{name} holds no frame", "copy, download or export it again")
        ticks = np.unique(np.array([packet.tick for packet in shown], dtype=np.int64))
        length = int(ticks[-1] - ticks[0])
        end = int(ticks[-1]) + (max(shown).length or length // max(1, len(ticks) - 1) or 1)
        _refuse_cut(container, stream, len(packets), end, name)
        if orientation[0]:
            height, width = width, height
        return Film(
            source=source,
            name=name,
            height=height,
            width=width,
            duration=float((end - int(ticks[0])) * stream.time_base),
            ticks=ticks,
            keys=keys,
            tick=stream.time_base,
            orientation=orientation,
        )


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream; what PyAV raises ends here."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise DataError("videos need PyAV", "pip install 'vitrail[video]'") from error
    try:
        with av.open(
            io.BytesIO(source) if isinstance(source, bytes) else f"file:{source}",
            metadata_errors="replace",
            options={"format_whitelist": FORMATS, "protocol_whitelist": "file"},
        ) as container:
            covers = av.stream.Disposition.attached_pic  # the picture on a song
            streams = [stream for stream in container.streams.video if not stream.disposition & covers]
            if not streams:
                raise DataError(f"{name} holds no video", "is it sound alone?")
            stream = streams[0]
            context = stream.codec_context
            if context is None:
                raise DataError(f"{name} is in a codec that FFmpeg does not know", "convert it, say to H.264")
            if context.width * context.height > MAX_PIXELS:
                raise DataError(f"{name} claims frames of {context.height:,}×{context.width:,} pixels", "shrink it")
            context.options = {"max_pixels": str(MAX_PIXELS)}  # the stream itself may say otherwise later
            yield container, stream
    except (FFmpegError, OSError, ValueError, ArithmeticError, MemoryError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} is broken or no video: {reason}", "copy, download or export it again") from error


class _Packet(NamedTuple):
    tick: int
    length: int
    key: bool
    shown: bool


def _walk(container: Any, stream: Any, name: str) -> list[_Packet]:
    packets = []
    for packet in tqdm(container.demux(stream), desc=name, delay=2, leave=False, disable=None, unit="frames"):
        if not packet.size:  # the end
            continue
        if packet.pts is None:
            raise DataError(f"frame {len(packets)} of {name} carries no time", _REMUX)
        # Frames that an edit has cut are not shown, but others may need them.
        packets.append(_Packet(packet.pts, packet.duration or 0, packet.is_keyframe, not packet.is_discard))
        if len(packets) > MAX_FRAMES:
            raise DataError(f"{name} has more than {MAX_FRAMES:,} frames", "cut it first")
    return packets


def _refuse_cut(container: Any, stream: Any, frames: int, end: int, name: str) -> None:
    """A file that ends before it says it does is no whole file."""
    tick = stream.time_base
    start = min(stream.start_time or 0, 0)
    said = None
    if stream.duration is not None:
        said = float(stream.duration * tick)
    elif "DURATION" in stream.metadata:  # Matroska: 00:00:05.000000000
        hours, minutes, seconds = stream.metadata["DURATION"].split(":")
        said = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    elif container.duration is not None and len(container.streams) == 1:
        said = container.duration / 1_000_000
    got = float((end - start) * tick)
    slack = 0.1 + 2 * got / frames
    fewer = stream.frames > frames and "mp4" not in container.format.name  # in MP4 an edit may leave out some
    if fewer or (said is not None and got < said - slack):
        claims = f"{stream.frames:,} frames" if fewer else f"{said:.2f} s"
        raise DataError(f"{name} is cut off: {frames:,} frames, {got:.2f} s of {claims}", "copy or download it again")


def _decode(film: Film, numbers: np.ndarray, size: tuple[int, int] | None) -> Iterator[tuple[int, int, np.ndarray]]:
    """Number, tick and pixels (H, W, 3) of the frames with these rising numbers: one run from each key that any of them
    needs."""
    runs = groupby(numbers.tolist(), lambda number: int(np.searchsorted(film.keys, film.ticks[number], side="right")))
    with _opened(film.source, film.name) as (container, stream):
        for before, group in runs:  # as many keys lie before these frames
            left = list(group)
            if before:
                container.seek(int(film.keys[before - 1]), stream=stream)
                left = yield from _run(film, container.decode(stream), left, size)
            if left:  # a container that cannot jump exactly is read from its beginning
                with _opened(film.source, film.name) as (again, same):
                    left = yield from _run(film, again.decode(same), left, size)
            if left:
                raise DataError(f"{film.name} shows nothing at {film.seconds[left[0]]:.3f} s", "export it again")


def _run(
    film: Film, frames: Iterator[Any], numbers: list[int], size: tuple[int, int] | None
) -> Generator[tuple[int, int, np.ndarray], None, list[int]]:
    """The newest frame at or before each number's tick; returns the numbers that come before any frame.

    Nearly always that is the frame of this tick. Some codecs have packets that show nothing (VP8): there it is the one
    still on the screen, and its own tick is told.
    """
    held, at = None, 0
    for frame in chain(frames, (None,)):
        if frame is not None and (frame.pts is None or (held is not None and frame.pts < held.pts)):
            raise DataError(f"{film.name}: its frames' times are wrong", _REMUX)
        while at < len(numbers) and (frame is None or frame.pts > film.ticks[numbers[at]]):
            if held is None:
                return numbers[at:]
            yield numbers[at], held.pts, _pixels(held, film, size)
            at += 1
        if at == len(numbers):
            break
        held = frame
    return []


def _pixels(frame: Any, film: Film, size: tuple[int, int] | None) -> np.ndarray:
    """RGB (H, W, 3), upright."""
    swap, mirror, flip = film.orientation
    height, width = size or (film.height, film.width)
    if frame.is_corrupt:
        raise DataError(
            f"{film.name}: the frame at {float((frame.pts - int(film.ticks[0])) * film.tick):.3f} s is damaged",
            "copy, download or export it again",
        )
    coded = (width, height) if swap else (height, width)
    if size is None and (frame.height, frame.width) != coded:
        raise DataError(f"{film.name} changes to {frame.height}×{frame.width} pixels on its way", "give size=(h, w)")
    pixels = frame.to_ndarray(format="rgb24", height=coded[0], width=coded[1])
    if swap:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if flip else 1, :: -1 if mirror else 1]


def _orientation(frame: Any, name: str) -> Orientation:
    """What brings a frame upright, from its display matrix: x' = a·x + c·y, y' = b·x + d·y."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return False, False, False
    a, b, _, c, d, *_ = (np.frombuffer(bytes(data), np.int32) / _CORNER).round(3).tolist()
    if (b, c) == (0, 0) and a and d:
        return False, a < 0, d < 0
    if (a, d) == (0, 0) and b and c:
        return True, c < 0, b < 0
    raise DataError(f"{name} is turned by an odd angle: {a, b, c, d}", "turn it upright and export it again")
