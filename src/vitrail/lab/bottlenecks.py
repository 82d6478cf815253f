"""Collect the activations of every bottleneck that an image passes through in a model.

Shapes: B images, N tokens, D width, H × W pixels.
"""

from collections.abc import Iterator
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.encoders import ConvTower, ViT
from vitrail.errors import ConfigError
from vitrail.evals.image_feature_extractor import find_image_tower
from vitrail.lab.bottleneck_information import Bottleneck
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.genie_model import Genie
from vitrail.models.qlip_model import QLIP
from vitrail.models.unified_model import UnifiedModel
from vitrail.models.vlm import VLM
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.stream import build_stream, pack_streams

BATCH_SIZE = 64
DEFAULT_IMAGE_SIZE = 224  # image size for models that accept any size


def get_image_size(model: nn.Module) -> int:
    """Return the image size (pixels per side) to use for a model."""
    if isinstance(model, VLM | CrossAttentionVLM):
        return getattr(getattr(model.config, "policy", None), "image_size", DEFAULT_IMAGE_SIZE)
    codec = model.codec if isinstance(model, Genie) else find_codec(model)
    if codec is not None:
        return codec.image_size[0]
    return _get_tower(model).config.image


def load_preprocessing(model: nn.Module, folder: Path) -> ImagePreprocessor | None:
    """Read the preprocessing of a vision tower from its folder; None for models that prepare images themselves."""
    if isinstance(model, VLM | CrossAttentionVLM | Genie) or find_codec(model) is not None:
        return None
    tower = _get_tower(model)
    return ImagePreprocessor.from_folder(folder, tower.config, require_tower_size=tower is not model)


def find_codec(model: nn.Module) -> Codec | None:
    found = getattr(model, "codec", model)
    return found if isinstance(found, Codec) else None


@torch.no_grad()
def collect_bottlenecks(
    model: nn.Module, images: Tensor, preprocessing: ImagePreprocessor | None = None
) -> list[Bottleneck]:
    """Collect the pixels and every later bottleneck of images, as float32 on the CPU.

    `images` is uint8 (B, 3, H, W). `preprocessing` applies to vision towers only and defaults to that of towers trained
    with this library; other models prepare images themselves.
    """
    model = model.eval()
    parts = [list(_iter_bottlenecks(model, some, preprocessing)) for some in images.split(BATCH_SIZE)]
    pixels = Bottleneck("pixels", images.flatten(2).mT.float() / 127.5 - 1, 24)
    joined = [each[0]._replace(tokens=torch.cat([b.tokens for b in each])) for each in zip(*parts, strict=True)]
    return [pixels, *joined]


@singledispatch
def _iter_bottlenecks(
    model: nn.Module, images: Tensor, preprocessing: ImagePreprocessor | None
) -> Iterator[Bottleneck]:
    """Yield the bottlenecks after the pixels: those of a vision tower, or of a model that is registered below."""
    tower = _get_tower(model)
    prepare = preprocessing or ImagePreprocessor.default(tower.config)
    own = next(model.parameters())
    pixels = torch.stack([prepare(picture.permute(1, 2, 0).cpu().numpy()) for picture in images]).to(own)
    yield Bottleneck("patches", _to_cpu(tower(pixels)))
    if isinstance(tower, ConvTower) or tower.config.pool != "none":
        yield Bottleneck(
            "pooled", _to_cpu(tower.forward_pooled(pixels)[:, None]), source=_get_pooled_source(tower.config, "patches")
        )
    if isinstance(model, ContrastiveModel) and model.config.embed_dim:
        yield Bottleneck("embedding", _to_cpu(model.encode_image(pixels)[:, None]))


@_iter_bottlenecks.register
def _(model: VLM | CrossAttentionVLM, images: Tensor, preprocessing: None) -> Iterator[Bottleneck]:
    found = [list(_iter_vlm_bottlenecks(model, picture)) for picture in images]
    for each in zip(*found, strict=True):
        yield each[0]._replace(tokens=torch.stack([b.tokens for b in each]))


@_iter_bottlenecks.register
def _(model: UnifiedModel, images: Tensor, preprocessing: None) -> Iterator[Bottleneck]:
    codec = model.codec
    yield from _iter_codec_bottlenecks(codec, codec.to_pixels(images))
    features, _ = model.encode_images(codec.to_pixels(images))
    piece = model.make_input_image_piece(features)
    source = "features" if model.config.image_input == "features" else "codes"
    yield Bottleneck("soft tokens", _to_cpu(piece.embeds[:, 1:]), source=source)
    yield Bottleneck("last hidden states", _to_cpu(model.forward_hidden(model.build_layout(piece))[:, 1:]))


@_iter_bottlenecks.register
def _(model: QLIP, images: Tensor, preprocessing: None) -> Iterator[Bottleneck]:
    pixels = model.codec.to_pixels(images)
    yield from _iter_codec_bottlenecks(model.codec, pixels)
    after = _get_pooled_source(model.config.image, "features")
    yield Bottleneck("embedding", _to_cpu(model.encode_image(pixels)[:, None]), source=after)


@_iter_bottlenecks.register
def _(model: Codec, images: Tensor, preprocessing: None) -> Iterator[Bottleneck]:
    yield from _iter_codec_bottlenecks(model, model.to_pixels(images))


@_iter_bottlenecks.register
def _(model: Genie, images: Tensor, preprocessing: None) -> Iterator[Bottleneck]:
    """Yield the codes of the first frame: later frames depend on actions."""
    found = model.codec.encode(model.codec.to_pixels(images[:, None]))
    yield Bottleneck("codes", _to_cpu(found.codes.flatten(1, 3)), model.codec.bits)


def _iter_codec_bottlenecks(codec: Codec, pixels: Tensor) -> Iterator[Bottleneck]:
    features = codec.forward_features(pixels)  # (B, h, w, E)
    yield Bottleneck("features", _to_cpu(features.flatten(1, 2)))
    yield Bottleneck("before the quantizer", _to_cpu(codec.pre_quant_proj(features).flatten(1, 2)))
    yield Bottleneck("codes", _to_cpu(codec.quantize(features).codes.flatten(1, 2)), codec.bits)


def _get_pooled_source(config: Any, tokens: str) -> str:
    """Name the bottleneck that pooled features derive from. A CLS token is not computed from the final patches."""
    return "pixels" if getattr(config, "pool", "") == "cls" else tokens


def _get_tower(model: nn.Module) -> Any:
    found = find_image_tower(model)
    if not isinstance(found, ViT | ConvTower):
        raise ConfigError(
            f"bottlenecks of a {type(model).__name__} are not supported",
            "use a codec, a vision tower, a contrastive, vision-language, unified or world model",
        )
    return found


def _iter_vlm_bottlenecks(model: VLM | CrossAttentionVLM, image_tensor: Tensor) -> Iterator[Bottleneck]:
    """Yield the input and output of the connector, and the decoder's last hidden states where images are tokens."""
    captured: list[Tensor] = []
    hooks = []
    if model.connector is not None:
        hooks.append(
            model.connector.register_forward_hook(lambda _module, inputs, output: captured.extend((inputs[0], output)))
        )
    try:
        image = Image.fromarray(image_tensor.permute(1, 2, 0).cpu().numpy())
        if isinstance(model, VLM):
            inputs = model.prepare_images([image])
            stream = build_stream(model.config.make_parts(inputs.layouts[0]), model.config.rules)
            last = model.forward_hidden(pack_streams([stream], len(stream)), inputs)[0]
            if model.queries is not None:  # the decoder reads the queries, not the connector output
                captured[2:] = [model.encode_images(inputs).features[0]]
        else:
            last = model.encode_images(model.prepare_images([image]))[0]
    finally:
        for hook in hooks:
            hook.remove()
    names = ("tower", "soft tokens") if len(captured) < 3 else ("tower", "before the queries", "soft tokens")
    for name, tokens in zip(names, captured, strict=False):
        yield Bottleneck(name, _to_cpu(tokens.flatten(0, -2)))
    if isinstance(model, VLM):
        # DeepStack features also reach the decoder, in addition to the soft tokens.
        yield Bottleneck("last hidden states", _to_cpu(last), source="pixels" if len(model.stack) else "")
    elif not captured:
        yield Bottleneck("tower", _to_cpu(last))


def _to_cpu(x: Tensor) -> Tensor:
    return x.float().cpu()
