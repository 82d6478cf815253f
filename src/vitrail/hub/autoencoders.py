"""diffusers' AutoencoderKL: the continuous codec of Stable Diffusion, SDXL and FLUX, in both directions."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.quantizers import KLConfig
from vitrail.errors import CheckpointError
from vitrail.hub.family import Family, refuse, round_trip
from vitrail.hub.maps import Move, fuse_layer, layer, rename, reshape, under

About = dict[str, Any]
DOWN, UP = ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"), ("UpDecoderBlock2D", "AttnUpDecoderBlock2D")

OLDER = tuple(
    (f".attentions.0.{now}.", f".attentions.0.{then}.")
    for now, then in [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")]
)
"""What files from before 2023 call the parts of the attention in the middle."""

Width = Annotated[int, Meta(ge=1, le=2**20)]


class _Said(msgspec.Struct):
    """What a config.json may say, and what diffusers takes for granted where it does not. Counts are bounded: a
    stranger's file must not make us build for ever."""

    in_channels: Width = 3
    out_channels: Width = 3
    down_block_types: tuple[str, ...] = (DOWN[0],)
    up_block_types: tuple[str, ...] = (UP[0],)
    block_out_channels: Annotated[tuple[Width, ...], Meta(min_length=1, max_length=16)] = (64,)
    layers_per_block: Annotated[int, Meta(ge=1, le=1000)] = 1
    act_fn: str = "silu"
    latent_channels: Width = 4
    norm_num_groups: Width = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    shift_factor: float = 0.0
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True


def _read(about: About) -> CodecConfig:
    refuse(about, latents_mean="latents moved by a mean a channel are not built", latents_std="nor by a deviation")
    try:
        said = msgspec.convert({key: value for key, value in about.items() if value is not None}, _Said)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error), "fetch the file again") from None
    if said.in_channels != said.out_channels or said.act_fn not in ("silu", "swish"):
        raise CheckpointError(
            f"{said.in_channels} channels in, {said.out_channels} out and act_fn {said.act_fn!r}",
            "as many out as in, and silu, are built",
        )
    widths, size = said.block_out_channels, said.sample_size
    return CodecConfig(
        net=ConvPairConfig(
            widths=widths,
            layers=said.layers_per_block,
            latent=said.latent_channels,
            attention=said.mid_block_add_attention,
            levels=_levels(said.down_block_types, said.up_block_types, len(widths)),
            groups=said.norm_num_groups,
            channels=said.in_channels,
            size=(size, size) if isinstance(size, int) else size,
        ),
        quantizer=KLConfig(width=said.latent_channels),
        into="linear" if said.use_quant_conv else "none",
        out_of="linear" if said.use_post_quant_conv else "none",
        mean=(0.5,) * said.in_channels,
        std=(0.5,) * said.in_channels,
        scale=said.scaling_factor,
        shift=said.shift_factor,
    )


def _levels(down: tuple[str, ...], up: tuple[str, ...], count: int) -> tuple[int, ...]:
    """The levels whose blocks have attention, the same on both sides."""
    for names, known in ((down, DOWN), (up, UP)):
        if len(names) != count or not set(names) <= set(known):
            raise CheckpointError(f"{count} levels of the kinds {names}", f"each must be one of {', '.join(known)}")
    there = tuple(i for i, name in enumerate(down) if name == DOWN[1])
    if there != tuple(i for i, name in enumerate(reversed(up)) if name == UP[1]):
        raise CheckpointError(f"down_block_types {down} and up_block_types {up} differ in attention")
    return there


def _write(config: CodecConfig) -> About:
    net = config.net
    if not isinstance(net, ConvPairConfig) or config.quantizer != KLConfig(width=net.latent):
        raise CheckpointError("an AutoencoderKL is convolutional and has the KL bottleneck")
    if not config.halved or "mlp" in (config.into, config.out_of):
        raise CheckpointError("an AutoencoderKL reads pixels of −1 … 1 and has at most one product beside the codes")
    attention = [i in net.levels for i in range(len(net.widths))]
    return {
        "in_channels": net.channels,
        "out_channels": net.channels,
        "down_block_types": [DOWN[own] for own in attention],
        "up_block_types": [UP[own] for own in reversed(attention)],
        "block_out_channels": list(net.widths),
        "layers_per_block": net.layers,
        "act_fn": "silu",
        "latent_channels": net.latent,
        "norm_num_groups": net.groups,
        "sample_size": net.size[0] if net.size[0] == net.size[1] else list(net.size),
        "scaling_factor": config.scale,
        "shift_factor": config.shift or None,
        "use_quant_conv": config.into == "linear",
        "use_post_quant_conv": config.out_of == "linear",
        "mid_block_add_attention": net.attention,
    }


# ---- names ------------------------------------------------------------------------------------------------------


def _moves(config: CodecConfig) -> list[Move]:
    net = config.net
    assert isinstance(net, ConvPairConfig)
    moves = [*_matrix("into", "quant_conv", 2 * net.latent)] if config.into == "linear" else []
    moves += _matrix("out_of", "post_quant_conv", net.latent) if config.out_of == "linear" else []
    for side in ("encoder", "decoder"):
        moves += under(f"{side}.", f"{side}.", _side(net, side))
    return moves


def _matrix(ours: str, theirs: str, width: int) -> list[Move]:
    """A convolution of one pixel is a product with a matrix."""
    weight = reshape(f"{ours}.weight", f"{theirs}.weight", (width, width, 1, 1))
    return [weight, rename(f"{ours}.bias", f"{theirs}.bias")]


def _side(net: ConvPairConfig, side: str) -> list[Move]:
    top, down = len(net.widths) - 1, side == "encoder"
    moves = [
        *layer("first", "conv_in"),
        *layer("norm", "conv_norm_out"),
        *layer("last", "conv_out"),
        *under("middle.0.", "mid_block.resnets.0.", _resnet(False)),
        *under("middle.2.", "mid_block.resnets.1.", _resnet(False)),
    ]
    if net.attention:
        moves += under("middle.1.", "mid_block.attentions.0.", _attention(net.widths[-1]))
    for i, width in enumerate(net.widths):
        theirs = f"down_blocks.{i}" if down else f"up_blocks.{top - i}"
        before = net.widths[max(i - 1, 0)] if down else net.widths[min(i + 1, top)]
        step = 2 if i in net.levels else 1
        for j in range(net.layers + (0 if down else 1)):
            own = _resnet(j == 0 and before != width)
            moves += under(f"levels.{i}.{j * step}.", f"{theirs}.resnets.{j}.", own)
            if i in net.levels:
                moves += under(f"levels.{i}.{j * step + 1}.", f"{theirs}.attentions.{j}.", _attention(width))
        if down and i < top:
            moves += layer(f"downs.{i}.conv", f"{theirs}.downsamplers.0.conv")
        elif not down and i:
            moves += layer(f"ups.{i - 1}.conv", f"{theirs}.upsamplers.0.conv")
    return moves


def _resnet(shortcut: bool) -> list[Move]:
    moves = [move for part in ("norm1", "conv1", "norm2", "conv2") for move in layer(part, part)]
    return moves + layer("shortcut", "conv_shortcut") if shortcut else moves


def _attention(width: int) -> list[Move]:
    return [
        *layer("norm", "group_norm"),
        *fuse_layer("op.qkv", ["to_q", "to_k", "to_v"], [width] * 3),
        *layer("op.out", "to_out.0"),
    ]


AUTOENCODER_KL = Family(
    "AutoencoderKL",
    Codec,
    _read,
    _write,
    round_trip(_read, _write),
    _moves,
    key="_class_name",
    stem="diffusion_pytorch_model",
    older=OLDER,
)
