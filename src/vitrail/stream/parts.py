"""What a sample is made of: parts, in any order and number.

A part is one run of tokens of one kind. Its tokens carry ids (words, codes, binned actions), or they reserve places
that features will fill: the part's own (a picture from a tower, 32 tokens from a resampler) or the rows of a learned
table that every sample shares (queries, LLaVA's newline). A modality is a row of `KINDS`.

N tokens of a part
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.processing.cut import Cut
from vitrail.processing.grid import Grid


class Kind(NamedTuple):
    """`id` is what `Stream.kinds` holds; `features` says what may fill its places where it carries no ids."""

    id: int
    features: Literal["none", "own", "table"]
    says: str


KINDS = {
    "text": Kind(0, "none", "words and special tokens"),
    "image": Kind(1, "own", "a still picture: features of a tower, or codes"),
    "video": Kind(2, "own", "a video: features of a tower, or codes"),
    "action": Kind(3, "own", "what was done: binned ids, or embedded states"),
    "query": Kind(4, "table", "learned slots that ask, the same in every sample"),
}
NEWLINE = "newline"  # the table that newline tokens without an id are read from
TABLES = (*(name for name, kind in KINDS.items() if kind.features == "table"), NEWLINE)

Shape: TypeAlias = Grid | Cut | int  # a lattice, a picture cut into several, or a line of so many tokens


class Run(NamedTuple):
    """t × h × w tokens in raster order, with a newline after each row, after all of them, or none."""

    t: int
    h: int
    w: int
    newline: Literal["none", "row", "end"] = "none"

    @property
    def wide(self) -> int:
        """Columns, the newlines' own included."""
        return self.w + (self.newline == "row")

    @property
    def tokens(self) -> int:
        return self.t * self.h * self.wide + (self.newline == "end")

    def newlines(self) -> Tensor:
        """(N,) booleans, True where a newline stands."""
        mask = torch.zeros(self.tokens, dtype=torch.bool)
        if self.newline == "end":
            mask[-1] = True
        elif self.newline == "row":
            mask[self.w :: self.wide] = True
        return mask


def runs(shape: Grid | Cut) -> list[Run]:
    """The lattices of a shape, in reading order."""
    if isinstance(shape, Grid):
        return [Run(shape.t, shape.rows, shape.columns)]
    return [Run(1, *span.size, span.newline) for span in shape.spans]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Made by `words`, `picture`, `video`, `actions` and `queries`; a new modality is `Part(kind=…)` and a row.

    loss     whether the tokens are to be learnt: all that have ids, or one flag a token
    both     read both ways? None: as the rules say of its kind; a name: as one span with the neighbours of that name
    seconds  how long a temporal patch lasts
    newline  the id of newline tokens; without one they are row 0 of the learned table "newline"
    source   parts of one source fill their places from one block of features, each beginning at its row `first`;
             without one, a part has a block of its own
    """

    kind: str
    shape: Shape
    ids: Sequence[int] | Tensor | None = None
    loss: bool | Sequence[bool] | Tensor = False
    both: bool | str | None = None
    seconds: float = 1.0
    newline: int | None = None
    source: object = None
    first: int = 0

    @property
    def tokens(self) -> int:
        return self.shape if isinstance(self.shape, int) else sum(run.tokens for run in runs(self.shape))

    def newlines(self) -> Tensor:
        """(N,) booleans, True where a newline stands."""
        if isinstance(self.shape, int):
            return torch.zeros(self.shape, dtype=torch.bool)
        return torch.cat([run.newlines() for run in runs(self.shape)])

    def __str__(self) -> str:
        match self.shape:
            case Grid(t=t, rows=h, columns=w):
                size = f"{t}×{h}×{w}" if self.kind == "video" else f"{h}×{w}"
            case Cut(height=h, width=w):
                size = f"{h}×{w} pixels in {self.tokens} tokens"
            case _:
                size = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        return f"{self.kind}, {size}"


def words(ids: Sequence[int] | Tensor, loss: bool | Sequence[bool] | Tensor = False, **more) -> Part:
    """Text and special tokens; `Chat.ids` and `Chat.loss` go in as they are."""
    return Part(kind="text", shape=len(ids), ids=ids, loss=loss, **more)


def picture(shape: Shape, ids: Sequence[int] | Tensor | None = None, **more) -> Part:
    """A still: a `Grid`, a policy's `Cut`, or the number of tokens a resampler makes of it. `ids` are codes."""
    if isinstance(shape, Grid) and shape.t > 1:
        raise StreamError(f"a picture with {shape.t} temporal patches", "use video(grid, seconds=…)")
    return Part(kind="image", shape=shape, ids=ids, **more)


def video(shape: Shape, ids: Sequence[int] | Tensor | None = None, *, seconds: float = 1.0, **more) -> Part:
    """A video, of which every temporal patch lasts `seconds` (two frames at 4 frames a second: 0.5). A `Cut` of its
    frames can have newlines among them, and no time in its positions."""
    return Part(kind="video", shape=shape, ids=ids, seconds=seconds, **more)


def actions(ids: Sequence[int] | Tensor | int, loss: bool | Sequence[bool] | Tensor = False, **more) -> Part:
    """Binned actions, or a number of places for embedded ones."""
    if isinstance(ids, int):
        return Part(kind="action", shape=ids, loss=loss, **more)
    return Part(kind="action", shape=len(ids), ids=ids, loss=loss, **more)


def queries(count: int, **more) -> Part:
    """The first `count` rows of the learned table "query"."""
    return Part(kind="query", shape=count, **more)


def patch_by_patch(clip: Part, before: Sequence[Part], after: Sequence[Part] = ()) -> list[Part]:
    """A video one temporal patch at a time, `before[k]` ahead of patch k and `after` behind each (Qwen3-VL).

    The patches still fill their places from one block of features, the video's.
    """
    grid = clip.shape
    if not isinstance(grid, Grid) or len(before) != grid.t:
        raise StreamError(
            f"{len(before)} parts to stand before the temporal patches of a part of {clip}",
            "give a video with a Grid, and one part for each of its temporal patches",
        )
    one, size = grid.with_(t=1), grid.rows * grid.columns
    source = object() if clip.source is None else clip.source
    out: list[Part] = []
    for k, ahead in enumerate(before):
        ids = None if clip.ids is None else clip.ids[k * size : (k + 1) * size]
        loss = clip.loss if isinstance(clip.loss, bool) else clip.loss[k * size : (k + 1) * size]
        patch = replace(clip, shape=one, ids=ids, loss=loss, source=source, first=clip.first + k * size)
        out += [ahead, patch, *after]
    return out
