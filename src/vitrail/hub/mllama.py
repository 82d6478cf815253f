"""Llama-3.2-Vision in transformers' layout (Mllama): a tiled tower, one linear layer, and a Llama in which gated blocks
that look at pictures are inserted.

Where transformers 5 differs from Meta's own code, by which the weights were made, Meta's is followed. A tap of the
tower is what enters the block of its number, not what leaves it (`tower.taps`, one more each, gives the other), and
words that see no picture skip the blocks; transformers lets their attention see every picture of the batch, padding
included, which makes their logits depend on their company.
"""

from typing import Any

from vitrail.backbones.fusion import CrossConfig
from vitrail.connectors import ProjectorConfig
from vitrail.encoders.tiled import TiledViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.decoders import DECODERS, decoder_moves, spelt
from vitrail.hub.family import Family, refuse, round_trip
from vitrail.hub.habit import Habit
from vitrail.hub.maps import Move, fuse_layer, layer, rename, under
from vitrail.hub.towers_vl import TOWERS_VL
from vitrail.models.looking import LookingVLM, LookingVLMConfig
from vitrail.nn import BlockConfig
from vitrail.processing import processors
from vitrail.processing.canvas import Canvas

About = dict[str, Any]

LLAMA = next(row for row in DECODERS if row.name == "llama")
TOWER = next(row for row in TOWERS_VL if row.name == "mllama_vision_model")
EXTRA = 8  # rows of the embedding beyond the head's, in every checkpoint
UNSAID = ("architectures", "head_dim", "attention_bias", "mlp_bias")  # of Llama's config, and not of this one's text

# What transformers takes for granted where a config.json leaves it out.
TEXT: About = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip
IMAGE = 128_256


def _read(about: About) -> LookingVLMConfig:
    text = TEXT | {key: value for key, value in (about.get("text_config") or {}).items() if value is not None}
    vision = about.get("vision_config") or {}
    refuse(
        text,
        tie_word_embeddings="the head has fewer rows than the embedding",
        dropout="it is not built",
        attention_bias="this model has none",
        mlp_bias="this model has none",
    )
    crossed = tuple(text["cross_attention_layers"])
    plain = LLAMA.read(text | {"num_hidden_layers": text["num_hidden_layers"] - len(crossed), "head_dim": None})
    own = plain.block.attention
    # transformers would turn so many channels of heads that have others.
    if text.get("head_dim") not in (None, own.channels(plain.block.width)):
        raise CheckpointError(f"head_dim is {text['head_dim']}, and heads are hidden_size / num_attention_heads")
    tower = TOWER.read(vision)
    if vision.get("vision_output_dim", tower.width) != tower.width:
        raise CheckpointError(
            f"vision_output_dim is {vision['vision_output_dim']}, and the tower with its taps gives {tower.width}"
        )
    attention = own.with_(qk_norm="rms", eps=plain.block.eps)
    fusion = CrossConfig(at=crossed, where="inserted", attention=attention, blind="skip")
    return LookingVLMConfig(
        tower=tower,
        connector=ProjectorConfig(reads=tower.width, gives=plain.block.width, layers=1),
        decoder=plain.with_(fusion=fusion, extra=EXTRA),
        mark=about.get("image_token_index", about.get("image_token_id", IMAGE)),
        joined=True,
        policy=Canvas(tile=tower.image, patch=tower.patch, most=tower.tiles),
    )


def _write(config: LookingVLMConfig) -> About:
    if not isinstance(config.tower, TiledViTConfig):
        raise ConfigError("Llama-3.2-Vision has a tiled tower")
    text = LLAMA.write(config.decoder)
    text |= {
        "model_type": "mllama_text_model",
        "num_hidden_layers": config.decoder.layers + len(config.cross.at),
        "cross_attention_layers": list(config.cross.at),
        "pad_token_id": None,  # transformers' own, 128004, is no id of a small vocabulary
    }
    return {
        "architectures": ["MllamaForConditionalGeneration"],
        "vision_config": {"model_type": TOWER.name, **TOWER.write(config.tower)},
        "text_config": {key: value for key, value in text.items() if key not in UNSAID},
        "image_token_index": config.mark,
    }


def _moves(config: LookingVLMConfig) -> list[Move]:
    decoder, crossed = config.decoder, sorted(config.cross.at)
    words = [i for i in range(decoder.layers + len(crossed)) if i not in crossed]
    text = [
        move._replace(theirs=tuple(_numbered(name, words) for name in move.theirs)) for move in decoder_moves(decoder)
    ]
    block = [
        *cross_moves(config.cross.block(decoder.block), ("q_norm", "k_norm")),
        rename("branches.cross.gate", "cross_attn_attn_gate"),
        rename("branches.mlp.gate", "cross_attn_mlp_gate"),
    ]
    for n, i in enumerate(crossed):
        text += under(f"fusion.blocks.{n}.", f"model.layers.{i}.", block)
    return [
        *under("tower.", "vision_model.", TOWER.moves(config.tower)),
        *layer("connector.layers.linears.0", "multi_modal_projector"),
        *under("decoder.", "language_model.", text),
    ]


def cross_moves(block: BlockConfig, norms: tuple[str, str]) -> list[Move]:
    """A block that looks at pictures, all but its gates."""
    attention, op = block.attention, "branches.cross.op"
    rows = attention.groups * attention.channels(block.width)
    moves = [
        *layer(f"{op}.q", "cross_attn.q_proj", False),
        *fuse_layer(f"{op}.kv", ["cross_attn.k_proj", "cross_attn.v_proj"], [rows, rows], False),
        *layer(f"{op}.out", "cross_attn.o_proj", False),
        *layer("branches.cross.norm", "input_layernorm", False),
        *layer("branches.mlp.norm", "post_attention_layernorm", False),
        *fuse_layer("branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [block.mlp.hidden] * 2, False),
        *layer("branches.mlp.op.down", "mlp.down_proj", False),
    ]
    for ours, theirs in zip(("q_norm", "k_norm"), norms, strict=True):
        moves += layer(f"{op}.{ours}", f"cross_attn.{theirs}", False) if attention.qk_norm else []
    return moves


def _numbered(name: str, numbers: list[int]) -> str:
    """A layer's name with its number among all layers, inserted ones included."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(numbers[int(parts[2])])
    return ".".join(parts)


def whole_spelt(config: LookingVLMConfig) -> LookingVLMConfig:
    """The same model with everything said."""
    decoder = spelt(config.decoder)
    block = config.cross.block(decoder.block)
    heads = block.attention.with_(kv_heads=block.attention.groups, head_dim=block.attention.channels(block.width))
    cross = config.cross.with_(
        at=tuple(sorted(config.cross.at)), attention=heads, mlp=block.mlp, context_width=config.width
    )
    return config.with_(decoder=decoder.with_(fusion=cross), policy=config.fitted)


MLLAMA = Family(
    "mllama",
    LookingVLM,
    _read,
    _write,
    round_trip(_read, _write, whole_spelt, processors.MLLAMA),
    _moves,
    pictures=processors.MLLAMA,
    habit=Habit("MllamaProcessor", "llama3", {"after": ""}, tokens={"image_token": "image"}),
)
