"""Causal video codecs of diffusers, import and export: AutoencoderKLCosmos, -Wan and -CogVideoX."""

import itertools
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vitrail.codecs.causal_video_codec import CausalVideoCodec, CausalVideoCodecConfig
from vitrail.codecs.cogvideox_autoencoder import CogVideoXAutoencoderConfig
from vitrail.codecs.cosmos_autoencoder import CosmosAutoencoderConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig, KLConfig
from vitrail.codecs.wan_autoencoder import WanAutoencoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, rename, rename_layer, view
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]
ChannelCount = Annotated[int, Meta(ge=1, le=2**20)]
LevelWidths = Annotated[tuple[ChannelCount, ...], Meta(min_length=2, max_length=16)]


class _CosmosSchema(msgspec.Struct):
    """Schema of the config with the defaults of diffusers. Counts are bounded, because the files are untrusted."""

    in_channels: ChannelCount = 3
    out_channels: ChannelCount = 3
    latent_channels: ChannelCount = 16
    encoder_block_out_channels: LevelWidths = (128, 256, 512, 512)
    decode_block_out_channels: LevelWidths = (256, 512, 512, 512)
    attention_resolutions: tuple[int, ...] = (32,)
    resolution: ChannelCount = 1024
    num_layers: Annotated[int, Meta(ge=1, le=1000)] = 2
    patch_size: Annotated[int, Meta(ge=1, le=64)] = 4
    patch_type: str = "haar"
    scaling_factor: float = 1.0
    spatial_compression_ratio: Annotated[int, Meta(ge=1, le=1024)] = 8
    temporal_compression_ratio: Annotated[int, Meta(ge=1, le=1024)] = 8
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None


class _WanSchema(msgspec.Struct):
    """Schema of the config with the defaults of diffusers."""

    base_dim: ChannelCount = 96
    decoder_base_dim: ChannelCount | None = None
    z_dim: ChannelCount = 16
    dim_mult: LevelWidths = (1, 2, 4, 4)
    num_res_blocks: Annotated[int, Meta(ge=1, le=1000)] = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    is_residual: bool = False
    in_channels: ChannelCount = 3
    out_channels: ChannelCount = 3
    patch_size: Annotated[int, Meta(ge=1, le=64)] | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8


class _CogVideoXSchema(msgspec.Struct):
    """Schema of the config with the defaults of diffusers."""

    in_channels: ChannelCount = 3
    out_channels: ChannelCount = 3
    down_block_types: tuple[str, ...] = ("CogVideoXDownBlock3D",) * 4
    up_block_types: tuple[str, ...] = ("CogVideoXUpBlock3D",) * 4
    block_out_channels: LevelWidths = (128, 256, 256, 512)
    latent_channels: ChannelCount = 16
    layers_per_block: Annotated[int, Meta(ge=1, le=1000)] = 3
    act_fn: str = "silu"
    norm_eps: float = 1e-6
    norm_num_groups: ChannelCount = 32
    temporal_compression_ratio: float = 4
    sample_height: ChannelCount = 480
    sample_width: ChannelCount = 720
    scaling_factor: float = 1.15258426
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False
    invert_scale_latents: bool = False


SchemaT = TypeVar("SchemaT", _CosmosSchema, _WanSchema, _CogVideoXSchema)


def _parse_config(hf_config: HFConfig, kind: type[SchemaT]) -> SchemaT:
    try:
        return msgspec.convert({key: value for key, value in hf_config.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error), "correct this key, as in the original config") from None


def _read_cosmos(hf_config: HFConfig) -> CausalVideoCodecConfig:
    settings = _parse_config(hf_config, _CosmosSchema)
    if settings.in_channels != settings.out_channels or settings.patch_type not in ("haar", "rearrange"):
        raise CheckpointError(
            f"in_channels {settings.in_channels}, out_channels {settings.out_channels}, "
            f"patch_type {settings.patch_type!r}",
            "equal channels, and the patch types haar and rearrange are supported",
        )
    resolutions = _list_resolutions(settings.resolution, settings.patch_size, len(settings.encoder_block_out_channels))
    return CausalVideoCodecConfig(
        net=CosmosAutoencoderConfig(
            encoder_widths=settings.encoder_block_out_channels,
            decoder_widths=settings.decode_block_out_channels,
            layers=settings.num_layers,
            latent_channels=settings.latent_channels,
            spatial_factor=settings.spatial_compression_ratio,
            temporal_factor=settings.temporal_compression_ratio,
            patch_size=settings.patch_size,
            wavelets=settings.patch_type == "haar",
            attention_levels=tuple(i for i, side in enumerate(resolutions) if side in settings.attention_resolutions),
            channels=settings.in_channels,
            image_size=settings.resolution,
        ),
        quantizer=IdentityQuantizerConfig(dim=settings.latent_channels),
        latents_mean=settings.latents_mean or (),
        latents_std=settings.latents_std or (),
        scaling_factor=settings.scaling_factor,
    )


def _list_resolutions(resolution: int, patch_size: int, num_widths: int) -> list[int]:
    """Return the resolution of each level, the finest first."""
    return [resolution // patch_size >> i for i in range(num_widths - 1)]


def _write_cosmos(config: CausalVideoCodecConfig) -> HFConfig:
    net, quantizer = config.net, config.quantizer
    if not isinstance(net, CosmosAutoencoderConfig):
        raise CheckpointError(f"AutoencoderKLCosmos has no network of kind {type(net).__name__}")
    if not isinstance(quantizer, IdentityQuantizerConfig) or {config.pre_quant, config.post_quant} != {"linear"}:
        raise CheckpointError("AutoencoderKLCosmos has continuous latents between two linear layers")
    resolutions = _list_resolutions(net.image_size, net.patch_size, len(net.encoder_widths))
    return {
        "in_channels": net.channels,
        "out_channels": net.channels,
        "latent_channels": net.latent_channels,
        "encoder_block_out_channels": list(net.encoder_widths),
        "decode_block_out_channels": list(net.decoder_widths),
        "attention_resolutions": [resolutions[i] for i in net.attention_levels],
        "resolution": net.image_size,
        "num_layers": net.layers,
        "patch_size": net.patch_size,
        "patch_type": "haar" if net.wavelets else "rearrange",
        "scaling_factor": config.scaling_factor,
        "spatial_compression_ratio": net.spatial_factor,
        "temporal_compression_ratio": net.temporal_factor,
        "latents_mean": list(config.latents_mean) or None,
        "latents_std": list(config.latents_std) or None,
    }


def _read_wan(hf_config: HFConfig) -> CausalVideoCodecConfig:
    settings = _parse_config(hf_config, _WanSchema)
    patch = settings.patch_size or 1
    channels, rest = divmod(settings.in_channels, patch**2)
    if settings.in_channels != settings.out_channels or rest or settings.attn_scales:
        raise CheckpointError(
            f"in_channels {settings.in_channels}, out_channels {settings.out_channels}, patch_size {patch}, "
            f"attn_scales {settings.attn_scales}",
            "equal channels, a multiple of the patch, and attention in the middle only are supported",
        )
    net = WanAutoencoderConfig(
        width=settings.base_dim,
        decoder_width=settings.decoder_base_dim or 0,
        multipliers=settings.dim_mult,
        layers=settings.num_res_blocks,
        latent_channels=settings.z_dim,
        temporal_steps=settings.temperal_downsample,
        resampled_shortcut=settings.is_residual,
        patch_size=patch,
        channels=channels,
    )
    if (settings.scale_factor_spatial, settings.scale_factor_temporal) != (net.spatial_factor, net.temporal_factor):
        raise CheckpointError(
            f"scale_factor_spatial {settings.scale_factor_spatial} and scale_factor_temporal "
            f"{settings.scale_factor_temporal} contradict the levels, which give {net.spatial_factor} and "
            f"{net.temporal_factor}",
            "correct one of them",
        )
    return CausalVideoCodecConfig(
        net=net,
        quantizer=KLConfig(width=settings.z_dim),
        latents_mean=settings.latents_mean or (),
        latents_std=settings.latents_std or (),
    )


def _write_wan(config: CausalVideoCodecConfig) -> HFConfig:
    net = config.net
    if (
        not isinstance(net, WanAutoencoderConfig)
        or not isinstance(config.quantizer, KLConfig)
        or {config.pre_quant, config.post_quant} != {"linear"}
    ):
        raise CheckpointError("AutoencoderKLWan has a KL bottleneck between two linear layers of Wan's networks")
    pixels = net.channels * net.patch_size**2
    return {
        "base_dim": net.width,
        "decoder_base_dim": net.decoder_width or None,
        "z_dim": net.latent_channels,
        "dim_mult": list(net.multipliers),
        "num_res_blocks": net.layers,
        "attn_scales": [],
        "temperal_downsample": list(net.temporal_steps),
        "latents_mean": list(config.latents_mean) or None,
        "latents_std": list(config.latents_std) or None,
        "is_residual": net.resampled_shortcut,
        "in_channels": pixels,
        "out_channels": pixels,
        "patch_size": net.patch_size if net.patch_size > 1 else None,
        "scale_factor_temporal": net.temporal_factor,
        "scale_factor_spatial": net.spatial_factor,
    }


def _read_cogvideox(hf_config: HFConfig) -> CausalVideoCodecConfig:
    settings = _parse_config(hf_config, _CogVideoXSchema)
    num_levels, ratio = len(settings.block_out_channels), settings.temporal_compression_ratio
    types = {*settings.down_block_types, *settings.up_block_types}
    if {len(settings.down_block_types), len(settings.up_block_types)} != {num_levels} or (
        types != {"CogVideoXDownBlock3D", "CogVideoXUpBlock3D"}
    ):
        raise CheckpointError(
            f"block types {sorted(types)} do not fit {num_levels} block_out_channels",
            "give CogVideoXDownBlock3D and CogVideoXUpBlock3D, one of each for each level",
        )
    unsupported = {
        "out_channels": settings.out_channels != settings.in_channels,
        "act_fn": settings.act_fn not in ("silu", "swish"),
        "temporal_compression_ratio": ratio != int(ratio),
        "shift_factor": bool(settings.shift_factor),
        # The convolutions have as many channels as the pixels.
        "use_quant_conv": settings.use_quant_conv and settings.latent_channels != settings.out_channels,
        "use_post_quant_conv": settings.use_post_quant_conv and settings.latent_channels != settings.out_channels,
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            raise CheckpointError(
                f"{name} {getattr(settings, name)} is not supported",
                "use out_channels equal to in_channels, act_fn silu, an integer ratio, no shift_factor, and quant "
                "convolutions only with as many latent channels as out_channels",
            )
    return CausalVideoCodecConfig(
        net=CogVideoXAutoencoderConfig(
            widths=settings.block_out_channels,
            layers=settings.layers_per_block,
            latent_channels=settings.latent_channels,
            temporal_factor=int(ratio),
            norm_groups=settings.norm_num_groups,
            norm_eps=settings.norm_eps,
            channels=settings.in_channels,
            image_size=(settings.sample_height, settings.sample_width),
        ),
        quantizer=KLConfig(width=settings.latent_channels),
        pre_quant="linear" if settings.use_quant_conv else "none",
        post_quant="linear" if settings.use_post_quant_conv else "none",
        latents_mean=settings.latents_mean or (),
        latents_std=settings.latents_std or (),
        scaling_factor=settings.scaling_factor,
        invert_scale_latents=settings.invert_scale_latents,
    )


def _write_cogvideox(config: CausalVideoCodecConfig) -> HFConfig:
    net, bridges = config.net, {config.pre_quant, config.post_quant}
    if not isinstance(net, CogVideoXAutoencoderConfig) or not isinstance(config.quantizer, KLConfig):
        raise CheckpointError("AutoencoderKLCogVideoX has a KL bottleneck between CogVideoX's networks")
    if bridges != {"none"} and net.latent_channels != net.channels:
        raise CheckpointError("AutoencoderKLCogVideoX has projections only with as many latent channels as channels")
    return {
        "in_channels": net.channels,
        "out_channels": net.channels,
        "down_block_types": ["CogVideoXDownBlock3D"] * len(net.widths),
        "up_block_types": ["CogVideoXUpBlock3D"] * len(net.widths),
        "block_out_channels": list(net.widths),
        "latent_channels": net.latent_channels,
        "layers_per_block": net.layers,
        "act_fn": "silu",
        "norm_eps": net.norm_eps,
        "norm_num_groups": net.norm_groups,
        "temporal_compression_ratio": net.temporal_factor,
        "sample_height": net.image_size[0],
        "sample_width": net.image_size[1],
        "scaling_factor": config.scaling_factor,
        "shift_factor": None,
        "latents_mean": list(config.latents_mean) or None,
        "latents_std": list(config.latents_std) or None,
        "force_upcast": True,
        "use_quant_conv": config.pre_quant == "linear",
        "use_post_quant_conv": config.post_quant == "linear",
        "invert_scale_latents": config.invert_scale_latents,
    }


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_cosmos_rules(config: CausalVideoCodecConfig) -> list[TensorRule]:
    net, latent = config.net, config.net.latent_channels
    assert isinstance(net, CosmosAutoencoderConfig)
    pixels = net.channels * net.patch_size**3
    encoder, decoder = net.encoder_widths, net.decoder_widths[::-1]
    rules = [*_build_pointwise("pre_quant_proj", "quant_conv", latent, latent)]
    rules += _build_pointwise("post_quant_proj", "post_quant_conv", latent, latent)
    for side, widths, steps, outer, layers in (
        ("encoder", encoder, net.encoder_steps, (pixels, latent), net.layers),
        ("decoder", decoder, net.decoder_steps, (latent, pixels), net.layers + 1),
    ):
        up, top = side == "decoder", len(widths) - 2
        own = [*_build_factorized("first", "conv_in", outer[0], widths[0]), *_build_norm("norm", "norm_out")]
        own += _build_factorized("last", "conv_out", widths[-1], outer[1])
        own += _build_middle(widths[0] if up else widths[-1])
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            block = f"{'up' if up else 'down'}_blocks.{i}"
            has_attention = (top - i if up else i) in net.attention_levels
            for j in range(layers):
                at = j * (3 if has_attention else 1)
                width = after if j else before
                own += add_prefix(f"levels.{i}.{at}.", f"{block}.resnets.{j}.", _build_resnet(width, after))
                if has_attention:
                    own += _build_attention(f"levels.{i}.{at + 1}", f"{block}.attentions.{j}", after)
                    own += _build_attention(f"levels.{i}.{at + 2}", f"{block}.temp_attentions.{j}", after)
            if i < len(steps):
                kind = "upsamplers" if up else "downsamplers"
                own += add_prefix(f"steps.{i}.", f"{block}.{kind}.0.", _build_step(after, *steps[i], up))
        rules += add_prefix(f"{side}.", f"{side}.", own)
    return rules


def _build_pointwise(native: str, hf: str, in_features: int, out_features: int) -> list[TensorRule]:
    """Build the rules of a linear layer, which diffusers stores as a 1 × 1 × 1 convolution."""
    shape = (out_features, in_features)
    return [view(f"{native}.weight", f"{hf}.weight", shape, (*shape, 1, 1, 1)), rename(f"{native}.bias", f"{hf}.bias")]


def _build_space(native: str, hf: str, in_channels: int, out_channels: int) -> list[TensorRule]:
    kernel = (out_channels, in_channels, 3, 3)
    weight = view(f"{native}.weight", f"{hf}.weight", kernel, (*kernel[:2], 1, 3, 3))
    return [weight, rename(f"{native}.bias", f"{hf}.bias")]


def _build_time(native: str, hf: str, in_channels: int, out_channels: int | None = None) -> list[TensorRule]:
    kernel = (in_channels if out_channels is None else out_channels, in_channels, 3)
    weight = view(f"{native}.weight", f"{hf}.weight", kernel, (*kernel, 1, 1))
    return [weight, rename(f"{native}.bias", f"{hf}.bias")]


def _build_factorized(native: str, hf: str, in_channels: int, out_channels: int) -> list[TensorRule]:
    space = _build_space(f"{native}.space", f"{hf}.conv_s", in_channels, out_channels)
    return [*space, *_build_time(f"{native}.time", f"{hf}.conv_t", out_channels)]


def _build_norm(native: str, hf: str) -> list[TensorRule]:
    return rename_layer(native, f"{hf}.norm")


def _build_resnet(in_channels: int, out_channels: int) -> list[TensorRule]:
    rules = [*_build_norm("norm1", "norm1"), *_build_norm("norm2", "norm2")]
    rules += _build_factorized("conv1", "conv1", in_channels, out_channels)
    rules += _build_factorized("conv2", "conv2", out_channels, out_channels)
    has_shortcut = in_channels != out_channels
    return rules + (_build_pointwise("shortcut", "conv_shortcut", in_channels, out_channels) if has_shortcut else [])


def _build_attention(native: str, hf: str, width: int) -> list[TensorRule]:
    names, shape = [f"{hf}.to_{part}" for part in "qkv"], (width, width, 1, 1, 1)
    return [
        *_build_norm(f"{native}.norm", f"{hf}.norm"),
        _fuse_kernels(f"{native}.qkv.weight", [f"{name}.weight" for name in names], shape),
        fuse(f"{native}.qkv.bias", [f"{name}.bias" for name in names], [width] * 3),
        *_build_pointwise(f"{native}.out", f"{hf}.to_out.0", width, width),
    ]


def _fuse_kernels(native: str, hf: list[str], shape: tuple[int, ...]) -> TensorRule:
    """Fuse 1 × 1 × 1 convolutions into one matrix."""
    fused = fuse(native, hf, [shape[0]] * len(hf))

    def push(tensors: list[Any]) -> list[Any]:
        return [part.reshape(shape) for part in fused.export(tensors)]

    return TensorRule((native,), tuple(hf), lambda tensors: fused.load([part.flatten(1) for part in tensors]), push)


def _build_middle(width: int) -> list[TensorRule]:
    return [
        *add_prefix("middle.0.", "mid_block.resnets.0.", _build_resnet(width, width)),
        *_build_attention("middle.1", "mid_block.attentions.0", width),
        *_build_attention("middle.2", "mid_block.temp_attentions.0", width),
        *add_prefix("middle.3.", "mid_block.resnets.1.", _build_resnet(width, width)),
    ]


def _build_step(width: int, space: bool, time: bool, up: bool) -> list[TensorRule]:
    if not space and not time:
        return []
    names = ("conv2", "conv1") if up else ("conv1", "conv2")
    rules = _build_space("space", names[0], width, width) if space else []
    rules += _build_time("time", names[1], width) if time else []
    return rules + _build_pointwise("out", "conv3", width, width)


def _build_wan_rules(config: CausalVideoCodecConfig) -> list[TensorRule]:
    net, latent = config.net, config.net.latent_channels
    assert isinstance(net, WanAutoencoderConfig)
    rules = _build_pointwise("pre_quant_proj", "quant_conv", 2 * latent, 2 * latent)
    rules += _build_pointwise("post_quant_proj", "post_quant_conv", latent, latent)
    encoder = list(zip(net.encoder_widths[:-1], net.encoder_widths[1:], strict=True))
    for side, widths, steps in (
        ("encoder", encoder, net.temporal_steps),
        ("decoder", net.decoder_widths, net.temporal_steps[::-1]),
    ):
        up = side == "decoder"
        middle, layers = widths[0][0] if up else widths[-1][1], net.layers + up
        own = [*rename_layer("first", "conv_in"), *rename_layer("last", "conv_out")]
        own += [_build_gamma("norm", "norm_out", widths[-1][1], 3)]
        own += add_prefix("middle.0.", "mid_block.resnets.0.", _build_wan_resnet(middle, middle))
        own += add_prefix("middle.1.", "mid_block.attentions.0.", _build_wan_attention(middle))
        own += add_prefix("middle.2.", "mid_block.resnets.1.", _build_wan_resnet(middle, middle))
        position = 0  # in the flat list of the encoder of Wan 2.1
        for i, (before, after) in enumerate(widths):
            for j in range(layers):
                block = f"up_blocks.{i}.resnets.{j}." if up else f"down_blocks.{position}."
                if net.resampled_shortcut and not up:
                    block = f"down_blocks.{i}.resnets.{j}."
                own += add_prefix(f"levels.{i}.blocks.{j}.", block, _build_wan_resnet(after if j else before, after))
                position += 1
            if i < len(steps):
                block = f"up_blocks.{i}.upsamplers.0." if up else f"down_blocks.{position}."
                if net.resampled_shortcut:
                    block = f"up_blocks.{i}.upsampler." if up else f"down_blocks.{i}.downsampler."
                step = rename_layer("space", "resample.1")
                step += _build_time("time", "time_conv", after, 2 * after if up else after) if steps[i] else []
                own += add_prefix(f"levels.{i}.step.", block, step)
                position += 1
        rules += add_prefix(f"{side}.", f"{side}.", own)
    return rules


def _build_gamma(native: str, hf: str, width: int, axes: int) -> TensorRule:
    return view(f"{native}.weight", f"{hf}.gamma", (width,), (width, *(1,) * axes))


def _build_wan_resnet(in_channels: int, out_channels: int) -> list[TensorRule]:
    rules = [_build_gamma("norm1", "norm1", in_channels, 3), _build_gamma("norm2", "norm2", out_channels, 3)]
    rules += [*rename_layer("conv1", "conv1"), *rename_layer("conv2", "conv2")]
    has_shortcut = in_channels != out_channels
    return rules + (_build_pointwise("shortcut", "conv_shortcut", in_channels, out_channels) if has_shortcut else [])


def _build_wan_attention(width: int) -> list[TensorRule]:
    return [
        _build_gamma("norm", "norm", width, 2),
        view("qkv.weight", "to_qkv.weight", (3 * width, width), (3 * width, width, 1, 1)),
        rename("qkv.bias", "to_qkv.bias"),
        view("out.weight", "proj.weight", (width, width), (width, width, 1, 1)),
        rename("out.bias", "proj.bias"),
    ]


def _build_cogvideox_rules(config: CausalVideoCodecConfig) -> list[TensorRule]:
    net = config.net
    assert isinstance(net, CogVideoXAutoencoderConfig)
    rules = []
    for native, hf, kind, width in (
        ("pre_quant_proj", "quant_conv", config.pre_quant, 2 * net.latent_channels),
        ("post_quant_proj", "post_quant_conv", config.post_quant, net.latent_channels),
    ):
        rules += _build_pointwise(native, hf, width, width) if kind == "linear" else []
    for side, widths, layers in (
        ("encoder", net.widths, net.layers),
        ("decoder", net.widths[::-1], net.layers + 1),
    ):
        latent, kind = (net.latent_channels, "up") if side == "decoder" else (0, "down")
        middle = widths[0] if latent else widths[-1]
        own = [*rename_layer("first", "conv_in.conv"), *rename_layer("last", "conv_out.conv")]
        own += _build_cogvideox_norm("norm", "norm_out", widths[-1], latent)
        for j in range(2):
            block = _build_cogvideox_resnet(middle, middle, latent)
            own += add_prefix(f"middle.blocks.{j}.", f"mid_block.resnets.{j}.", block)
        for i, (before, after) in enumerate(itertools.pairwise((widths[0], *widths))):
            for j in range(layers):
                block = _build_cogvideox_resnet(after if j else before, after, latent)
                own += add_prefix(f"levels.{i}.blocks.{j}.", f"{kind}_blocks.{i}.resnets.{j}.", block)
            if i < len(widths) - 1:
                own += rename_layer(f"levels.{i}.step.space", f"{kind}_blocks.{i}.{kind}samplers.0.conv")
        rules += add_prefix(f"{side}.", f"{side}.", own)
    return rules


def _build_cogvideox_norm(native: str, hf: str, width: int, latent: int) -> list[TensorRule]:
    """Build the rules of a norm, which the latents modulate if `latent` is not 0."""
    if not latent:
        return rename_layer(native, hf)
    names = [f"{hf}.conv_y.conv", f"{hf}.conv_b.conv"]
    return [
        *rename_layer(native, f"{hf}.norm_layer"),
        _fuse_kernels(f"{native}.modulation.weight", [f"{name}.weight" for name in names], (width, latent, 1, 1, 1)),
        fuse(f"{native}.modulation.bias", [f"{name}.bias" for name in names], [width] * 2),
    ]


def _build_cogvideox_resnet(in_channels: int, out_channels: int, latent: int) -> list[TensorRule]:
    rules = _build_cogvideox_norm("norm1", "norm1", in_channels, latent)
    rules += _build_cogvideox_norm("norm2", "norm2", out_channels, latent)
    rules += [*rename_layer("conv1", "conv1.conv"), *rename_layer("conv2", "conv2.conv")]
    has_shortcut = in_channels != out_channels
    return rules + (_build_pointwise("shortcut", "conv_shortcut", in_channels, out_channels) if has_shortcut else [])


AUTOENCODER_COSMOS, AUTOENCODER_WAN, AUTOENCODER_COGVIDEOX = (
    CheckpointFamily(
        name,
        CausalVideoCodec,
        read,
        write,
        build_round_trip_check(read, write),
        rules,
        config_key="_class_name",
        weights_stem="diffusion_pytorch_model",
    )
    for name, read, write, rules in [
        ("AutoencoderKLCosmos", _read_cosmos, _write_cosmos, _build_cosmos_rules),
        ("AutoencoderKLWan", _read_wan, _write_wan, _build_wan_rules),
        ("AutoencoderKLCogVideoX", _read_cogvideox, _write_cogvideox, _build_cogvideox_rules),
    ]
)
FAMILIES.register("AutoencoderKLCosmos", AUTOENCODER_COSMOS)
FAMILIES.register("AutoencoderKLWan", AUTOENCODER_WAN)
FAMILIES.register("AutoencoderKLCogVideoX", AUTOENCODER_COGVIDEOX)
