"""DeepSeek-VL in transformers' layout: SigLIP, alone or beside Segment Anything's tower, an MLP, a Llama."""

from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.hybrid import HybridConfig
from vitrail.encoders.sam import SAMConfig
from vitrail.encoders.towers import TowerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.family import Family, round_trip
from vitrail.hub.habit import Habit, Words
from vitrail.hub.llava import TOWERS, WORDS, family_of, named, part, whole_spelt
from vitrail.hub.maps import Move, layer, rename, under
from vitrail.hub.towers_vl import TOWERS_VL, neck_moves
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import processors
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import Framed
from vitrail.stream import Rules

About = dict[str, Any]

COARSE = {"siglip_vision_model": TOWERS["siglip_vision_model"]}
FINE = {row.name: row for row in TOWERS_VL if row.name == "sam_vision_model"}
LEAST = 14  # pixels that a thin picture keeps, unless its processor says another number


def _words(about: About) -> dict[str, Any]:
    """What both are told of the decoder and of words; the whole's word on tied embeddings goes first."""
    _, decoder = part(about, "text_config", WORDS, "llama")
    tied = about.get("tie_word_embeddings", decoder.tied)
    return {"decoder": decoder.with_(tied=tied), "rules": Rules(fill=about.get("image_token_id", 100_015))}


def _policy(tower: ViTConfig, **more: Any) -> Framed:
    """As DeepSeek-VL's pictures are prepared where no file says how."""
    framed = Framed(size=tower.image, patch=tower.patch, unread=tower.image % tower.patch, least=1, **more)
    return framed.with_(least=min(LEAST, framed.side))


def _read(about: About) -> VLMConfig:
    _, tower = part(about, "vision_config", COARSE, "siglip_vision_model")
    words, norm = _words(about), NORMS["half"]
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(reads=tower.block.width, gives=words["decoder"].block.width),
        policy=_policy(tower),
        mean=norm.mean,
        std=norm.std,
        **words,
    )


def _read_hybrid(about: About) -> VLMConfig:
    _, low = part(about, "vision_config", COARSE, "siglip_vision_model")
    _, high = part(about, "high_res_vision_config", FINE, "sam_vision_model")
    words, norm = _words(about), NORMS["clip"]
    tower = HybridConfig(low=TowerConfig(vit=low), high=high, mean=norm.mean, std=norm.std)
    apart = (tower.fine, low.block.width)
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(reads=tower.width, gives=words["decoder"].block.width, apart=apart),
        policy=_policy(low, fine=tower.image, fill=processors.fill_of(norm.mean)),
        mean=(0.0,) * 3,  # each tower has its own
        std=(1.0,) * 3,
        **words,
    )


def _both(config: VLMConfig, tower: ViTConfig) -> About:
    return {
        "vision_config": named(family_of(tower, COARSE), tower),
        "text_config": named(family_of(config.decoder, WORDS), config.decoder),
        "image_token_id": config.rules.fill,
        "tie_word_embeddings": config.decoder.tied,
    }


def _write(config: VLMConfig) -> About:
    if not isinstance(config.tower, ViTConfig):
        raise ConfigError("DeepSeek-VL without a fine tower is a ViT and a projector")
    return {"architectures": ["DeepseekVLForConditionalGeneration"], **_both(config, config.tower)}


def _write_hybrid(config: VLMConfig) -> About:
    if not isinstance(config.tower, HybridConfig):
        raise ConfigError("DeepSeek-VL of two resolutions is a hybrid tower and a projector")
    high = config.tower.high
    return {
        "architectures": ["DeepseekVLHybridForConditionalGeneration"],
        **_both(config, config.tower.low.vit),
        "high_res_vision_config": named(family_of(high, FINE), high),
    }


def _told(config: Any, words: Words) -> About:
    return {"num_image_tokens": config.tower.side**2}


# ---- names ------------------------------------------------------------------------------------------------------


def _decoder_moves(config: VLMConfig) -> list[Move]:
    """The language model's head stands outside of what holds it and the tower."""
    moves = []
    for move in family_of(config.decoder, WORDS).moves(config.decoder):
        theirs = (name.replace("model.", "model.language_model.", 1) for name in move.theirs)
        moves.append(move._replace(theirs=tuple(theirs)))
    return under("decoder.", "", moves)


def _moves(config: VLMConfig) -> list[Move]:
    return [
        *under("tower.", "model.vision_model.", COARSE["siglip_vision_model"].moves(config.tower)),
        *layer("connector.layers.linears.0", "model.aligner.linear1"),
        *layer("connector.layers.linears.1", "model.aligner.linear2"),
        *_decoder_moves(config),
    ]


def _hybrid_moves(config: VLMConfig) -> list[Move]:
    tower = config.tower
    assert isinstance(tower, HybridConfig)
    high: SAMConfig = tower.high
    first = "connector.layers.linears.0.parts"
    return [
        *under("tower.low.", "model.vision_model.", COARSE["siglip_vision_model"].moves(tower.low.vit)),
        *under("tower.high.", "model.high_res_vision_model.", FINE["sam_vision_model"].moves(high)),
        *neck_moves(high.block.width, high.gives, "tower.neck", "model.high_res_vision_neck"),
        *layer("tower.halve1", "model.high_res_vision_proj.conv1", bias=False),
        *layer("tower.halve2", "model.high_res_vision_proj.conv2", bias=False),
        rename("tower.alpha", "model.high_res_vision_alpha"),
        *layer(f"{first}.0", "model.aligner.high_res_vision_proj"),
        *layer(f"{first}.1", "model.aligner.vision_proj"),
        *layer("connector.layers.linears.1", "model.aligner.proj"),
        *_decoder_moves(config),
    ]


DEEPSEEK_VL = tuple(
    Family(
        name,
        VLM,
        read,
        write,
        round_trip(read, write, whole_spelt, shown),
        moves,
        copies=(("lm_head.weight", "model.language_model.embed_tokens.weight"),),
        older=(("model.vision_model.", "model.vision_model.vision_model."),),  # as the released files have it
        pictures=shown,
        habit=Habit(processor, "deepseek-vl", fields=_told, tokens={"image_token": "image"}),
    )
    for name, read, write, moves, shown, processor in [
        ("deepseek_vl", _read, _write, _moves, processors.DEEPSEEK_VL, "DeepseekVLProcessor"),
        (
            *("deepseek_vl_hybrid", _read_hybrid, _write_hybrid, _hybrid_moves),
            *(processors.DEEPSEEK_VL_HYBRID, "DeepseekVLHybridProcessor"),
        ),
    ]
)
