"""The protocol between the page and the server over a WebSocket.

The page sends text messages, which are `ResetMessage` or `StepMessage` as JSON, and binary messages, which are image
files to start from. The server replies to each message once, with a binary frame or with an `ErrorMessage` as JSON. Its
first message is a `HelloMessage`.

A binary frame is the length of a JSON text (4 bytes, little-endian), the JSON text of a `FrameMessage`, and the RGB
pixels of each view, row by row.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, VitrailError

MAX_MESSAGE_LENGTH = 1000  # characters of a text message
SEED_LIMIT = 2**31  # exclusive limit of the seeds of simulators

NonNegativeInt: TypeAlias = Annotated[int, Meta(ge=0, lt=SEED_LIMIT)]
StartChoice: TypeAlias = Literal["real", "picture", "any"] | NonNegativeInt
"""Start of the model: the simulator's first frame, the uploaded image, any start image, or a start image by index."""


class ResetMessage(Config, tag="reset", tag_field="do"):
    """Reset the worlds. Without a seed it is random."""

    start: StartChoice
    seed: NonNegativeInt | None = None


class StepMessage(Config, tag="step", tag_field="do"):
    """Take one action, by its index in `HelloMessage.actions`."""

    action: NonNegativeInt


class ActionInfo(Config):
    """An action: its name, its keys, and whether it acts in the model and in the simulator."""

    name: str
    keys: tuple[str, ...]
    model: bool
    real: bool


class HelloMessage(Config, tag="hello", tag_field="is"):
    """The first message of the server.

    idle        index of the action while no key is held
    rate        steps a second of the world
    starts      number of start images of the model
    choices     available start choices
    most_bytes  maximum size of an uploaded image; 0 if uploads are not supported
    """

    title: str
    views: tuple[str, ...]
    actions: tuple[ActionInfo, ...]
    idle: int | None
    rate: float
    starts: int
    choices: tuple[str, ...]
    most_bytes: int


class ViewInfo(Config):
    """The current frame of one world. Only a simulator has a reward and an end."""

    name: str
    height: int
    width: int
    reward: float | None = None
    ended: bool = False


class FrameMessage(Config, tag="frame", tag_field="is"):
    """The header of a binary frame."""

    step: int
    seed: int
    start: StartChoice
    ms: float  # time on the server in milliseconds
    views: tuple[ViewInfo, ...]


class ErrorMessage(Config, tag="error", tag_field="is"):
    """A refused message. `is_running` says whether the world continues."""

    problem: str
    remedy: str
    is_running: bool


_message_decoder = msgspec.json.Decoder(ResetMessage | StepMessage)


def parse_message(text: str) -> ResetMessage | StepMessage:
    """Parse a text message. Invalid messages are refused with the reason."""
    if len(text) > MAX_MESSAGE_LENGTH:
        raise DataError(f"the message has {len(text):,} characters", f"send at most {MAX_MESSAGE_LENGTH:,}")
    try:
        return _message_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ConfigError) as error:
        remedy = 'send {"do": "step", "action": 0} or {"do": "reset", …}'
        if "$.seed" in str(error):
            remedy = f"give a whole number from 0 to {SEED_LIMIT - 1}"
        raise DataError(f"the message is invalid: {error}", remedy) from None


def encode_error(error: VitrailError, is_running: bool = False) -> str:
    """Encode an error as a text message."""
    return encode_message(ErrorMessage(problem=error.problem, remedy=error.remedy, is_running=is_running))


def encode_message(message: HelloMessage | ErrorMessage) -> str:
    """Encode a text message."""
    return msgspec.json.encode(message).decode()


def pack_frame(frame: FrameMessage, pixels: list[np.ndarray]) -> bytes:
    """Pack a frame with the pixels of each view, uint8 (H, W, 3)."""
    head = msgspec.json.encode(frame)
    return b"".join([len(head).to_bytes(4, "little"), head, *(np.ascontiguousarray(one).tobytes() for one in pixels)])


def unpack_frame(data: bytes) -> tuple[FrameMessage, list[np.ndarray]]:
    """Unpack a frame; the inverse of `pack_frame`."""
    end = 4 + int.from_bytes(data[:4], "little")
    frame, pixels = msgspec.json.decode(data[4:end], type=FrameMessage), []
    for view in frame.views:
        shape = (view.height, view.width, 3)
        pixels.append(np.frombuffer(data, np.uint8, int(np.prod(shape)), end).reshape(shape))
        end += pixels[-1].size
    return frame, pixels
