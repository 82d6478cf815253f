"""Videos as a vision-language model is shown them: files, or frames with their times.

T frames that are read, C channels, H, W pixels
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

from vitrail.data.formats.folders import VIDEOS
from vitrail.data.video import Film, open_video
from vitrail.encoders.packed import PackedViTConfig
from vitrail.errors import ConfigError, DataError
from vitrail.models.vlm_config import VLMConfig
from vitrail.processing.cut import RESAMPLE
from vitrail.processing.footage import step_of
from vitrail.processing.images import Source, load_image, to_array
from vitrail.processing.preprocessing import blamed
from vitrail.processing.resolution import AnyRes, Crop, Native, Tiles
from vitrail.stream import patch_times

HELD = 1 << 28  # bytes of frames in their own size that are held at once


@dataclass(frozen=True, eq=False)
class Video:
    """
    source       a file, the bytes of one, or frames: pictures of one size, with the `seconds` at which they were taken
    frames, fps  how many to read, or how many a second; else of a file as the model's config says, of frames all
    """

    source: "str | os.PathLike[str] | bytes | Sequence[Source] | np.ndarray | Tensor"
    seconds: Sequence[float] | None = None
    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str | os.PathLike | bytes):
            if self.seconds is not None:
                raise ConfigError("a video's file has times of its own", "leave seconds out")
            return
        seconds = np.asarray([] if self.seconds is None else self.seconds, dtype=np.float64)
        count = len(self.source)
        if not count:
            raise ConfigError("a video without frames", "give at least one")
        if seconds.shape != (count,):
            raise ConfigError(f"{count} frames of a video and {seconds.size} times", "give seconds, one for each frame")
        if not np.isfinite(seconds).all() or seconds[0] < 0 or (np.diff(seconds) <= 0).any():
            raise ConfigError(f"frames at the seconds {self.seconds!s:.80}", "count up from the start of the video")


class Watched(NamedTuple):
    """What is read of a video."""

    pixels: Tensor  # (T, C, H, W), normalised, T filled up to whole temporal patches
    times: list[float]  # of the temporal patches
    seconds: float  # that each of them lasts


def is_video(source: Any) -> bool:
    """Whether something shown is a video: one that says so, or a file that is named like one."""
    named = isinstance(source, str | os.PathLike) and Path(source).suffix.lower() in VIDEOS
    return named or isinstance(source, Video)


def watch(video: Video, config: VLMConfig) -> Watched:
    """The frames that a model reads of a video, in the size that it reads them."""
    tower, policy, films = config.tower, config.policy, config.films
    if films is None or not isinstance(policy, Native | Tiles | AnyRes):
        raise ConfigError(f"{type(tower).__name__} reads no videos", "give frames as pictures")
    source, S = video.source, tower.temporal if isinstance(tower, PackedViTConfig) else 1
    merge = 1 if isinstance(policy, AnyRes) else policy.merge
    film = open_video(source) if isinstance(source, str | os.PathLike | bytes) else None
    times = np.asarray(video.seconds, dtype=np.float64) if film is None else film.seconds
    lasts = step_of(times.tolist()) * len(times) if film is None else film.duration
    if film is None and video.frames is None and video.fps is None:
        chosen = list(range(len(times)))
    else:
        with blamed("a video of frames" if film is None else film.name):
            chosen = films.pick(len(times), lasts, S, frames=video.frames, fps=video.fps)
    frames, size = [], None
    for image in _pictures(source, chosen) if film is None else _decoded(film, times[chosen]):
        size = size or (image.height, image.width)
        if (image.height, image.width) != size:
            raise DataError(f"a video with frames of {size} and {(image.height, image.width)} pixels", "give one size")
        # The same for all frames, so that a long video is brought to its size while it is decoded.
        height, width = films.size(len(chosen), *size, patch=policy.patch, merge=merge, temporal=S)
        if films.crops:
            image = Crop(size=films.side, patch=1, resample=policy.resample).apply(image)[0]
        else:
            image = image.resize((width, height), RESAMPLE[policy.resample])
        frames.append(to_array(image, config.mean, config.std))
    frames += frames[-1:] * (-len(frames) % S)
    return Watched(torch.stack(frames), patch_times(times[chosen].tolist(), S), S * lasts / len(chosen))


def _pictures(frames: Any, chosen: Sequence[int]) -> Iterator[Image.Image]:
    return (load_image(frames[n]) for n in chosen)


def _decoded(film: Film, times: np.ndarray) -> Iterator[Image.Image]:
    """A part of the frames at a time: those of a long video would not fit into memory in their own size."""
    few = max(1, HELD // (film.height * film.width * 3))
    for start in range(0, len(times), few):
        yield from map(Image.fromarray, film.at(times[start : start + few]).frames)
