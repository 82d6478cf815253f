"""LLaVA-1.5 and LLaVA-NeXT, in transformers' layout: a tower, an MLP, a language model, each of a family of its own."""

from collections.abc import Callable
from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.decoders import DECODERS, spelt
from vitrail.hub.encoders import ENCODERS
from vitrail.hub.family import ACTIVATIONS, Family, round_trip
from vitrail.hub.habit import Habit, Words
from vitrail.hub.maps import Move, layer, under, view
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import processors
from vitrail.processing.anyres import AnyRes
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import Crop, Naive
from vitrail.stream import Rules

About = dict[str, Any]

TOWERS = {row.name: row for row in ENCODERS if row.name.endswith("vision_model")}
WORDS = {row.name: row for row in DECODERS}
NORM = {"clip_vision_model": "clip", "siglip_vision_model": "half"}
TILES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def part(about: About, key: str, rows: dict[str, Family], default: str) -> tuple[Family, Any]:
    """The family of a part of a model, and its config."""
    own = about.get(key) or {}
    name = own.get("model_type") or default
    if name not in rows:
        raise CheckpointError(f"{key}.model_type {name!r} is not built here", f"known: {', '.join(rows)}")
    return rows[name], rows[name].read(own)


def family_of(config: Any, rows: dict[str, Family]) -> Family:
    """The family that a part is written as: the first that fits."""
    for row in rows.values():
        if row.fits(config):
            return row
    raise ConfigError(f"no family of transformers is a {type(config).__name__} like this", f"known: {', '.join(rows)}")


def named(row: Family, config: Any) -> About:
    return {"model_type": row.name, **row.write(config)}


def _read(about: About) -> VLMConfig:
    towers, tower = part(about, "vision_config", TOWERS, "clip_vision_model")
    _, decoder = part(about, "text_config", WORDS, "llama")
    if about.get("tie_word_embeddings") and not decoder.tied:  # either place says so
        decoder = decoder.with_(tied=True)
    strategy = about.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(f"vision_feature_select_strategy is {strategy!r}", "known: default, full")
    found = about.get("vision_feature_layer", -2)
    if not isinstance(found, int):
        raise CheckpointError(f"vision_feature_layer is {found!r}: features of several layers are not put together")
    image = about.get("image_token_id", about.get("image_token_index", 32_000))
    # "default" leaves the first token out, whatever it is: SigLIP, which has no CLS, is read whole ("full").
    if (strategy == "full") != (tower.prefix == 0) and strategy == "default":
        raise CheckpointError("vision_feature_select_strategy 'default' would drop a patch: the tower has no CLS")
    act = about.get("projector_hidden_act", "gelu")
    width = decoder.block.width
    connector = ProjectorConfig(
        reads=tower.block.width,
        gives=width,
        activation=ACTIVATIONS[act],  # pyrefly: ignore
        bias=about.get("multimodal_projector_bias", True),
    )
    norm = NORMS[NORM.get(towers.name, "half")]
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder,
        policy=_policy(about, tower),
        mean=norm.mean,
        std=norm.std,
        layer=found,
        prefix=strategy == "full" and tower.prefix > 0,
        newline="image_grid_pinpoints" in about or about.get("model_type") == "llava_next",
        rules=Rules(fill=image),
    )


def _policy(about: About, tower: ViTConfig) -> Crop | Naive | AnyRes:
    unread = tower.image % tower.patch
    if about.get("model_type") != "llava_next" and "image_grid_pinpoints" not in about:
        if tower.prefix:
            return Crop(size=tower.image, patch=tower.patch, unread=unread)
        return Naive(size=tower.image, patch=tower.patch, unread=unread)
    sizes = about.get("image_grid_pinpoints") or TILES
    wrong = [size for size in sizes if size[0] % tower.image or size[1] % tower.image]
    if wrong:
        raise CheckpointError(f"image_grid_pinpoints {wrong[0]} is no whole number of tiles of {tower.image}")
    grids = tuple((size[0] // tower.image, size[1] // tower.image) for size in sizes)
    return AnyRes(tile=tower.image, patch=tower.patch, unread=unread, grids=grids)


def _write(config: VLMConfig) -> About:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.connector, ProjectorConfig):
        raise ConfigError("LLaVA is a ViT and a projector")
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.connector.activation)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": named(family_of(config.tower, TOWERS), config.tower),
        "text_config": named(family_of(config.decoder, WORDS), config.decoder),
        "image_token_index": config.rules.fill,
        "projector_hidden_act": activation,
        "multimodal_projector_bias": config.connector.bias,
        "vision_feature_layer": config.layer,
        "vision_feature_select_strategy": _strategy(config),
        "tie_word_embeddings": config.decoder.tied,
    }


def _strategy(config: Any) -> str:
    return "full" if config.prefix or not config.tower.prefix else "default"


def _told(config: Any, words: Words) -> About:
    """By these the processor counts a picture's tokens."""
    return {
        "patch_size": config.tower.patch,
        "num_additional_image_tokens": config.tower.prefix,
        "vision_feature_select_strategy": _strategy(config),
        **{f"{mark}_token": words[mark] for mark in ("image", "video") if mark in words},
    }


def _write_next(config: VLMConfig) -> About:
    if not isinstance(config.policy, AnyRes):
        raise ConfigError("LLaVA-NeXT cuts pictures into tiles")
    return _write(config) | {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": processors.pinpoints(config.policy),
    }


def _moves(config: VLMConfig) -> list[Move]:
    towers, words = family_of(config.tower, TOWERS), family_of(config.decoder, WORDS)
    assert isinstance(config.connector, ProjectorConfig)
    moves = [
        *under("tower.", "vision_tower.", towers.moves(config.tower)),
        *layer("connector.layers.linears.0", "multi_modal_projector.linear_1", config.connector.bias),
        *layer("connector.layers.linears.1", "multi_modal_projector.linear_2", config.connector.bias),
        *under("decoder.", "language_model.", words.moves(config.decoder)),
    ]
    width = config.decoder.block.width
    return [*moves, view("newline", "image_newline", (1, width), (width,))] if config.newline else moves


def gridded(about: About) -> None:
    """Refuse a config by which the tower's CLS would be read among the patches of tiles and frames."""
    if about["vision_feature_select_strategy"] == "full" and part(about, "vision_config", TOWERS, "")[1].prefix:
        raise CheckpointError(
            "vision_feature_select_strategy 'full' reads the tower's CLS, which has no place in a grid of tokens",
            "known for this tower: default",
        )


def video_mark(about: About, usual: int) -> dict[str, int]:
    return {"video": about.get("video_token_id", about.get("video_token_index", usual))}


def film_spelt(usual: int) -> Callable[[VLMConfig], VLMConfig]:
    """`whole_spelt` of those that read videos, by a token that is usually this."""

    def films_spelt(config: VLMConfig) -> VLMConfig:
        marks = {"video": usual} | config.marks
        return whole_spelt(config).with_(footage=None, marks=marks)  # its own file says the footage

    return films_spelt


def whole_spelt(config: VLMConfig) -> VLMConfig:
    policy = config.policy
    if isinstance(policy, Crop) and policy.edge == policy.size:
        policy = policy.with_(edge=None)
    return config.with_(decoder=spelt(config.decoder), policy=policy)


OLDER = (("vision_tower.", "vision_tower.vision_model."),)  # as the released files have it
COPIES = (("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),)

LLAVA = tuple(
    Family(
        name,
        VLM,
        _read,
        write,
        round_trip(_read, write, whole_spelt, shown),
        _moves,
        copies=COPIES,
        older=OLDER,
        pictures=shown,
        habit=Habit(processor, "vicuna", fields=_told, tokens={"image_token": "image"}),
    )
    for name, write, shown, processor in [
        ("llava", _write, processors.LLAVA, "LlavaProcessor"),
        ("llava_next", _write_next, processors.LLAVA_NEXT, "LlavaNextProcessor"),
    ]
)
