"""Video sampling: choose the frames of a video and their size, without decoding.

The rules match the video processors of Qwen, GLM-4V, InternVL, LLaVA-OneVision, LLaVA-NeXT-Video and SmolVLM.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from vitrail.config import Config, PositiveInt
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.processing.image_layout import Size
from vitrail.processing.image_preprocessor import parse_square_size
from vitrail.processing.resolution_policies import NativePolicy

JsonDict = dict[str, Any]
SamplingRule: TypeAlias = Literal[
    "qwen2-vl", "qwen3-vl", "glm4v", "internvl", "llava-onevision", "llava-next-video", "smolvlm"
]
DEFAULT_NUM_FRAMES: dict[SamplingRule, int] = {"internvl": 8, "llava-onevision": 32, "llava-next-video": 8}
"""Default number of frames of rules with square frames, as in the authors' examples."""
VIDEO_PROCESSORS: dict[SamplingRule, str] = {
    "qwen2-vl": "Qwen2VLVideoProcessor",
    "qwen3-vl": "Qwen3VLVideoProcessor",
    "glm4v": "Glm4vVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "llava-onevision": "LlavaOnevisionVideoProcessor",
    "llava-next-video": "LlavaNextVideoVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}
VIDEO_PROCESSOR_FILE, VIDEO_PROCESSOR_KEY = "video_preprocessor_config.json", "video_processor"
MAX_FRAMES = 100_000
"""Maximum number of frames that a file may request; files are untrusted."""


class VideoSamplingConfig(Config):
    """Frame sampling and frame size of videos.

    rule        qwen2-vl: evenly spaced from the first frame, in whole temporal patches; pixel budget per frame
                qwen3-vl: evenly spaced from the first to the last frame; pixel budget per video
                glm4v: one every 1 / fps seconds, the last one twice for an even number; pixel budget per video
                internvl: middle frames of equal segments, squashed to a square of max_pixels
                llava-onevision: first frames of equal segments, squashed to a square of max_pixels
                llava-next-video: first frames of equal segments, resized and centre-cropped to that square
                smolvlm: evenly spaced from the first to the last frame, without the first and last second of a long
                video; resized to longest_edge, then squashed to a square of max_pixels
    fps         sampled frames per second, limited by min_frames and max_frames
    num_frames  fixed number of frames per video, which replaces fps unless the caller passes fps
    min_pixels, max_pixels  pixel budget
    max_tokens  maximum tokens per video, of which a tenth is reserved for text (qwen2-vl), or per frame (qwen3-vl)
    longest_edge  longest edge of a frame before it is squashed; smolvlm only
    """

    rule: SamplingRule
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None
    max_tokens: PositiveInt | None = None
    longest_edge: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fps < math.inf:
            raise ConfigError(f"VideoSamplingConfig.fps is {self.fps}", "give a number above 0")
        for least, most in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
            low, high = getattr(self, least), getattr(self, most)
            if not 1 <= low <= high:
                raise ConfigError(
                    f"VideoSamplingConfig: {least} is {low} and {most} is {high}", f"give 1 ≤ {least} ≤ {most}"
                )
        if self.max_frames > MAX_FRAMES:
            raise ConfigError(f"VideoSamplingConfig.max_frames is {self.max_frames:,}", f"give at most {MAX_FRAMES:,}")
        if self.num_frames is not None and not 1 <= self.num_frames <= MAX_FRAMES:
            raise ConfigError(
                f"VideoSamplingConfig.num_frames is {self.num_frames:,}", f"give 1 … {MAX_FRAMES:,}, or remove it"
            )

    @classmethod
    def default(cls, rule: SamplingRule, token_size: int) -> "VideoSamplingConfig":
        """Return the released settings for tokens (or square tiles) of token_size × token_size pixels."""
        if rule in DEFAULT_NUM_FRAMES:
            return cls(
                rule=rule,
                min_pixels=token_size**2,
                max_pixels=token_size**2,
                min_frames=1,
                num_frames=DEFAULT_NUM_FRAMES[rule],
            )
        if rule == "smolvlm":
            square = token_size**2
            return cls(
                rule=rule,
                min_pixels=square,
                max_pixels=square,
                fps=1.0,
                min_frames=1,
                max_frames=64,
                longest_edge=token_size,
            )
        if rule == "qwen2-vl":
            return cls(rule=rule, min_pixels=128 * token_size**2, max_pixels=768 * token_size**2, max_tokens=128_000)
        if rule == "glm4v":
            budget = {"min_pixels": 112**2, "max_pixels": 28**2 * 2 * 30_000}
            return cls(rule=rule, **budget, min_frames=1, max_frames=600)  # five minutes
        return cls(rule=rule, min_pixels=64 * 64, max_pixels=24 * 1024**2, max_tokens=768)

    # ---- frame selection ---------------------------------------------------------------------------------------

    def sample_frame_indices(
        self,
        total_frames: int,
        seconds: float,
        temporal_patch_size: int = 2,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
    ) -> list[int]:
        """Return the indices of the frames to read from a video with `total_frames` frames in `seconds` seconds.

        `num_frames` or `fps` override the config.
        """
        if num_frames is not None and fps is not None:
            raise ConfigError(f"both num_frames ({num_frames}) and fps ({fps}) are given", "give only one of the two")
        if fps is not None and not 0 < fps < math.inf:
            raise ConfigError(f"fps is {fps}", "give a number above 0")
        if num_frames is not None and not 1 <= num_frames <= total_frames:
            raise ConfigError(
                f"num_frames is {num_frames}, and the video has {total_frames:,} frames", f"give 1 … {total_frames:,}"
            )
        if num_frames is None and fps is None and self.num_frames is not None:
            num_frames = min(self.num_frames, total_frames)
        target_frames = seconds * (fps or self.fps)
        if self.rule == "glm4v" and num_frames is None:
            return self._sample_seconds(total_frames, seconds, fps or self.fps)
        if self.rule == "smolvlm":
            return self._sample_without_ends(total_frames, seconds, num_frames, fps or self.fps)
        if self.rule != "qwen2-vl":
            count = num_frames or min(max(int(target_frames), self.min_frames), self.max_frames, total_frames)
            if self.rule == "internvl":
                return [(2 * n + 1) * total_frames // (2 * count) for n in range(count)]
            if self.is_square:
                return [n * total_frames // count for n in range(count)]
            return np.linspace(0, total_frames - 1, count).round().astype(int).tolist()
        if num_frames is None:
            num_frames = (
                math.floor(
                    min(max(target_frames, self.min_frames), self.max_frames, total_frames) / temporal_patch_size
                )
                * temporal_patch_size
            )
        else:
            num_frames = (
                min(round(num_frames / temporal_patch_size), total_frames // temporal_patch_size) * temporal_patch_size
            )
        # A video shorter than one temporal patch is repeated to fill it.
        count = num_frames or min(total_frames, temporal_patch_size)
        return [n * total_frames // count for n in range(count)]

    def _sample_seconds(self, total_frames: int, seconds: float, fps: float) -> list[int]:
        """Return the frames at every 1 / fps seconds; of a long video, as many as are allowed, evenly spaced."""
        rate, longest = total_frames / seconds, self.max_frames / self.fps
        if seconds <= longest:
            places = [n * rate / fps for n in range(max(int(seconds * fps), 1))]
        else:
            count = int(longest * fps)
            places = range(total_frames) if count >= total_frames else (np.linspace(0, seconds, count) * rate).tolist()
        # The rate is a quotient: rounding errors must not reach the next frame.
        found = dict.fromkeys(min(total_frames - 1, math.ceil(round(place, 6))) for place in places)
        return [*found, *list(found)[-1:] * (len(found) % 2)]

    def _sample_without_ends(self, total_frames: int, seconds: float, num_frames: int | None, fps: float) -> list[int]:
        """Sample evenly, from a long video without its first and last second, as in the reference."""
        count = num_frames or max(1, min(round(fps * seconds), self.max_frames, total_frames))
        first, last, rate = 0, total_frames - 1, total_frames / seconds
        if seconds - 2 > (num_frames or self.max_frames) * fps:
            first, last = int(rate), min(int(total_frames - rate), last)
        return np.unique(np.linspace(first, last, count, dtype=int)).tolist()

    # ---- frame size --------------------------------------------------------------------------------------------

    def frame_size(
        self,
        num_frames: int,
        height: int,
        width: int,
        *,
        patch_size: int,
        merge_size: int,
        temporal_patch_size: int = 2,
    ) -> Size:
        """Return the height and width to which the given number of frames is resized."""
        if self.is_square:
            return (self.square_size, self.square_size)
        factor, max_pixels = patch_size * merge_size, self.max_pixels
        floor = int(1.05 * self.min_pixels)
        if self.rule == "qwen2-vl":
            if self.max_tokens is not None:
                max_pixels = max(
                    min(max_pixels, int(0.9 * self.max_tokens * factor**2) * temporal_patch_size // num_frames), floor
                )
            native = NativePolicy(
                patch_size=patch_size,
                merge_size=merge_size,
                min_pixels=self.min_pixels,
                max_pixels=max(max_pixels, factor**2),
            )
            return native.layout(height, width).views[0].resized_size
        if self.max_tokens is not None:
            max_pixels = num_frames * max(min(self.max_tokens * factor**2, max_pixels // num_frames), floor)
        return self._resize_whole_video(num_frames, height, width, factor, max_pixels, temporal_patch_size)

    @property
    def is_square(self) -> bool:
        """Whether each frame becomes a square tile."""
        return self.rule in (*DEFAULT_NUM_FRAMES, "smolvlm")

    @property
    def uses_center_crop(self) -> bool:
        """Whether square frames are centre-cropped. Otherwise they are squashed."""
        return self.rule == "llava-next-video"

    @property
    def square_size(self) -> int:
        """Side of a square frame in pixels."""
        return math.isqrt(self.max_pixels)

    def _resize_whole_video(
        self, num_frames: int, height: int, width: int, factor: int, max_pixels: int, temporal: int
    ) -> Size:
        """Apply smart_resize to the whole video, with float64 rounding as in the reference."""
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ImageError(f"frames of {height}×{width} pixels have an aspect ratio above 200", "crop them")
        filled = max(1, round(num_frames / temporal)) * temporal
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if filled * tall * wide > max_pixels:
            beta = math.sqrt(num_frames * height * width / max_pixels)
            tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif filled * tall * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (num_frames * height * width))
            tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return tall, wide

    # ---- processor config files --------------------------------------------------------------------------------

    def with_processor_config(self, processor_config: JsonDict) -> "VideoSamplingConfig":
        """Return the config with the settings of a video processor config. Missing keys change nothing."""
        if self.rule == "smolvlm":
            return self._with_longest_edge_config(processor_config)
        if self.is_square:
            return self._with_square_config(processor_config)
        size = processor_config.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(
                f"size is {size!r}", "give shortest_edge and longest_edge, in pixels of a whole video"
            )
        settings = {
            key: processor_config.get(key) for key in ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")
        }
        if self.rule == "glm4v":
            duration = processor_config.get("max_duration") or self.max_frames / self.fps
            settings["max_frames"] = int(duration * (settings["fps"] or self.fps))
        settings["min_pixels"] = settings["min_pixels"] or size.get("shortest_edge")
        settings["max_pixels"] = settings["max_pixels"] or size.get("longest_edge")
        found = self.replace(**{key: value for key, value in settings.items() if value is not None})
        if processor_config.get("cap_pixels_per_frame") is False:
            return found.replace(max_tokens=None)
        return found.replace(max_tokens=processor_config.get("max_video_tokens") or found.max_tokens)

    def _with_square_config(self, json_config: JsonDict) -> "VideoSamplingConfig":
        shift = json_config.get("initial_shift") if self.rule == "internvl" else None
        if shift is not None and shift is not True:
            raise CheckpointError(
                f"initial_shift is {shift!r}", "only true is supported: middle frames of equal segments"
            )
        size, num_frames, fps = (json_config.get(key) for key in ("size", "num_frames", "fps"))
        if self.uses_center_crop:
            size = self._parse_crop_size(json_config)
        found = (
            self
            if size is None
            else self.replace(min_pixels=parse_square_size(size) ** 2, max_pixels=parse_square_size(size) ** 2)
        )
        if fps is not None:
            found = found.replace(fps=fps, num_frames=None)
        # num_frames takes precedence, as in transformers.
        return found if num_frames is None else found.replace(num_frames=num_frames)

    def _with_longest_edge_config(self, json_config: JsonDict) -> "VideoSamplingConfig":
        """Read SmolVLM's settings, which older files have in `video_sampling`."""
        older = json_config.get("video_sampling") or {}
        size = older.get("video_size", json_config.get("size") if not older else None)
        if size is not None and (not isinstance(size, dict) or not isinstance(size.get("longest_edge"), int)):
            raise CheckpointError(f"the size of video frames is {size!r}", "give a longest_edge in pixels")
        settings = {
            "fps": older.get("fps", json_config.get("fps")),
            "max_frames": older.get("max_frames", json_config.get("num_frames")),
            "longest_edge": None if size is None else size["longest_edge"],
        }
        return self.replace(**{key: value for key, value in settings.items() if value is not None})

    def _parse_crop_size(self, json_config: JsonDict) -> Any:
        """Return the size of the centre crop of a frame."""
        size, crop = (json_config.get(key) for key in ("size", "crop_size"))
        if json_config.get("do_center_crop") is False:
            raise CheckpointError("do_center_crop is false", "only centre-cropped frames are supported")
        if isinstance(size, dict) and {key for key in size if size[key] is not None} != {"shortest_edge"}:
            raise CheckpointError(f"size is {size}", "give only shortest_edge: other sizes change the aspect ratio")
        if size is not None and crop is not None and parse_square_size(size) != parse_square_size(crop):
            raise CheckpointError(
                f"size is {size}, and crop_size is {crop}", "give a crop_size equal to the shortest_edge"
            )
        return crop if size is None else size

    def to_processor_config(self) -> JsonDict:
        """Return the video processor config with these settings."""
        if self.rule == "smolvlm":
            return {
                "video_processor_type": VIDEO_PROCESSORS[self.rule],
                "size": {"longest_edge": self.longest_edge},
                "max_image_size": {"longest_edge": self.square_size},
                "fps": self.fps,
                "num_frames": self.max_frames,
                "do_sample_frames": True,
            }
        if self.is_square:
            square: JsonDict = {"height": self.square_size, "width": self.square_size}
            crop = {"size": {"shortest_edge": self.square_size}, "do_center_crop": True, "crop_size": square}
            return {
                "video_processor_type": VIDEO_PROCESSORS[self.rule],
                **(crop if self.uses_center_crop else {"size": square}),
                **({"fps": self.fps} if self.num_frames is None else {"num_frames": self.num_frames}),
                "do_sample_frames": True,
                **({"initial_shift": True} if self.rule == "internvl" else {}),
            }
        shared: JsonDict = {
            "video_processor_type": VIDEO_PROCESSORS[self.rule],
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "fps": self.fps,
            "do_sample_frames": True,
        }
        if self.rule == "glm4v":
            return shared | {"max_duration": round(self.max_frames / self.fps)}
        return {
            **shared,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "cap_pixels_per_frame": self.max_tokens is not None,
            **({} if self.max_tokens is None else {"max_video_tokens": self.max_tokens}),
        }


def frame_interval(timestamps: Sequence[float]) -> float:
    """Return the mean interval between frames with these timestamps, in seconds; 1.0 for a single frame."""
    return (timestamps[-1] - timestamps[0]) / (len(timestamps) - 1) if len(timestamps) > 1 else 1.0
