"""Pixels ⇄ codes: an encoder, a quantizer and a decoder by config.

B batch, C channels, H, W pixels, h, w codes along a side, E width of the features, d width of a code, G groups of ids
"""

import hashlib
import json
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.codecs.conv import ConvDecoder, ConvEncoder, ConvPairConfig
from vitrail.codecs.quantizers import (
    GroupedVQ,
    Quantized,
    Quantizer,
    QuantizerConfig,
    ResidualVQ,
    SimVQ,
    make_quantizer,
)
from vitrail.codecs.vit import ViTDecoder, ViTPairConfig
from vitrail.config import Config
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Work, cost

Bridge = Literal["none", "linear", "mlp"]
HALF = (0.5, 0.5, 0.5)


class CodecConfig(Config):
    """`net` says what the encoder and the decoder are, `quantizer` what lies between.

    into       from the features to what the quantizer reads: nothing, a product, or two with GELU between (QLIP)
    out_of     from a code to what the decoder reads: nothing, a product, or one with GELU behind, since the decoder
               begins with another
    mean, std  of the pixels in 0 … 1 that the networks read; those of −1 … 1 unless given
    scale      what diffusion models multiply codes by, once `shift` is taken off; encoding and decoding do neither
    """

    net: ConvPairConfig | ViTPairConfig
    quantizer: QuantizerConfig
    into: Bridge = "linear"
    out_of: Bridge = "linear"
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    scale: float = 1.0
    shift: float = 0.0

    @property
    def halved(self) -> bool:
        """Whether the networks read −1 … 1 as it comes."""
        return set(self.mean) == set(self.std) == {0.5}

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.net.channels and not self.halved:
            raise ConfigError(
                f"{self.net.channels} channels need as many means and deviations: {self.mean}, {self.std}"
            )
        if not all(deviation > 0 for deviation in self.std):
            raise ConfigError(f"deviations {self.std} are divided by", "give numbers above 0")


class Codec(nn.Module):
    """Pictures of any size that `factor` divides; pixels are floats in −1 … 1, as `codec.pixels` makes them of bytes"""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config, net = config, config.net
        self.quantizer: Quantizer = make_quantizer(config.quantizer)
        reads, gives = self.quantizer.dim, self.quantizer.width
        if isinstance(net, ConvPairConfig):
            # A bottleneck that reads a mean and a variance has as many channels of each.
            E = net.latent * reads // gives
            self.encoder: nn.Module = ConvEncoder(net, E)
            self.decoder: nn.Module = ConvDecoder(net, gives)
        else:
            E = net.encoder.block.width
            self.encoder, self.decoder = ViT(net.encoder), ViTDecoder(net)
        self.wide = E  # of the features
        for bridge, (left, right) in {"into": (E, reads), "out_of": (gives, net.reads)}.items():
            if getattr(config, bridge) == "none" and left != right:
                raise ConfigError(
                    f"{bridge} is 'none', and {left} channels do not fit {right}",
                    f"make {bridge} 'linear', or them equal",
                )
        self.into = make_bridge(config.into, E, E, reads)
        self.out_of = make_bridge(config.out_of, gives, net.reads, None)

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return self.config.net.factor

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the pictures it was made for."""
        return self.config.net.size

    @property
    def bits(self) -> int:
        """Of one code; 0 where codes are continuous."""
        return self.quantizer.bits

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each id of a code can have; none where codes are continuous."""
        return self.quantizer.sizes

    @property
    def grouped(self) -> bool:
        """Whether ids have an axis of groups."""
        return isinstance(self.quantizer, GroupedVQ | ResidualVQ)

    @property
    def bits_per_pixel(self) -> float:
        return self.bits / self.factor**2

    @property
    def tower(self) -> ViT | None:
        """The encoder, where it is a tower that can be probed like any other: one that reads −1 … 1 as it comes."""
        return self.encoder if isinstance(self.encoder, ViT) and self.config.halved else None

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    # ---- there and back -----------------------------------------------------------------------------------------

    def encode(self, pixels: Tensor) -> Quantized:
        """pixels (B, C, H, W) → codes (B, h, w, d), ids (B, h, w) or (B, h, w, G)"""
        return self.quantize(self.features(pixels))

    def features(self, pixels: Tensor) -> Tensor:
        """pixels (B, C, H, W) → what the encoder makes of them (B, h, w, E)"""
        C, factor = self.config.net.channels, self.factor
        if pixels.ndim != 4 or pixels.shape[1] != C:
            raise ImageError(f"pixels of shape {tuple(pixels.shape)}", f"a codec reads (B, {C}, H, W)")
        H, W = pixels.shape[2:]
        if H % factor or W % factor or not H or not W:
            near = " × ".join(str(max(1, round(side / factor)) * factor) for side in (H, W))
            raise ImageError(
                f"a picture of {H} × {W} does not divide into codes of {factor} × {factor} pixels",
                f"resize it to {near}, or crop or pad it to multiples of {factor}",
            )
        x = self.encoder(self._seen(pixels))
        return x.unflatten(1, (H // factor, W // factor)) if x.ndim == 3 else x

    def quantize(self, features: Tensor) -> Quantized:
        """features (…, E) → codes (…, d)"""
        return self.quantizer(self.into(features))

    def lookup(self, ids: Tensor) -> Tensor:
        """ids (B, h, w) or (B, h, w, G) → codes (B, h, w, d)"""
        return self.quantizer.lookup(ids).to(next(self.decoder.parameters()).dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """codes (B, h, w, d) → pixels (B, C, H, W), not clamped"""
        if codes.ndim != 4 or codes.shape[-1] != self.quantizer.width:
            raise ImageError(f"codes of shape {tuple(codes.shape)}", f"give (B, h, w, {self.quantizer.width})")
        read = self.out_of(codes)
        pixels = self.decoder(read, codes) if isinstance(self.decoder, ConvDecoder) else self.decoder(read)
        if self.config.halved:
            return pixels
        mean, std = self._norm(pixels)
        return (pixels * std + mean) * 2 - 1

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """pixels (B, C, H, W) → the same by way of their codes, within −1 … 1"""
        return self.decode(self.encode(pixels).codes).clamp(-1, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Quantized]:
        """The reconstruction, not clamped, and the codes it is made of: what training needs."""
        quantized = self.encode(pixels)
        return self.decode(quantized.codes), quantized

    # ---- bytes --------------------------------------------------------------------------------------------------

    def pixels(self, bytes: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → −1 … 1 where the codec lies, in its type"""
        own = next(self.encoder.parameters())  # a codebook may keep a type of its own
        return (bytes.to(own.device).float() / 127.5 - 1).to(own.dtype)

    @staticmethod
    def bytes(pixels: Tensor) -> Tensor:
        """−1 … 1 → uint8, what lies outside clamped"""
        return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def _seen(self, pixels: Tensor) -> Tensor:
        if self.config.halved:
            return pixels
        mean, std = self._norm(pixels)
        return ((pixels + 1) / 2 - mean) / std

    def _norm(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(values).view(-1, 1, 1) for values in (self.config.mean, self.config.std))
        return mean, std

    def work(self, batch: int = 1, height: int | None = None, width: int | None = None) -> Work:
        """What `cost` needs to know of so many pictures, of the codec's own size unless told."""
        H, W = (height or self.size[0]), (width or height or self.size[1])
        return Work.full((H // self.factor) * (W // self.factor), batch)


def make_bridge(kind: Bridge, left: int, right: int, then: int | None) -> nn.Module:
    """left → right, and with GELU between on to `then`, if there is one."""
    match kind:
        case "none":
            return nn.Identity()
        case "linear":
            return nn.Linear(left, right if then is None else then)
        case "mlp":
            first = [nn.Linear(left, right), nn.GELU()]
            return nn.Sequential(*first, *([] if then is None else [nn.Linear(right, then)]))


def identity(codec: Codec) -> str:
    """A hash of all that ids depend on: the config and every weight. Another codec has another."""
    made = hashlib.sha256(json.dumps(codec.config.plain(), sort_keys=True).encode())
    for name, tensor in sorted(codec.state_dict().items()):
        own = tensor.detach().cpu().contiguous()
        made.update(f"{name} {own.dtype} {tuple(own.shape)}".encode())
        made.update(own.flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.flops.register
def _(module: Codec, work: Work) -> int:
    """Of `codec(pixels)`: encoding and decoding once."""
    net = module.config.net
    seen = work
    if isinstance(net, ViTPairConfig):  # its CLS and registers go through too
        seen = Work.full(net.encoder.prefix + work.tokens // work.rows, work.rows)
    between = (module.into, module.quantizer, module.out_of)
    total = cost.flops(module.encoder, seen) + cost.flops(module.decoder, work)
    return total + sum(cost.flops(part, work) for part in between)


def _tables(module: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """The codebooks of a quantizer and of its parts, whether a gradient moves them or not."""
    found = [(part, getattr(part, "codebook", None)) for part in module.modules()]
    return [(part, table) for part, table in found if isinstance(table, Tensor)]


@cost.flops.register
def _(module: Quantizer, work: Work) -> int:
    """Every vector against every code of each table; SimVQ makes its table anew each time."""
    tables = _tables(module)
    made = sum(2 * table.numel() * table.shape[1] for part, table in tables if isinstance(part, SimVQ))
    return made + sum(2 * table.numel() * work.tokens for _, table in tables)


@cost.bytes.register
def _(module: Quantizer, work: Work) -> cost.Bytes:
    """Tables that no gradient moves are weights too."""
    held = {id(own): own for own in (*module.parameters(), *(table for _, table in _tables(module)))}
    size = sum(own.numel() * own.element_size() for own in held.values())
    return cost.Bytes(weights=size, read=size)


cost.bytes.register(Codec, cost.sum_bytes)
