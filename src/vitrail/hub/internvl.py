"""InternVL in transformers' layout: InternViT over tiles, 2 × 2 neighbours through a norm and an MLP, a decoder."""

from typing import Any

from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.family import ACTIVATIONS, Family, round_trip
from vitrail.hub.habit import VIDEO, Habit, Words
from vitrail.hub.llava import COPIES, WORDS, family_of, named, part, whole_spelt
from vitrail.hub.maps import Move, layer, under
from vitrail.hub.towers_vl import TOWERS_VL, activation_name
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import processors
from vitrail.processing.images import NORMS
from vitrail.processing.tiles import Tiles
from vitrail.stream import Rules

About = dict[str, Any]

TOWERS = {row.name: row for row in TOWERS_VL if row.name == "internvl_vision"}
EPS = 1e-5  # of the connector's norm; no config says another


def _read(about: About) -> VLMConfig:
    _, tower = part(about, "vision_config", TOWERS, "internvl_vision")
    _, decoder = part(about, "text_config", WORDS, "qwen2")
    strategy = about.get("vision_feature_select_strategy", "default")
    if strategy != "default":
        raise CheckpointError(
            f"vision_feature_select_strategy is {strategy!r}: only patches lie in a grid that can be merged",
            "known: default",
        )
    width = decoder.block.width
    connector = MergerConfig(
        reads=tower.block.width,
        gives=width,
        hidden=width,
        merge=_merge(about.get("downsample_ratio", 0.5)),
        norm_at="after",
        eps=EPS,
        activation=_activation(about.get("projector_hidden_act", "gelu")),
    )
    norm = NORMS["imagenet"]
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder.with_(tied=about.get("tie_word_embeddings", decoder.tied)),  # the whole's word goes first
        policy=Tiles(tile=tower.image, patch=tower.patch, merge=connector.merge),
        mean=norm.mean,
        std=norm.std,
        layer=_layer(about.get("vision_feature_layer", -1), tower.layers),
        rules=Rules(fill=about.get("image_token_id", 151_667)),
    )


def _merge(ratio: float) -> int:
    merge = round(1 / ratio) if ratio else 0
    if merge * ratio != 1:
        raise CheckpointError(f"downsample_ratio is {ratio}: no whole number of neighbours", "known: 1, 0.5, 0.25, …")
    return merge


def _activation(name: str) -> Any:
    if name not in ACTIVATIONS:
        raise CheckpointError(f"projector_hidden_act {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _layer(found: Any, layers: int) -> int | None:
    """None for the last, which has the tower's norm if there is one."""
    if not isinstance(found, int):
        raise CheckpointError(f"vision_feature_layer is {found!r}: features of several layers are not put together")
    return None if found in (-1, layers) else found


def _write(config: VLMConfig) -> About:
    tower, connector = config.tower, config.connector
    if not (isinstance(tower, ViTConfig) and isinstance(connector, MergerConfig) and isinstance(config.policy, Tiles)):
        raise ConfigError("InternVL is a ViT over tiles and a merger")
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "vision_config": named(family_of(tower, TOWERS), tower),
        "text_config": named(family_of(config.decoder, WORDS), config.decoder),
        "image_token_id": config.rules.fill,
        **_told(config, {}),
        "downsample_ratio": 1 / connector.merge,
        "projector_hidden_act": activation_name(connector.activation),
        "vision_feature_layer": -1 if config.layer is None else config.layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.decoder.tied,
    }


def _told(config: Any, words: Words) -> About:
    return {"image_seq_length": (config.tower.side // config.connector.merge) ** 2}  # tokens of a tile


def _spelt(config: VLMConfig) -> VLMConfig:
    return whole_spelt(config).with_(footage=None)  # which its own file says


def _moves(config: VLMConfig) -> list[Move]:
    towers, words = family_of(config.tower, TOWERS), family_of(config.decoder, WORDS)
    return [
        *under("tower.", "vision_tower.", towers.moves(config.tower)),
        *layer("connector.norm", "multi_modal_projector.layer_norm"),
        *layer("connector.layers.linears.0", "multi_modal_projector.linear_1"),
        *layer("connector.layers.linears.1", "multi_modal_projector.linear_2"),
        *under("decoder.", "language_model.", words.moves(config.decoder)),
    ]


AROUND = ("<img>", "</img>")
TOKENS = {
    "context_image_token": "image",
    "start_image_token": AROUND[0],
    "end_image_token": AROUND[1],
    "video_token": VIDEO,
}

INTERNVL = Family(
    "internvl",
    VLM,
    _read,
    _write,
    round_trip(_read, _write, _spelt, processors.INTERNVL),
    _moves,
    copies=COPIES,
    pictures=processors.INTERNVL,
    videos=True,
    habit=Habit("InternVLProcessor", "chatml", around=AROUND, fields=_told, tokens=TOKENS),
)
