"""The places in a model that all of a picture goes through, with what is there.

B pictures, N tokens, D width, H, W pixels
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.encoders import Conv, ViT
from vitrail.errors import ConfigError
from vitrail.evals.viewer import tower_of
from vitrail.lab.information import Bottleneck
from vitrail.models.clip import Contrastive
from vitrail.models.genie import Genie
from vitrail.models.looking import LookingVLM
from vitrail.models.qlip import QLIP
from vitrail.models.unified import Unified
from vitrail.models.vlm import VLM
from vitrail.processing.preprocessing import Preprocessing
from vitrail.stream import build, pack

BATCH = 64
DRAWN = 224  # pixels of a side of what models that take any size are shown


def side_of(model: nn.Module) -> int:
    """Pixels of a side of the pictures that a model is shown here."""
    if isinstance(model, VLM | LookingVLM):
        return getattr(getattr(model.config, "policy", None), "size", DRAWN)
    codec = model.codec if isinstance(model, Genie) else codec_of(model)
    if codec is not None:
        return codec.size[0]
    return _tower(model).config.image


def prepared_as(model: nn.Module, folder: Path) -> Preprocessing | None:
    """How the folder of a tower, or of a model with one, says that its pictures are prepared; other models know."""
    if isinstance(model, VLM | LookingVLM | Genie) or codec_of(model) is not None:
        return None
    tower = _tower(model)
    return Preprocessing.read(folder, tower.config, fixed=tower is not model)


def codec_of(model: nn.Module) -> Codec | None:
    found = getattr(model, "codec", model)
    return found if isinstance(found, Codec) else None


@torch.no_grad()
def bottlenecks(model: nn.Module, pictures: Tensor, preprocessing: Preprocessing | None = None) -> list[Bottleneck]:
    """pictures uint8 (B, 3, H, W) → pixels and every bottleneck after them, on the CPU, in float32. Towers are shown
    pictures as `preprocessing` says, or as models trained here are; other models know themselves."""
    model = model.eval()
    parts = [list(_walk(model, some, preprocessing)) for some in pictures.split(BATCH)]
    pixels = Bottleneck("pixels", pictures.flatten(2).mT.float() / 127.5 - 1, 24)
    joined = [each[0]._replace(tokens=torch.cat([b.tokens for b in each])) for each in zip(*parts, strict=True)]
    return [pixels, *joined]


def _walk(model: nn.Module, pictures: Tensor, preprocessing: Preprocessing | None) -> Iterator[Bottleneck]:
    match model:
        case VLM() | LookingVLM():
            found = [list(_seen(model, picture)) for picture in pictures]
            for each in zip(*found, strict=True):
                yield each[0]._replace(tokens=torch.stack([b.tokens for b in each]))
        case Unified():
            codec = model.codec
            yield from _coded(codec, codec.pixels(pictures))
            seen, _ = model.look(codec.pixels(pictures))
            shown = model.shown(seen)
            read = "features" if model.config.sees == "features" else "codes"
            yield Bottleneck("soft tokens", _kept(shown.x[:, 1:]), after=read)
            yield Bottleneck("last hidden states", _kept(model.hidden(model.lay(shown))[:, 1:]))
        case QLIP():
            pixels = model.codec.pixels(pictures)
            yield from _coded(model.codec, pixels)
            after = _pooled_from(model.config.image, "features")
            yield Bottleneck("embedding", _kept(model.encode_image(pixels)[:, None]), after=after)
        case Codec():
            yield from _coded(model, model.pixels(pictures))
        case Genie():  # its first frame: what was done since is no matter of a picture
            found = model.codec.encode(model.codec.pixels(pictures[:, None]))
            yield Bottleneck("codes", _kept(found.codes.flatten(1, 3)), model.codec.bits)
        case _:
            yield from _towered(model, pictures, preprocessing)


def _coded(codec: Codec, pixels: Tensor) -> Iterator[Bottleneck]:
    features = codec.features(pixels)  # (B, h, w, E)
    yield Bottleneck("features", _kept(features.flatten(1, 2)))
    yield Bottleneck("before the quantizer", _kept(codec.into(features).flatten(1, 2)))
    yield Bottleneck("codes", _kept(codec.quantize(features).codes.flatten(1, 2)), codec.bits)


def _towered(model: nn.Module, pictures: Tensor, preprocessing: Preprocessing | None) -> Iterator[Bottleneck]:
    tower = _tower(model)
    prepare = preprocessing or Preprocessing.own(tower.config)
    own = next(model.parameters())
    pixels = torch.stack([prepare(picture.permute(1, 2, 0).cpu().numpy()) for picture in pictures]).to(own)
    yield Bottleneck("patches", _kept(tower(pixels)))
    if isinstance(tower, Conv) or tower.config.pool != "none":
        yield Bottleneck("pooled", _kept(tower.pool(pixels)[:, None]), after=_pooled_from(tower.config, "patches"))
    if isinstance(model, Contrastive) and model.config.embed:
        yield Bottleneck("embedding", _kept(model.encode_image(pixels)[:, None]))


def _pooled_from(config: Any, tokens: str) -> str:
    """A CLS token went through all blocks beside the patches: it is not made of what they became."""
    return "pixels" if getattr(config, "pool", "") == "cls" else tokens


def _tower(model: nn.Module) -> Any:
    found = tower_of(model)
    if not isinstance(found, ViT | Conv):
        raise ConfigError(
            f"a {type(model).__name__} has no bottlenecks that are known here",
            "give a codec, a picture tower, a contrastive, a vision-language, a unified or a world model",
        )
    return found


def _seen(model: VLM | LookingVLM, picture: Tensor) -> Iterator[Bottleneck]:
    """What goes into the connector and what comes out of it, and, where pictures are tokens, out of the decoder."""
    kept: list[Tensor] = []
    hooks = []
    if model.connector is not None:
        hooks.append(model.connector.register_forward_hook(lambda module, given, out: kept.extend((given[0], out))))
    try:
        image = Image.fromarray(picture.permute(1, 2, 0).cpu().numpy())
        if isinstance(model, VLM):
            shown = model.prepare([image])
            stream = build(model.config.parts(shown.shapes[0]), model.config.rules)
            last = model.hidden(pack([stream], len(stream)), shown)[0]
            if model.queries is not None:  # which the decoder reads, and not what the connector gives
                kept[2:] = [model.look(shown).blocks[0]]
        else:
            last = model.look(model.prepare([image]))[0]
    finally:
        for hook in hooks:
            hook.remove()
    names = ("tower", "soft tokens") if len(kept) < 3 else ("tower", "before the queries", "soft tokens")
    for name, tokens in zip(names, kept, strict=False):
        yield Bottleneck(name, _kept(tokens.flatten(0, -2)))
    if isinstance(model, VLM):
        # Features of several depths reach the decoder beside the soft tokens.
        yield Bottleneck("last hidden states", _kept(last), after="pixels" if len(model.stack) else "")
    elif not kept:
        yield Bottleneck("tower", _kept(last))


def _kept(x: Tensor) -> Tensor:
    return x.float().cpu()
