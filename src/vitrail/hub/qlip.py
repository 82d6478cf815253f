"""QLIP's published layout (a config.json of `QLIPModel`): its tokenizer is a `Codec`, its two towers a `Contrastive`.

The encoder is EVA-02's ViT; codes are made from its patches before the last norm, and what is compared with words is
its CLS behind that norm. Both models read one file, and each leaves alone what is the other's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.quantizers import BSQConfig
from vitrail.codecs.vit import ViTPairConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.about import check_about
from vitrail.hub.encoders import _read_clip_text, _text_moves, _vit, _write_clip_text, patch_moves
from vitrail.hub.family import ACTIVATIONS, Family, need, round_trip
from vitrail.hub.maps import Move, fuse, fuse_layer, layer, rename, under, view
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.processing.images import NORMS

About = dict[str, Any]

# What the published configuration takes for granted where a config.json leaves it out.
TOWER: About = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), True),
    **dict.fromkeys(("subln", "swiglu", "rope"), False),
}
SPAN = 16  # patches that rotary positions span


def _tower(about: About, key: str) -> About:
    own = about.get(key) or {}
    check_about({"vision_config": own})
    return {**TOWER, **{name: value for name, value in own.items() if value is not None}}


# ---- blocks and towers ------------------------------------------------------------------------------------------


def _read_block(about: About) -> BlockConfig:
    biases = tuple(about[f"{name}_bias"] for name in "qkv")
    if biases not in ((True, True, True), (True, False, True)):
        raise CheckpointError(f"q_bias, k_bias, v_bias are {biases}", "all of them, or all but k's, are built")
    inner, eps, hidden = "layer" if about["subln"] else None, about["layer_norm_eps"], about["intermediate_size"]
    if about["swiglu"]:
        mlp: Any = GatedConfig(hidden=hidden, bias=True, inner_norm=inner, eps=eps)
    elif inner or about["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(f"subln with an MLP of {about['hidden_act']}", "norms inside are built for SwiGLU")
    else:
        mlp = PlainConfig(hidden=hidden, activation=ACTIVATIONS[about["hidden_act"]])  # pyrefly: ignore
    attention = AttentionConfig(
        heads=about["num_attention_heads"], bias="all" if biases[1] else "all_but_k", inner_norm=inner, eps=eps
    )
    return BlockConfig(width=about["hidden_size"], attention=attention, mlp=mlp, eps=eps)


def _read_tower(about: About, **more: Any) -> ViTConfig:
    block = _read_block(about)
    rotary = RotaryConfig(head_dim=block.width // block.attention.heads, layout="2d", pairing="adjacent")
    turned: About = {"rotary": rotary, "rotary_span": SPAN} if about["rope"] else {}
    return ViTConfig(layers=about["num_hidden_layers"], block=block, resize="bicubic_antialias", **turned, **more)


def _read_vision(about: About) -> ViTConfig:
    own = _tower(about, "vision_config")
    biased = about.get("vision_projection_bias", True)
    return _read_tower(
        own,
        image=own["image_size"],
        patch=own["patch_size"],
        channels=own["num_channels"],
        cls=True,
        positions="cls_and_patches",
        pool="cls",
        norm_last="pooled",
        head=(about.get("projection_dim") or 512) if biased else 0,
    )


def _write_tower(config: ViTConfig, image: int, patch: int, channels: int) -> About:
    block, mlp = config.block, config.block.mlp
    gated = isinstance(mlp, GatedConfig)
    return {
        "hidden_size": block.width,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_channels": channels,
        "image_size": image,
        "patch_size": patch,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == mlp.activation),
        "layer_norm_eps": block.eps,
        "q_bias": True,
        "k_bias": block.attention.bias == "all",
        "v_bias": True,
        "subln": block.attention.inner_norm is not None,
        "swiglu": gated,
        "rope": config.rotary is not None,
    }


def _block_moves(block: BlockConfig) -> list[Move]:
    attention, mlp, W, hidden = "branches.self.op", "branches.mlp.op", block.width, block.mlp.hidden
    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    moves = [
        *layer("branches.self.norm", "layer_norm1"),
        *layer("branches.mlp.norm", "layer_norm2"),
        *layer(f"{attention}.out", "self_attn.out_proj"),
    ]
    if block.attention.bias == "all":
        moves += fuse_layer(f"{attention}.qkv", qkv, [W] * 3)
    else:
        moves += [fuse(f"{attention}.qkv.weight", [f"{name}.weight" for name in qkv], [W] * 3)]
        moves += [rename(f"{attention}.{x}_bias", f"self_attn.{x}_proj.bias") for x in "qv"]
    if block.attention.inner_norm:
        moves += layer(f"{attention}.inner_norm", "self_attn.inner_attn_ln")
    if not isinstance(block.mlp, GatedConfig):
        return [*moves, *layer(f"{mlp}.up", "mlp.fc1"), *layer(f"{mlp}.down", "mlp.fc2")]
    moves += [*fuse_layer(f"{mlp}.gate_up", ["mlp.w1", "mlp.w2"], [hidden] * 2), *layer(f"{mlp}.down", "mlp.w3")]
    return moves + layer(f"{mlp}.norm", "mlp.ffn_ln") if block.mlp.inner_norm else moves


def _blocks(config: ViTConfig) -> list[Move]:
    one = _block_moves(config.block)
    return [move for i in range(config.layers) for move in under(f"blocks.{i}.", f"encoder.layers.{i}.", one)]


def _vision_moves(config: ViTConfig) -> list[Move]:
    moves = [
        rename("cls", "embeddings.class_embedding"),
        rename("positions.table", "embeddings.position_embedding.weight"),
        *patch_moves(config, "embeddings.patch_embedding"),
        *layer("norm_last", "post_layernorm"),
        *_blocks(config),
    ]
    return under("", "vision_model.", moves) + (layer("head", "visual_projection") if config.head else [])


# ---- the tokenizer ----------------------------------------------------------------------------------------------


def _read(about: About) -> CodecConfig:
    seen, drawn = _tower(about, "vision_config"), _tower(about, "decoder_config")
    kind = seen.get("quantizer"), seen.get("quantizer_embed_type"), seen.get("quantizer_l2_norm")
    if kind != ("bsq", "mlp", True):
        raise CheckpointError(
            f"quantizer, embed_type and l2_norm are {kind}", "bsq behind an mlp, normalised, is built"
        )
    made = need(seen, "quantizer_cfg")
    if not made.get("l2_norm", True):
        raise CheckpointError("quantizer_cfg.l2_norm is false: codes that are not on the sphere are not built")
    encoder, width = _read_vision(about), drawn["hidden_size"]
    if (seen.get("hidden_size_post_q") or seen["hidden_size"]) != width:
        raise CheckpointError(f"hidden_size_post_q is not the decoder's width, {width}")
    decoder = _read_tower(drawn, image=drawn["image_size"] // drawn["patch_size"], patch=1, channels=width)
    if decoder.side != encoder.side or drawn["patch_size"] != encoder.patch:
        raise CheckpointError("the encoder's and the decoder's patches or pictures differ in size")
    norm = NORMS["clip"]
    return CodecConfig(
        net=ViTPairConfig(encoder=encoder, decoder=decoder, hidden=drawn["intermediate_size"]),
        quantizer=BSQConfig(bits=need(made, "embed_dim")),
        into="mlp",
        out_of="mlp",
        mean=norm.mean,
        std=norm.std,
    )


def _write(config: CodecConfig) -> About:
    net, norm = config.net, NORMS["clip"]
    if not isinstance(net, ViTPairConfig) or not isinstance(config.quantizer, BSQConfig):
        raise CheckpointError("QLIP has ViTs on both sides of BSQ")
    if (config.mean, config.std) != norm:
        raise CheckpointError("QLIP reads pixels by CLIP's mean and deviation")
    image, patch, channels = net.encoder.image, net.encoder.patch, net.encoder.channels
    return {
        "architectures": ["QLIPModel"],
        "model_type": "clip",
        "vision_config": {
            **_write_tower(net.encoder, image, patch, channels),
            "quantizer": "bsq",
            "quantizer_embed_type": "mlp",
            "quantizer_l2_norm": True,
            "quantizer_cfg": {
                "embed_dim": config.quantizer.bits,
                "group_size": 1,
                "input_format": "blc",
                "l2_norm": True,
            },
            "hidden_size_post_q": net.decoder.block.width,
        },
        "decoder_config": _write_tower(net.decoder, image, patch, channels),
        "projection_dim": net.encoder.head or 512,
        "vision_projection_bias": bool(net.encoder.head),
    }


def _moves(config: CodecConfig) -> list[Move]:
    net = config.net
    assert isinstance(net, ViTPairConfig)
    N, W = net.decoder.side**2, net.decoder.block.width
    drawn = [
        view("body.positions.table", "position_embeddings", (N, W), (1, N, W)),
        *layer("body.norm_last", "norm"),
        *under("body.", "", _blocks(net.decoder)),
        *layer("hidden.0", "ffn.0"),
        *layer("last", "conv_out"),
    ]
    bridges = {"into.0": "quant_embed.c_fc", "into.2": "quant_embed.c_proj", "out_of.0": "quant_embed_post.c_fc"}
    # The decoder begins with the second product behind the codes.
    bridges["decoder.body.embed.proj"] = "quant_embed_post.c_proj"
    return [
        *under("encoder.", "", _vision_moves(net.encoder)),
        *(move for ours, theirs in bridges.items() for move in layer(ours, f"vision_model.{theirs}")),
        *under("decoder.", "vision_decoder.", drawn),
    ]


# ---- the towers -------------------------------------------------------------------------------------------------


def _read_towers(about: About) -> ContrastiveConfig:
    words = about.get("text_config") or {}
    built = ("subln", "swiglu", "rope"), ("q_bias", "k_bias", "v_bias")
    if any(words.get(key) for key in built[0]) or not all(words.get(key, True) for key in built[1]):
        raise CheckpointError("the text tower is not CLIP's: subln, swiglu, rope or a missing bias", "CLIP's is built")
    image = _read_vision(about)
    if not image.head or about.get("text_projection_bias"):
        raise CheckpointError("the projections' biases are not QLIP's: one for pictures, none for words")
    text = _read_clip_text({"hidden_act": "gelu", **words}).with_(head=image.head)
    return ContrastiveConfig(image=image, text=text, log_scale=about.get("logit_scale_init_value") or 2.6592)


def _write_towers(config: ContrastiveConfig) -> About:
    image = _vit(config)
    return {
        "architectures": ["QLIPModel"],
        "model_type": "clip",
        "vision_config": _write_tower(image, image.image, image.patch, image.channels),
        "text_config": _write_clip_text(config.text.with_(head=0)),
        "projection_dim": image.head,
        "vision_projection_bias": True,
        "text_projection_bias": False,
        "logit_scale_init_value": config.log_scale,
    }


def _towers_moves(config: ContrastiveConfig) -> list[Move]:
    return [
        *under("image.", "", _vision_moves(_vit(config))),
        *under("text.", "text_model.", _text_moves(config.text.with_(head=0))),
        _unbiased("text.head", "text_projection"),
        view("log_scale", "logit_scale", (1,), ()),
    ]


def _unbiased(ours: str, theirs: str) -> Move:
    """A product of ours with a bias that theirs has not: zero, or it cannot be written."""

    def push(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if tensors[1].count_nonzero():
            raise CheckpointError(
                f"{ours}.bias is not zero, and QLIP has none", "train without it to write this layout"
            )
        return tensors[:1]

    return Move(
        (f"{ours}.weight", f"{ours}.bias"),
        (f"{theirs}.weight",),
        lambda tensors: [tensors[0], tensors[0].new_zeros(len(tensors[0]))],
        push,
    )


# ---- rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Family):
    """A family that is a part of what a file holds; what `beside` begins is another's."""

    beside: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        return name.startswith(self.beside) or super().ignores(name)


WORDS = ("text_model.", "text_projection.", "logit_scale")
CODES = ("vision_decoder.", "vision_model.quant_embed.", "vision_model.quant_embed_post.")

QLIP, TOWERS = (
    Part(
        "QLIPModel",
        model,
        read,
        write,
        round_trip(read, write),
        moves,
        (".position_ids", ".rope.freqs_cos", ".rope.freqs_sin"),
        key="architectures",
        beside=beside,
    )
    for model, read, write, moves, beside in [
        (Codec, _read, _write, _moves, WORDS),
        (Contrastive, _read_towers, _write_towers, _towers_moves, CODES),
    ]
)


def load_towers(path_or_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Contrastive:
    """The two towers of a checkpoint whose codec `hub.load` gives: what compares pictures with words."""
    from vitrail.hub.configs import THEIRS, Found, resolve
    from vitrail.hub.files import Weights, read_json
    from vitrail.hub.folders import build

    path = resolve(path_or_id)
    file = path / THEIRS
    config = TOWERS.config(read_json(file), file)
    found = Found(path, Contrastive, config, TOWERS, lambda: Weights(path))
    return cast(Contrastive, build(found, dtype, device))
