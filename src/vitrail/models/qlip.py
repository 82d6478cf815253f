"""Codecs as they are trained: beside a critic and a teacher, and, in QLIP, together with words.

B pictures, T texts, S side, X prefix tokens, h, w codes along a side, d width of a code, D of features, E of embeddings
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.discriminator import Discriminator, DiscriminatorConfig
from vitrail.codecs.vit import ViTPairConfig
from vitrail.config import Config
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.models.masked import frozen
from vitrail.nn import Work, cost


class TaughtCodecConfig(Config):
    """
    codec    what is trained, and what is kept in the end
    critic   the discriminator that it must fool; none where no stage plays that game
    teacher  a frozen tower whose features its codes should tell (GAIA-1: DINO)
    """

    codec: CodecConfig
    critic: DiscriminatorConfig | None = None
    teacher: ViTConfig | None = None


class Critic(nn.Module):
    """pixels (B, C, H, W) in −1 … 1 → logits (B, 1, h, w), high for what looks real; and how many passes it learned
    in."""

    passes: Tensor

    def __init__(self, config: DiscriminatorConfig):
        super().__init__()
        self.config, self.net = config, Discriminator(config)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixels.to(self.net.last.weight.dtype)).float()

    def held(self, pixels: Tensor) -> Tensor:
        """The same logits, with a gradient to the pixels and none to the critic.

        Its weights are handed in as constants. Turning `requires_grad` off and on would have to know which weights a
        stage trains, and a compiler cannot follow it; this leaves the module as it is, sharded or not.
        """
        weights = {name: weight.detach() for name, weight in self.net.named_parameters()}
        seen = pixels.to(self.net.last.weight.dtype)
        return functional_call(self.net, weights, (seen,)).float()


class TaughtCodec(nn.Module):
    """A codec with those who teach it. `product` is the codec: they stay behind."""

    def __init__(self, config: TaughtCodecConfig):
        super().__init__()
        self.config = config
        self.codec = Codec(config.codec)
        self.critic = None if config.critic is None else Critic(config.critic)
        self.teacher = None if config.teacher is None else frozen(ViT(config.teacher))
        width = self.codec.quantizer.width
        self.tell = None if config.teacher is None else nn.Linear(width, config.teacher.block.width)

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts that learn nothing here, and must come from elsewhere."""
        return () if self.teacher is None else ("teacher",)

    @property
    def product(self) -> nn.Module:
        """What is kept when the training is over."""
        return self.codec

    @property
    def tower(self) -> nn.Module:
        return self.codec.encoder

    def train(self, mode: bool = True) -> "TaughtCodec":
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def told(self, codes: Tensor) -> Tensor:
        """codes (B, h, w, d) → what they say of the teacher's features (B, h, w, D)"""
        assert self.tell is not None
        return self.tell(codes)

    @torch.no_grad()
    def lesson(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """pixels (B, C, H, W) → the teacher's features (B, h, w, D), of a picture resized so that it has a patch for
        every code"""
        assert self.teacher is not None
        size = [side * self.teacher.config.patch for side in grid]
        if list(pixels.shape[2:]) != size:
            # In float32: a CPU has no such kernel of half precision.
            pixels = F.interpolate(pixels.float(), size, mode="bilinear", antialias=True).to(pixels.dtype)
        return self.teacher(pixels).unflatten(1, grid)


class QLIPConfig(TaughtCodecConfig, kw_only=True):
    """The codec's encoder is the picture tower too: its `pool` (CLS, mean or attention) makes what is compared with
    words, from the features that the quantizer reads. The other fields are those of `ContrastiveConfig`."""

    text: TextConfig
    embed: int | None = None
    log_scale: float = math.log(1 / 0.07)
    bias: float | None = None

    @property
    def image(self) -> ViTConfig:
        assert isinstance(self.codec.net, ViTPairConfig)
        return self.codec.net.encoder

    @property
    def contrastive(self) -> ContrastiveConfig:
        return ContrastiveConfig(
            image=self.image, text=self.text, embed=self.embed, log_scale=self.log_scale, bias=self.bias
        )

    @property
    def width(self) -> int:
        """Of the embeddings."""
        return self.contrastive.width

    def __post_init__(self) -> None:
        if not isinstance(self.codec.net, ViTPairConfig):
            raise ConfigError("QLIP's encoder is a ViT, and this codec has none", 'give codec.net of kind "vit"')
        if not self.codec.halved:
            raise ConfigError(
                f"the codec normalises pixels by {self.codec.mean} and {self.codec.std}",
                "leave mean and std out: its encoder is a tower by itself, and reads −1 … 1 as all made here do",
            )
        _ = self.contrastive  # which refuses what cannot be compared


class QLIP(TaughtCodec):
    """A codec whose encoder also tells which words belong to a picture."""

    config: QLIPConfig  # pyrefly: ignore

    def __init__(self, config: QLIPConfig):
        super().__init__(config)
        self.text = TextTower(config.text)
        E = config.embed
        self.image_projection = nn.Linear(config.image.pooled, E, bias=False) if E else nn.Identity()
        self.text_projection = nn.Linear(config.text.pooled, E, bias=False) if E else nn.Identity()
        self.log_scale = nn.Parameter(torch.tensor([config.log_scale]))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor([config.bias]))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    @property
    def product(self) -> "QLIP":
        """The codec and the words; the weights are these."""
        if self.critic is None and self.teacher is None:
            return self
        with torch.device("meta"):
            kept = QLIP(self.config.with_(critic=None, teacher=None))
        return _shared(kept, self, codec=self.codec, log_scale=self.log_scale, bias=self.bias)

    @property
    def contrastive(self) -> Contrastive:
        """The two towers, which the suites of evaluation ask; the weights are these."""
        with torch.device("meta"):
            towers = Contrastive(self.config.contrastive)
        return _shared(towers, self, image=self.codec.encoder, log_scale=self.log_scale, bias=self.bias)

    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """pixels (B, C, S, S) → features (B, h, w, D), which the quantizer reads, and embeddings (B, E), not
        normalised: one pass of the encoder for both"""
        encoder, patch = self.codec.encoder, self.config.image.patch
        assert isinstance(encoder, ViT)
        tokens = encoder.tokens(pixels)  # (B, X + h·w, D)
        h, w = (side // patch for side in pixels.shape[2:])
        return tokens[:, encoder.config.prefix :].unflatten(1, (h, w)), self.image_projection(pooled(encoder, tokens))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """(B, E), not normalised"""
        return self.look(pixels)[1]

    def encode_text(self, ids: Tensor) -> Tensor:
        """(T, E), not normalised"""
        return self.text_projection(self.text.pool(ids))

    def work(self, batch: int = 1, length: int | None = None) -> Work:
        """So many pictures, each with a text of `length` tokens: the context."""
        texts = self.text.work(batch, length)
        return self.codec.work(batch).with_(context=texts.tokens, context_pairs=texts.pairs)


def pooled(tower: ViT, tokens: Tensor) -> Tensor:
    """tokens (B, X + N, D) → what `tower.pool` makes of the picture that they are of"""
    config = tower.config
    patches = tokens[:, config.prefix :]
    if tower.pooler is not None:
        one = tower.pooler(patches)
    elif config.pool == "cls":
        one = tokens[:, 0]
    else:  # sums of halves pass what a half can hold
        one = patches.mean(1, dtype=torch.promote_types(tokens.dtype, torch.float32)).to(tokens.dtype)
    one = tower.norm_last(one) if config.norm_last == "pooled" else one
    return one if tower.head is None else tower.head(one)


@cost.flops.register
def _(module: QLIP, work: Work) -> int:
    """Of pictures drawn again and compared with texts, `work` as `QLIP.work` gives it; of none who teaches."""
    drawn = Work(tokens=work.tokens, pairs=work.pairs, rows=work.rows)
    texts = Work(tokens=work.context, pairs=work.context_pairs, rows=work.rows)
    total = cost.flops(module.codec, drawn) + cost.flops(module.text, texts)
    heads = module.codec.encoder.head, module.text.head, module.image_projection, module.text_projection
    one = Work(tokens=work.rows, pairs=0)  # a vector each
    return (
        total
        + sum(cost.flops(head, one) for head in heads if head is not None)
        + (2 * module.config.width * work.rows**2)
    )


@cost.bytes.register
def _(module: TaughtCodec, work: Work) -> cost.Bytes:
    """A teacher's weights are buffers, which count too."""
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return cost.Bytes(weights=size, read=size)


def _shared(into, qlip: QLIP, **parts: nn.Module | nn.Parameter | None):
    """A model without weights, given those of QLIP's that it has a place for."""
    same = {name: getattr(qlip, name) for name in ("text", "image_projection", "text_projection")}
    for name, part in {**same, **parts}.items():
        setattr(into, name, part)
    into.training = qlip.training
    return into
