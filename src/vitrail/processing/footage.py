"""Which frames of a video are read, and how large: arithmetic only, no pixels. As in the video processors of Qwen,
InternVL, LLaVA-OneVision and LLaVA-NeXT-Video.

T temporal patches of S frames each
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from vitrail.config import Config
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.processing.cut import Size
from vitrail.processing.preprocessing import side_of
from vitrail.processing.resolution import Native

About = dict[str, Any]
Rule: TypeAlias = Literal["qwen2-vl", "qwen3-vl", "internvl", "llava-onevision", "llava-next-video"]
FRAMES: dict[Rule, int] = {"internvl": 8, "llava-onevision": 32, "llava-next-video": 8}
"""Of rules by which each frame is read as a square: how many are read, as in their authors' examples."""
PROCESSORS: dict[Rule, str] = {
    "qwen2-vl": "Qwen2VLVideoProcessor",
    "qwen3-vl": "Qwen3VLVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "llava-onevision": "LlavaOnevisionVideoProcessor",
    "llava-next-video": "LlavaNextVideoVideoProcessor",
}
FILE, PART = "video_preprocessor_config.json", "video_processor"
MOST = 100_000
"""Frames that a file may ask for: a stranger's number must not make us decode for ever."""


class Footage(Config):
    """
    rule        qwen2-vl: whole temporal patches of frames, evenly from the first on; a budget of pixels is a frame's.
                qwen3-vl: evenly from the first frame to the last; a budget is that of the whole video.
                internvl: the middle frames of as many equal parts; each is squashed to a square of max_pixels.
                llava-onevision: the first frames of as many equal parts, squashed likewise.
                llava-next-video: the same frames; of each the middle square, its short edge brought to that size.
    fps         frames a second that are read, but no fewer than min_frames, if the video has them, and no more than
                max_frames
    frames      read of every video instead, unless it is asked about by frames a second
    min_pixels, max_pixels  the budget
    cap         tokens that no video passes, a tenth of them left for words (qwen2-vl), or no frame (qwen3-vl)
    """

    rule: Rule
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frames: int | None = None
    cap: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fps < math.inf:
            raise ConfigError(f"Footage.fps is {self.fps}", "give a number above 0")
        for least, most in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
            low, high = getattr(self, least), getattr(self, most)
            if not 1 <= low <= high:
                raise ConfigError(f"Footage: {least} {low} and {most} {high}", f"give 1 ≤ {least} ≤ {most}")
        if self.max_frames > MOST:
            raise ConfigError(f"Footage.max_frames is {self.max_frames:,}", f"give at most {MOST:,}")
        if self.frames is not None and not 1 <= self.frames <= MOST:
            raise ConfigError(f"Footage.frames is {self.frames:,}", f"give 1 … {MOST:,}, or leave it out")
        if self.cap is not None and self.cap < 1:
            raise ConfigError(f"Footage.cap is {self.cap}", "give at least one token, or leave it out")

    @classmethod
    def usual(cls, rule: Rule, factor: int) -> "Footage":
        """As the models were released, for tokens of factor × factor pixels; of squares, for tiles of as many."""
        if rule in FRAMES:
            return cls(rule=rule, min_pixels=factor**2, max_pixels=factor**2, min_frames=1, frames=FRAMES[rule])
        if rule == "qwen2-vl":
            return cls(rule=rule, min_pixels=128 * factor**2, max_pixels=768 * factor**2, cap=128_000)
        return cls(rule=rule, min_pixels=64 * 64, max_pixels=24 * 1024**2, cap=768)

    # ---- which frames ------------------------------------------------------------------------------------------

    def pick(
        self, total: int, seconds: float, temporal: int = 2, *, frames: int | None = None, fps: float | None = None
    ) -> list[int]:
        """Numbers of the frames that are read of a video of so many frames and seconds: `frames` of them, or `fps` a
        second, or as the config says."""
        if frames is not None and fps is not None:
            raise ConfigError(f"{frames} frames, and {fps} a second", "give one of the two")
        if fps is not None and not 0 < fps < math.inf:
            raise ConfigError(f"{fps} frames a second", "give a number above 0")
        if frames is not None and not 1 <= frames <= total:
            raise ConfigError(f"{frames} frames of a video that has {total:,}", f"ask for 1 … {total:,}")
        if frames is None and fps is None and self.frames is not None:
            frames = min(self.frames, total)
        wanted = seconds * (fps or self.fps)
        if self.rule != "qwen2-vl":
            count = frames or min(max(int(wanted), self.min_frames), self.max_frames, total)
            if self.rule == "internvl":
                return [(2 * n + 1) * total // (2 * count) for n in range(count)]
            if self.squares:
                return [n * total // count for n in range(count)]
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        if frames is None:
            frames = math.floor(min(max(wanted, self.min_frames), self.max_frames, total) / temporal) * temporal
        else:
            frames = min(round(frames / temporal), total // temporal) * temporal
        count = frames or min(total, temporal)  # a video shorter than a temporal patch fills one
        return [n * total // count for n in range(count)]

    # ---- how large ---------------------------------------------------------------------------------------------

    def size(self, frames: int, height: int, width: int, *, patch: int, merge: int, temporal: int = 2) -> Size:
        """Height and width that so many frames of this size are brought to."""
        if self.squares:
            return (self.side, self.side)
        factor, most = patch * merge, self.max_pixels
        floor = int(1.05 * self.min_pixels)
        if self.rule == "qwen2-vl":
            if self.cap is not None:
                most = max(min(most, int(0.9 * self.cap * factor**2) * temporal // frames), floor)
            native = Native(patch=patch, merge=merge, min_pixels=self.min_pixels, max_pixels=max(most, factor**2))
            return native.cut(height, width).views[0].resized
        if self.cap is not None:
            most = frames * max(min(self.cap * factor**2, most // frames), floor)
        return self._shared(frames, height, width, factor, most, temporal)

    @property
    def squares(self) -> bool:
        """Whether each frame is read as a square."""
        return self.rule in FRAMES

    @property
    def crops(self) -> bool:
        """Whether that is the middle of the frame; else the frame is squashed."""
        return self.rule == "llava-next-video"

    @property
    def side(self) -> int:
        """Of the square that is read of a frame."""
        return math.isqrt(self.max_pixels)

    def _shared(self, frames: int, height: int, width: int, factor: int, most: int, temporal: int) -> Size:
        """Smart-resize of a whole video, rounded in float64 as the reference does."""
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ImageError(f"frames of {height}×{width} are more than 200 times longer than wide", "crop them")
        filled = max(1, round(frames / temporal)) * temporal
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if filled * tall * wide > most:
            beta = math.sqrt(frames * height * width / most)
            tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif filled * tall * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (frames * height * width))
            tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return tall, wide

    # ---- as files say it ---------------------------------------------------------------------------------------

    def told(self, about: About) -> "Footage":
        """With what a video processor's file says; what it leaves out stays."""
        if self.squares:
            return self._told_parts(about)
        size = about.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(
                f"size is {size!r}", "give shortest_edge and longest_edge, in pixels of a whole video"
            )
        said = {key: about.get(key) for key in ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")}
        said["min_pixels"] = said["min_pixels"] or size.get("shortest_edge")
        said["max_pixels"] = said["max_pixels"] or size.get("longest_edge")
        found = self.with_(**{key: value for key, value in said.items() if value is not None})
        if about.get("cap_pixels_per_frame") is False:
            return found.with_(cap=None)
        return found.with_(cap=about.get("max_video_tokens") or found.cap)

    def _told_parts(self, about: About) -> "Footage":
        shift = about.get("initial_shift") if self.rule == "internvl" else None
        if shift is not None and shift is not True:
            raise CheckpointError(
                f"initial_shift is {shift!r}", "only true is built: frames amid their parts of a video"
            )
        size, frames, fps = (about.get(key) for key in ("size", "num_frames", "fps"))
        if self.crops:
            size = self._told_crop(about)
        found = self if size is None else self.with_(min_pixels=side_of(size) ** 2, max_pixels=side_of(size) ** 2)
        if fps is not None:
            found = found.with_(fps=fps, frames=None)
        return found if frames is None else found.with_(frames=frames)  # which goes first in theirs, too

    def _told_crop(self, about: About) -> Any:
        """The size of the middle that is kept of a frame."""
        size, crop = (about.get(key) for key in ("size", "crop_size"))
        if about.get("do_center_crop") is False:
            raise CheckpointError("do_center_crop is false", "only frames whose middle is kept are built")
        if isinstance(size, dict) and {key for key in size if size[key] is not None} != {"shortest_edge"}:
            raise CheckpointError(
                f"size is {size}", "give a shortest_edge alone: only frames that keep their aspect are built"
            )
        if size is not None and crop is not None and side_of(size) != side_of(crop):
            raise CheckpointError(
                f"size is {size}, and crop_size {crop}", "only crops as large as the short edge are built"
            )
        return crop if size is None else size

    def words(self) -> About:
        """As such a file says it."""
        if self.squares:
            square: About = {"height": self.side, "width": self.side}
            crop = {"size": {"shortest_edge": self.side}, "do_center_crop": True, "crop_size": square}
            return {
                "video_processor_type": PROCESSORS[self.rule],
                **(crop if self.crops else {"size": square}),
                **({"fps": self.fps} if self.frames is None else {"num_frames": self.frames}),
                "do_sample_frames": True,
                **({"initial_shift": True} if self.rule == "internvl" else {}),
            }
        return {
            "video_processor_type": PROCESSORS[self.rule],
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "fps": self.fps,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "do_sample_frames": True,
            "cap_pixels_per_frame": self.cap is not None,
            **({} if self.cap is None else {"max_video_tokens": self.cap}),
        }


def step_of(seconds: Sequence[float]) -> float:
    """How long a frame is shown, of frames shown at these seconds; one alone could be shown for ever, and it is one."""
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 1.0
