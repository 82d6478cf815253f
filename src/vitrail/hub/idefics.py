"""Idefics, the open copy of Flamingo, in transformers' layout: CLIP's tower, a Perceiver resampler, and a Llama before
whose layers stand gated blocks that look at the last picture.

Its vocabulary is Llama's and a few added words, in tables of their own: <fake_token_around_image> first, then <image>.
"""

from typing import Any

from vitrail.backbones.fusion import CrossConfig
from vitrail.connectors import ResamplerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.decoders import DECODERS, decoder_moves
from vitrail.hub.encoders import ENCODERS
from vitrail.hub.family import Family, refuse, round_trip
from vitrail.hub.habit import Habit
from vitrail.hub.maps import Move, fuse, fuse_layer, layer, rename, under, view
from vitrail.hub.mllama import UNSAID, cross_moves, whole_spelt
from vitrail.models.looking import LookingVLM, LookingVLMConfig
from vitrail.processing import processors
from vitrail.processing.resolution import Naive

About = dict[str, Any]

LLAMA = next(row for row in DECODERS if row.name == "llama")
CLIP = next(row for row in ENCODERS if row.name == "clip_vision_model")

# What transformers takes for granted where a config.json leaves it out.
DEFAULTS: About = {
    "vocab_size": 32_000,
    "additional_vocab_size": 0,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "alpha_type": "float",
    "tie_word_embeddings": False,
    "cross_layer_interval": 1,
    "qk_layer_norms": False,
    "use_resampler": False,
    "max_position_embeddings": 2048,
}
VISION: About = {
    "embed_dim": 768,
    "image_size": 224,
    "intermediate_size": 5120,
    "patch_size": 14,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
PERCEIVER: About = {
    "resampler_n_latents": 64,
    "resampler_depth": 6,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "qk_layer_norms_perceiver": False,
}
ALPHAS: dict[str, Any] = {"float": True, "vector": "channels"}


def _said(about: About | None, defaults: About) -> About:
    return defaults | {key: value for key, value in (about or {}).items() if value is not None}


def _read(about: About) -> LookingVLMConfig:
    vision, perceiver = _said(about.get("vision_config"), VISION), _said(about.get("perceiver_config"), PERCEIVER)
    about = _said(about, DEFAULTS)
    refuse(about, dropout="it is not built")
    added, every, layers = (
        about[key] for key in ("additional_vocab_size", "cross_layer_interval", "num_hidden_layers")
    )
    mark = about.get("image_token_id", about["vocab_size"] + 1)
    if added < 2 or mark != about["vocab_size"] + 1:
        raise CheckpointError(
            f"additional_vocab_size is {added} and image_token_id {mark}: <image> must be the second added word",
            "as in every released Idefics",
        )
    if every < 1 or layers % every:
        raise CheckpointError(f"cross_layer_interval {every} does not divide {layers} layers, and some would have none")
    if about["alpha_type"] not in ALPHAS:
        raise CheckpointError(f"alpha_type is {about['alpha_type']!r}", f"known: {', '.join(ALPHAS)}")
    decoder = LLAMA.read(about | {"vocab_size": about["vocab_size"] + added, "num_key_value_heads": None})
    tower = CLIP.read({"hidden_size": vision["embed_dim"], **vision})  # some files have it by that name
    D, own = tower.block.width, decoder.block.attention
    fusion = CrossConfig(
        at=tuple(range(0, layers, every)),
        context_width=D,
        attention=own.with_(qk_norm="rms" if about["qk_layer_norms"] else None, eps=decoder.block.eps),
        gated=ALPHAS[about["alpha_type"]],
    )
    resampler = ResamplerConfig(
        reads=D,
        gives=D,
        latents=perceiver["resampler_n_latents"],
        layers=perceiver["resampler_depth"],
        heads=perceiver["resampler_n_heads"],
        head_dim=perceiver["resampler_head_dim"],
        hidden=4 * D,
        activation="relu",
        qk_norm="layer" if perceiver["qk_layer_norms_perceiver"] else None,
    )
    return LookingVLMConfig(
        tower=tower,
        connector=resampler if about["use_resampler"] else None,
        decoder=decoder.with_(fusion=fusion),
        mark=mark,
        prefix=True,
        policy=Naive(size=tower.image, patch=tower.patch, unread=tower.image % tower.patch),
    )


def _write(config: LookingVLMConfig) -> About:
    tower, resampler, cross, decoder = config.tower, config.connector, config.cross, config.decoder
    if not isinstance(tower, ViTConfig) or not (resampler is None or isinstance(resampler, ResamplerConfig)):
        raise ConfigError("Idefics is a ViT, perhaps with a resampler")
    if config.mark < 2:
        raise ConfigError(f"mark {config.mark} leaves no vocabulary before Idefics' added words")
    vision = CLIP.write(tower)
    about = LLAMA.write(decoder) | {
        "vocab_size": config.mark - 1,
        "additional_vocab_size": _added(config),
        "image_token_id": config.mark,  # which transformers does not ask for
        "cross_layer_interval": decoder.layers // len(cross.at),
        "qk_layer_norms": cross.block(decoder.block).attention.qk_norm is not None,
        "alpha_type": "vector" if cross.gated == "channels" else "float",
        "use_resampler": resampler is not None,
        "vision_config": {
            "model_type": "idefics_vision",
            "embed_dim": vision.pop("hidden_size"),
            **{key: value for key, value in vision.items() if key in VISION},
        },
    }
    if resampler is not None:
        about["perceiver_config"] = {
            "use_resampler": True,
            "resampler_n_latents": resampler.latents,
            "resampler_depth": resampler.layers,
            "resampler_n_heads": resampler.heads,
            "resampler_head_dim": resampler.block().attention.channels(resampler.reads),
            "qk_layer_norms_perceiver": resampler.qk_norm is not None,
        }
    unsaid = (*UNSAID, "num_key_value_heads")
    return {
        "architectures": ["IdeficsForVisionText2Text"],
        **{key: value for key, value in about.items() if key not in unsaid},
    }


def _added(config: LookingVLMConfig) -> int:
    """Words in tables of their own: from the one before the mark on."""
    return config.decoder.vocab - (config.mark - 1)


def _moves(config: LookingVLMConfig) -> list[Move]:
    decoder, cross, W = config.decoder, config.cross, config.decoder.block.width
    sizes = [config.mark - 1, _added(config)]
    embed = ["model.embed_tokens.weight", "model.embed_tokens.additional_embedding.weight"]
    text = [move for move in decoder_moves(decoder) if move.ours not in (("embed.weight",), ("head.weight",))]
    text += [fuse("embed.weight", embed, sizes)]
    if not decoder.tied:
        text += [fuse("head.weight", ["lm_head.weight", "lm_head.additional_fc.weight"], sizes)]
    block = cross_moves(cross.block(decoder.block), ("q_layer_norm", "k_layer_norm"))
    for ours, theirs in (("cross", "alpha_cross_attn"), ("mlp", "alpha_dense")):
        shapes = ((W,), (1, 1, W)) if cross.gated == "channels" else ((1,), (1,))
        block += [view(f"branches.{ours}.gate", theirs, *shapes)]
    for n in range(len(cross.at)):
        text += under(f"fusion.blocks.{n}.", f"model.gated_cross_attn_layers.{n}.", block)
    moves = [*under("tower.", "model.vision_model.", CLIP.moves(config.tower)), *under("decoder.", "", text)]
    if isinstance(config.connector, ResamplerConfig):
        moves += under("connector.", "model.perceiver_resampler.", _resampler_moves(config.connector))
    return moves


def _resampler_moves(config: ResamplerConfig) -> list[Move]:
    op, rows = "branches.joint.op", config.heads * config.block().attention.channels(config.reads)
    block = [
        *layer("branches.joint.context_norm", "0.context_layer_norm"),
        *layer("branches.joint.norm", "0.latents_layer_norm"),
        *layer(f"{op}.q", "0.q_proj", False),
        *fuse_layer(f"{op}.kv", ["0.k_proj", "0.v_proj"], [rows, rows], False),
        *layer(f"{op}.out", "0.output_proj", False),
        *layer("branches.mlp.norm", "1.ln"),
        *layer("branches.mlp.op.up", "1.fc", False),
        *layer("branches.mlp.op.down", "1.c_proj", False),
    ]
    if config.qk_norm is not None:
        block += [*layer(f"{op}.q_norm", "0.q_layer_norm"), *layer(f"{op}.k_norm", "0.k_layer_norm")]
    moves = [rename("latents", "latents"), *layer("norm", "layer_norm")]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"blocks.{i}.", block)
    return moves


def _spelt(config: LookingVLMConfig) -> LookingVLMConfig:
    """The same model with everything said."""
    made = config.connector
    if isinstance(made, ResamplerConfig):
        block = made.block()
        made = made.with_(head_dim=block.attention.channels(made.reads), hidden=block.mlp.hidden)
    return whole_spelt(config).with_(connector=made)


COPIES = (  # tied, and stored all the same
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.additional_fc.weight", "model.embed_tokens.additional_embedding.weight"),
)

IDEFICS = Family(
    "idefics",
    LookingVLM,
    _read,
    _write,
    round_trip(_read, _write, _spelt, processors.IDEFICS),
    _moves,
    copies=COPIES,
    pictures=processors.IDEFICS,
    habit=Habit("IdeficsProcessor", "idefics", end="<end_of_utterance>", fixed="<image>", chats=False, pads=True),
)
