"""Clip data source: a sample is an index, and clips are rendered on the device that uses them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from vitrail.config import Config, NonNegativeInt, PositiveInt, Seed
from vitrail.data.clips.clip_questions import (
    MAX_SECONDS,
    STEPS_PER_SECOND,
    ClipQuestions,
    generate_clip_questions,
)
from vitrail.data.clips.clip_renderer import SIDE, render_clips
from vitrail.data.clips.clip_sampler import MIN_FRAMES, ClipBatch, Split, sample_clips
from vitrail.data.source_spec import DataSourceSpec
from vitrail.errors import ConfigError
from vitrail.registry import DATA_SOURCES

MAX_NOISE = 40  # a larger change of brightness hides colours


class ClipSourceConfig(Config, tag="clips", tag_field="kind"):
    """Settings of a source of clips with questions about time.

    num_frames   frames of a clip; each batch has one of these numbers
    fps          frames per second; each batch has one of these rates
    image_size   side of the frames in pixels
    noise        largest change of the brightness of a pixel, of 255
    split        train and test share no combination of shapes, colours and background
    num_samples  samples before they repeat
    seed         seed of the clips
    """

    num_frames: tuple[int, ...] = (8, 16, 32)
    fps: tuple[float, ...] = (1.0, 2.0, 4.0)
    image_size: int = SIDE
    noise: NonNegativeInt = 12
    split: Split = "train"
    num_samples: PositiveInt = 1 << 30
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not self.num_frames or min(self.num_frames) < MIN_FRAMES:
            raise ConfigError(
                f"num_frames is {self.num_frames}: a clip needs room for its events", f"give {MIN_FRAMES} or more"
            )
        for fps in self.fps:
            if fps <= 0 or STEPS_PER_SECOND % fps or (max(self.num_frames) - 1) / fps >= MAX_SECONDS:
                raise ConfigError(
                    f"fps is {fps:g} with {max(self.num_frames)} frames", f"give 1, 2 or 4, for up to {MAX_SECONDS} s"
                )
        if not self.fps:
            raise ConfigError("fps is empty", "give at least one rate, such as 2")
        if self.image_size < SIDE or self.image_size % SIDE:
            raise ConfigError(f"image_size is {self.image_size}", f"give a multiple of {SIDE} pixels")
        if self.noise > MAX_NOISE:
            raise ConfigError(f"noise is {self.noise}", f"give at most {MAX_NOISE}: colours must stay visible")


class ClipSample(NamedTuple):
    """A clip by its source and index."""

    source: str
    index: int


class ClipLayout(NamedTuple):
    """What all clips of a batch share."""

    num_frames: int
    fps: float

    @property
    def timestamps(self) -> list[float]:
        """Seconds of the frames."""
        return [frame / self.fps for frame in range(self.num_frames)]


class ClipData(NamedTuple):
    """Rendered clips with their descriptions and questions."""

    clips: ClipBatch
    frames: Tensor  # uint8 (B, T, 3, S, S)
    questions: ClipQuestions


class ClipSource:
    """Dataset of `ClipSample`s. `render_indices` renders clips on the device of the indices."""

    def __init__(self, config: ClipSourceConfig, name: str = "clips"):
        self.config, self.name = config, name

    @property
    def fingerprint(self) -> str:
        """Version of the clips, which depend on the config only."""
        return "1"

    def __len__(self) -> int:
        return self.config.num_samples

    def __getitem__(self, item: int) -> ClipSample:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return ClipSample(self.name, item)

    @property
    def layouts(self) -> list[ClipLayout]:
        """All layouts of batches."""
        return [ClipLayout(frames, fps) for frames in self.config.num_frames for fps in self.config.fps]

    def select_layout(self, indices: Sequence[int]) -> ClipLayout:
        """Return the layout of a batch: a function of its indices."""
        return self.layouts[sum(indices) * 0x9E3779B1 % (1 << 32) * len(self.layouts) >> 32]

    def sample_questions(self, index: Tensor, layout: ClipLayout) -> tuple[ClipBatch, ClipQuestions]:
        """Sample the descriptions and questions of clips, without rendering."""
        clips = sample_clips(index, layout.num_frames, self.config.seed, self.config.split)
        return clips, generate_clip_questions(clips, index, layout.fps, self.config.seed)

    def render_indices(self, index: Tensor, layout: ClipLayout) -> ClipData:
        """Sample and render the clips of indices (B,)."""
        clips, questions = self.sample_questions(index, layout)
        frames = render_clips(clips, self.config.image_size, self.config.seed, self.config.noise)
        return ClipData(clips, frames, questions)


DATA_SOURCES.register(
    "clips", DataSourceSpec(ClipSourceConfig, lambda config, context: ClipSource(config, context.name), ("clips",))
)
