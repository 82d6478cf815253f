"""BLIP-2 in transformers' layout: a ViT, whose every token a Q-Former looks at, a projection, and a decoder. Or, after
the first stage, words beside the Q-Former's queries, and heads that compare and match."""

from typing import Any

from vitrail.connectors import QFormerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.encoders import patch_moves
from vitrail.hub.family import Family, round_trip
from vitrail.hub.habit import Habit
from vitrail.hub.llava import WORDS, family_of, named, part, whole_spelt
from vitrail.hub.maps import Move, fuse_layer, layer, rename, under, view
from vitrail.hub.opt import OPT
from vitrail.hub.towers_vl import activation_name, activation_of, one_size, tower_row, whole
from vitrail.models.qformer import TextQFormer, TextQFormerConfig
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.processing import processors
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import Naive
from vitrail.stream import Rules

About = dict[str, Any]

# What transformers takes for granted where a config.json leaves it out.
TOWER: About = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
QUERIES: About = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
    "use_qformer_text_input": False,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
DECODERS = {OPT.name: OPT, **WORDS}

# ---- tower ------------------------------------------------------------------------------------------------------


def _read_tower(about: About) -> ViTConfig:
    about = whole(about, TOWER)
    block = BlockConfig(
        width=about["hidden_size"],
        attention=AttentionConfig(heads=about["num_attention_heads"], bias="all" if about["qkv_bias"] else "out"),
        mlp=PlainConfig(hidden=about["intermediate_size"], activation=activation_of(about)),
        eps=about["layer_norm_eps"],
    )
    return ViTConfig(
        layers=about["num_hidden_layers"],
        block=block,
        image=one_size(about, "image_size"),
        patch=one_size(about, "patch_size"),
        cls=True,
        positions="cls_and_patches",
    )


def _write_tower(config: ViTConfig) -> About:
    block = config.block
    return {
        "architectures": ["Blip2VisionModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "image_size": config.image,
        "patch_size": config.patch,
        "hidden_act": activation_name(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "qkv_bias": block.attention.bias == "all",
    }


def _tower_moves(config: ViTConfig) -> list[Move]:
    W, rows = config.block.width, 1 + config.side**2
    moves = [
        view("cls", "embeddings.class_embedding", (W,), (1, 1, W)),
        *patch_moves(config, "embeddings.patch_embedding"),
        view("positions.table", "embeddings.position_embedding", (rows, W), (1, rows, W)),
        *layer("norm_last", "post_layernorm"),
    ]
    block = [
        *layer("branches.self.norm", "layer_norm1"),
        *layer("branches.self.op.qkv", "self_attn.qkv", config.block.attention.bias == "all"),
        *layer("branches.self.op.out", "self_attn.projection"),
        *layer("branches.mlp.norm", "layer_norm2"),
        *layer("branches.mlp.op.up", "mlp.fc1"),
        *layer("branches.mlp.op.down", "mlp.fc2"),
    ]
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"encoder.layers.{i}.", block)
    return moves


BLIP2_TOWER = tower_row("blip_2_vision_model", ViT, _read_tower, _write_tower, _tower_moves)

# ---- Q-Former ---------------------------------------------------------------------------------------------------


def _read_queries(about: About, reads: int, gives: int) -> QFormerConfig:
    own = whole(about.get("qformer_config") or {}, QUERIES)
    if own["hidden_act"] != "gelu":
        raise CheckpointError(f"qformer_config.hidden_act is {own['hidden_act']!r}: a Q-Former has gelu")
    return QFormerConfig(
        reads=reads,
        gives=gives,
        queries=about.get("num_query_tokens", 32),
        layers=own["num_hidden_layers"],
        every=own["cross_attention_frequency"],
        width=own["hidden_size"],
        heads=own["num_attention_heads"],
        hidden=own["intermediate_size"],
        text=own["use_qformer_text_input"],
        eps=own["layer_norm_eps"],
    )


def _write_queries(config: QFormerConfig) -> About:
    return {
        "model_type": "blip_2_qformer",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "encoder_hidden_size": config.reads,
        "cross_attention_frequency": config.every,
        "use_qformer_text_input": config.text,
        "layer_norm_eps": config.eps,
    }


def qformer_moves(config: QFormerConfig) -> list[Move]:
    """Of what looks: not of the queries, nor of the projection."""
    moves = layer("norm", "layernorm")
    for i in range(config.layers):
        ours, theirs = f"layers.{i}.block.branches", f"encoder.layer.{i}"
        moves += _looking_moves(f"{ours}.self", f"{theirs}.attention", config.width, cross=False)
        if i % config.every == 0:
            moves += _looking_moves(f"{ours}.cross", f"{theirs}.crossattention", config.width, cross=True)
        moves += _mlp_moves(f"{ours}.mlp", f"{theirs}.intermediate_query", f"{theirs}.output_query")
        if config.text:
            moves += _mlp_moves(f"layers.{i}.words", f"{theirs}.intermediate", f"{theirs}.output")
    return moves


def _looking_moves(ours: str, theirs: str, width: int, *, cross: bool) -> list[Move]:
    q, *kv = [f"{theirs}.attention.{name}" for name in ("query", "key", "value")]
    if cross:
        moves = layer(f"{ours}.op.q", q) + fuse_layer(f"{ours}.op.kv", kv, [width] * 2)
    else:
        moves = fuse_layer(f"{ours}.op.qkv", [q, *kv], [width] * 3)
    out = layer(f"{ours}.op.out", f"{theirs}.output.dense")
    return moves + out + layer(f"{ours}.norm", f"{theirs}.output.LayerNorm")


def _mlp_moves(ours: str, up: str, down: str) -> list[Move]:
    moves = layer(f"{ours}.op.up", f"{up}.dense") + layer(f"{ours}.op.down", f"{down}.dense")
    return moves + layer(f"{ours}.norm", f"{down}.LayerNorm")


def _eye_moves(tower: ViTConfig, queries: QFormerConfig, name: str) -> list[Move]:
    """Of the tower, the queries, and what looks."""
    size = (queries.queries, queries.width)
    return [
        *under("tower.", "vision_model.", _tower_moves(tower)),
        view(f"{name}.queries", "query_tokens", size, (1, *size)),
        *under(f"{name}.", "qformer.", qformer_moves(queries)),
    ]


# ---- the whole --------------------------------------------------------------------------------------------------


def _read(about: About) -> VLMConfig:
    words = (about.get("text_config") or {}).get("model_type") or "opt"
    if words == "t5":
        raise CheckpointError(
            "text_config.model_type is 't5': FLAN-T5 reads the picture in an encoder, and only decoders are built",
            f"use a BLIP-2 whose language model is one of {', '.join(DECODERS)}, such as OPT",
        )
    tower = _read_tower(about.get("vision_config") or {})
    _, decoder = part(about, "text_config", DECODERS, "opt")
    image = about.get("image_token_index", about.get("image_token_id"))
    if image is None:
        raise CheckpointError(
            "image_token_index is missing: older files do not say which id stands for a picture",
            "add it to config.json, or fetch the file again (OPT: 50265)",
        )
    return VLMConfig(
        tower=tower,
        connector=_read_queries(about, tower.block.width, decoder.block.width),
        decoder=decoder,
        policy=Naive(size=tower.image, patch=tower.patch, unread=tower.image % tower.patch),
        mean=NORMS["clip"].mean,
        std=NORMS["clip"].std,
        prefix=True,
        rules=Rules(fill=image),
    )


def _write(config: VLMConfig) -> About:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.connector, QFormerConfig):
        raise ConfigError("BLIP-2 is a ViT and a Q-Former")
    return {
        "architectures": ["Blip2ForConditionalGeneration"],
        "vision_config": named(BLIP2_TOWER, config.tower),
        "qformer_config": _write_queries(config.connector),
        "text_config": named(family_of(config.decoder, DECODERS), config.decoder),
        "num_query_tokens": config.connector.queries,
        "image_token_index": config.rules.fill,
        "tie_word_embeddings": config.decoder.tied,
        "use_decoder_only_language_model": True,
    }


def _moves(config: VLMConfig) -> list[Move]:
    queries, words = config.connector, family_of(config.decoder, DECODERS)
    assert isinstance(config.tower, ViTConfig) and isinstance(queries, QFormerConfig)
    return [
        *_eye_moves(config.tower, queries, "connector"),
        *layer("connector.project", "language_projection"),
        *under("decoder.", "language_model.", words.moves(config.decoder)),
    ]


COPIES = (("language_model.lm_head.weight", "language_model.model.decoder.embed_tokens.weight"),)
BLIP2 = Family(
    "blip-2",
    VLM,
    _read,
    _write,
    round_trip(_read, _write, whole_spelt, processors.BLIP),
    _moves,
    copies=COPIES,
    pictures=processors.BLIP,
    habit=Habit(
        "Blip2Processor",
        "blip-2",
        fields=lambda config, words: {"num_query_tokens": config.connector.queries},
        fixed="<image>",
        chats=False,
    ),
)

# ---- after the first stage --------------------------------------------------------------------------------------


def _read_text(about: About) -> TextQFormerConfig:
    tower = _read_tower(about.get("vision_config") or {})
    words = whole(about.get("qformer_config") or {}, QUERIES)
    return TextQFormerConfig(
        tower=tower,
        qformer=_read_queries(about, tower.block.width, about.get("image_text_hidden_size", 256)),
        vocab=words["vocab_size"],
        context=words["max_position_embeddings"],
        prefix=True,
        log_scale=None,  # which is not kept, nor is the head that writes
    )


def _write_text(config: TextQFormerConfig) -> About:
    words = {"vocab_size": config.vocab, "max_position_embeddings": config.context}
    return {
        "architectures": ["Blip2ForImageTextRetrieval"],
        "model_type": "blip-2",
        "vision_config": named(BLIP2_TOWER, config.tower),
        "qformer_config": _write_queries(config.qformer) | words,
        "num_query_tokens": config.qformer.queries,
        "image_text_hidden_size": config.qformer.gives,
        "image_token_index": None,
    }


def _text_moves(config: TextQFormerConfig) -> list[Move]:
    return [
        *_eye_moves(config.tower, config.qformer, "qformer"),
        rename("embed.weight", "embeddings.word_embeddings.weight"),
        rename("positions", "embeddings.position_embeddings.weight"),
        *layer("qformer.project", "vision_projection"),
        *layer("text_projection", "text_projection"),
        *layer("matcher", "itm_head"),
    ]


BLIP2_TEXT = Family(
    "Blip2ForImageTextRetrieval",
    TextQFormer,
    _read_text,
    _write_text,
    round_trip(_read_text, _write_text),
    _text_moves,
    key="architectures",
)
