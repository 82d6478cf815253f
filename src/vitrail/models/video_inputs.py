"""Video inputs of vision-language models: files, or frames with timestamps.

Shapes: T sampled frames, C channels, H, W pixels.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.formats.media_folders import VIDEO_SUFFIXES
from vitrail.data.video_file import VideoFile, open_video
from vitrail.errors import ConfigError, DataError
from vitrail.models.vlm_config import VLMConfig
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.image_layout import PIL_RESAMPLING
from vitrail.processing.image_loading import ImageSource, load_image, to_pixel_values
from vitrail.processing.image_preprocessor import name_file_in_errors
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.resolution_policies import CropPolicy, NativePolicy
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.processing.video_sampling import frame_interval
from vitrail.stream import compute_patch_times

MAX_BUFFERED_BYTES = 1 << 28  # bytes of decoded frames in memory at a time


@dataclass(frozen=True, eq=False)
class Video:
    """Video input.

    source           a file, its bytes, or frames of one size with `timestamps` in seconds
    num_frames, fps  how many frames to sample, or how many a second; None: as the model's config specifies for files,
                     and
                     all frames for frames
    """

    source: "str | os.PathLike[str] | bytes | Sequence[ImageSource] | np.ndarray | Tensor"
    timestamps: Sequence[float] | None = None
    num_frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str | os.PathLike | bytes):
            if self.timestamps is not None:
                raise ConfigError("timestamps were given for a video file, which has its own", "remove timestamps")
            return
        seconds = np.asarray([] if self.timestamps is None else self.timestamps, dtype=np.float64)
        count = len(self.source)
        if not count:
            raise ConfigError("the video has no frames", "give at least 1")
        if seconds.shape != (count,):
            raise ConfigError(
                f"the video has {count} frames, but {seconds.size} timestamps", "give one timestamp for each frame"
            )
        if not np.isfinite(seconds).all() or seconds[0] < 0 or (np.diff(seconds) <= 0).any():
            raise ConfigError(
                f"timestamps are {self.timestamps!s:.80}", "give increasing seconds from the start of the video"
            )


class VideoFrames(NamedTuple):
    """Frames of a video as a model reads them."""

    pixels: Tensor  # (T, C, H, W), normalized, padded to whole temporal patches
    timestamps: list[float]  # seconds of the temporal patches
    seconds_per_patch: float  # duration of a temporal patch


def is_video(source: Any) -> bool:
    """Whether a source is a video: a `Video`, or a path with a video suffix."""
    named = isinstance(source, str | os.PathLike) and Path(source).suffix.lower() in VIDEO_SUFFIXES
    return named or isinstance(source, Video)


def read_video_frames(video: Video, config: VLMConfig) -> VideoFrames:
    """Sample the frames of a video that a model reads, and resize them for it."""
    tower, policy, films = config.tower, config.policy, config.resolved_video_sampling
    if films is None or not isinstance(policy, NativePolicy | TilesPolicy | AnyResPolicy | SplitPolicy):
        raise ConfigError(f"{type(tower).__name__} does not support videos", "give frames as images")
    source, S = video.source, config.frames_per_step
    merge = 1 if isinstance(policy, AnyResPolicy) else policy.merge_size
    opened = open_video(source) if isinstance(source, str | os.PathLike | bytes) else None
    times = np.asarray(video.timestamps, dtype=np.float64) if opened is None else opened.timestamps
    duration = frame_interval(times.tolist()) * len(times) if opened is None else opened.duration
    if opened is None and video.num_frames is None and video.fps is None:
        frame_indices = list(range(len(times)))
    else:
        with name_file_in_errors("a video of frames" if opened is None else opened.name):
            frame_indices = films.sample_frame_indices(
                len(times), duration, S, num_frames=video.num_frames, fps=video.fps
            )
    frames, size = [], None
    for image in (
        _load_frames(source, frame_indices) if opened is None else _decode_frames(opened, times[frame_indices])
    ):
        size = size or (image.height, image.width)
        if (image.height, image.width) != size:
            raise DataError(
                f"the video has frames of {size} and of {(image.height, image.width)} pixels", "give frames of one size"
            )
        # One size for all frames, so a long video is resized while it is decoded.
        height, width = films.frame_size(
            len(frame_indices),
            *size,
            patch_size=policy.patch_size,
            merge_size=merge,
            temporal_patch_size=S // config.temporal_pooling,
        )
        if films.uses_center_crop:
            image = CropPolicy(image_size=films.square_size, patch_size=1, resample=policy.resample).apply(image)[0]
        elif isinstance(policy, SplitPolicy):
            edge = films.longest_edge or policy.tile_size
            [image] = policy.replace(split=False, longest_edge=edge).apply(image)
        else:
            image = image.resize((width, height), PIL_RESAMPLING[policy.resample])
        frames.append(to_pixel_values(image, config.mean, config.std))
    frames += frames[-1:] * (-len(frames) % S)
    seconds = times[frame_indices].tolist()
    patch_times = seconds[::S] if films.rule == "glm4v" else compute_patch_times(seconds, S)
    return VideoFrames(torch.stack(frames), patch_times, S * duration / len(frame_indices))


def _load_frames(frames: Any, indices: Sequence[int]) -> Iterator[Image.Image]:
    return (load_image(frames[n]) for n in indices)


def _decode_frames(video_file: VideoFile, times: np.ndarray) -> Iterator[Image.Image]:
    """Decode frames in chunks: all frames of a long video in their own size would not fit into memory."""
    few = max(1, MAX_BUFFERED_BYTES // (video_file.height * video_file.width * 3))
    for start in range(0, len(times), few):
        yield from map(Image.fromarray, video_file.read_frames(times[start : start + few]).frames)
