"""What the page and the server say to each other over a socket.

The page sends texts, which are `Reset` or `Step` as JSON, and bytes, which are the file of a picture to start from. To
each the server answers once: with a frame, in bytes, or with an `Error`, as JSON. Before all it says `Hello`.

A frame is the length of a JSON text (4 bytes, the lowest first), that text (`Frame`), and behind it the pixels of each
view in turn, RGB, row by row.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, VitrailError

LONGEST = 1000  # characters of a message
SEEDS = 2**31  # simulators take no larger ones

Number: TypeAlias = Annotated[int, Meta(ge=0, lt=SEEDS)]
Start: TypeAlias = Literal["real", "picture", "any"] | Number
"""Where the model starts: as the simulator does, from the picture given, or from a picture that came with it"""


class Reset(Config, tag="reset", tag_field="do"):
    """Begin anew; by chance where no seed is given."""

    start: Start
    seed: Number | None = None


class Step(Config, tag="step", tag_field="do"):
    """One action, by its number in `Hello.actions`."""

    action: Number


class Offer(Config):
    """An action: its name, the keys that are held together for it, and which of the two sides it moves."""

    name: str
    keys: tuple[str, ...]
    model: bool
    real: bool


class Hello(Config, tag="hello", tag_field="is"):
    """What can be played here. `idle` is the action while no key is held; `starts` counts the pictures that came with
    the model; `rate` is how many steps a second the world was made for."""

    title: str
    views: tuple[str, ...]
    actions: tuple[Offer, ...]
    idle: int | None
    rate: float
    starts: int
    choices: tuple[str, ...]  # of the words that are a `Start`, those that can be asked for now
    most_bytes: int


class View(Config):
    """One of the two worlds as it is seen now; a model knows no reward and no end."""

    name: str
    height: int
    width: int
    reward: float | None = None
    ended: bool = False


class Frame(Config, tag="frame", tag_field="is"):
    step: int
    seed: int
    start: Start
    ms: float  # that the server took
    views: tuple[View, ...]


class Error(Config, tag="error", tag_field="is"):
    """`begun` is whether the world that was being played goes on as it was."""

    problem: str
    remedy: str
    begun: bool


_asked = msgspec.json.Decoder(Reset | Step)


def read(text: str) -> Reset | Step:
    """Refused with the reason unless it is exactly one of the two."""
    if len(text) > LONGEST:
        raise DataError(f"a message of {len(text):,} characters", f"{LONGEST:,} are enough")
    try:
        return _asked.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ConfigError) as error:
        remedy = 'say {"do": "step", "action": 0} or {"do": "reset", …}'
        if "$.seed" in str(error):
            remedy = f"seeds are whole numbers below {SEEDS}"
        raise DataError(f"this is no message: {error}", remedy) from None


def failed(error: VitrailError, begun: bool = False) -> str:
    return say(Error(problem=error.problem, remedy=error.remedy, begun=begun))


def say(message: Hello | Error) -> str:
    return msgspec.json.encode(message).decode()


def pack(frame: Frame, pixels: list[np.ndarray]) -> bytes:
    """uint8 (H, W, 3) of each view"""
    head = msgspec.json.encode(frame)
    return b"".join([len(head).to_bytes(4, "little"), head, *(np.ascontiguousarray(one).tobytes() for one in pixels)])


def unpack(data: bytes) -> tuple[Frame, list[np.ndarray]]:
    """The inverse of `pack`."""
    end = 4 + int.from_bytes(data[:4], "little")
    frame, pixels = msgspec.json.decode(data[4:end], type=Frame), []
    for view in frame.views:
        shape = (view.height, view.width, 3)
        pixels.append(np.frombuffer(data, np.uint8, int(np.prod(shape)), end).reshape(shape))
        end += pixels[-1].size
    return frame, pixels
