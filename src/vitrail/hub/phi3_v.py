"""Phi-3-vision and Phi-3.5-vision: CLIP over the tiles of a padded canvas, a merger with learned separators, and Phi-3.

transformers has no such models; they follow the published code. Exports have the published layout, for which other
libraries need the code files of the original repository. The config names the vision tower and no image token: its id
is read from the tokenizer's files.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import CLIP_VISION
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.llava_original import TOWERS
from vitrail.hub.phi3 import PHI3, write_published_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer, view
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import hd_image_processors
from vitrail.processing.hd_tiles import HDTransformPolicy
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.tokenizer_files import read_added_tokens
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

IMAGE_TOKEN, IMAGE_TOKEN_KEY = "<|image|>", "image_token_id"
MERGE = 2
EMBEDDING: HFConfig = {
    "embedding_cls": "image",
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}  # all released configs have these values
TOWER_DEFAULTS: HFConfig = {"name": "clip_vision_model", "layer_idx": -2, "type_feature": "patch"}


def check_settings(settings: HFConfig, expected: HFConfig, where: str) -> None:
    """Raise an error if a setting is given and is not the supported one."""
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise CheckpointError(f"{where}.{key} is {settings[key]!r}, which is not supported", f"known: {value!r}")


def build_image_token_reader(token: str) -> Callable[[HFConfig, Path], HFConfig]:
    """Build the function that adds the id of the image token, if the folder has a file of the tokenizer with it."""

    def add_image_token(hf_config: HFConfig, folder: Path) -> HFConfig:
        tokens = read_added_tokens(folder)
        return {**hf_config, IMAGE_TOKEN_KEY: tokens[token]} if token in tokens else hf_config

    return add_image_token


def _read_tower(settings: HFConfig) -> tuple[ViTConfig, int]:
    """Return the named vision tower, and the layer that is read."""
    settings = fill_defaults(settings, TOWER_DEFAULTS)
    known = {key: TOWER_DEFAULTS[key] for key in ("name", "type_feature")}
    check_settings(settings, known, "img_processor")
    name = settings.get("model_name")
    if name not in TOWERS:
        raise CheckpointError(f"img_processor.model_name {name!r} is not supported", f"known: {', '.join(TOWERS)}")
    tower = CLIP_VISION.from_hf_config(TOWERS[name])
    check_settings(settings, {"image_dim_out": tower.width}, "img_processor")
    return tower, settings["layer_idx"]


def _read_config(hf_config: HFConfig) -> VLMConfig:
    check_settings(hf_config.get("embd_layer") or {}, EMBEDDING, "embd_layer")
    tower, layer = _read_tower(hf_config.get("img_processor") or {})
    decoder, normalization = PHI3.from_hf_config(hf_config), NORMALIZATIONS["clip"]
    return VLMConfig(
        tower=tower,
        connector=MergerConfig(
            in_features=tower.width,
            out_features=decoder.block.width,
            merge=MERGE,
            intermediate_size=decoder.block.width,
            norm_position="none",
            separators=True,
        ),
        decoder=decoder,
        policy=HDTransformPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, merge_size=MERGE),
        mean=normalization.mean,
        std=normalization.std,
        vision_feature_layer=layer,
        rules=StreamRules(fill_id=hf_config.get(IMAGE_TOKEN_KEY, 32_044)),
    )


def _write_config(config: VLMConfig) -> HFConfig:
    names = [name for name, tower in TOWERS.items() if CLIP_VISION.from_hf_config(tower) == config.tower]
    if not names:
        raise ConfigError("the tower is none that Phi-3-vision names", f"known: {', '.join(TOWERS)}")
    return {
        "architectures": ["Phi3VForCausalLM"],
        **write_published_config(config.decoder, "su"),
        "embd_layer": EMBEDDING,
        "img_processor": {
            **TOWER_DEFAULTS,
            "model_name": names[0],
            "image_dim_out": config.tower.width,
            "num_img_tokens": config.view_grid.num_tokens,
            "layer_idx": config.vision_feature_layer,
        },
        IMAGE_TOKEN_KEY: config.rules.fill_id,  # not used by the published code
    }


def build_projection_rules(config: VLMConfig, prefix: str) -> list[TensorRule]:
    """Build the tensor rules of a merger with separators."""
    assert isinstance(config.connector, MergerConfig)
    width = config.connector.block_width
    return [
        view("connector.separator", f"{prefix}glb_GN", (width,), (1, 1, width)),
        view("connector.newline", f"{prefix}sub_GN", (width,), (1, 1, 1, width)),
        *rename_layer("connector.layers.linears.0", f"{prefix}img_projection.0"),
        *rename_layer("connector.layers.linears.1", f"{prefix}img_projection.2"),
    ]


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    prefix = "model.vision_embed_tokens."
    return [
        *add_prefix("tower.", f"{prefix}img_processor.vision_model.", CLIP_VISION.tensor_rules(config.tower)),
        *build_projection_rules(config, prefix),
        *add_prefix("decoder.", "", PHI3.tensor_rules(config.decoder)),
    ]


PHI3_V = CheckpointFamily(
    "phi3_v",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, hd_image_processors.PHI3_V),
    _build_rules,
    image_processor=hd_image_processors.PHI3_V,
    add_settings=build_image_token_reader(IMAGE_TOKEN),
    chat_config=ChatConfig("Phi3VProcessor", "phi-3-vision", end_of_turn="<|end|>", required_word="type"),
)
FAMILIES.register("phi3_v", PHI3_V)
