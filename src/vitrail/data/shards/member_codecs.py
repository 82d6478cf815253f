"""Encoding and decoding of the members of a sample, by kind. A new kind is a row of `MEMBER_CODECS`."""

import io
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from vitrail.processing.image_loading import load_image


class MemberCodec(NamedTuple):
    """How a member is encoded and decoded. Images have no decoder here: `decode_image` applies the configured
    transform."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any] | None


def get_codec(ending: str) -> MemberCodec | None:
    """Return the codec of a member by the last part of its ending: "seg.png" is a PNG."""
    return MEMBER_CODECS.get(ending.rsplit(".", 1)[-1])


def _image_codec(form: str, **options: Any) -> MemberCodec:
    def encode(value: Any) -> bytes:
        image = value if isinstance(value, Image.Image) and value.mode in ("L", "RGB") else load_image(value)
        file = io.BytesIO()
        image.copy().save(file, form, **options)  # Pillow's writer stores its settings on the image
        return file.getvalue()

    return MemberCodec(encode, None)


def _encode_array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _encode_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


_JPEG_CODEC = _image_codec("JPEG", quality=95)

MEMBER_CODECS = {
    "jpg": _JPEG_CODEC,
    "jpeg": _JPEG_CODEC,
    "png": _image_codec("PNG"),
    "webp": _image_codec("WEBP", lossless=True),
    "txt": MemberCodec(str.encode, bytes.decode),
    "json": MemberCodec(_encode_json, msgspec.json.decode),
    "cls": MemberCodec(lambda value: str(operator.index(value)).encode(), int),
    "npy": MemberCodec(_encode_array, lambda data: np.load(io.BytesIO(data), allow_pickle=False)),
}
