"""Encodes frames as short videos, losslessly or nearly so, and arrays as compressed bytes; and decodes them.

Shapes: T frames, H and W pixels.
"""

import gzip
import io
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.episodes.episode import VideoQuality
from vitrail.errors import DataError

KEYFRAME_INTERVAL = 16  # frames from one keyframe to the next
NPY_HEADER_BYTES = 1 << 14  # upper bound of the header of an .npy file


class VideoEncoding(NamedTuple):
    """Codec, pixel format and options of a video encoder."""

    codec: str
    pixel_format: str
    options: dict[str, str]


# H.264 in both cases: lossless RGB, or YUV without chroma subsampling, which permits odd sizes.
VIDEO_ENCODINGS: dict[VideoQuality, VideoEncoding] = {
    "lossless": VideoEncoding("libx264rgb", "rgb24", {"qp": "0", "preset": "veryfast"}),
    "small": VideoEncoding("libx264", "yuv444p", {"crf": "18", "preset": "medium"}),
}
# Supported by every player; needs an even height and width.
PLAYABLE_ENCODING = VideoEncoding("libx264", "yuv420p", {"crf": "18"})


def encode_frames(frames: np.ndarray, fps: float, encoding: VideoEncoding, container_format: str = "matroska") -> bytes:
    """Encode uint8 (T, H, W, 3) as a video file. The same frames give the same bytes."""
    av = require_av()
    file, rate = io.BytesIO(), Fraction(fps).limit_denominator(1000)
    with av.open(file, "w", format=container_format, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(encoding.codec, rate=rate, options=encoding.options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], encoding.pixel_format
        context = stream.codec_context
        context.gop_size, context.max_b_frames, context.thread_count = KEYFRAME_INTERVAL, 0, 1
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def decode_frames(data: bytes, start: int, stop: int, image_size: int) -> np.ndarray:
    """Decode frames `start` to `stop` of a file by `encode_frames`, whose longer side has `image_size` pixels.

    Decoding starts at the last keyframe before `start`.
    """
    av = require_av()
    frames: list[np.ndarray] = []
    try:
        with av.open(io.BytesIO(data), format="matroska") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # callers run in parallel already
            packets = [packet for packet in container.demux(stream) if packet.size]
            keyframe = max((i for i, packet in enumerate(packets[: start + 1]) if packet.is_keyframe), default=0)
            for number, frame in enumerate(_decode_packets(stream, packets[keyframe:stop]), keyframe):
                if max(frame.height, frame.width) != image_size:
                    raise DataError(
                        f"a video has {frame.height} × {frame.width} pixels, expected a side of {image_size}"
                    )
                if number >= start:
                    frames.append(frame.to_ndarray(format="rgb24"))
        if len(frames) == stop - start:
            return np.stack(frames)
    except (av.error.FFmpegError, IndexError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(f"a video is broken: {' '.join(str(error).split())[:200]}") from error
    raise DataError(f"a video is broken: only {len(frames)} of frames {start} … {stop} can be decoded")


def _decode_packets(stream: Any, packets: list[Any]) -> Any:
    """Decode packets, and flush the decoder."""
    for packet in (*packets, None):  # None flushes delayed frames
        yield from stream.codec_context.decode(packet)


def encode_array(array: np.ndarray) -> bytes:
    """Encode an array as .npy.gz."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return gzip.compress(file.getvalue(), 6, mtime=0)


def decode_array(data: bytes, max_bytes: int | None = None) -> np.ndarray:
    """Decode an array from .npy, or, if `max_bytes` is given, from .npy.gz of at most that many bytes unpacked."""
    try:
        if max_bytes is not None:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(NPY_HEADER_BYTES + max_bytes + 1)
            if len(data) > NPY_HEADER_BYTES + max_bytes:
                raise ValueError(f"it unpacks to more than {max_bytes:,} bytes")
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        if not array.ndim:
            raise ValueError("it is a single number")
        return array
    except Exception as error:  # numpy raises many types on a damaged header
        raise DataError(f"an array is broken: {' '.join(str(error).split())[:200]}") from error


def require_av() -> Any:
    """Import PyAV, or raise `DataError` with the install command."""
    try:
        import av
        import av.error
    except ImportError:
        raise DataError(
            "frames of episodes need PyAV, which is not installed", "pip install 'vitrail[video]'"
        ) from None
    return av
