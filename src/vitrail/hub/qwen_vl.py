"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and with experts, in transformers' layout: a tower for pictures and videos
of any size, a merger, and a language model whose rotary positions are time, height and width.

Which rule places a video is a way of use: no config.json says it.
"""

from functools import partial
from typing import Any, NamedTuple

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.packed import PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.about import MOST
from vitrail.hub.decoders import DECODERS, spelt
from vitrail.hub.family import Family, refuse, round_trip
from vitrail.hub.habit import Habit
from vitrail.hub.maps import Move, layer, under
from vitrail.hub.towers_qwen import QWEN_TOWERS
from vitrail.hub.towers_vl import whole
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import ExpertsConfig
from vitrail.processing import processors
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import Native
from vitrail.stream import Rules

About = dict[str, Any]

WORDS = {row.name: row for row in DECODERS}
IMAGE = 151_655
MARKS = {"video": 151_656, "vision_start": 151_652, "vision_end": 151_653}
TOKENS = {f"{mark}_token": mark for mark in ("image", *MARKS)}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _text(*sizes: float, **more: Any) -> About:
    return {**dict(zip(SIZES, sizes, strict=True)), "hidden_act": "silu", **more}


# What transformers takes for granted of the language model where a config.json leaves it out.
QWEN2 = _text(152_064, 8192, 29_568, 80, 64, 8, 32_768, 1e-5, 1e6)
QWEN3 = _text(151_936, 4096, 22_016, 32, 32, 32, 128_000, 1e-6, 5e5, head_dim=128)
# `num_experts`, the older word, comes first where a file says it.
EXPERTS = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN3_MOE = _text(151_936, 2048, 5632, 24, 16, 16, 128_000, 1e-6, 5e5, **EXPERTS)


class Kin(NamedTuple):
    """What one `model_type` differs in from the others.

    text      what its language model has where nothing is said; `words` is the family of that
    sections  slots of time, height and width where nothing is said
    rule      by which its authors place the tokens of a stream
    gives     the key of vision_config that says how wide the merger's tokens are
    merger    the names of its norm and its two layers
    parts     the names of the tower and of the language model
    pixels    the least and the most of a picture, as its preprocessor_config.json has them
    habit     how it is spoken to
    """

    name: str
    architecture: str
    tower: Family
    words: Family
    text: About
    layout: str
    sections: tuple[int, int, int]
    rule: str
    gives: str
    merger: tuple[str, str, str]
    parts: tuple[str, str]
    norm: str
    pixels: tuple[int, int]
    habit: Habit


_SECOND: Any = {
    "words": WORDS["qwen2"],
    "text": QWEN2,
    "layout": "mrope",
    "sections": (16, 24, 24),
    "merger": ("ln_q", "mlp.0", "mlp.2"),
    "parts": ("visual.", "model."),
    "norm": "clip",
    "pixels": (56 * 56, 28 * 28 * 16_384),
}
_THIRD: Any = {
    "tower": QWEN_TOWERS["qwen3_vl"],
    "layout": "mrope_interleaved",
    "sections": (24, 20, 20),
    "rule": "qwen3-vl",
    "gives": "out_hidden_size",
    "merger": ("norm", "linear_fc1", "linear_fc2"),
    "parts": ("model.visual.", "model.language_model."),
    "norm": "half",
    "pixels": (256 * 256, 4096 * 4096),
    "habit": Habit("Qwen3VLProcessor", "qwen2-vl", {"default_system": ""}, tokens=TOKENS),
}
_TWO: Any = {
    "tower": QWEN_TOWERS["qwen2_vl"],
    "rule": "qwen2-vl",
    "gives": "hidden_size",
    "habit": Habit("Qwen2VLProcessor", "qwen2-vl", tokens=TOKENS),
}
_TWO_AND_A_HALF: Any = {
    "tower": QWEN_TOWERS["qwen2_5_vl"],
    "rule": "qwen2.5-vl",
    "gives": "out_hidden_size",
    "habit": Habit("Qwen2_5_VLProcessor", "qwen2-vl", tokens=TOKENS),
}
KIN = (
    Kin("qwen2_vl", "Qwen2VLForConditionalGeneration", **_TWO, **_SECOND),
    Kin("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", **_TWO_AND_A_HALF, **_SECOND),
    Kin("qwen3_vl", "Qwen3VLForConditionalGeneration", words=WORDS["qwen3"], text=QWEN3, **_THIRD),
    Kin("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", words=WORDS["qwen3_moe"], text=QWEN3_MOE, **_THIRD),
)
WIDTH = 3584  # of the merger's tokens where nothing is said


# ---- configs ----------------------------------------------------------------------------------------------------


def _read(kin: Kin, about: About) -> VLMConfig:
    vision = _named(about, "vision_config", (kin.name, f"{kin.name}_vision"))
    _check_counts(vision)
    tower, decoder = kin.tower.read(vision), _read_words(kin, about)
    gives, W = vision.get(kin.gives) or WIDTH, decoder.block.width
    if gives != W:
        raise CheckpointError(
            f"vision_config.{kin.gives} is {gives}, and the language model is {W} wide", "they must agree"
        )
    if tower.taps:
        decoder = decoder.with_(fusion=DeepStackConfig(at=tuple(range(len(tower.taps)))))
    norm, least, most = NORMS[kin.norm], *kin.pixels
    time: About = {"tokens_per_second": float(vision.get("tokens_per_second") or 4)} if kin.rule == "qwen2.5-vl" else {}
    return VLMConfig(
        tower=tower,
        connector=_merger(tower, W),
        decoder=decoder,
        policy=Native(patch=tower.patch, merge=tower.merge, min_pixels=least, max_pixels=most),
        mean=norm.mean,
        std=norm.std,
        stack=_merger(tower, W, norm_at="after") if tower.taps else None,
        rules=Rules(positions=kin.rule, vocab=decoder.vocab, fill=about.get("image_token_id", IMAGE), **time),
        marks={mark: about.get(f"{mark}_token_id", usual) for mark, usual in MARKS.items()},
    )


def _named(about: About, key: str, names: tuple[str, ...]) -> About:
    """A part of a config.json, which may say what it is."""
    own = about.get(key) or {}
    if own.get("model_type", names[-1]) not in names:
        raise CheckpointError(f"{key}.model_type is {own['model_type']!r}", f"expected: {names[-1]}")
    return own


COUNTS = ("depth", "num_heads", "spatial_merge_size", "temporal_patch_size", "in_channels")
WIDTHS = ("embed_dim", "out_hidden_size", "window_size", "num_position_embeddings", "tokens_per_second")


def _check_counts(vision: About) -> None:
    """What only these towers call so; `hub.about` knows the rest."""
    for keys, most in ((COUNTS, MOST), (WIDTHS, 2**20)):
        for key in keys:
            value = vision.get(key, 1)
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise CheckpointError(f"vision_config.{key} is {value!r}", f"expected a number of 1 … {most:,}")


def _read_words(kin: Kin, about: About) -> DecoderConfig:
    flat = kin.rule != "qwen3-vl" and about.get("text_config") is None  # as the second generation was released
    own = about if flat else _named(about, "text_config", (f"{kin.name}_text",))
    text = whole(own, kin.text)
    if own.get("num_key_value_heads", 1) is None:
        text["num_key_value_heads"] = text["num_attention_heads"]
    width, heads = text["hidden_size"], text["num_attention_heads"]
    text["head_dim"] = text.get("head_dim") or width // heads
    if kin.text is QWEN2 and text["head_dim"] * heads != width:
        raise CheckpointError(f"{heads} heads of {text['head_dim']} are not {width} wide")
    if set(text.get("layer_types") or ()) - {"full_attention"}:
        refuse(text, layer_types="sliding windows in some layers are not built")
    rope = {**(text.pop("rope_scaling", None) or {}), **(text.get("rope_parameters") or {})}
    sections, interleaved = rope.pop("mrope_section", kin.sections), kin.layout == "mrope_interleaved"
    if rope.pop("mrope_interleaved", interleaved) != interleaved:
        raise CheckpointError(f"mrope_interleaved is {not interleaved}: a {kin.name} has it otherwise")
    for key in ("type", "rope_type"):
        if rope.get(key) == "mrope":  # the older word for sections, which say it themselves
            rope[key] = "default"
    tied = about.get("tie_word_embeddings") or (interleaved is False and text.get("tie_word_embeddings"))
    renormalized = {"norm_topk_prob": True}  # the experts of Qwen3-VL always are
    decoder = kin.words.read({**text, **renormalized, "rope_parameters": rope, "tie_word_embeddings": bool(tied)})
    return decoder.with_(rotary=decoder.rotary.with_(layout=kin.layout, sections=tuple(sections)))


def _merger(tower: PackedViTConfig, width: int, **more: Any) -> MergerConfig:
    norm = tower.block.norm
    return MergerConfig(reads=tower.block.width, gives=width, merge=tower.merge, norm=norm, order="blocks", **more)


def _write(kin: Kin, config: VLMConfig) -> About:
    tower, decoder, rules = config.tower, config.decoder, config.rules
    if not isinstance(tower, PackedViTConfig) or not isinstance(config.policy, Native):
        raise ConfigError(f"a {kin.name} reads pictures of their own size")
    text = kin.words.write(decoder)
    del text["architectures"], text["tie_word_embeddings"]  # which are the whole model's
    text["rope_parameters"]["mrope_section"] = list(decoder.rotary.sections or ())
    if kin.layout == "mrope_interleaved":
        text["rope_parameters"]["mrope_interleaved"] = True
    vision = {**kin.tower.write(tower), kin.gives: config.connector.gives}
    if kin.rule == "qwen2.5-vl":
        vision["tokens_per_second"] = round(rules.tokens_per_second)
    return {
        "architectures": [kin.architecture],
        "vision_config": {**vision, "model_type": f"{kin.name}_vision"},
        "text_config": {**text, "model_type": f"{kin.name}_text"},
        "image_token_id": rules.fill,
        **{f"{mark}_token_id": id for mark, id in (MARKS | config.marks).items()},
        "tie_word_embeddings": decoder.tied,
    }


def _spelt(config: VLMConfig) -> VLMConfig:
    """The same model with everything said, and used in the usual way."""
    usual = config.rules.positions.removesuffix("/transformers")
    films, said = config.films, config.with_(footage=None).films
    if films is not None and said is not None and films.rule == said.rule:  # which its own file says
        config = config.with_(footage=None)
    return config.with_(
        decoder=spelt(config.decoder),
        rules=config.rules.with_(positions=usual, vocab=config.decoder.vocab),
        marks=MARKS | config.marks,
    )


# ---- names ------------------------------------------------------------------------------------------------------


def _moves(kin: Kin, config: VLMConfig) -> list[Move]:
    tower, (visual, words) = config.tower, kin.parts
    assert isinstance(tower, PackedViTConfig)
    merger = [
        *layer("norm", kin.merger[0], tower.block.norm == "layer"),
        *layer("layers.linears.0", kin.merger[1]),
        *layer("layers.linears.1", kin.merger[2]),
    ]
    moves = under("tower.", visual, kin.tower.moves(tower)) + under("connector.", f"{visual}merger.", merger)
    for k in range(len(tower.taps)):
        moves += under(f"stack.{k}.", f"{visual}deepstack_merger_list.{k}.", merger)
    for move in kin.words.moves(config.decoder):
        moves += under("decoder.", "", [_nested(_fused(move, config.decoder), words)])
    return moves


def _nested(move: Move, words: str) -> Move:
    """The language model's names as they are within a whole; its head stands outside."""
    return move._replace(
        theirs=tuple(words + name.removeprefix("model.") if name.startswith("model.") else name for name in move.theirs)
    )


def _fused(move: Move, config: DecoderConfig) -> Move:
    """Qwen3-VL keeps all experts of a layer in one tensor, as here; the released files have each matrix transposed."""
    ahead, found, _ = move.theirs[0].partition(".mlp.experts.")
    mlp, W = config.block.mlp, config.block.width
    if not found or not isinstance(mlp, ExpertsConfig):
        return move
    up = move.ours[0].endswith("gate_up")
    shape = (mlp.count, 2 * mlp.hidden, W) if up else (mlp.count, W, mlp.hidden)
    return Move(
        move.ours,
        (f"{ahead}.mlp.experts.{'gate_up' if up else 'down'}_proj",),
        lambda tensors: [x if tuple(x.shape) == shape else x.mT.contiguous() for x in tensors],
        list,
    )


def _row(kin: Kin) -> Family:
    read, write, (_, words) = partial(_read, kin), partial(_write, kin), kin.parts
    return Family(
        kin.name,
        VLM,
        read,
        write,
        round_trip(read, write, _spelt, processors.QWEN_VL),
        partial(_moves, kin),
        copies=(("lm_head.weight", f"{words}embed_tokens.weight"),),
        # The second generation's files under the names that its modules have by now.
        older=(("visual.", "model.visual."), ("model.", "model.language_model.")) if words == "model." else (),
        pictures=processors.QWEN_VL,
        videos=True,
        habit=kin.habit,
    )


QWEN_VL = tuple(_row(kin) for kin in KIN)
