"""Clips as descriptions: which shapes there are, and what happens to them in which frame.

A clip is a function of the seed, its index and its number of frames. There are three kinds of clips:

    events  three shapes; one event happens to each, in different frames
    jumps   three shapes, of which two jump up, each jump in one frame
    needle  two shapes in all frames, and a third one in a single frame

Shapes: B clips, O = 3 objects, T frames, J jumps
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.data.scenes.counter_rng import random_distinct, random_integers

SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
CLIP_KINDS = ("events", "jumps", "needle")
EVENTS = ("none", "appears", "disappears", "turns", "moves right", "moves left")
NO_EVENT, APPEARS, DISAPPEARS, TURNS, MOVES_RIGHT, MOVES_LEFT = range(len(EVENTS))
NUM_OBJECTS = 3
NUM_BACKGROUNDS = 6
MAX_JUMPS = 4  # of one shape; two jumps are never in adjacent frames
MIN_FRAMES = 2 * MAX_JUMPS  # the first frame has no jump
EVENT_SHARE, JUMP_SHARE = 6, 2  # clips of these kinds among 10; the others have a needle
MAX_MOVE_FRAMES = 4

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class ClipBatch:
    """Descriptions of clips with T frames. Frames count from 0.

    An event of frame f is visible in frame f for the first time. A needle is visible in frame f only.
    """

    kind: Tensor  # (B,) index into CLIP_KINDS
    background: Tensor  # (B,)
    shape: Tensor  # (B, O) index into SHAPES, different in a clip
    colour: Tensor  # (B, O) index into COLOURS
    new_colour: Tensor  # (B, O) colour after it turned
    lane: Tensor  # (B, O) row of the canvas, from 0 to 2, different in a clip
    column: Tensor  # (B, O) place in the row, from 0 to 2
    event: Tensor  # (B, O) index into EVENTS
    frame: Tensor  # (B, O) frame of the event; of the third object of a needle clip, the frame that shows it
    move_frames: Tensor  # (B, O) frames that a move takes
    jumps: Tensor  # (B, 2, J) frames in which the first two objects jump, ascending; T after the last jump
    num_frames: int

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def num_jumps(self) -> Tensor:
        """Number of jumps (B, 2) of the first two objects."""
        return (self.jumps < self.num_frames).sum(2)


def sample_clips(index: Tensor, num_frames: int, seed: int = 0, split: Split = "train") -> ClipBatch:
    """Sample the clips of indices (B,).

    The splits share no combination of shapes, colours and background: their sum modulo the number of backgrounds is 0
    in test clips only.
    """
    T, label = num_frames, f"{split} {num_frames}"

    def draw(name: str, *shape: int, high: int | Tensor) -> Tensor:
        return random_integers(seed, index, f"{label} {name}", *shape, high=high)

    def draw_distinct(name: str, count: int, high: int | Tensor) -> Tensor:
        return random_distinct(seed, index, f"{label} {name}", count, high=high)

    share = draw("kind", high=10)
    kind = (share >= EVENT_SHARE).long() + (share >= EVENT_SHARE + JUMP_SHARE)
    shape, lane = draw_distinct("shape", NUM_OBJECTS, len(SHAPES)), draw_distinct("lane", NUM_OBJECTS, 3)
    colour = draw("colour", NUM_OBJECTS, high=len(COLOURS))
    change = draw("new colour", NUM_OBJECTS, high=len(COLOURS) - 1)
    order = torch.arange(1, NUM_OBJECTS + 1, device=index.device)
    combination = (shape * order + colour * (order + NUM_OBJECTS)).sum(1)
    offset = 0 if split == "test" else 1 + draw("background", high=NUM_BACKGROUNDS - 1)
    is_event, is_needle = kind == CLIP_KINDS.index("events"), kind == CLIP_KINDS.index("needle")
    event = 1 + draw("event", NUM_OBJECTS, high=len(EVENTS) - 1)
    frame = 1 + draw_distinct("frame", NUM_OBJECTS, T - 1)
    needle = draw("needle", high=T)
    frame[:, 2] = torch.where(is_needle, needle, frame[:, 2])
    return ClipBatch(
        kind=kind,
        background=(offset - combination) % NUM_BACKGROUNDS,
        shape=shape,
        colour=colour,
        new_colour=(colour + 1 + change) % len(COLOURS),
        lane=lane,
        column=draw("column", NUM_OBJECTS, high=3),
        event=torch.where(is_event[:, None], event, NO_EVENT),
        frame=frame,
        move_frames=2 + draw("move", NUM_OBJECTS, high=MAX_MOVE_FRAMES - 1),
        jumps=torch.stack(
            [
                _sample_jumps(1 + draw("jumps 0", high=MAX_JUMPS), draw_distinct, "jump 0", T),
                _sample_jumps(draw("jumps 1", high=MAX_JUMPS), draw_distinct, "jump 1", T),
            ],
            1,
        ).masked_fill((kind != CLIP_KINDS.index("jumps"))[:, None, None], T),
        num_frames=T,
    )


def _sample_jumps(
    count: Tensor, draw_distinct: Callable[[str, int, Tensor], Tensor], name: str, num_frames: int
) -> Tensor:
    """Sample `count` (B,) frames from 1 on, no two of them adjacent: (B, J), ascending, padded with `num_frames`."""
    rank = torch.arange(MAX_JUMPS, device=count.device)
    places = draw_distinct(name, MAX_JUMPS, num_frames - count.clamp(min=1))  # a gap of one frame after each jump
    places = torch.where(rank < count[:, None], places, num_frames).sort(1).values
    return torch.where(rank < count[:, None], 1 + places + rank, num_frames)
