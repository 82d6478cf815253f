"""Parts of a sample: runs of tokens of one kind, in any order and number.

The tokens of a part either have ids (text, image codes, binned actions) or are placeholders for features. Features are
the part's own (image features from a tower or resampler) or rows of a learned table that all samples share (queries,
LLaVA's newline). Each modality is a row of `TOKEN_KINDS`.

Shapes: N tokens of a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitrail.errors import StreamError
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import ImageLayout, Newline


class TokenKind(NamedTuple):
    """A token kind. `id` is its value in `Stream.kinds`; `features` says what fills tokens without ids."""

    id: int
    features: Literal["none", "own", "table"]
    description: str


TOKEN_KINDS = {
    "text": TokenKind(0, "none", "text and special tokens"),
    "image": TokenKind(1, "own", "an image: features of a tower, or codes"),
    "video": TokenKind(2, "own", "a video: features of a tower, or codes"),
    "action": TokenKind(3, "own", "actions: binned ids, or embeddings"),
    "query": TokenKind(4, "table", "learned queries, shared by all samples"),
}
NEWLINE_FEED = "newline"  # learned table for newline tokens (row 0) and separators (row 1) without an id
TABLE_FEEDS = (*(name for name, kind in TOKEN_KINDS.items() if kind.features == "table"), NEWLINE_FEED)

LossMask: TypeAlias = bool | Sequence[bool] | Tensor  # one flag for all tokens with ids, or one per token
PartShape: TypeAlias = Grid | ImageLayout | int  # a grid, an image layout, or a number of tokens


class TokenRun(NamedTuple):
    """t × h × w tokens in raster order, with newlines as in `ViewSpan`."""

    t: int
    h: int
    w: int
    newline: Newline = "none"

    @property
    def row_length(self) -> int:
        """Tokens per row, including the newline."""
        return self.w + (self.newline in ("row", "row_and_end"))

    @property
    def num_tokens(self) -> int:
        return self.t * self.h * self.row_length + (self.newline in ("end", "row_and_end"))

    def newline_rows(self) -> Tensor:
        """Return the rows (N,) of the learned table: 0 at newline tokens, 1 at a separator, −1 at others."""
        rows = torch.full((self.num_tokens,), -1)
        if self.newline in ("row", "row_and_end"):
            rows[self.w :: self.row_length] = 0
        if self.newline in ("end", "row_and_end"):
            rows[-1] = 1 if self.newline == "row_and_end" else 0
        return rows


def token_runs(shape: Grid | ImageLayout) -> list[TokenRun]:
    """Return the token runs of a shape, in reading order."""
    if isinstance(shape, Grid):
        return [TokenRun(shape.t, shape.num_rows, shape.num_columns)]
    return [TokenRun(1, *span.size, span.newline) for span in shape.spans]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run of tokens of one kind, created by `text_part`, `image_part`, `video_part`, `action_part` and `query_part`.

    A new modality needs only `Part(kind=…)` and a row of `TOKEN_KINDS`.

    loss_mask      whether the tokens are training targets: one flag for all tokens with ids, or one flag per token
    bidirectional  whether attention is bidirectional. None: as in the rules; a name: one span with adjacent parts of
                   the same name
    seconds        duration of a temporal patch
    newline_id     id of newline tokens, or one id for each. None: rows of the learned table "newline"
    source         parts with the same source share one block of features; None: the part has its own block
    first_row      first row of the part in that block
    """

    kind: str
    shape: PartShape
    ids: Sequence[int] | Tensor | None = None
    loss_mask: LossMask = False
    bidirectional: bool | str | None = None
    seconds: float = 1.0
    newline_id: int | tuple[int, ...] | None = None
    source: object = None
    first_row: int = 0

    @property
    def num_tokens(self) -> int:
        return self.shape if isinstance(self.shape, int) else sum(run.num_tokens for run in token_runs(self.shape))

    def newline_rows(self) -> Tensor:
        """Return the rows (N,) of the learned table "newline" at newline tokens and separators, −1 at others."""
        if isinstance(self.shape, int):
            return torch.full((self.shape,), -1)
        return torch.cat([run.newline_rows() for run in token_runs(self.shape)])

    def newline_mask(self) -> Tensor:
        """Return booleans (N,), True at newline tokens and separators."""
        return self.newline_rows() >= 0

    def __str__(self) -> str:
        match self.shape:
            case Grid(t=t, num_rows=h, num_columns=w):
                size = f"{t}×{h}×{w}" if self.kind == "video" else f"{h}×{w}"
            case ImageLayout(height=h, width=w):
                size = f"{h}×{w} pixels in {self.num_tokens} tokens"
            case _:
                size = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        return f"{self.kind}, {size}"


def text_part(
    ids: Sequence[int] | Tensor, loss_mask: LossMask = False, *, bidirectional: bool | str | None = None
) -> Part:
    """Return a part of text and special tokens, for example from `EncodedChat.ids` and `EncodedChat.loss_mask`."""
    return Part(kind="text", shape=len(ids), ids=ids, loss_mask=loss_mask, bidirectional=bidirectional)


def image_part(
    shape: PartShape,
    ids: Sequence[int] | Tensor | None = None,
    *,
    loss_mask: LossMask = False,
    bidirectional: bool | str | None = None,
    newline_id: int | tuple[int, ...] | None = None,
    source: object = None,
    first_row: int = 0,
) -> Part:
    """Return an image part. `shape` is a `Grid`, an `ImageLayout` or a number of tokens; `ids` are image codes."""
    if isinstance(shape, Grid) and shape.t > 1:
        raise StreamError(f"an image has {shape.t} temporal patches", "use video_part(grid, seconds=…)")
    return Part(
        kind="image",
        shape=shape,
        ids=ids,
        loss_mask=loss_mask,
        bidirectional=bidirectional,
        newline_id=newline_id,
        source=source,
        first_row=first_row,
    )


def video_part(
    shape: PartShape,
    ids: Sequence[int] | Tensor | None = None,
    *,
    seconds: float = 1.0,
    loss_mask: LossMask = False,
    bidirectional: bool | str | None = None,
    newline_id: int | None = None,
    source: object = None,
    first_row: int = 0,
) -> Part:
    """Return a video part. Each temporal patch lasts `seconds` (two frames at 4 frames per second: 0.5).

    An `ImageLayout` of the frames can contain newlines, but its positions have no time axis.
    """
    return Part(
        kind="video",
        shape=shape,
        ids=ids,
        seconds=seconds,
        loss_mask=loss_mask,
        bidirectional=bidirectional,
        newline_id=newline_id,
        source=source,
        first_row=first_row,
    )


def action_part(
    ids: Sequence[int] | Tensor | int, loss_mask: LossMask = False, *, bidirectional: bool | str | None = None
) -> Part:
    """Return a part of binned actions, or of a number of placeholders for action embeddings."""
    count, given = (ids, None) if isinstance(ids, int) else (len(ids), ids)
    return Part(kind="action", shape=count, ids=given, loss_mask=loss_mask, bidirectional=bidirectional)


def query_part(count: int, *, bidirectional: bool | str | None = None) -> Part:
    """Return a part of the first `count` rows of the learned table "query"."""
    return Part(kind="query", shape=count, bidirectional=bidirectional)


def interleave_patches(clip: Part, before: Sequence[Part], after: Sequence[Part] = ()) -> list[Part]:
    """Split a video into temporal patches, with `before[k]` before patch k and `after` after each (Qwen3-VL).

    All patches share the feature block of the video.
    """
    grid = clip.shape
    if not isinstance(grid, Grid) or len(before) != grid.t:
        raise StreamError(
            f"{len(before)} parts for the temporal patches of a part of {clip}",
            "give a video with a Grid, and one part per temporal patch",
        )
    one, size = grid.replace(t=1), grid.num_rows * grid.num_columns
    source = object() if clip.source is None else clip.source
    out: list[Part] = []
    for k, ahead in enumerate(before):
        ids = None if clip.ids is None else clip.ids[k * size : (k + 1) * size]
        loss = clip.loss_mask if isinstance(clip.loss_mask, bool) else clip.loss_mask[k * size : (k + 1) * size]
        patch = replace(clip, shape=one, ids=ids, loss_mask=loss, source=source, first_row=clip.first_row + k * size)
        out += [ahead, patch, *after]
    return out
