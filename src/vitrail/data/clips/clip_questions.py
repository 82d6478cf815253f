"""Questions about clips with their answers, as rows of text pieces.

Every clip has five questions. One is about its shapes and their colours, which need no time; it is a control. The
others depend on the kind of the clip:

    events  what happens first, what happens last, when an event happens, in which third of the clip another one happens
    jumps   how often each of two shapes jumps, when the first one jumps first, and in which third
    needle  what is visible in a single frame, when, in which third, and how often a shape jumps (never)

Shapes: B clips, Q questions of a clip, P pieces of a question or an answer
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.data.clips.clip_sampler import CLIP_KINDS, COLOURS, EVENTS, MAX_JUMPS, SHAPES, TURNS, ClipBatch
from vitrail.data.language.text_pieces import PieceTable
from vitrail.data.scenes.counter_rng import random_integers
from vitrail.errors import ConfigError

QUESTION_KINDS = ("order", "count", "when", "part", "needle", "shapes")
KINDS_OF_CLIPS = (
    ("order", "order", "when", "part", "shapes"),
    ("count", "count", "when", "part", "shapes"),
    ("needle", "when", "part", "count", "shapes"),
)
"""Kinds of the questions about each kind of clip, in the order of CLIP_KINDS."""
NUM_QUESTIONS = len(KINDS_OF_CLIPS[0])
PIECES = 6  # of a question, and of an answer
MAX_SECONDS = 1024
STEPS_PER_SECOND = 4  # times are multiples of a quarter of a second
PARTS = ("the beginning", "the middle", "the end")
EVENT_VERBS = ("", " appears", " disappears", " turns", " moves to the right", " moves to the left")
EVENT_QUESTIONS = ("", " appear?", " disappear?", " change its colour?", " move?", " move?")
FIRST_WORDINGS = ("What happens first?", "Which event comes first?")
LAST_WORDINGS = ("What happens last?", "Which event comes last?")


class ClipQuestions(NamedTuple):
    """Questions with their answers. Rows of pieces are padded with the empty piece 0."""

    question: Tensor  # (B, Q, P)
    answer: Tensor  # (B, Q, P)
    kind: Tensor  # (B, Q) index into QUESTION_KINDS


class _Rows(NamedTuple):
    """Rows of the pieces in the table."""

    table: PieceTable
    the_shape: Tensor
    the_shape_first: Tensor
    event_verb: Tensor
    event_question: Tensor
    colour: Tensor
    colour_first: Tensor
    first: Tensor
    last: Tensor
    when: int
    when_needle: int
    which_part: int
    how_often: int
    needle: int
    which_shapes: int
    jump: int
    jump_first: int
    visible: int
    times: Tensor
    number: Tensor
    part: Tensor
    a_colour: Tensor
    shape: Tensor
    kinds: Tensor  # (clip kinds, Q) index into QUESTION_KINDS


@cache
def _rows() -> _Rows:
    table = PieceTable()
    return _Rows(
        table,
        the_shape=table.add_all([f" the {name}" for name in SHAPES]),
        the_shape_first=table.add_all([f"the {name}" for name in SHAPES]),
        event_verb=table.add_all(EVENT_VERBS),
        event_question=table.add_all(EVENT_QUESTIONS),
        colour=table.add_all([f" {name}" for name in COLOURS]),
        colour_first=table.add_all(COLOURS),
        first=table.add_all(FIRST_WORDINGS),
        last=table.add_all(LAST_WORDINGS),
        when=table.add("When does"),
        when_needle=table.add("When is"),
        which_part=table.add("In which part does"),
        how_often=table.add("How often does"),
        needle=table.add("What is visible in only one frame?"),
        which_shapes=table.add("Which shapes are there?"),
        jump=table.add(" jump?"),
        jump_first=table.add(" jump first?"),
        visible=table.add(" visible?"),
        times=table.add_all([format_time(step / STEPS_PER_SECOND) for step in range(MAX_SECONDS * STEPS_PER_SECOND)]),
        number=table.add_all([str(n) for n in range(MAX_JUMPS + 1)]),
        part=table.add_all(PARTS),
        a_colour=table.add_all([f"a {name}" for name in COLOURS]),
        shape=table.add_all([f" {name}" for name in SHAPES]),
        kinds=torch.tensor([[QUESTION_KINDS.index(name) for name in names] for names in KINDS_OF_CLIPS]),
    )


@cache
def _rows_on(device: torch.device) -> _Rows:
    tensors: dict[str, Any] = {name: x.to(device) for name, x in _rows()._asdict().items() if isinstance(x, Tensor)}
    return _rows()._replace(**tensors)


def format_time(seconds: float) -> str:
    """Format the time of an event as answers give it, with the digits of a text timestamp."""
    return f"{seconds:.1f} seconds"


def get_piece_table() -> PieceTable:
    """Return the table of all pieces of questions and answers."""
    return _rows().table


def generate_clip_questions(clips: ClipBatch, index: Tensor, fps: float, seed: int = 0) -> ClipQuestions:
    """Generate the questions about clips whose frames are 1 / fps seconds apart."""
    T, steps, rows = clips.num_frames, STEPS_PER_SECOND / fps, _rows_on(clips.kind.device)
    if steps != int(steps) or (T - 1) / fps >= MAX_SECONDS:
        raise ConfigError(
            f"clips of {T} frames at {fps:g} frames per second", f"use 1, 2 or 4, and less than {MAX_SECONDS} seconds"
        )
    zero = torch.zeros_like(index)

    def draw(name: str, high: int) -> Tensor:
        return random_integers(seed, index, f"question {T} {name}", high=high)

    def pick(values: Tensor, place: Tensor) -> Tensor:
        return values.gather(1, place[:, None])[:, 0]

    def row(*pieces: Tensor | int) -> Tensor:
        columns = [zero + piece for piece in pieces]
        return torch.stack([*columns, *[zero] * (PIECES - len(columns))], 1)

    def describe(place: Tensor) -> Tensor:
        """Describe the event of one object of each clip."""
        event = pick(clips.event, place)
        colour = torch.where(event == TURNS, rows.colour[pick(clips.new_colour, place)], 0)
        return row(rows.the_shape_first[pick(clips.shape, place)], rows.event_verb[event], colour)

    def tell_time(frame: Tensor) -> Tensor:
        return row(rows.times[frame * int(steps)])

    def tell_part(frame: Tensor) -> Tensor:
        return row(rows.part[frame * len(PARTS) // T])

    def ask_event(start: int, place: Tensor) -> Tensor:
        name = rows.the_shape[pick(clips.shape, place)]
        return row(start, name, rows.event_question[pick(clips.event, place)])

    wording = draw("wording", len(FIRST_WORDINGS))
    one = draw("object", 3)
    other = (one + 1 + draw("other object", 2)) % 3
    names = rows.the_shape[clips.shape]
    first, last = clips.frame.argmin(1), clips.frame.argmax(1)
    first_jump, jumps = clips.jumps[:, 0, 0].clamp(max=T - 1), clips.num_jumps
    needle = clips.frame[:, 2]
    needle_name = row(rows.a_colour[clips.colour[:, 2]], rows.shape[clips.shape[:, 2]])
    which_shapes, list_shapes = row(rows.which_shapes), _list_shapes(clips, rows)
    questions = (  # by kind of clip
        (
            row(rows.first[wording]),
            row(rows.last[wording]),
            ask_event(rows.when, one),
            ask_event(rows.which_part, other),
            which_shapes,
        ),
        (
            row(rows.how_often, names[:, 0], rows.jump),
            row(rows.how_often, names[:, 1], rows.jump),
            row(rows.when, names[:, 0], rows.jump_first),
            row(rows.which_part, names[:, 0], rows.jump_first),
            which_shapes,
        ),
        (
            row(rows.needle),
            row(rows.when_needle, names[:, 2], rows.visible),
            row(rows.which_part, names[:, 2], rows.event_question[1]),
            row(rows.how_often, names[:, 0], rows.jump),
            which_shapes,
        ),
    )
    when, part = tell_time(pick(clips.frame, one)), tell_part(pick(clips.frame, other))
    often = [row(rows.number[jumps[:, n]]) for n in (0, 1)]
    answers = (
        (describe(first), describe(last), when, part, list_shapes),
        (*often, tell_time(first_jump), tell_part(first_jump), list_shapes),
        (needle_name, tell_time(needle), tell_part(needle), often[0], list_shapes),
    )
    place = clips.kind[:, None, None, None]

    def select(options: tuple[tuple[Tensor, ...], ...]) -> Tensor:
        stacked = torch.stack([torch.stack(own, 1) for own in options], 1)  # (B, kinds, Q, P)
        return stacked.gather(1, place.expand(-1, 1, *stacked.shape[2:]))[:, 0]

    return ClipQuestions(select(questions), select(answers), rows.kinds[clips.kind])


def _list_shapes(clips: ClipBatch, rows: _Rows) -> Tensor:
    """Name the shapes (B, P) from top to bottom, with the colours that they have at first."""
    order = clips.lane.argsort(1)
    colour, shape = clips.colour.gather(1, order), rows.shape[clips.shape.gather(1, order)]
    first, others = rows.colour_first[colour[:, :1]], rows.colour[colour[:, 1:]]
    return torch.stack([torch.cat([first, others], 1), shape], 2).flatten(1)


assert len(EVENT_VERBS) == len(EVENT_QUESTIONS) == len(EVENTS) and len(CLIP_KINDS) == 3
