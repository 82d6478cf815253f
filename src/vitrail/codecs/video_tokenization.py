"""Tokenize videos to a token file and back, segment by segment, and resume an interrupted run.

Memory is bounded by a segment: frames are read, encoded in chunks and written while a video is decoded.

Shapes: H, W pixels, T frames of a chunk, t latent frames, h, w codes along a side.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.causal_video_codec import CausalVideoCodec
from vitrail.codecs.codec import compute_codec_identity
from vitrail.codecs.image_sources import ImageResizeConfig, find_duplicate
from vitrail.codecs.image_tokenization import assign_output_paths, check_same_order
from vitrail.codecs.token_file import TokenFileHeader, VideoTokenSettings
from vitrail.codecs.video_codec import VideoCodec
from vitrail.codecs.video_token_file import (
    TokenizedVideo,
    VideoRecord,
    VideoTokenFile,
    VideoTokenFileWriter,
    count_segment_frames,
    count_segments,
    find_interval,
    pack_steps,
    pad_frame_count,
)
from vitrail.data.formats.media_folders import VIDEO_SUFFIXES
from vitrail.data.video_file import VideoFile, open_video
from vitrail.data.video_writer import VideoWriter, check_video_suffix
from vitrail.errors import ConfigError, DataError, VitrailError

AnyVideoCodec = CausalVideoCodec | VideoCodec
SEGMENT_FRAMES = 121  # about: a segment has 1 + m·n frames
CHUNK_FRAMES = 8


class VideoSource(NamedTuple):
    """Named video file."""

    name: str
    path: Path


def find_videos(paths: Sequence[str | Path]) -> list[VideoSource]:
    """Find the videos of files and folders, in the given order. Videos of a folder have their relative path as name."""
    videos: list[VideoSource] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in VIDEO_SUFFIXES and file.is_file())
            if not found:
                raise DataError(f"{path} has no videos", f"add files that end in {', '.join(sorted(VIDEO_SUFFIXES))}")
            videos += [VideoSource(file.relative_to(path).as_posix(), file) for file in found]
        elif path.is_file():
            videos.append(VideoSource(path.name, path))
        else:
            raise DataError(f"{path} does not exist", "give video files, or folders of them")
    duplicate = find_duplicate([video.name for video in videos])
    if duplicate is not None:
        raise DataError(f"two videos have the name {duplicate!r}", "tokenize them separately, or rename one")
    if not videos:
        raise DataError("there are no videos", "give video files, or folders of them")
    return videos


# ---- videos to tokens -------------------------------------------------------------------------------------------


def build_video_header(
    codec: AnyVideoCodec,
    resize: ImageResizeConfig,
    codec_name: str,
    *,
    segment_frames: int | None = None,
    chunk_frames: int | None = None,
    start: float = 0.0,
    end: float | None = None,
    fps: float | None = None,
) -> TokenFileHeader:
    if codec.training:
        raise ConfigError("the codec is in training mode, so its codebook may change", "call codec.eval()")
    channels = codec.config.channels if isinstance(codec, VideoCodec) else codec.config.net.channels
    if channels != 3:
        raise ConfigError(f"the codec encodes frames of {channels} channels", "use a codec of RGB frames")
    m, is_discrete = 1 if isinstance(codec, VideoCodec) else codec.config.net.chunk_frames, bool(codec.vocab_sizes)
    dtype = str(next(codec.encoder.parameters()).dtype).removeprefix("torch.")
    return TokenFileHeader(
        model=compute_codec_identity(codec),
        name=codec_name,
        sizes=codec.vocab_sizes,
        groups=codec.has_id_groups,
        factor=codec.downsample_factor,
        fit=json.loads(json.dumps(resize.to_dict())),  # the same types as after reading the file
        video=VideoTokenSettings(
            temporal_factor=codec.temporal_factor,
            frame_multiple=m,
            segment_frames=1 + -(-(SEGMENT_FRAMES - 1) // m) * m if segment_frames is None else segment_frames,
            chunk_frames=-(-CHUNK_FRAMES // m) * m if chunk_frames is None else chunk_frames,
            latent_dtype=None if is_discrete else dtype,  # type: ignore[arg-type]  # the config checks it
            latent_width=0 if is_discrete else codec.quantizer.width,
            start=float(start),
            end=None if end is None else float(end),
            fps=None if fps is None else float(fps),
        ),
    )


def tokenize_videos(
    codec: AnyVideoCodec,
    videos: Sequence[VideoSource],
    output_path: str | Path,
    *,
    resize: ImageResizeConfig | None = None,
    codec_name: str = "codec",
    segment_frames: int | None = None,
    chunk_frames: int | None = None,
    start: float = 0.0,
    end: float | None = None,
    fps: float | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> VideoTokenFile:
    """Write the ids or latents of videos to a token file.

    resize          how frames are made divisible by the codec's factor; by default edges are padded
    segment_frames  frames that are coded independently of those before: 1 + m·n, where m is the temporal factor of the
                    codec, and 8 for CogVideoX; by default about 121
    chunk_frames    frames that are encoded at a time: a multiple of m; by default about 8
    start, end      part of each video, in seconds
    fps             frame rate to resample to; by default every frame is kept, with its timestamp
    progress        called with a video's name, its frames done since the last call, and all its frames

    An interrupted run resumes when it is called again; a finished file is returned as it is. Videos that cannot be read
    completely are listed in `errors` of the file. If none can be read, an error is raised.
    """
    resize = (resize or ImageResizeConfig(how="pad")).resolve_size(codec)
    header = build_video_header(
        codec,
        resize,
        codec_name,
        segment_frames=segment_frames,
        chunk_frames=chunk_frames,
        start=start,
        end=end,
        fps=fps,
    )
    output_path, names = Path(output_path), [video.name for video in videos]
    assign_output_paths(names, VIDEO_SUFFIXES, ".mp4")  # raises if the file could not be detokenized
    if output_path.exists():
        return _check_finished(output_path, header, videos)
    failures: list[VitrailError] = []
    with VideoTokenFileWriter(output_path, header) as writer:
        num_done = len(writer.completed_names)
        check_same_order(writer.partial_path, writer.completed_names, names[:num_done])
        for video in videos[num_done:]:
            try:
                _tokenize_video(codec, video, writer, resize, progress)
            except _ReadError as failure:
                writer.skip(video.name, failure.error.problem)
                failures.append(failure.error)
            writer.flush()
        if not writer.names:
            writer.partial_path.unlink()
            if len(failures) == len(videos) == 1:
                raise failures[0]
            name, reason = writer.errors[0]
            raise DataError(f"none of {len(videos)} videos can be read; {name}: {reason}", "give other videos")
        writer.finish()
    return VideoTokenFile(output_path)


class _ReadError(Exception):
    """Error of a source, as opposed to one of the token file."""

    def __init__(self, error: VitrailError):
        super().__init__(error)
        self.error = error


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except VitrailError as error:
        raise _ReadError(error) from error


@torch.no_grad()
def _tokenize_video(
    codec: AnyVideoCodec,
    source: VideoSource,
    writer: VideoTokenFileWriter,
    resize: ImageResizeConfig,
    progress: Callable[[str, int, int], Any] | None,
) -> None:
    settings = writer.settings
    with _reading():
        video = open_video(source.path)
        record, numbers = describe_video(source, video, writer.header, resize)
    num_done, total = writer.start_video(record), len(numbers)
    count = min(num_done * settings.segment_frames, total)
    if progress is not None:
        progress(source.name, count, total)
    plans = [
        plan_chunks(count_segment_frames(total, number, settings), settings)
        for number in range(num_done, count_segments(total, settings))
    ]
    frames = _read_frames(video, numbers[count:], count, resize, codec.downsample_factor)
    with closing(frames), closing(_read_ahead(frames, [own for plan in plans for own, _ in plan])) as chunks:
        for plan in plans:
            cache, tokens, last = codec.make_cache(), [], None
            for own, padding in plan:
                chunk = next(chunks)
                last = chunk[-1] if chunk else last
                assert last is not None  # the first chunk of a segment has a frame
                pixels = torch.stack(chunk + [last] * padding)[None]
                tokens.append(_encode_chunk(codec, pixels, cache)[0].cpu())
                if progress is not None:
                    progress(source.name, own, total)
            writer.add_segment(torch.cat(tokens))
            writer.flush()


def _read_ahead(frames: Iterator[Tensor], counts: Sequence[int]) -> Generator[list[Tensor], None, None]:
    """Yield chunks of the given numbers of frames. A thread reads the next chunk meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(list, itertools.islice(frames, count)) for count in counts[:1]]
        for count in counts[1:]:
            chunk = pending.pop().result()
            pending.append(pool.submit(list, itertools.islice(frames, count)))
            yield chunk
        for last in pending:
            yield last.result()


def describe_video(
    source: VideoSource, video: VideoFile, header: TokenFileHeader, resize: ImageResizeConfig
) -> tuple[VideoRecord, np.ndarray]:
    """Describe a video as it is encoded. Also return the numbers of its encoded frames."""
    assert header.video is not None
    numbers, steps, time_base = select_frames(video, header.video)
    try:
        pixels, image_size = resize.apply(Image.new("RGB", (video.width, video.height)), header.factor)
    except DataError as error:
        raise DataError(f"{video.name} {error.problem}", "use --fit pad or cover") from None
    try:
        with source.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror}", "check the file") from error
    record = VideoRecord(
        name=source.name,
        num_frames=len(numbers),
        time_base=(time_base.numerator, time_base.denominator),
        pts_steps=pack_steps(steps),
        grid=(pixels.shape[1] // header.factor, pixels.shape[2] // header.factor),
        image_size=image_size,
        source_size=(video.height, video.width),
        orientation=video.orientation,
        source_digest=digest,
    )
    return record, numbers


def select_frames(video: VideoFile, settings: VideoTokenSettings) -> tuple[np.ndarray, np.ndarray, Fraction]:
    """Select the frames to encode: their numbers, the units of time that each is displayed, and the unit in seconds."""
    end = video.duration if settings.end is None else min(settings.end, video.duration)
    if settings.start >= end:
        raise DataError(f"{video.name} lasts {video.duration:.3f} s, less than the start", "give an earlier start")
    if settings.fps is not None:
        rate = Fraction(settings.fps).limit_denominator(100_000)
        count = max(1, int(np.ceil((end - settings.start) * float(rate) - 1e-6)))
        times = settings.start + np.arange(count) / float(rate)
        numbers = np.searchsorted(video.timestamps, times + 1e-6, side="right") - 1  # displayed at these times
        return numbers, np.ones(count, np.int64), 1 / rate
    first, stop = find_interval(video.timestamps, settings.start, settings.end)
    if first == stop:
        raise DataError(f"{video.name} has no frame in {settings.start} … {end} s", "give a longer part")
    last = round(video.duration / float(video.time_base)) + int(video.pts[0])  # end of the last frame
    ends = np.append(video.pts[1:], max(last, int(video.pts[-1]) + 1))
    return np.arange(first, stop), (ends - video.pts)[first:stop], video.time_base


def plan_chunks(num_frames: int, settings: VideoTokenSettings) -> list[tuple[int, int]]:
    """Split a segment into chunks, each given as its frames and the repetitions of the last frame behind them."""
    total = pad_frame_count(num_frames, settings)
    ends = [*range(1 + settings.chunk_frames, total, settings.chunk_frames), total]
    return [
        (max(0, min(end, num_frames) - start), end - max(start, min(end, num_frames)))
        for start, end in itertools.pairwise([0, *ends])
    ]


def _read_frames(
    video: VideoFile, numbers: np.ndarray, num_before: int, resize: ImageResizeConfig, factor: int
) -> Generator[Tensor, None, None]:
    """Yield resized frames, uint8 (3, H, W)."""
    count = num_before
    try:
        for pixels in video.iterate_frames(numbers):
            yield resize.apply(Image.fromarray(pixels), factor)[0]
            count += 1
    except VitrailError as error:
        total = num_before + len(numbers)
        raise _ReadError(
            DataError(f"{error.problem}; {count:,} of {total:,} frames were read", error.remedy)
        ) from error


def _encode_chunk(codec: AnyVideoCodec, frames: Tensor, cache: Any) -> Tensor:
    """Encode uint8 (1, T, 3, H, W) to ids (1, t, h, w) or latents (1, t, h, w, d), after the chunks in the cache."""
    pixels = codec.to_pixels(frames)
    if isinstance(codec, VideoCodec):
        output = codec.encode(pixels, cache.encoder)
        cache.encoder.commit()
    else:
        output = codec.encode(pixels, cache)
    return output.codes if output.ids is None else output.ids


def _check_finished(path: Path, header: TokenFileHeader, videos: Sequence[VideoSource]) -> VideoTokenFile:
    file = VideoTokenFile(path, codec_identity=header.model)
    same = file.header.replace(name=header.name) == header
    if not same or set(file.names) | set(file.errors) != {video.name for video in videos}:
        file.close()
        raise DataError(f"{path} exists and has other videos or settings", "remove it, or give another path")
    return file


# ---- tokens to videos -------------------------------------------------------------------------------------------


@torch.no_grad()
def decode_frames(
    codec: AnyVideoCodec, video: TokenizedVideo, start: float = 0.0, end: float | None = None
) -> Iterator[np.ndarray]:
    """Decode the frames from `start` until before `end`, in seconds: uint8 (H, W, 3), one at a time.

    Decoding starts with the segment of the first frame, so a part has the frames of the whole video, bit for bit.
    """
    settings, (H, W) = video.file.settings, video.image_size
    frames = video.find_frames(start, end)
    S, step = settings.segment_frames, settings.chunk_frames // settings.temporal_factor
    for number in range(frames[0] // S, frames[-1] // S + 1):
        tokens, cache, at = video.read_segment(number), codec.make_cache(), number * S
        stop = min(frames.stop, at + count_segment_frames(video.num_frames, number, settings))
        bounds = [0, *range(1 + step, len(tokens), step), len(tokens)]
        for first, last in itertools.pairwise(bounds):
            if at >= stop:
                break
            for pixels in _decode_chunk(codec, tokens[None, first:last], cache):
                if frames.start <= at < stop:
                    yield pixels[:, :H, :W].permute(1, 2, 0).contiguous().numpy()
                at += 1


def _decode_chunk(codec: AnyVideoCodec, tokens: Tensor, cache: Any) -> Tensor:
    """Decode ids or latents of a chunk to uint8 (T, 3, H, W), after the chunks in the cache."""
    tokens = tokens.to(codec.device)
    codes = tokens if tokens.is_floating_point() else codec.lookup(tokens)
    if isinstance(codec, VideoCodec):
        pixels = codec.decode(codes, cache.decoder)
        cache.decoder.commit()
    else:
        pixels = codec.decode(codes, cache)
    return codec.to_uint8(pixels[0]).cpu()


def detokenize_videos(
    codec: AnyVideoCodec,
    token_file: VideoTokenFile,
    output_path: str | Path,
    *,
    start: float = 0.0,
    end: float | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> list[Path]:
    """Verify the digest of a token file, and write its videos as H.264 with their timestamps.

    output_path  a file .mp4, .mov or .mkv for a single video; otherwise a folder, to which MP4 files are written
    start, end   part of each video, in seconds
    progress     called with a video's name, its frames done since the last call, and all its frames
    """
    if token_file.header.model != compute_codec_identity(codec):
        raise DataError(
            f"{token_file.path} was written by another codec: {token_file.header.name}", "give the codec that wrote it"
        )
    token_file.verify_digest()
    output_path = Path(output_path)
    if len(token_file) == 1 and output_path.suffix and not output_path.is_dir():
        check_video_suffix(output_path)
        paths = [output_path]
    else:
        if output_path.is_file() or output_path.suffix.lower() in VIDEO_SUFFIXES:
            raise DataError(
                f"{token_file.path} has {len(token_file)} videos, but {output_path} is one file", "give a folder"
            )
        places = assign_output_paths(token_file.names, VIDEO_SUFFIXES, ".mp4")
        paths = [output_path / places[name] for name in token_file.names]
    for video, path in zip(token_file, paths, strict=True):
        frames = video.find_frames(start, end)
        offset = int(video.pts[frames.start])
        with VideoWriter(path, *video.image_size, video.time_base, video.frame_rate) as writer:
            for number, pixels in zip(frames, decode_frames(codec, video, start, end), strict=True):
                shown_for = int(video.pts[number + 1] - video.pts[number])
                writer.add(pixels, int(video.pts[number]) - offset, shown_for)
                if progress is not None:
                    progress(video.name, 1, len(frames))
    return paths
