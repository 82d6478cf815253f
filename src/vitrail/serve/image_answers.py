"""Answers of models without tokens: embeddings of texts and images, and images that are drawn or edited."""

import base64
import io
import time
from collections.abc import Sequence
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import msgspec
import numpy as np

from vitrail.errors import VitrailError
from vitrail.serve.openai_schema import (
    APIError,
    EmbeddingInput,
    EmbeddingRequest,
    ImageEditRequest,
    ImageRequest,
    convert_validation_error,
    to_api_error,
)
from vitrail.serve.served_model import ServedModel

FILE_PREFIX = "data:application/octet-stream;base64,"  # of the files of a form


def embed_inputs(model: ServedModel, request: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """Embed texts and images. Returns vectors and the number of text tokens."""
    inputs = request.input if isinstance(request.input, list) else [request.input]
    pipeline = model.pipeline
    for index, one in enumerate(inputs):
        if isinstance(one, str) and not one.strip():
            raise APIError("the text is empty", param=f"input[{index}]")
    texts = [one for one in inputs if isinstance(one, str)]
    images = [
        model.load_image(one.image_url, f"input[{i}].image_url.url")
        for i, one in enumerate(inputs)
        if isinstance(one, EmbeddingInput)
    ]
    try:
        with model.lock:
            rows = {"text": iter(pipeline.encode_texts(texts).numpy()) if texts else iter(())}
            rows["image"] = iter(pipeline.encode_images(images).numpy()) if images else iter(())
            tokens = sum(len(pipeline.tokenizer.encode(text)) for text in texts)
    except VitrailError as error:
        raise to_api_error(error, "input") from None
    vectors = [next(rows["text" if isinstance(one, str) else "image"]) for one in inputs]
    if request.dimensions is not None and request.dimensions != len(vectors[0]):
        raise APIError(f"dimensions must be {len(vectors[0])} for this model", param="dimensions")
    return vectors, tokens


def encode_vector(vector: np.ndarray, encoding: str) -> Any:
    vector = vector.astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()


def _check_size(model: ServedModel, size: str | None) -> None:
    height, width = model.pipeline.model.codec.image_size
    if size not in (None, "auto", f"{width}x{height}"):
        raise APIError(f"{model.name} draws {width}x{height} pixels", param="size")


def _encode_images(images: Sequence[Any]) -> dict[str, Any]:
    data = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        data.append({"b64_json": base64.b64encode(file.getvalue()).decode()})
    return {"created": int(time.time()), "data": data, "output_format": "png"}


def draw_images(model: ServedModel, request: ImageRequest) -> dict[str, Any]:
    """Draw images from a prompt."""
    _check_size(model, request.size)
    options = {} if request.guidance_scale is None else {"guidance_scale": request.guidance_scale}
    try:
        with model.lock:
            return _encode_images(
                model.pipeline.draw([request.prompt] * (request.n or 1), seed=request.seed, **options)
            )
    except VitrailError as error:
        raise to_api_error(error, "prompt") from None


def edit_image(model: ServedModel, request: ImageEditRequest) -> dict[str, Any]:
    """Draw the box around the transparent pixels of the mask again; without a mask, draw variations of the image."""
    _check_size(model, request.size)
    image, box = model.load_image(request.image, "image"), None
    if request.mask is not None:
        box = find_transparent_box(model.read_data_url(request.mask, "mask"))
    options: dict[str, Any] = {} if request.guidance_scale is None else {"guidance_scale": request.guidance_scale}
    try:
        with model.lock:
            if box is None:
                found = model.pipeline.vary(image, request.prompt, count=request.n or 1, seed=request.seed, **options)
            else:
                prompts = [request.prompt] * (request.n or 1)
                found = model.pipeline.inpaint(image, prompts, box, seed=request.seed, **options)
    except VitrailError as error:
        raise to_api_error(error, "prompt") from None
    return _encode_images(found)


def find_transparent_box(data: bytes) -> tuple[float, float, float, float]:
    """Return the box (x0, y0, x1, y1 in 0 … 1) around the transparent pixels of a PNG."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as mask:
            if mask.width * mask.height > 1 << 24:
                raise APIError("the mask has too many pixels", param="mask")
            found = mask.convert("RGBA").getchannel("A").point(lambda level: 255 if level < 128 else 0).getbbox()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise APIError(f"the mask is no PNG image: {str(error)[:200]}", param="mask") from None
    if found is None:
        raise APIError("the mask has no transparent pixels", param="mask")
    return found[0] / mask.width, found[1] / mask.height, found[2] / mask.width, found[3] / mask.height


def parse_form(body: bytes, content_type: str) -> ImageEditRequest:
    """Decode a multipart form."""
    try:
        parsed = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
        fields: dict[str, Any] = {}
        for part in parsed.iter_parts():
            name = part.get_param("name", header="content-disposition")
            data = part.get_payload(decode=True)
            if isinstance(name, str) and isinstance(data, bytes):
                name = name.removesuffix("[]")
                is_file = name in ("image", "mask")
                fields[name] = FILE_PREFIX + base64.b64encode(data).decode() if is_file else data.decode()
    except Exception as error:  # the parser raises many kinds of errors
        raise APIError(f"the form cannot be read: {type(error).__name__}") from None
    try:
        return msgspec.convert(fields, ImageEditRequest, strict=False)
    except msgspec.ValidationError as error:
        raise convert_validation_error(error, ImageEditRequest) from None
