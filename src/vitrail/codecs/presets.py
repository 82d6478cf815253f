"""Released codecs as rows: VQGAN, MoVQ, aMUSEd's, Stable Diffusion's VAE, GAIA-1's tokenizer, BSQ-ViT, QLIP."""

from typing import Any

from vitrail.codecs.codec import CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.quantizers import BSQConfig, KLConfig, QuantizerConfig, VQConfig
from vitrail.codecs.vit import ViTPairConfig
from vitrail.encoders.presets import SIZES, eva02
from vitrail.encoders.vit import ViTConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.processing.images import NORMS


def vit_pair(encoder: ViTConfig, reads: int, *, hidden: int | None = None) -> ViTPairConfig:
    """A ViT and its mirror: a decoder of the same blocks, which is given `reads` numbers for a code."""
    alone: dict[str, Any] = {"cls": False, "registers": 0, "mask": False, "pool": "none", "head": 0}
    decoder = encoder.with_(
        image=encoder.side,
        patch=1,
        channels=reads,
        order="channels_first",
        patch_bias=True,
        positions="patches",
        norm_last="tokens",
        **alone,
    )
    return ViTPairConfig(encoder=encoder, decoder=decoder, hidden=hidden)


def vit_codec(encoder: ViTConfig, quantizer: QuantizerConfig, reads: int, **more: Any) -> CodecConfig:
    """A product before the quantizer; behind it the decoder begins with one. `reads` is the width of a code."""
    return CodecConfig(net=vit_pair(encoder, reads, **more), quantizer=quantizer, into="linear", out_of="none")


def _bsq_vit(patch: int, bits: int, image: int = 256, size: str = "B") -> CodecConfig:
    width, layers, heads, hidden = SIZES[size]
    block = BlockConfig(width=width, attention=AttentionConfig(heads=heads, bias="all"), mlp=PlainConfig(hidden=hidden))
    encoder = ViTConfig(layers=layers, block=block, image=image, patch=patch, norm_first=True)
    return vit_codec(encoder, BSQConfig(bits=bits), bits, hidden=hidden)


def _qlip(size: str, patch: int, image: int, embed: int, bits: int = 28) -> CodecConfig:
    """EVA-02 for CLIP, whose codes are made before its last norm. The decoder mirrors it: the published repository
    leaves its sizes to each checkpoint's config."""
    encoder = eva02(size, patch, image, for_clip=True, head=embed).with_(norm_last="pooled")
    pair = vit_pair(encoder, SIZES[size][0], hidden=encoder.block.mlp.hidden)
    norm = NORMS["clip"]
    return CodecConfig(net=pair, quantizer=BSQConfig(bits=bits), into="mlp", out_of="mlp", mean=norm.mean, std=norm.std)


def _vqgan(
    codes: int, widths: tuple[int, ...] = (128, 128, 256, 256, 512), dim: int = 256, around: bool = True, **more: Any
) -> CodecConfig:
    """`around`: with attention, in the middle and at the coarsest level."""
    levels = (len(widths) - 1,) if around else ()
    net = ConvPairConfig(widths=widths, latent=dim, attention=around, levels=levels, **more)
    return CodecConfig(net=net, quantizer=VQConfig(codes=codes, dim=dim))


def _vae(latent: int, size: int, scale: float, shift: float = 0.0, bridge: Any = "linear") -> CodecConfig:
    net, bridges = ConvPairConfig(latent=latent, size=(size, size)), {"into": bridge, "out_of": bridge}
    return CodecConfig(net=net, quantizer=KLConfig(width=latent), **bridges, scale=scale, shift=shift)


CODECS: dict[str, CodecConfig] = {
    "vqgan-f16-1024":  _vqgan(1024),
    "vqgan-f16-16384": _vqgan(16_384),
    "movq":            _vqgan(16_384, (128, 256, 256, 512), 4, modulated=True, size=(512, 512)),
    "amused":          _vqgan(8192, (128, 256, 256, 512, 768), 64, around=False, size=(512, 512)),
    "sd-vae":          _vae(4, 256, 0.18215),
    "sdxl-vae":        _vae(4, 1024, 0.13025),
    "flux-vae":        _vae(16, 1024, 0.3611, 0.1159, "none"),
    "gaia1":           _vqgan(8192, (192, 192, 384, 768, 1024), size=(288, 512)),
    "bsq-vit-b8-18":   _bsq_vit(8, 18),
    "bsq-vit-b8-36":   _bsq_vit(8, 36),
    "bsq-vit-b16-28":  _bsq_vit(16, 28),
    "qlip-b16-256":    _qlip("B", 16, 256, 512),
    "qlip-b8-256":     _qlip("B", 8, 256, 512),
    "qlip-l14-392":    _qlip("L", 14, 392, 768),
}  # fmt: skip
"""GAIA-1's paper gives size, factor, codes and 0.3B parameters; the widths are ours, chosen to come near that."""
