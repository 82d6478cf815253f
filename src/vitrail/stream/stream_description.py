"""Describe streams in TOML or JSON by part sizes, to inspect them without a tokenizer or images.

row_length = 96
[rules]
positions = "qwen2.5-vl"
[[samples]]
name = "caption"
parts = [{ text = 4 }, { image = [8, 12], merge_size = 2 }, { text = 6, loss = true }]
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from vitrail.config import Config, NonNegativeInt, PositiveInt
from vitrail.errors import ConfigError
from vitrail.file_reading import parse_json, parse_toml, read_text_file
from vitrail.processing.grid import Grid
from vitrail.processing.resolution_policies import get_policy
from vitrail.stream.stream_builder import Stream, StreamRules, build_stream
from vitrail.stream.stream_parts import (
    Part,
    PartShape,
    action_part,
    image_part,
    interleave_patches,
    query_part,
    text_part,
    video_part,
)


class PartDescription(Config):
    """Size of one part: exactly one of text, image, video, action and query, plus options.

    image             (rows, columns) of patches, (height, width) in pixels with a resolution `policy`, or a number of
                      tokens
    video             (temporal patches, rows, columns)
    timestamp_tokens  text tokens before each temporal patch of a video
    codes             the part has ids (image codes) instead of features
    loss              the tokens are training targets
    """

    text: NonNegativeInt | None = None
    image: tuple[int, int] | int | None = None
    video: tuple[int, int, int] | None = None
    action: NonNegativeInt | None = None
    query: NonNegativeInt | None = None
    merge_size: int = 1
    policy: str | None = None
    seconds: float = 1.0
    timestamp_tokens: NonNegativeInt = 0
    codes: bool = False
    loss: bool = False
    bidirectional: bool | str | None = None

    def __post_init__(self) -> None:
        given = [name for name in PART_BUILDERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a part must be one of {', '.join(PART_BUILDERS)}, not {' and '.join(given) or 'none of them'}",
                "write { text = 12 } or { image = [24, 32], merge_size = 2 }",
            )

    def build_parts(self) -> list[Part]:
        return next(make(self) for name, make in PART_BUILDERS.items() if getattr(self, name) is not None)


def _build_image_parts(size: PartDescription) -> list[Part]:
    shape: PartShape
    if isinstance(size.image, int):
        shape = size.image
    else:
        assert size.image is not None
        h, w = size.image
        shape = get_policy(size.policy).layout(h, w) if size.policy else Grid(h=h, w=w, merge_size=size.merge_size)
    codes = None
    if size.codes:
        codes = [0] * int((~image_part(shape).newline_mask()).sum())
    return [image_part(shape, codes, loss_mask=size.loss, bidirectional=size.bidirectional)]


def _build_video_parts(size: PartDescription) -> list[Part]:
    assert size.video is not None
    t, h, w = size.video
    grid = Grid(t=t, h=h, w=w, merge_size=size.merge_size)
    codes = [0] * grid.num_tokens if size.codes else None
    clip = video_part(grid, codes, seconds=size.seconds, loss_mask=size.loss, bidirectional=size.bidirectional)
    return interleave_patches(clip, [text_part([0] * size.timestamp_tokens)] * t) if size.timestamp_tokens else [clip]


PART_BUILDERS: dict[str, Callable[[PartDescription], list[Part]]] = {
    "text": lambda size: [text_part([0] * (size.text or 0), size.loss, bidirectional=size.bidirectional)],
    "image": _build_image_parts,
    "video": _build_video_parts,
    "action": lambda size: [action_part([0] * (size.action or 0), size.loss, bidirectional=size.bidirectional)],
    "query": lambda size: [query_part(size.query or 0, bidirectional=size.bidirectional)],
}


class SampleDescription(Config):
    parts: tuple[PartDescription, ...]
    name: str = ""

    def build_parts(self) -> list[Part]:
        return [part for size in self.parts for part in size.build_parts()]


class StreamDescription(Config):
    """Samples, stream rules and the tokens per row (default: those of the longest sample)."""

    samples: tuple[SampleDescription, ...]
    rules: StreamRules = StreamRules()
    row_length: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("the description has no samples", "write at least one [[samples]]")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a description from a .toml or .json file."""
        try:
            text = read_text_file(path)
            data = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", "give a .toml or .json file") from None
        except ValueError as error:  # both parsers' errors, and text that is not UTF-8
            raise ConfigError(f"{path} cannot be parsed: {error}", "fix the file") from None
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.problem}", error.remedy or "fix the file") from None

    def build_streams(self) -> list[Stream]:
        return [
            build_stream(sample.build_parts(), self.rules, name=sample.name or f"sample {i}")
            for i, sample in enumerate(self.samples)
        ]


EXAMPLE_DESCRIPTION = StreamDescription.load(Path(__file__).with_name("example_streams.toml"))
