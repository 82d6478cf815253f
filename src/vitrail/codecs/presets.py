"""Configs of released codecs: VQGAN, MoVQ, aMUSEd, Stable Diffusion's VAE, GAIA-1, BSQ-ViT, QLIP; video codecs."""

from typing import Any

from vitrail.codecs.causal_video_codec import CausalVideoCodecConfig
from vitrail.codecs.codec import CodecConfig
from vitrail.codecs.cogvideox_autoencoder import CogVideoXAutoencoderConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.cosmos_autoencoder import CosmosAutoencoderConfig
from vitrail.codecs.quantizers import BSQConfig, FSQConfig, KLConfig, QuantizerConfig, VQConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.codecs.wan_autoencoder import WanAutoencoderConfig
from vitrail.encoders.presets import VIT_SIZES, eva02_vit_config
from vitrail.encoders.vit import ViTConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.processing.image_loading import NORMALIZATIONS


def make_vit_autoencoder_config(
    encoder: ViTConfig, code_width: int, *, intermediate_size: int | None = None
) -> ViTAutoencoderConfig:
    """Build a ViT encoder and a decoder with the same blocks, whose input has `code_width` channels."""
    encoder_only: dict[str, Any] = {
        "cls_token": False,
        "register_tokens": 0,
        "mask_token": False,
        "pool": "none",
        "head_width": 0,
    }
    decoder = encoder.replace(
        image_size=encoder.grid_size,
        patch_size=1,
        channels=code_width,
        patch_order="channels_first",
        patch_bias=True,
        positions="patches",
        norm_last="tokens",
        **encoder_only,
    )
    return ViTAutoencoderConfig(encoder=encoder, decoder=decoder, intermediate_size=intermediate_size)


def make_vit_codec_config(
    encoder: ViTConfig, quantizer: QuantizerConfig, code_width: int, *, intermediate_size: int | None = None
) -> CodecConfig:
    """Build a codec with codes of `code_width`, a linear layer before the quantizer and one at the decoder's start."""
    return CodecConfig(
        net=make_vit_autoencoder_config(encoder, code_width, intermediate_size=intermediate_size),
        quantizer=quantizer,
        pre_quant="linear",
        post_quant="none",
    )


def _bsq_vit(patch: int, bits: int, image: int = 256, size: str = "B") -> CodecConfig:
    width, layers, heads, intermediate_size = VIT_SIZES[size]
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias="all"),
        mlp=PlainMLPConfig(intermediate_size=intermediate_size),
    )
    encoder = ViTConfig(layers=layers, block=block, image_size=image, patch_size=patch, norm_first=True)
    return make_vit_codec_config(encoder, BSQConfig(bits=bits), bits, intermediate_size=intermediate_size)


def _qlip(size: str, patch: int, image: int, embed: int, bits: int = 28) -> CodecConfig:
    """EVA-02 for CLIP, whose codes are computed before its last norm.

    The decoder mirrors the encoder: the published repository leaves its size to each checkpoint's config.
    """
    encoder = eva02_vit_config(size, patch, image, for_clip=True, head_width=embed).replace(norm_last="pooled")
    pair = make_vit_autoencoder_config(
        encoder, VIT_SIZES[size][0], intermediate_size=encoder.block.mlp.intermediate_size
    )
    norm = NORMALIZATIONS["clip"]
    return CodecConfig(
        net=pair, quantizer=BSQConfig(bits=bits), pre_quant="mlp", post_quant="mlp", mean=norm.mean, std=norm.std
    )


def _vqgan(
    codes: int,
    widths: tuple[int, ...] = (128, 128, 256, 256, 512),
    dim: int = 256,
    around: bool = True,
    **net_fields: Any,
) -> CodecConfig:
    """VQGAN; with `around`, attention in the middle and at the coarsest level."""
    levels = (len(widths) - 1,) if around else ()
    net = ConvAutoencoderConfig(
        widths=widths, latent_channels=dim, mid_attention=around, attention_levels=levels, **net_fields
    )
    return CodecConfig(net=net, quantizer=VQConfig(codebook_size=codes, dim=dim))


def _vae(latent: int, size: int, scale: float, shift: float = 0.0, bridge: Any = "linear") -> CodecConfig:
    net = ConvAutoencoderConfig(latent_channels=latent, image_size=(size, size))
    bridges = {"pre_quant": bridge, "post_quant": bridge}
    return CodecConfig(net=net, quantizer=KLConfig(width=latent), **bridges, scaling_factor=scale, shift_factor=shift)


CODEC_PRESETS: dict[str, CodecConfig] = {
    "vqgan-f16-1024":  _vqgan(1024),
    "vqgan-f16-16384": _vqgan(16_384),
    "movq":            _vqgan(16_384, (128, 256, 256, 512), 4, spatial_norm=True, image_size=(512, 512)),
    "amused":          _vqgan(8192, (128, 256, 256, 512, 768), 64, around=False, image_size=(512, 512)),
    "sd-vae":          _vae(4, 256, 0.18215),
    "sdxl-vae":        _vae(4, 1024, 0.13025),
    "flux-vae":        _vae(16, 1024, 0.3611, 0.1159, "none"),
    "gaia1":           _vqgan(8192, (192, 192, 384, 768, 1024), image_size=(288, 512)),
    "bsq-vit-b8-18":   _bsq_vit(8, 18),
    "bsq-vit-b8-36":   _bsq_vit(8, 36),
    "bsq-vit-b16-28":  _bsq_vit(16, 28),
    "qlip-b16-256":    _qlip("B", 16, 256, 512),
    "qlip-b8-256":     _qlip("B", 8, 256, 512),
    "qlip-l14-392":    _qlip("L", 14, 392, 768),
}  # fmt: skip
"""The GAIA-1 paper gives the image size, downsample factor, codebook size and 0.3B parameters. The widths are chosen
here to match that parameter count."""


def _cosmos(discrete: bool, temporal_factor: int, spatial_factor: int) -> CausalVideoCodecConfig:
    quantizer = FSQConfig(levels=(8, 8, 8, 5, 5, 5)) if discrete else IdentityQuantizerConfig(dim=16)
    net = CosmosAutoencoderConfig(temporal_factor=temporal_factor, spatial_factor=spatial_factor)
    return CausalVideoCodecConfig(net=net, quantizer=quantizer)


VIDEO_CODEC_PRESETS: dict[str, CausalVideoCodecConfig] = {
    **{
        f"cosmos-{'dv' if discrete else 'cv'}{time}x{space}x{space}": _cosmos(discrete, time, space)
        for discrete in (False, True)
        for time, space in ((4, 8), (8, 8), (8, 16))
    },
    "cogvideox": CausalVideoCodecConfig(
        net=CogVideoXAutoencoderConfig(),
        quantizer=KLConfig(width=16),
        pre_quant="none",
        post_quant="none",
        scaling_factor=0.7,
        invert_scale_latents=True,
    ),
    "wan2.1": CausalVideoCodecConfig(net=WanAutoencoderConfig(), quantizer=KLConfig(width=16)),
    "wan2.2": CausalVideoCodecConfig(
        net=WanAutoencoderConfig(
            width=160, decoder_width=256, latent_channels=48, resampled_shortcut=True, patch_size=2
        ),
        quantizer=KLConfig(width=48),
    ),
}
"""Published shapes of causal video codecs: Cosmos with continuous (cv) and discrete (dv) codes, CogVideoX 1.5, Wan."""
