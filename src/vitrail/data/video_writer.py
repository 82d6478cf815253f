"""Writer of H.264 files, frame by frame, with the given timestamps.

Shapes: H, W pixels.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from vitrail.data.episodes.frame_encoding import PLAYABLE_ENCODING, VIDEO_ENCODINGS, require_av
from vitrail.errors import DataError

CONTAINER_FORMATS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}  # suffix → name of the container in FFmpeg
KEYFRAME_INTERVAL = 120


class VideoWriter:
    """Write frames uint8 (H, W, 3) to an MP4, MOV or Matroska file.

    The file appears under its name when the writer is left without an error. Odd sizes are kept: they are written
    without chroma subsampling. Matroska rounds timestamps to milliseconds.
    """

    def __init__(self, path: Path, height: int, width: int, time_base: Fraction, frame_rate: Fraction):
        av = require_av()
        check_video_suffix(path)
        self.path, self.partial_path = path, path.with_name(f"{path.name}.partial")
        encoding = PLAYABLE_ENCODING if height % 2 == width % 2 == 0 else VIDEO_ENCODINGS["small"]
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._container = av.open(str(self.partial_path), "w", format=CONTAINER_FORMATS[path.suffix.lower()])
            rate = frame_rate.limit_denominator(1001)
            self._stream = self._container.add_stream(encoding.codec, rate=rate, options=encoding.options)
            self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, encoding.pixel_format
            context = self._stream.codec_context
            context.time_base, context.gop_size, context.max_b_frames = time_base, KEYFRAME_INTERVAL, 0
        self._time_base = time_base
        self._durations: deque[int] = deque()  # of frames that the encoder has not returned yet

    def add(self, pixels: np.ndarray, pts: int, duration: int) -> None:
        """Add a frame that is displayed at `pts` for `duration`, in units of the time base."""
        av = require_av()
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        frame.pts, frame.duration, frame.time_base = pts, duration, self._time_base
        self._durations.append(duration)
        self._encode(frame)

    def _encode(self, frame: Any) -> None:
        """Encode a frame, or None for the end, and write the packets that are complete."""
        with self._writing():
            for packet in self._stream.encode(frame):
                packet.duration = self._durations.popleft()  # without B-frames, packets have the order of frames
                self._container.mux(packet)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (require_av().error.FFmpegError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self.path} cannot be written: {reason}", "give another path, or free disk space"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(require_av().error.FFmpegError, OSError, ValueError):
                self._container.close()
            self.partial_path.unlink(missing_ok=True)
            return
        try:
            self._encode(None)
            with self._writing():
                self._container.close()
                self.partial_path.replace(self.path)
        except DataError:
            self.partial_path.unlink(missing_ok=True)
            raise


def check_video_suffix(path: Path) -> None:
    if path.suffix.lower() not in CONTAINER_FORMATS:
        raise DataError(f"{path} is not a name of a video", f"end it in {', '.join(CONTAINER_FORMATS)}")
