"""Pictures and words in one space: CLIP and SigLIP.

B pictures, T texts, E width of the embedding
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.presets import TEXTS, VITS
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.vit import Grids, ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh


class ContrastiveConfig(Config):
    """`embed` is the width both towers are projected to (CLIP); without it their pooled vectors are the embeddings
    (SigLIP). `log_scale` and `bias` are what the logits start with; a model without a bias has none to learn."""

    image: ViTConfig | ConvConfig
    text: TextConfig
    embed: int | None = None
    log_scale: float = math.log(1 / 0.07)
    bias: float | None = None

    @property
    def width(self) -> int:
        """Of the embeddings."""
        return self.embed or self.image.pooled

    def __post_init__(self) -> None:
        if isinstance(self.image, ViTConfig) and self.image.pool == "none":
            raise ConfigError("the image tower of a contrastive model needs a pool", "choose cls, mean or attention")
        widths = self.image.pooled, self.text.pooled
        if self.embed is None and widths[0] != widths[1]:
            raise ConfigError(
                f"pictures of width {widths[0]} cannot be compared with texts of width {widths[1]}",
                "give `embed`, or a tower a head of the other's width",
            )


class Contrastive(nn.Module):
    """logits[b, t] = scale · cos(picture b, text t) + bias"""

    def __init__(self, config: ContrastiveConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image) if isinstance(config.image, ViTConfig) else Conv(config.image)
        self.text = TextTower(config.text)
        E = config.embed
        self.image_projection = nn.Linear(config.image.pooled, E, bias=False) if E else nn.Identity()
        self.text_projection = nn.Linear(config.text.pooled, E, bias=False) if E else nn.Identity()
        # Of one element, and not of none: ranks cannot share what has no axis.
        self.log_scale = nn.Parameter(torch.tensor([float(config.log_scale)]))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor([float(config.bias)]))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    def encode_image(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        """(B, E), not normalised; pixels and grids as the tower reads them, grids a `ViT` alone."""
        if grids is None:
            return self.image_projection(self.image.pool(pixels))
        if not isinstance(self.image, ViT):
            raise ImageError("a convolutional tower reads pixels, not patches", "give (B, C, H, W)")
        return self.image_projection(self.image.pool(pixels, grids))

    def encode_text(self, ids: Tensor) -> Tensor:
        """(T, E), not normalised."""
        return self.text_projection(self.text.pool(ids))

    def forward(self, pixels: Tensor, ids: Tensor, grids: Grids | None = None) -> Tensor:
        """Logits (B, T)."""
        u, v = (F.normalize(x, dim=-1) for x in (self.encode_image(pixels, grids), self.encode_text(ids)))
        logits = self.scale * u @ v.T
        return logits if self.bias is None else logits + self.bias

    def work(self, batch: int = 1, size: int | None = None, length: int | None = None) -> Work:
        """So many pictures of `size` × `size` pixels, each with a text of `length` tokens: the context."""
        pictures, texts = self.image.work(batch, size), self.text.work(batch, length)
        return pictures.with_(context=texts.tokens, context_pairs=texts.pairs)


@cost.flops.register
def _(module: Contrastive, work: Work) -> int:
    """Of `model(pixels, ids)`, `work` as `Contrastive.work` gives it."""
    pictures, texts = _sides(work)
    one = Work(tokens=work.rows, pairs=0)  # a vector each
    total = cost.flops(module.image, pictures) + cost.flops(module.text, texts)
    if isinstance(module.image, ViT) and module.image.pooler is not None:
        patches = work.tokens - work.rows * module.image.config.prefix
        total += cost.flops(module.image.pooler, pictures.with_(tokens=patches))
    heads = module.image.head, module.text.head, module.image_projection, module.text_projection
    total += sum(cost.flops(head, one) for head in heads if head is not None)
    embed = module.config.embed or module.config.text.pooled
    return total + 2 * embed * work.rows**2


@cost.bytes.register
def _(module: Contrastive, work: Work) -> cost.Bytes:
    pictures, texts = _sides(work)
    towers = cost.bytes(module.image, pictures) + cost.bytes(module.text, texts)
    beside = weigh(module.image_projection, module.text_projection, *module.parameters(recurse=False))
    pooling = weigh(
        *(module.image.pooling if isinstance(module.image, ViT) else [module.image.head]), module.text.head
    )  # which the towers alone do not read
    return towers + cost.Bytes(weights=beside, read=beside + pooling)


def _sides(work: Work) -> tuple[Work, Work]:
    """The pictures' work and the texts'."""
    texts = Work(tokens=work.context, pairs=work.context_pairs, rows=work.rows)
    return Work(tokens=work.tokens, pairs=work.pairs, rows=work.rows), texts


# ---- released models --------------------------------------------------------------------------------------------

CLIP, SIGLIP = {"log_scale": math.log(1 / 0.07)}, {"log_scale": math.log(10), "bias": -10.0}

CONTRASTIVE: dict[str, ContrastiveConfig] = {
    name: ContrastiveConfig(image=VITS[image], text=TEXTS[text], embed=embed, **start)
    for name, image, text, embed, start in [
        # name                 picture tower          text tower        embed  start
        ("clip-b16",           "clip-b16",            "clip-b",          512,  CLIP),
        ("clip-l14",           "clip-l14",            "clip-l",          768,  CLIP),
        ("clip-l14-336",       "clip-l14-336",        "clip-l",          768,  CLIP),
        ("clip-h14",           "clip-h14",            "clip-h",         1024,  CLIP),
        ("clip-g14",           "clip-g14",            "clip-h",         1024,  CLIP),
        ("clip-bigg14",        "clip-bigg14",         "clip-bigg",      1280,  CLIP),
        ("siglip-b16-256",     "siglip-b16-256",      "siglip-b",       None,  SIGLIP),
        ("siglip-l16-384",     "siglip-l16-384",      "siglip-l",       None,  SIGLIP),
        ("siglip-so400m-384",  "siglip-so400m-384",   "siglip-so400m",  None,  SIGLIP),
        ("siglip2-b16-256",    "siglip-b16-256",      "siglip2-b",      None,  SIGLIP),
        ("siglip2-naflex-b16", "siglip2-naflex-b16",  "siglip2-b",      None,  SIGLIP),
    ]
}  # fmt: skip
