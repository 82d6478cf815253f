"""Samples described in a few words, as TOML or JSON: to look at a stream before there is a tokenizer or a picture.

budget = 96
[rules]
positions = "qwen2.5-vl"
[[samples]]
name = "caption"
parts = [{ text = 4 }, { picture = [8, 12], merge = 2 }, { text = 6, loss = true }]
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Self

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid
from vitrail.processing.resolution import named
from vitrail.stream.build import Rules, Stream, build
from vitrail.stream.parts import Part, Shape, actions, patch_by_patch, picture, queries, video, words


class PartSize(Config):
    """One of text, picture, video, action, query, and what is said of it.

    A picture is (rows, columns) of patches, (height, width) in pixels under a resolution `policy`, or a number of
    tokens; a video is (temporal patches, rows, columns), with `stamp` words before each temporal patch. `codes` means
    that it carries ids.
    """

    text: int | None = None
    picture: tuple[int, int] | int | None = None
    video: tuple[int, int, int] | None = None
    action: int | None = None
    query: int | None = None
    merge: int = 1
    policy: str | None = None
    seconds: float = 1.0
    stamp: int = 0
    codes: bool = False
    loss: bool = False
    both: bool | str | None = None

    def __post_init__(self) -> None:
        given = [name for name in MAKERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a part is one of {', '.join(MAKERS)}, not {' and '.join(given) or 'none of them'}",
                "write it as { text = 12 } or { picture = [24, 32], merge = 2 }",
            )
        for name in ("text", "action", "query", "stamp"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"the number of tokens in {name!r} is {getattr(self, name)}", "count from 0 on")

    def parts(self) -> list[Part]:
        return next(make(self) for name, make in MAKERS.items() if getattr(self, name) is not None)


def _picture(size: PartSize) -> list[Part]:
    shape: Shape
    if isinstance(size.picture, int):
        shape = size.picture
    else:
        assert size.picture is not None
        h, w = size.picture
        shape = named(size.policy).cut(h, w) if size.policy else Grid(h=h, w=w, merge=size.merge)
    codes = None
    if size.codes:
        codes = [0] * int((~picture(shape).newlines()).sum())
    return [picture(shape, codes, loss=size.loss, both=size.both)]


def _video(size: PartSize) -> list[Part]:
    assert size.video is not None
    t, h, w = size.video
    grid = Grid(t=t, h=h, w=w, merge=size.merge)
    codes = [0] * grid.tokens if size.codes else None
    clip = video(grid, codes, seconds=size.seconds, loss=size.loss, both=size.both)
    return patch_by_patch(clip, [words([0] * size.stamp)] * t) if size.stamp else [clip]


MAKERS: dict[str, Callable[[PartSize], list[Part]]] = {
    "text": lambda size: [words([0] * (size.text or 0), size.loss, both=size.both)],
    "picture": _picture,
    "video": _video,
    "action": lambda size: [actions([0] * (size.action or 0), size.loss, both=size.both)],
    "query": lambda size: [queries(size.query or 0, both=size.both)],
}


class SampleSize(Config):
    parts: tuple[PartSize, ...]
    name: str = ""

    def all_parts(self) -> list[Part]:
        return [part for size in self.parts for part in size.parts()]


class Description(Config):
    """Samples, the rules they are built by, and how many tokens a row holds (the longest sample's, unless given)."""

    samples: tuple[SampleSize, ...]
    rules: Rules = Rules()
    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("a description with no samples", "write at least one [[samples]]")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"Description.budget is {self.budget}", "give the tokens of a row")

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a .toml or .json file."""
        try:
            text = path.read_text()
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", "give a .toml or .json file") from None
        except ValueError as error:  # both parsers' errors, and text that is not UTF-8
            raise ConfigError(f"{path} cannot be parsed: {error}", "mend it there") from None
        try:
            return cls.read(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.problem}", error.remedy or "mend it there") from None

    def streams(self) -> list[Stream]:
        return [
            build(sample.all_parts(), self.rules, name=sample.name or f"sample {i}")
            for i, sample in enumerate(self.samples)
        ]


EXAMPLE = Description.read(
    {
        "budget": 112,
        "rules": {"positions": "qwen2.5-vl", "both": ["image"]},
        "samples": [
            {"name": "caption", "parts": [{"text": 3}, {"picture": [8, 12], "merge": 2}, {"text": 7, "loss": True}]},
            {
                "name": "compare",
                "parts": [
                    {"text": 4},
                    {"picture": [8, 8], "merge": 2},
                    {"text": 3},
                    {"picture": [6, 10], "merge": 2},
                    {"text": 5},
                    {"text": 6, "loss": True},
                ],
            },
            {
                "name": "clip",
                "parts": [
                    {"text": 4},
                    {"video": [6, 4, 6], "merge": 2, "seconds": 1.0},
                    {"text": 5},
                    {"text": 4, "loss": True},
                ],
            },
            {
                "name": "robot",
                "parts": [
                    {"text": 5},
                    {"picture": [6, 6], "merge": 2},
                    {"action": 4, "loss": True},
                    {"picture": [6, 6], "merge": 2},
                    {"action": 4, "loss": True},
                    {"query": 4},
                ],
            },
            {
                "name": "draw",
                "parts": [{"text": 5}, {"picture": [5, 5], "codes": True, "loss": True, "both": False}],
            },
            {"name": "words", "parts": [{"text": 14, "loss": True}]},
        ],
    }
)
