"""InternVL of transformers: InternViT over tiles, a merger of 2 × 2 patches, and a decoder."""

from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import VIDEO_TOKEN, ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.llava import (
    DUPLICATE_TENSORS,
    LANGUAGE_MODELS,
    find_part_family,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer
from vitrail.hub.vlm_towers import INTERNVL_VISION, to_hf_activation
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

VISION_TOWERS = {INTERNVL_VISION.name: INTERNVL_VISION}
EPS = 1e-5  # of the connector's norm; fixed, not part of the config

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "image_token_id": 151_667,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    _, tower = read_part(hf_config, "vision_config", VISION_TOWERS, "internvl_vision")
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "qwen2")
    # The top-level key takes precedence.
    tied = hf_config.get("tie_word_embeddings", decoder.tie_word_embeddings)
    return make_config(hf_config, tower, decoder.replace(tie_word_embeddings=tied))


def make_config(hf_config: HFConfig, tower: ViTConfig, decoder: DecoderConfig) -> VLMConfig:
    """Make the config of an InternVL with these parts; `hf_config` has the other keys of transformers."""
    strategy = hf_config["vision_feature_select_strategy"]
    if strategy != "default":
        raise CheckpointError(
            f"vision_feature_select_strategy is {strategy!r}: only patches can be merged",
            "known: default",
        )
    width = decoder.block.width
    connector = MergerConfig(
        in_features=tower.block.width,
        out_features=width,
        intermediate_size=width,
        merge=_read_merge_size(hf_config["downsample_ratio"]),
        norm_position="after",
        eps=EPS,
        activation=_read_activation(hf_config["projector_hidden_act"]),
    )
    norm = NORMALIZATIONS["imagenet"]
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder,
        policy=TilesPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, merge_size=connector.merge),
        mean=norm.mean,
        std=norm.std,
        vision_feature_layer=_read_feature_layer(hf_config["vision_feature_layer"], tower.layers),
        rules=StreamRules(fill_id=hf_config["image_token_id"]),
    )


def _read_merge_size(ratio: float) -> int:
    merge_size = round(1 / ratio) if ratio else 0
    if merge_size * ratio != 1:
        raise CheckpointError(f"downsample_ratio is {ratio}: its inverse must be an integer", "known: 1, 0.5, 0.25, …")
    return merge_size


def _read_activation(name: str) -> Any:
    if name not in ACTIVATIONS:
        raise CheckpointError(f"projector_hidden_act {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _read_feature_layer(value: Any, num_layers: int) -> int | None:
    """Read the feature layer; None for the last, which includes the tower's norm."""
    if not isinstance(value, int):
        raise CheckpointError(f"vision_feature_layer is {value!r}: several layers are not supported")
    return None if value in (-1, num_layers) else value


def _write_config(config: VLMConfig) -> HFConfig:
    tower, connector = config.tower, config.connector
    if not (
        isinstance(tower, ViTConfig) and isinstance(connector, MergerConfig) and isinstance(config.policy, TilesPolicy)
    ):
        raise ConfigError("InternVL needs a ViT, tiles and a merger")
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "vision_config": write_part(find_part_family(tower, VISION_TOWERS), tower),
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_id": config.rules.fill_id,
        **_write_processor_fields(config, {}),
        "downsample_ratio": 1 / connector.merge,
        "projector_hidden_act": to_hf_activation(connector.activation),
        "vision_feature_layer": -1 if config.vision_feature_layer is None else config.vision_feature_layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"image_seq_length": (config.tower.grid_size // config.connector.merge) ** 2}  # tokens of a tile


def _normalize_config(config: VLMConfig) -> VLMConfig:
    return normalize_llava_config(config).replace(video_sampling=None)  # part of the video processor file


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    tower_family, language_model = (
        find_part_family(config.tower, VISION_TOWERS),
        find_part_family(config.decoder, LANGUAGE_MODELS),
    )
    return [
        *add_prefix("tower.", "vision_tower.", tower_family.tensor_rules(config.tower)),
        *rename_layer("connector.norm", "multi_modal_projector.layer_norm"),
        *rename_layer("connector.layers.linears.0", "multi_modal_projector.linear_1"),
        *rename_layer("connector.layers.linears.1", "multi_modal_projector.linear_2"),
        *add_prefix("decoder.", "language_model.", language_model.tensor_rules(config.decoder)),
    ]


IMAGE_BOUNDARY_TOKENS = ("<img>", "</img>")
TOKENIZER_TOKENS = {
    "context_image_token": "image",
    "start_image_token": IMAGE_BOUNDARY_TOKENS[0],
    "end_image_token": IMAGE_BOUNDARY_TOKENS[1],
    "video_token": VIDEO_TOKEN,
}

LEGACY_NAMES = (  # names in files that transformers 4.52 and later wrote
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
)

INTERNVL = CheckpointFamily(
    "internvl",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, _normalize_config, image_processors.INTERNVL),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    legacy_names=LEGACY_NAMES,
    module_names=LEGACY_NAMES,
    image_processor=image_processors.INTERNVL,
    has_video_processor=True,
    chat_config=ChatConfig(
        "InternVLProcessor",
        "chatml",
        image_boundary_tokens=IMAGE_BOUNDARY_TOKENS,
        processor_fields=_write_processor_fields,
        tokenizer_tokens=TOKENIZER_TOKENS,
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_TOWERS["internvl_vision"].class_defaults},
)
FAMILIES.register("internvl", INTERNVL)
