"""OPT, the decoder of BLIP-2: learned positions, LayerNorm, a plain MLP with ReLU, biases."""

from typing import Any

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError
from vitrail.hub.decoders import spelt
from vitrail.hub.family import ACTIVATIONS, Family, need, round_trip
from vitrail.hub.maps import Move, fuse_layer, layer, rename, under
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, RotaryConfig

About = dict[str, Any]

UNREAD = 2  # rows of the table before the first token's
EPS = 1e-5  # no config says another


def _read(about: About) -> DecoderConfig:
    width, heads = need(about, "hidden_size"), need(about, "num_attention_heads")
    if not about.get("do_layer_norm_before", True):
        raise CheckpointError("do_layer_norm_before is false: norms behind the branches and none at the end (OPT-350m)")
    if (about.get("word_embed_proj_dim") or width) != width:
        raise CheckpointError(f"word_embed_proj_dim is {about['word_embed_proj_dim']}, the width {width} (OPT-350m)")
    if not about.get("layer_norm_elementwise_affine", True) or about.get("_remove_final_layer_norm"):
        raise CheckpointError("norms without weights, or none at the end, are not built (Galactica and older files)")
    name = about.get("activation_function", "relu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"activation_function {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    bias, context = bool(about.get("enable_bias", True)), about.get("max_position_embeddings", 2048)
    attention = AttentionConfig(heads=heads, bias="all" if bias else "none")
    mlp = PlainConfig(hidden=need(about, "ffn_dim"), activation=ACTIVATIONS[name], bias=bias)  # pyrefly: ignore
    return DecoderConfig(
        vocab=need(about, "vocab_size"),
        layers=need(about, "num_hidden_layers"),
        block=BlockConfig(width=width, attention=attention, mlp=mlp, eps=EPS),
        rotary=RotaryConfig(head_dim=attention.channels(width), dim=0),
        learned=context + UNREAD,
        context=context,
        tied=bool(about.get("tie_word_embeddings", True)),
    )


def _write(config: DecoderConfig) -> About:
    block = config.block
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": block.width,
        "word_embed_proj_dim": block.width,
        "ffn_dim": block.mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "activation_function": next(name for name, ours in ACTIVATIONS.items() if ours == block.mlp.activation),
        "max_position_embeddings": config.context,
        "enable_bias": block.attention.bias == "all",
        "do_layer_norm_before": True,
        "tie_word_embeddings": config.tied,
    }


def _moves(config: DecoderConfig) -> list[Move]:
    W, bias = config.block.width, config.block.attention.bias == "all"
    moves = [
        rename("embed.weight", "embed_tokens.weight"),
        rename("positions.weight", "embed_positions.weight"),
        *layer("norm", "final_layer_norm"),
    ]
    block = [
        *layer("branches.self.norm", "self_attn_layer_norm"),
        *fuse_layer("branches.self.op.qkv", [f"self_attn.{name}_proj" for name in "qkv"], [W] * 3, bias),
        *layer("branches.self.op.out", "self_attn.out_proj", bias),
        *layer("branches.mlp.norm", "final_layer_norm"),
        *layer("branches.mlp.op.up", "fc1", bias),
        *layer("branches.mlp.op.down", "fc2", bias),
    ]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"layers.{i}.", block)
    moves = under("", "model.decoder.", moves)
    return moves if config.tied else [*moves, rename("head.weight", "lm_head.weight")]


COPIES = (("lm_head.weight", "model.decoder.embed_tokens.weight"),)
OPT = Family("opt", Decoder, _read, _write, round_trip(_read, _write, spelt), _moves, copies=COPIES)
