"""The kinds of members a sample may have: how each is written, and how it is read. A new one is a row of `KINDS`."""

import io
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from vitrail.processing.images import load_image


class Kind(NamedTuple):
    """`encode` turns a value into the bytes of a member. `decode` turns them back; pictures have none, since what they
    become is a matter of policy (`decode_picture`)."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any] | None


def kind_of(ending: str) -> Kind | None:
    """The kind of a member by the last part of its ending: "seg.png" is a PNG."""
    return KINDS.get(ending.rsplit(".", 1)[-1])


def _picture(form: str, **options: Any) -> Kind:
    def encode(value: Any) -> bytes:
        image = value if isinstance(value, Image.Image) and value.mode in ("L", "RGB") else load_image(value)
        file = io.BytesIO()
        image.copy().save(file, form, **options)  # Pillow's writer leaves its settings on a picture
        return file.getvalue()

    return Kind(encode, None)


def _array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


_JPEG = _picture("JPEG", quality=95)

KINDS = {
    "jpg": _JPEG,
    "jpeg": _JPEG,
    "png": _picture("PNG"),
    "webp": _picture("WEBP", lossless=True),
    "txt": Kind(str.encode, bytes.decode),
    "json": Kind(_json, msgspec.json.decode),
    "cls": Kind(lambda value: str(operator.index(value)).encode(), int),
    "npy": Kind(_array, lambda data: np.load(io.BytesIO(data), allow_pickle=False)),
}
