"""Contrastive image–text models: CLIP and SigLIP.

Shapes: B images, T texts, E width of the embedding.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.encoder import AnyEncoderConfig, make_encoder
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.encoders.text_tower import TextTower, TextTowerConfig
from vitrail.encoders.vit import Grids, ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.registry import MODELS


class ContrastiveConfig(Config):
    """Config of a `ContrastiveModel`.

    image      config of the image tower
    text       config of the text tower
    embed_dim  width that both towers are projected to (CLIP); None: pooled outputs are the embeddings (SigLIP)
    log_scale  initial log of the logit scale
    bias       initial logit bias; None: no bias
    """

    image: AnyEncoderConfig
    text: TextTowerConfig
    embed_dim: int | None = None
    log_scale: float = math.log(1 / 0.07)
    bias: float | None = None

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        return self.embed_dim or self.image.pooled_width

    def __post_init__(self) -> None:
        if isinstance(self.image, ViTConfig) and self.image.pool == "none":
            raise ConfigError('image.pool is "none"', "set it to cls, mean or attention")
        if not self.image.pooled_width:
            raise ConfigError(
                f"image is a {type(self.image).__name__}, which has no pooled output", "use another encoder"
            )
        widths = self.image.pooled_width, self.text.pooled_width
        if self.embed_dim is None and widths[0] != widths[1]:
            raise ConfigError(
                f"the image tower has width {widths[0]}, the text tower {widths[1]}",
                "set `embed_dim`, or a head of the other's width in one of the towers",
            )


@MODELS.register("contrastive")
class ContrastiveModel(nn.Module):
    """Contrastive model: logits[b, t] = scale · cos(image b, text t) + bias."""

    Config = ContrastiveConfig

    def __init__(self, config: ContrastiveConfig):
        super().__init__()
        self.config = config
        self.image: Any = make_encoder(config.image)
        self.text = TextTower(config.text)
        E = config.embed_dim
        self.image_projection = nn.Linear(config.image.pooled_width, E, bias=False) if E else nn.Identity()
        self.text_projection = nn.Linear(config.text.pooled_width, E, bias=False) if E else nn.Identity()
        # One element instead of a scalar: FSDP cannot shard parameters without axes.
        self.log_scale = nn.Parameter(torch.tensor([float(config.log_scale)]))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor([float(config.bias)]))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    def encode_image(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        """Encode images to embeddings (B, E), not normalized; `grids` belong to packed patches of a `ViT`."""
        if grids is None:
            return self.image_projection(self.image.forward_pooled(pixels))
        if not isinstance(self.image, ViT):
            raise ImageError(
                f"grids were given to a {type(self.image).__name__}", "give pixels (B, C, H, W) without grids"
            )
        return self.image_projection(self.image.forward_pooled(pixels, grids))

    def encode_text(self, ids: Tensor) -> Tensor:
        """Encode texts to embeddings (T, E), not normalized."""
        return self.text_projection(self.text.forward_pooled(ids))

    def forward(self, pixels: Tensor, ids: Tensor, grids: Grids | None = None) -> Tensor:
        """Return logits (B, T) of all image–text pairs."""
        u, v = (F.normalize(x, dim=-1) for x in (self.encode_image(pixels, grids), self.encode_text(ids)))
        logits = self.scale * u @ v.T
        return logits if self.bias is None else logits + self.bias

    def workload(self, batch_size: int = 1, image_size: int | None = None, text_length: int | None = None) -> Workload:
        """Return the workload of square images with one text each; the text is the context of the workload."""
        image_work, text_work = self.image.workload(batch_size, image_size), self.text.workload(batch_size, text_length)
        return image_work.replace(context_tokens=text_work.tokens, context_pairs=text_work.attention_pairs)


@cost.count_flops.register
def _(module: ContrastiveModel, work: Workload) -> int:
    """Count `model(pixels, ids)`, with the workload of `ContrastiveModel.workload`."""
    image_work, text_work = _split_workload(work)
    pooled_work = Workload(tokens=work.sequences, attention_pairs=0)  # one vector for each image or text
    total = cost.count_flops(module.image, image_work) + cost.count_flops(module.text, text_work)
    if isinstance(module.image, ViT) and module.image.pooler is not None:
        patches = work.tokens - work.sequences * module.image.config.num_prefix_tokens
        total += cost.count_flops(module.image.pooler, image_work.replace(tokens=patches))
    heads = getattr(module.image, "head", None), module.text.head, module.image_projection, module.text_projection
    total += sum(cost.count_flops(head, pooled_work) for head in heads if head is not None)
    embed = module.config.embed_dim or module.config.text.pooled_width
    return total + 2 * embed * work.sequences**2


@cost.count_bytes.register
def _(module: ContrastiveModel, work: Workload) -> cost.MemoryBytes:
    image_work, text_work = _split_workload(work)
    towers = cost.count_bytes(module.image, image_work) + cost.count_bytes(module.text, text_work)
    projection_bytes = count_parameter_bytes(
        module.image_projection, module.text_projection, *module.parameters(recurse=False)
    )
    pooling = count_parameter_bytes(
        *(module.image.pooling_modules if isinstance(module.image, ViT) else [getattr(module.image, "head", None)]),
        module.text.head,
    )  # not counted with the towers
    return towers + cost.MemoryBytes(weights=projection_bytes, read=projection_bytes + pooling)


def _split_workload(work: Workload) -> tuple[Workload, Workload]:
    """Split the workload into that of the images and that of the texts."""
    texts = Workload(tokens=work.context_tokens, attention_pairs=work.context_pairs, sequences=work.sequences)
    return Workload(tokens=work.tokens, attention_pairs=work.attention_pairs, sequences=work.sequences), texts


# ---- released models --------------------------------------------------------------------------------------------

CLIP_INIT, SIGLIP_INIT = {"log_scale": math.log(1 / 0.07)}, {"log_scale": math.log(10), "bias": -10.0}

CONTRASTIVE_PRESETS: dict[str, ContrastiveConfig] = {
    name: ContrastiveConfig(image=VIT_PRESETS[image], text=TEXT_TOWER_PRESETS[text], embed_dim=embed, **start)
    for name, image, text, embed, start in [
        # name                 picture tower          text tower        embed  start
        ("clip-b16",           "clip-b16",            "clip-b",          512,  CLIP_INIT),
        ("clip-l14",           "clip-l14",            "clip-l",          768,  CLIP_INIT),
        ("clip-l14-336",       "clip-l14-336",        "clip-l",          768,  CLIP_INIT),
        ("clip-h14",           "clip-h14",            "clip-h",         1024,  CLIP_INIT),
        ("clip-g14",           "clip-g14",            "clip-h",         1024,  CLIP_INIT),
        ("clip-bigg14",        "clip-bigg14",         "clip-bigg",      1280,  CLIP_INIT),
        ("siglip-b16-256",     "siglip-b16-256",      "siglip-b",       None,  SIGLIP_INIT),
        ("siglip-l16-384",     "siglip-l16-384",      "siglip-l",       None,  SIGLIP_INIT),
        ("siglip-so400m-384",  "siglip-so400m-384",   "siglip-so400m",  None,  SIGLIP_INIT),
        ("siglip2-b16-256",    "siglip-b16-256",      "siglip2-b",      None,  SIGLIP_INIT),
        ("siglip2-naflex-b16", "siglip2-naflex-b16",  "siglip2-b",      None,  SIGLIP_INIT),
    ]
}  # fmt: skip
