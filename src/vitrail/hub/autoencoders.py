"""Convolutional codecs of diffusers, import and export.

AutoencoderKL is the continuous codec of Stable Diffusion, SDXL and FLUX. VQModel has a codebook: VQGAN, aMUSEd
and, with modulated norms, the MoVQ of Kandinsky.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.quantizers import KLConfig, QuantizerConfig, VQConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, reject_settings
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, fuse_layer, rename, rename_layer
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]
DOWN_BLOCKS, UP_BLOCKS = ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"), ("UpDecoderBlock2D", "AttnUpDecoderBlock2D")

LEGACY_NAMES = tuple(
    (f".attentions.0.{now}.", f".attentions.0.{then}.")
    for now, then in [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")]
)
"""Names of the middle attention in files from before 2023."""

SPATIAL_NORM_GROUPS = 32  # groups of diffusers' spatial norms, independent of norm_num_groups
CODEBOOK_DEFAULTS: dict[str, Any] = {
    "codebook_update": "gradient",
    "kmeans_iters": 0,
}  # training settings of a loaded codebook

WidthField = Annotated[int, Meta(ge=1, le=2**20)]


class _AutoencoderSchema(msgspec.Struct):
    """Schema of both configs with the defaults of diffusers. Counts are bounded, because the files are untrusted."""

    in_channels: WidthField = 3
    out_channels: WidthField = 3
    down_block_types: tuple[str, ...] = (DOWN_BLOCKS[0],)
    up_block_types: tuple[str, ...] = (UP_BLOCKS[0],)
    block_out_channels: Annotated[tuple[WidthField, ...], Meta(min_length=1, max_length=16)] = (64,)
    layers_per_block: Annotated[int, Meta(ge=1, le=1000)] = 1
    act_fn: str = "silu"
    norm_num_groups: WidthField = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    mid_block_add_attention: bool = True


class _AutoencoderKLSchema(_AutoencoderSchema):
    latent_channels: WidthField = 4
    shift_factor: float = 0.0
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True


class _VQModelSchema(_AutoencoderSchema):
    latent_channels: WidthField = 3
    num_vq_embeddings: Annotated[int, Meta(ge=1, le=2**31)] = 256
    vq_embed_dim: WidthField | None = None
    norm_type: Literal["group", "spatial"] = "group"


SchemaT = TypeVar("SchemaT", bound=_AutoencoderSchema)


def _parse_config(hf_config: HFConfig, kind: type[SchemaT]) -> SchemaT:
    try:
        settings = msgspec.convert({key: value for key, value in hf_config.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error), "correct this key, as in the original config") from None
    if settings.in_channels != settings.out_channels or settings.act_fn not in ("silu", "swish"):
        raise CheckpointError(
            f"in_channels {settings.in_channels}, out_channels {settings.out_channels}, act_fn {settings.act_fn!r}",
            "equal channels and silu are supported",
        )
    return settings


def _build_codec_config(
    settings: _AutoencoderSchema, latent: int, quantizer: QuantizerConfig, modulated: bool = False, **fields: Any
) -> CodecConfig:
    widths, size = settings.block_out_channels, settings.sample_size
    return CodecConfig(
        net=ConvAutoencoderConfig(
            widths=widths,
            layers=settings.layers_per_block,
            latent_channels=latent,
            mid_attention=settings.mid_block_add_attention,
            attention_levels=_read_attention_levels(settings.down_block_types, settings.up_block_types, len(widths)),
            norm_groups=settings.norm_num_groups,
            spatial_norm=modulated,
            channels=settings.in_channels,
            image_size=(size, size) if isinstance(size, int) else size,
        ),
        quantizer=quantizer,
        mean=(0.5,) * settings.in_channels,
        std=(0.5,) * settings.in_channels,
        scaling_factor=settings.scaling_factor,
        **fields,
    )


def _read_kl(hf_config: HFConfig) -> CodecConfig:
    reject_settings(
        hf_config,
        latents_mean="a mean for each channel is not supported",
        latents_std="a std for each channel is not supported",
    )
    settings = _parse_config(hf_config, _AutoencoderKLSchema)
    return _build_codec_config(
        settings,
        settings.latent_channels,
        KLConfig(width=settings.latent_channels),
        pre_quant="linear" if settings.use_quant_conv else "none",
        post_quant="linear" if settings.use_post_quant_conv else "none",
        shift_factor=settings.shift_factor,
    )


def _read_vq(hf_config: HFConfig) -> CodecConfig:
    settings = _parse_config(hf_config, _VQModelSchema)
    latent, modulated = settings.latent_channels, settings.norm_type == "spatial"
    dim = settings.vq_embed_dim or latent
    if modulated and (dim != latent or settings.norm_num_groups != SPATIAL_NORM_GROUPS):
        raise CheckpointError(
            f"norm_type spatial, {settings.norm_num_groups} groups, vq_embed_dim {dim} and {latent} latent channels",
            f"spatial norms need {SPATIAL_NORM_GROUPS} groups and vq_embed_dim equal to latent_channels",
        )
    return _build_codec_config(
        settings, latent, VQConfig(codebook_size=settings.num_vq_embeddings, dim=dim, **CODEBOOK_DEFAULTS), modulated
    )


def _read_attention_levels(down: tuple[str, ...], up: tuple[str, ...], count: int) -> tuple[int, ...]:
    """Return the levels with attention, which must be the same in encoder and decoder."""
    for names, known in ((down, DOWN_BLOCKS), (up, UP_BLOCKS)):
        if len(names) != count or not set(names) <= set(known):
            raise CheckpointError(
                f"{count} levels have the block types {names}", f"each must be one of {', '.join(known)}"
            )
    levels = tuple(i for i, name in enumerate(down) if name == DOWN_BLOCKS[1])
    if levels != tuple(i for i, name in enumerate(reversed(up)) if name == UP_BLOCKS[1]):
        raise CheckpointError(f"down_block_types {down} and up_block_types {up} differ in attention")
    return levels


def _write_networks(config: CodecConfig) -> HFConfig:
    """Write the keys of both networks."""
    net = config.net
    if (
        not isinstance(net, ConvAutoencoderConfig)
        or not config.has_default_normalization
        or "mlp" in (config.pre_quant, config.post_quant)
    ):
        raise CheckpointError(
            "diffusers' codecs need convolutions, pixels in −1 … 1 and at most one linear layer next to the codes"
        )
    attention = [i in net.attention_levels for i in range(len(net.widths))]
    return {
        "in_channels": net.channels,
        "out_channels": net.channels,
        "down_block_types": [DOWN_BLOCKS[has_attention] for has_attention in attention],
        "up_block_types": [UP_BLOCKS[has_attention] for has_attention in reversed(attention)],
        "block_out_channels": list(net.widths),
        "layers_per_block": net.layers,
        "act_fn": "silu",
        "latent_channels": net.latent_channels,
        "norm_num_groups": net.norm_groups,
        "sample_size": net.image_size[0] if net.image_size[0] == net.image_size[1] else list(net.image_size),
        "scaling_factor": config.scaling_factor,
        "mid_block_add_attention": net.mid_attention,
    }


def _write_kl(config: CodecConfig) -> HFConfig:
    if not isinstance(config.quantizer, KLConfig):
        raise CheckpointError("AutoencoderKL needs the KL bottleneck")
    bridges = {"use_quant_conv": config.pre_quant == "linear", "use_post_quant_conv": config.post_quant == "linear"}
    return {**_write_networks(config), "shift_factor": config.shift_factor or None, **bridges}


def _write_vq(config: CodecConfig) -> HFConfig:
    quantizer, net = config.quantizer, config.net
    if not isinstance(quantizer, VQConfig) or quantizer.metric != "euclid":
        raise CheckpointError("VQModel needs one codebook with Euclidean distance")
    modulated = isinstance(net, ConvAutoencoderConfig) and net.spatial_norm
    codebook_settings = {"num_vq_embeddings": quantizer.codebook_size, "vq_embed_dim": quantizer.dim}
    return {**_write_networks(config), **codebook_settings, "norm_type": "spatial" if modulated else "group"}


def _normalize_config(config: CodecConfig) -> CodecConfig:
    """Return the config without settings that matter in training only."""
    quantizer = config.quantizer
    return (
        config.replace(quantizer=VQConfig(codebook_size=quantizer.codebook_size, dim=quantizer.dim))
        if isinstance(quantizer, VQConfig)
        else config
    )


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_rules(config: CodecConfig) -> list[TensorRule]:
    net, quantizer = config.net, config.quantizer
    assert isinstance(net, ConvAutoencoderConfig)
    has_codebook = isinstance(quantizer, VQConfig)
    rules = _build_codebook_rules(quantizer) if has_codebook else []
    latent_width, code_width = (
        (net.latent_channels, quantizer.dim) if has_codebook else (2 * net.latent_channels, net.latent_channels)
    )  # mean and variance, or a code
    rules += (
        _build_pointwise_rules(
            "pre_quant_proj", "quant_conv", quantizer.dim if has_codebook else latent_width, latent_width
        )
        if config.pre_quant == "linear"
        else []
    )
    rules += (
        _build_pointwise_rules("post_quant_proj", "post_quant_conv", net.latent_channels, code_width)
        if config.post_quant == "linear"
        else []
    )
    for side in ("encoder", "decoder"):
        rules += add_prefix(f"{side}.", f"{side}.", _build_network_rules(net, side))
    return rules


def _build_pointwise_rules(native: str, hf: str, out_features: int, in_features: int) -> list[TensorRule]:
    """Build the rules of a linear layer, which diffusers stores as a 1 × 1 convolution."""
    weight = flatten_kernel(f"{native}.weight", f"{hf}.weight", (out_features, in_features, 1, 1))
    return [weight, rename(f"{native}.bias", f"{hf}.bias")]


def _build_codebook_rules(book: VQConfig) -> list[TensorRule]:
    """Build the rule of the codebook: imported codes start with equal usage counts; exported codes include the part
    that was learned by gradients."""
    state_name = "learned" if book.codebook_update == "gradient" else "sums"

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        codes = tensors[0].float()
        return [codes, torch.ones(len(codes)), torch.tensor(True), torch.zeros_like(tensors[0])]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        codes, _, _, learned = tensors
        return [codes + learned.to(codes.dtype) if state_name == "learned" else codes]

    native = tuple(f"quantizer.{name}" for name in ("codebook", "counts", "started", state_name))
    return [TensorRule(native, ("quantize.embedding.weight",), pull, push)]


def _build_network_rules(net: ConvAutoencoderConfig, side: str) -> list[TensorRule]:
    top, is_encoder = len(net.widths) - 1, side == "encoder"
    modulated = net.spatial_norm and not is_encoder
    rules = [
        *rename_layer("first", "conv_in"),
        *_build_norm_rules("norm", "conv_norm_out", modulated),
        *rename_layer("last", "conv_out"),
        *add_prefix("middle.0.", "mid_block.resnets.0.", _build_resnet_rules(False, modulated)),
        *add_prefix("middle.2.", "mid_block.resnets.1.", _build_resnet_rules(False, modulated)),
    ]
    if net.mid_attention:
        rules += add_prefix("middle.1.", "mid_block.attentions.0.", _build_attention_rules(net.widths[-1], modulated))
    for i, width in enumerate(net.widths):
        hf = f"down_blocks.{i}" if is_encoder else f"up_blocks.{top - i}"
        previous_width = net.widths[max(i - 1, 0)] if is_encoder else net.widths[min(i + 1, top)]
        stride = 2 if i in net.attention_levels else 1
        for j in range(net.layers + (0 if is_encoder else 1)):
            block_rules = _build_resnet_rules(j == 0 and previous_width != width, modulated)
            rules += add_prefix(f"levels.{i}.{j * stride}.", f"{hf}.resnets.{j}.", block_rules)
            if i in net.attention_levels:
                block_rules = _build_attention_rules(width, modulated)
                rules += add_prefix(f"levels.{i}.{j * stride + 1}.", f"{hf}.attentions.{j}.", block_rules)
        if is_encoder and i < top:
            rules += rename_layer(f"downs.{i}.conv", f"{hf}.downsamplers.0.conv")
        elif not is_encoder and i:
            rules += rename_layer(f"ups.{i - 1}.conv", f"{hf}.upsamplers.0.conv")
    return rules


def _build_norm_rules(native: str, hf: str, modulated: bool) -> list[TensorRule]:
    if not modulated:
        return rename_layer(native, hf)
    parts = {"norm": "norm_layer", "scale": "conv_y", "shift": "conv_b"}
    return [move for part, hf_part in parts.items() for move in rename_layer(f"{native}.{part}", f"{hf}.{hf_part}")]


def _build_resnet_rules(shortcut: bool, modulated: bool) -> list[TensorRule]:
    rules = [*rename_layer("conv1", "conv1"), *rename_layer("conv2", "conv2")]
    rules += [*_build_norm_rules("norm1", "norm1", modulated), *_build_norm_rules("norm2", "norm2", modulated)]
    return rules + rename_layer("shortcut", "conv_shortcut") if shortcut else rules


def _build_attention_rules(width: int, modulated: bool) -> list[TensorRule]:
    return [
        *_build_norm_rules("norm", "spatial_norm" if modulated else "group_norm", modulated),
        *fuse_layer("op.qkv", ["to_q", "to_k", "to_v"], [width] * 3),
        *rename_layer("op.out", "to_out.0"),
    ]


AUTOENCODER_KL, VQ_MODEL = (
    CheckpointFamily(
        name,
        Codec,
        read,
        write,
        build_round_trip_check(read, write, _normalize_config),
        _build_rules,
        config_key="_class_name",
        weights_stem="diffusion_pytorch_model",
        legacy_names=LEGACY_NAMES,
    )
    for name, read, write in [("AutoencoderKL", _read_kl, _write_kl), ("VQModel", _read_vq, _write_vq)]
)
FAMILIES.register("AutoencoderKL", AUTOENCODER_KL)
FAMILIES.register("VQModel", VQ_MODEL)
