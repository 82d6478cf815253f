"""LLaVA-OneVision of transformers: LLaVA-NeXT with a limit on the tokens of tiles, and with videos."""

import re
from typing import Any

from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.llava import (
    DUPLICATE_TENSORS,
    LEGACY_NAMES,
    LLAVA_NEXT,
    MODULE_NAMES,
    build_video_normalizer,
    check_grid_features,
    read_video_token_id,
)
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.anyres import LLAVA_ONEVISION_GRIDS, AnyResPolicy
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

VIDEO_TOKEN_ID, DEFAULT_ASPECT_RATIO = 151_647, "anyres_max_9"
VISION_DEFAULTS: HFConfig = {  # SigLIP-so400m without its last block
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
DEFAULTS: HFConfig = {
    "image_token_index": 151_646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    hf_config["vision_config"] = {
        "model_type": "siglip_vision_model",
        **(hf_config.get("vision_config") or VISION_DEFAULTS),
    }
    hf_config["text_config"] = {"model_type": "qwen2", **hf_config.get("text_config", {})}
    hf_config.setdefault(
        "image_grid_pinpoints", [[384 * rows, 384 * columns] for rows, columns in LLAVA_ONEVISION_GRIDS]
    )
    check_grid_features(hf_config)
    config = LLAVA_NEXT.from_hf_config(hf_config)
    policy = config.policy
    assert isinstance(policy, AnyResPolicy)
    return config.replace(
        policy=policy.replace(max_tiles=_parse_max_tiles(hf_config.get("vision_aspect_ratio", DEFAULT_ASPECT_RATIO))),
        vision_token_ids=read_video_token_id(hf_config, VIDEO_TOKEN_ID),
    )


def _parse_max_tiles(value: Any) -> int:
    match = re.fullmatch(r"anyres_max_(\d{1,4})", str(value))
    if match is None:
        raise CheckpointError(
            f"vision_aspect_ratio is {value!r}", f"known: {DEFAULT_ASPECT_RATIO}, or another number of tiles"
        )
    return int(match[1])


def _write_config(config: VLMConfig) -> HFConfig:
    return LLAVA_NEXT.to_hf_config(config) | {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "video_token_index": config.vision_token_ids.get("video", VIDEO_TOKEN_ID),
        "vision_aspect_ratio": _get_aspect_ratio(config),
    }


def _get_aspect_ratio(config: VLMConfig) -> str:
    if not isinstance(config.policy, AnyResPolicy) or config.policy.max_tiles is None:
        raise ConfigError("LLaVA-OneVision limits the number of tiles", "set policy.max_tiles")
    return f"anyres_max_{config.policy.max_tiles}"


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    """Write the settings from which the processor computes the number of image tokens.

    num_image_tokens includes the CLS token, which the processor subtracts.
    """
    return {
        "num_image_tokens": config.tower.grid_size**2 + config.tower.num_prefix_tokens,
        "vision_feature_select_strategy": "default" if config.tower.num_prefix_tokens else "full",
        "vision_aspect_ratio": _get_aspect_ratio(config),
        **{f"{token}_token": vision_tokens[token] for token in ("image", "video") if token in vision_tokens},
    }


LLAVA_ONEVISION = CheckpointFamily(
    "llava_onevision",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(
        _read_config, _write_config, build_video_normalizer(VIDEO_TOKEN_ID), image_processors.LLAVA_ONEVISION
    ),
    LLAVA_NEXT.tensor_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    legacy_names=LEGACY_NAMES,
    module_names=MODULE_NAMES,
    image_processor=image_processors.LLAVA_ONEVISION,
    has_video_processor=True,
    chat_config=ChatConfig(
        "LlavaOnevisionProcessor",
        "chatml",
        processor_fields=_write_processor_fields,
        tokenizer_tokens={"image_token": "image", "video_token": "video"},
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS},
)
FAMILIES.register("llava_onevision", LLAVA_ONEVISION)
