"""diffusers' convolutional codecs, in both directions: AutoencoderKL, the continuous one of Stable Diffusion, SDXL and
FLUX, and VQModel, those with a codebook of VQGAN, aMUSEd and, with modulated norms, Kandinsky's MoVQ."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.quantizers import KLConfig, QuantizerConfig, VQConfig
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

SPATIAL = 32  # groups of diffusers' norms that are modulated by codes, whatever the config says of others
KEPT: dict[str, Any] = {"learn": "gradient", "start": 0}  # how a codebook that comes with its codes goes on learning

Width = Annotated[int, Meta(ge=1, le=2**20)]


class _Said(msgspec.Struct):
    """What a config.json of either may say, and what diffusers takes for granted where it does not. Counts are bounded:
    a stranger's file must not make us build for ever."""

    in_channels: Width = 3
    out_channels: Width = 3
    down_block_types: tuple[str, ...] = (DOWN[0],)
    up_block_types: tuple[str, ...] = (UP[0],)
    block_out_channels: Annotated[tuple[Width, ...], Meta(min_length=1, max_length=16)] = (64,)
    layers_per_block: Annotated[int, Meta(ge=1, le=1000)] = 1
    act_fn: str = "silu"
    norm_num_groups: Width = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    mid_block_add_attention: bool = True


class _KLSaid(_Said):
    latent_channels: Width = 4
    shift_factor: float = 0.0
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True


class _VQSaid(_Said):
    latent_channels: Width = 3
    num_vq_embeddings: Annotated[int, Meta(ge=1, le=2**31)] = 256
    vq_embed_dim: Width | None = None
    norm_type: Literal["group", "spatial"] = "group"


S = TypeVar("S", bound=_Said)


def _said(about: About, kind: type[S]) -> S:
    try:
        said = msgspec.convert({key: value for key, value in about.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error), "fetch the file again") from None
    if said.in_channels != said.out_channels or said.act_fn not in ("silu", "swish"):
        raise CheckpointError(
            f"{said.in_channels} channels in, {said.out_channels} out and act_fn {said.act_fn!r}",
            "as many out as in, and silu, are built",
        )
    return said


def _config(said: _Said, latent: int, quantizer: QuantizerConfig, modulated: bool = False, **more: Any) -> CodecConfig:
    widths, size = said.block_out_channels, said.sample_size
    return CodecConfig(
        net=ConvPairConfig(
            widths=widths,
            layers=said.layers_per_block,
            latent=latent,
            attention=said.mid_block_add_attention,
            levels=_levels(said.down_block_types, said.up_block_types, len(widths)),
            groups=said.norm_num_groups,
            modulated=modulated,
            channels=said.in_channels,
            size=(size, size) if isinstance(size, int) else size,
        ),
        quantizer=quantizer,
        mean=(0.5,) * said.in_channels,
        std=(0.5,) * said.in_channels,
        scale=said.scaling_factor,
        **more,
    )


def _read_kl(about: About) -> CodecConfig:
    refuse(about, latents_mean="latents moved by a mean a channel are not built", latents_std="nor by a deviation")
    said = _said(about, _KLSaid)
    return _config(
        said,
        said.latent_channels,
        KLConfig(width=said.latent_channels),
        into="linear" if said.use_quant_conv else "none",
        out_of="linear" if said.use_post_quant_conv else "none",
        shift=said.shift_factor,
    )


def _read_vq(about: About) -> CodecConfig:
    said = _said(about, _VQSaid)
    latent, modulated = said.latent_channels, said.norm_type == "spatial"
    dim = said.vq_embed_dim or latent
    if modulated and (dim != latent or said.norm_num_groups != SPATIAL):
        raise CheckpointError(
            f"norm_type spatial with {said.norm_num_groups} groups, codes of {dim} and {latent} latent channels",
            f"diffusers' spatial norms have {SPATIAL} groups and read codes as wide as the latent channels",
        )
    return _config(said, latent, VQConfig(codes=said.num_vq_embeddings, dim=dim, **KEPT), modulated)


def _levels(down: tuple[str, ...], up: tuple[str, ...], count: int) -> tuple[int, ...]:
    """The levels whose blocks have attention, the same on both sides."""
    for names, known in ((down, DOWN), (up, UP)):
        if len(names) != count or not set(names) <= set(known):
            raise CheckpointError(f"{count} levels of the kinds {names}", f"each must be one of {', '.join(known)}")
    there = tuple(i for i, name in enumerate(down) if name == DOWN[1])
    if there != tuple(i for i, name in enumerate(reversed(up)) if name == UP[1]):
        raise CheckpointError(f"down_block_types {down} and up_block_types {up} differ in attention")
    return there


def _written(config: CodecConfig) -> About:
    """What either says of its networks."""
    net = config.net
    if not isinstance(net, ConvPairConfig) or not config.halved or "mlp" in (config.into, config.out_of):
        raise CheckpointError(
            "diffusers' codecs are convolutional, read pixels of −1 … 1 and have at most one product beside the codes"
        )
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
        "mid_block_add_attention": net.attention,
    }


def _write_kl(config: CodecConfig) -> About:
    if not isinstance(config.quantizer, KLConfig):
        raise CheckpointError("an AutoencoderKL has the KL bottleneck")
    bridges = {"use_quant_conv": config.into == "linear", "use_post_quant_conv": config.out_of == "linear"}
    return {**_written(config), "shift_factor": config.shift or None, **bridges}


def _write_vq(config: CodecConfig) -> About:
    codebook, net = config.quantizer, config.net
    if not isinstance(codebook, VQConfig) or codebook.metric != "euclid":
        raise CheckpointError("a VQModel has one codebook, whose codes are chosen by their distance")
    modulated = isinstance(net, ConvPairConfig) and net.modulated
    book = {"num_vq_embeddings": codebook.codes, "vq_embed_dim": codebook.dim}
    return {**_written(config), **book, "norm_type": "spatial" if modulated else "group"}


def _chosen(config: CodecConfig) -> CodecConfig:
    """Without what matters in training alone: how the codes of a codebook are learned."""
    book = config.quantizer
    return config.with_(quantizer=VQConfig(codes=book.codes, dim=book.dim)) if isinstance(book, VQConfig) else config


# ---- names ------------------------------------------------------------------------------------------------------


def _moves(config: CodecConfig) -> list[Move]:
    net, book = config.net, config.quantizer
    assert isinstance(net, ConvPairConfig)
    vq = isinstance(book, VQConfig)
    moves = _codebook(book) if vq else []
    wide, codes = (net.latent, book.dim) if vq else (2 * net.latent, net.latent)  # a mean and a variance, or a code
    moves += _matrix("into", "quant_conv", book.dim if vq else wide, wide) if config.into == "linear" else []
    moves += _matrix("out_of", "post_quant_conv", net.latent, codes) if config.out_of == "linear" else []
    for side in ("encoder", "decoder"):
        moves += under(f"{side}.", f"{side}.", _side(net, side))
    return moves


def _matrix(ours: str, theirs: str, out: int, into: int) -> list[Move]:
    """A convolution of one pixel is a product with a matrix."""
    weight = reshape(f"{ours}.weight", f"{theirs}.weight", (out, into, 1, 1))
    return [weight, rename(f"{ours}.bias", f"{theirs}.bias")]


def _codebook(book: VQConfig) -> list[Move]:
    """Their codes are ours, with as much use as any, and go on by gradients; what these taught ours is part of
    theirs."""
    beside = "learned" if book.learn == "gradient" else "sums"

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        codes = tensors[0].float()
        return [codes, torch.ones(len(codes)), torch.tensor(True), torch.zeros_like(tensors[0])]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        codes, _, _, kept = tensors
        return [codes + kept.to(codes.dtype) if beside == "learned" else codes]

    ours = tuple(f"quantizer.{name}" for name in ("codebook", "counts", "started", beside))
    return [Move(ours, ("quantize.embedding.weight",), pull, push)]


def _side(net: ConvPairConfig, side: str) -> list[Move]:
    top, down = len(net.widths) - 1, side == "encoder"
    modulated = net.modulated and not down
    moves = [
        *layer("first", "conv_in"),
        *_norm("norm", "conv_norm_out", modulated),
        *layer("last", "conv_out"),
        *under("middle.0.", "mid_block.resnets.0.", _resnet(False, modulated)),
        *under("middle.2.", "mid_block.resnets.1.", _resnet(False, modulated)),
    ]
    if net.attention:
        moves += under("middle.1.", "mid_block.attentions.0.", _attention(net.widths[-1], modulated))
    for i, width in enumerate(net.widths):
        theirs = f"down_blocks.{i}" if down else f"up_blocks.{top - i}"
        before = net.widths[max(i - 1, 0)] if down else net.widths[min(i + 1, top)]
        step = 2 if i in net.levels else 1
        for j in range(net.layers + (0 if down else 1)):
            own = _resnet(j == 0 and before != width, modulated)
            moves += under(f"levels.{i}.{j * step}.", f"{theirs}.resnets.{j}.", own)
            if i in net.levels:
                own = _attention(width, modulated)
                moves += under(f"levels.{i}.{j * step + 1}.", f"{theirs}.attentions.{j}.", own)
        if down and i < top:
            moves += layer(f"downs.{i}.conv", f"{theirs}.downsamplers.0.conv")
        elif not down and i:
            moves += layer(f"ups.{i - 1}.conv", f"{theirs}.upsamplers.0.conv")
    return moves


def _norm(ours: str, theirs: str, modulated: bool) -> list[Move]:
    if not modulated:
        return layer(ours, theirs)
    parts = {"norm": "norm_layer", "scale": "conv_y", "shift": "conv_b"}
    return [move for own, other in parts.items() for move in layer(f"{ours}.{own}", f"{theirs}.{other}")]


def _resnet(shortcut: bool, modulated: bool) -> list[Move]:
    moves = [*layer("conv1", "conv1"), *layer("conv2", "conv2")]
    moves += [*_norm("norm1", "norm1", modulated), *_norm("norm2", "norm2", modulated)]
    return moves + layer("shortcut", "conv_shortcut") if shortcut else moves


def _attention(width: int, modulated: bool) -> list[Move]:
    return [
        *_norm("norm", "spatial_norm" if modulated else "group_norm", modulated),
        *fuse_layer("op.qkv", ["to_q", "to_k", "to_v"], [width] * 3),
        *layer("op.out", "to_out.0"),
    ]


AUTOENCODER_KL, VQ_MODEL = (
    Family(
        name,
        Codec,
        read,
        write,
        round_trip(read, write, _chosen),
        _moves,
        key="_class_name",
        stem="diffusion_pytorch_model",
        older=OLDER,
    )
    for name, read, write in [("AutoencoderKL", _read_kl, _write_kl), ("VQModel", _read_vq, _write_vq)]
)
