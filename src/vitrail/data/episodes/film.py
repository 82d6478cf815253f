"""Frames ⇄ the bytes of a short video, exactly or nearly; and any array ⇄ compressed bytes.

T frames, H, W pixels
"""

import gzip
import io
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.episodes.episode import Video
from vitrail.errors import DataError

GOP = 16  # frames from one that needs no other to the next
HEAD = 1 << 14  # bytes that the head of an .npy file stays below


class _How(NamedTuple):
    codec: str
    pixels: str
    options: dict[str, str]


# H.264 either way: RGB with nothing rounded off, or colours as video has them, unsampled so that any size will do.
HOW: dict[Video, _How] = {
    "lossless": _How("libx264rgb", "rgb24", {"qp": "0", "preset": "veryfast"}),
    "small": _How("libx264", "yuv444p", {"crf": "18", "preset": "medium"}),
}
SHOWN = _How("libx264", "yuv420p", {"crf": "18"})  # what every player can show, of an even height and width


def encode_frames(frames: np.ndarray, rate: float, how: _How, form: str = "matroska") -> bytes:
    """uint8 (T, H, W, 3) → a video file; the same frames give the same bytes."""
    av = need_av()
    file, fps = io.BytesIO(), Fraction(rate).limit_denominator(1000)
    with av.open(file, "w", format=form, options={"fflags": "+bitexact"}) as out:
        stream = out.add_stream(how.codec, rate=fps, options=how.options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], how.pixels
        context = stream.codec_context
        context.gop_size, context.max_b_frames, context.thread_count = GOP, 0, 1
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = number, 1 / fps
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def decode_frames(data: bytes, start: int, stop: int, side: int) -> np.ndarray:
    """Frames start … stop of what `encode_frames` wrote, whose longer side has `side` pixels. Only packets from the key
    before them on are decoded."""
    av = need_av()
    found: list[np.ndarray] = []
    try:
        with av.open(io.BytesIO(data), format="matroska") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the callers are many already
            packets = [packet for packet in container.demux(stream) if packet.size]
            key = max((i for i, packet in enumerate(packets[: start + 1]) if packet.is_keyframe), default=0)
            for number, frame in enumerate(_decoded(stream, packets[key:stop]), key):
                if max(frame.height, frame.width) != side:
                    raise DataError(f"a video has {frame.height} × {frame.width} pixels where a side has {side}")
                if number >= start:
                    found.append(frame.to_ndarray(format="rgb24"))
        if len(found) == stop - start:
            return np.stack(found)
    except (av.error.FFmpegError, IndexError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(f"a video is broken: {' '.join(str(error).split())[:200]}") from error
    raise DataError(f"a video is broken: {len(found)} of the frames {start} … {stop} can be had")


def _decoded(stream: Any, packets: list[Any]) -> Any:
    for packet in (*packets, None):  # None: what is held back
        yield from stream.codec_context.decode(packet)


def encode_array(array: np.ndarray) -> bytes:
    """Any array → .npy.gz"""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return gzip.compress(file.getvalue(), 6, mtime=0)


def decode_array(data: bytes, limit: int | None = None) -> np.ndarray:
    """An array from .npy; or with a limit, from .npy.gz, of which no more bytes than that are unpacked."""
    try:
        if limit is not None:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(HEAD + limit + 1)
            if len(data) > HEAD + limit:
                raise ValueError(f"it unpacks to more than {limit:,} bytes")
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        if not array.ndim:
            raise ValueError("it is a single number")
        return array
    except Exception as error:  # whatever numpy's reader says of a damaged header
        raise DataError(f"an array is broken: {' '.join(str(error).split())[:200]}") from error


def need_av() -> Any:
    try:
        import av
        import av.error
    except ImportError:
        raise DataError("the frames of episodes need PyAV", "pip install 'vitrail[video]'") from None
    return av
