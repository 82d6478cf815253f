"""Image codec: an encoder, a quantizer and a decoder, built from a config.

Shapes: B batch, C channels, H, W pixels, h, w codes along a side, E width of the features, d width of a code,
G id groups.
"""

import hashlib
import json
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig, ConvDecoder, ConvEncoder
from vitrail.codecs.quantizers import (
    GroupedVQ,
    Quantizer,
    QuantizerConfig,
    QuantizerOutput,
    ResidualVQ,
    SimVQ,
    make_quantizer,
)
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig, ViTDecoder
from vitrail.config import Config
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Workload, cost
from vitrail.registry import MODELS

BridgeKind = Literal["none", "linear", "mlp"]
HALF_RANGE = (0.5, 0.5, 0.5)


class CodecConfig(Config):
    """Config of a `Codec`. `net` configures the encoder and the decoder, `quantizer` the quantizer between them.

    pre_quant       projection from features to quantizer input: none, linear, or linear–GELU–linear (QLIP)
    post_quant      projection from codes to decoder input: none, linear, or linear–GELU; the decoder starts with a
                    linear
    mean, std       normalization of pixels in 0 … 1 before the encoder; by default to −1 … 1
    scaling_factor  factor that diffusion models apply to codes after subtracting `shift_factor`; the codec applies
                    neither
    """

    net: ConvAutoencoderConfig | ViTAutoencoderConfig
    quantizer: QuantizerConfig
    pre_quant: BridgeKind = "linear"
    post_quant: BridgeKind = "linear"
    mean: tuple[float, ...] = HALF_RANGE
    std: tuple[float, ...] = HALF_RANGE
    scaling_factor: float = 1.0
    shift_factor: float = 0.0

    @property
    def has_default_normalization(self) -> bool:
        """Whether the networks take pixels in −1 … 1 without another normalization."""
        return set(self.mean) == set(self.std) == {0.5}

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.net.channels and not self.has_default_normalization:
            raise ConfigError(
                f"mean {self.mean} and std {self.std} do not match {self.net.channels} channels",
                "give one mean and one std for each channel",
            )
        if not all(deviation > 0 for deviation in self.std):
            raise ConfigError(f"std {self.std} is not positive", "give values above 0")


class CodecModule(nn.Module):
    """Base class of codecs of images (`Codec`) and of videos (`VideoCodec`)."""

    config: Any
    quantizer: Quantizer

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        raise NotImplementedError

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images or frames that the codec is trained for."""
        raise NotImplementedError

    @property
    def bits(self) -> int:
        """Bits of one code; 0 if codes are continuous."""
        return self.quantizer.bits

    @property
    def vocab_sizes(self) -> tuple[int, ...]:
        """Number of values of each id of a code; empty if codes are continuous."""
        return self.quantizer.vocab_sizes

    @property
    def has_id_groups(self) -> bool:
        """Whether ids have a group axis."""
        return isinstance(self.quantizer, GroupedVQ | ResidualVQ)

    @property
    def bits_per_pixel(self) -> float:
        return self.bits / self.downsample_factor**2

    def encode(self, pixels: Tensor, /) -> QuantizerOutput:
        raise NotImplementedError

    def decode(self, codes: Tensor, /) -> Tensor:
        raise NotImplementedError

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """Encode and decode pixels, clamped to −1 … 1."""
        return self.decode(self.encode(pixels).codes).clamp(-1, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, QuantizerOutput]:
        """Return the reconstruction, not clamped, and the quantizer output that the training losses need."""
        quantized = self.encode(pixels)
        return self.decode(quantized.codes), quantized

    @staticmethod
    def to_uint8(pixels: Tensor) -> Tensor:
        """Convert pixels in −1 … 1 to uint8; values outside are clamped."""
        return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


@MODELS.register("codec")
class Codec(CodecModule):
    """Image codec. Pixels are floats in −1 … 1 (see `uint8_to_pixels`); `downsample_factor` must divide both sides of
    an image.
    """

    Config = CodecConfig

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config, net = config, config.net
        self.quantizer = make_quantizer(config.quantizer)
        code_dim, code_width = self.quantizer.dim, self.quantizer.width
        if isinstance(net, ConvAutoencoderConfig):
            # The KL quantizer takes a mean and a variance for each channel.
            E = net.latent_channels * code_dim // code_width
            self.encoder: nn.Module = ConvEncoder(net, E)
            self.decoder: nn.Module = ConvDecoder(net, code_width)
        else:
            E = net.encoder.block.width
            self.encoder, self.decoder = ViT(net.encoder), ViTDecoder(net)
        self.feature_width = E
        for key, (left, right) in {
            "pre_quant": (E, code_dim),
            "post_quant": (code_width, net.decoder_channels),
        }.items():
            if getattr(config, key) == "none" and left != right:
                raise ConfigError(
                    f"{key} is 'none', but {left} channels do not match {right}",
                    f"set {key} to 'linear', or use equal widths",
                )
        self.pre_quant_proj = make_bridge(config.pre_quant, E, E, code_dim)
        self.post_quant_proj = make_bridge(config.post_quant, code_width, net.decoder_channels, None)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        return self.config.net.downsample_factor

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the codec is trained for."""
        return self.config.net.image_size

    @property
    def tower(self) -> ViT | None:
        """The encoder as a vision tower, if it is a ViT that takes pixels in −1 … 1; else None."""
        return self.encoder if isinstance(self.encoder, ViT) and self.config.has_default_normalization else None

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    # ---- encoding and decoding ----------------------------------------------------------------------------------

    def encode(self, pixels: Tensor) -> QuantizerOutput:
        """Encode pixels (B, C, H, W) to codes (B, h, w, d) and ids (B, h, w) or (B, h, w, G)."""
        return self.quantize(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, C, H, W) to encoder features (B, h, w, E)."""
        C, factor = self.config.net.channels, self.downsample_factor
        if pixels.ndim != 4 or pixels.shape[1] != C:
            raise ImageError(f"pixels have shape {tuple(pixels.shape)}", f"give pixels of shape (B, {C}, H, W)")
        H, W = pixels.shape[2:]
        if H % factor or W % factor or not H or not W:
            near = " × ".join(str(max(1, round(side / factor)) * factor) for side in (H, W))
            raise ImageError(
                f"an image of {H} × {W} pixels does not divide into codes of {factor} × {factor} pixels",
                f"resize it to {near}, or crop or pad it to multiples of {factor}",
            )
        x = self.encoder(self._normalize(pixels))
        return x.unflatten(1, (H // factor, W // factor)) if x.ndim == 3 else x

    def quantize(self, features: Tensor) -> QuantizerOutput:
        """Quantize features (…, E) to codes (…, d)."""
        return self.quantizer(self.pre_quant_proj(features))

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the codes (B, h, w, d) of ids (B, h, w) or (B, h, w, G)."""
        return self.quantizer.lookup(ids).to(next(self.decoder.parameters()).dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (B, h, w, d) to pixels (B, C, H, W), not clamped."""
        if codes.ndim != 4 or codes.shape[-1] != self.quantizer.width:
            raise ImageError(
                f"codes have shape {tuple(codes.shape)}", f"give codes of shape (B, h, w, {self.quantizer.width})"
            )
        read = self.post_quant_proj(codes)
        pixels = self.decoder(read, codes) if isinstance(self.decoder, ConvDecoder) else self.decoder(read)
        if self.config.has_default_normalization:
            return pixels
        mean, std = self._mean_and_std(pixels)
        return (pixels * std + mean) * 2 - 1

    # ---- pixel conversion and cost ------------------------------------------------------------------------------

    def to_pixels(self, images: Tensor) -> Tensor:
        """Convert uint8 images (B, C, H, W) to pixels in −1 … 1 on the codec's device, in its dtype."""
        own = next(self.encoder.parameters())  # a codebook may have another dtype
        return (images.to(own.device).float() / 127.5 - 1).to(own.dtype)

    def _normalize(self, pixels: Tensor) -> Tensor:
        if self.config.has_default_normalization:
            return pixels
        mean, std = self._mean_and_std(pixels)
        return ((pixels + 1) / 2 - mean) / std

    def _mean_and_std(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(values).view(-1, 1, 1) for values in (self.config.mean, self.config.std))
        return mean, std

    def workload(self, batch_size: int = 1, height: int | None = None, width: int | None = None) -> Workload:
        """Return the workload of encoding and decoding a batch of images, by default of the codec's own size."""
        H, W = (height or self.image_size[0]), (width or height or self.image_size[1])
        return Workload.full_attention((H // self.downsample_factor) * (W // self.downsample_factor), batch_size)


def make_bridge(kind: BridgeKind, in_features: int, out_features: int, final_features: int | None) -> nn.Module:
    """Build a projection from in_features to out_features, and with GELU between to `final_features` if it is given."""
    match kind:
        case "none":
            return nn.Identity()
        case "linear":
            return nn.Linear(in_features, out_features if final_features is None else final_features)
        case "mlp":
            first = [nn.Linear(in_features, out_features), nn.GELU()]
            return nn.Sequential(*first, *([] if final_features is None else [nn.Linear(out_features, final_features)]))


def compute_codec_identity(codec: CodecModule) -> str:
    """Hash everything that ids depend on: the config and all weights."""
    digest = hashlib.sha256(json.dumps(codec.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(codec.state_dict().items()):
        weights = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        digest.update(weights.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.count_flops.register
def _(module: Codec, work: Workload) -> int:
    """Count the FLOPs of `codec(pixels)`: one encoding and one decoding."""
    net = module.config.net
    encoder_work = work
    if isinstance(net, ViTAutoencoderConfig):  # CLS and register tokens pass through the encoder too
        encoder_work = Workload.full_attention(
            net.encoder.num_prefix_tokens + work.tokens // work.sequences, work.sequences
        )
    between = (module.pre_quant_proj, module.quantizer, module.post_quant_proj)
    total = cost.count_flops(module.encoder, encoder_work) + cost.count_flops(module.decoder, work)
    return total + sum(cost.count_flops(part, work) for part in between)


def _find_codebooks(module: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Find the codebooks of a quantizer and of its sub-quantizers, trainable or not."""
    candidates = [(part, getattr(part, "codebook", None)) for part in module.modules()]
    return [(part, table) for part, table in candidates if isinstance(table, Tensor)]


@cost.count_flops.register
def _(module: Quantizer, work: Workload) -> int:
    """Count comparisons of every vector with every code; SimVQ also computes its codebook each time."""
    tables = _find_codebooks(module)
    table_flops = sum(2 * table.numel() * table.shape[1] for part, table in tables if isinstance(part, SimVQ))
    return table_flops + sum(2 * table.numel() * work.tokens for _, table in tables)


@cost.count_bytes.register
def _(module: Quantizer, work: Workload) -> cost.MemoryBytes:
    """Count codebooks as weights, trainable or not."""
    tensors = {id(own): own for own in (*module.parameters(), *(table for _, table in _find_codebooks(module)))}
    size = sum(own.numel() * own.element_size() for own in tensors.values())
    return cost.MemoryBytes(weights=size, read=size)


cost.count_bytes.register(Codec, cost.sum_child_bytes)
