"""LLaVA-NeXT-Video of transformers: LLaVA-NeXT with average-pooled video frames."""

from typing import Any

from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.llava import (
    CLIP_L_336,
    DEFAULT_PINPOINTS,
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
from vitrail.processing.anyres import AnyResPolicy
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

VIDEO_TOKEN_ID, POOL_MODE = 32_000, "average"
DEFAULTS: HFConfig = {
    "image_token_index": 32_001,
    "image_grid_pinpoints": DEFAULT_PINPOINTS,
    "vision_feature_select_strategy": "default",
    "spatial_pool_mode": POOL_MODE,
    "spatial_pool_stride": 2,
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    hf_config["vision_config"] = {
        "model_type": "clip_vision_model",
        **(hf_config.get("vision_config") or CLIP_L_336),
    }
    check_grid_features(hf_config)
    config = LLAVA_NEXT.from_hf_config(hf_config)
    policy = config.policy
    assert isinstance(policy, AnyResPolicy)
    return config.replace(
        policy=policy.replace(video_pool_size=_read_pool_stride(hf_config, config)),
        vision_token_ids=read_video_token_id(hf_config, VIDEO_TOKEN_ID),
    )


def _read_pool_stride(hf_config: HFConfig, config: VLMConfig) -> int:
    mode, stride, grid_size = hf_config["spatial_pool_mode"], hf_config["spatial_pool_stride"], config.view_grid.h
    if mode != POOL_MODE:
        raise CheckpointError(f"spatial_pool_mode is {mode!r}", f"only {POOL_MODE} is supported")
    if type(stride) is not int or stride < 1 or grid_size % stride:
        raise CheckpointError(
            f"spatial_pool_stride is {stride!r}, but a frame has {grid_size} × {grid_size} patches",
            "use a divisor of the number of patches",
        )
    return stride


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.policy, AnyResPolicy) or config.policy.video_pool_size is None:
        raise ConfigError("LLaVA-NeXT-Video pools video frames", "set policy.video_pool_size")
    return LLAVA_NEXT.to_hf_config(config) | {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "video_token_index": config.vision_token_ids.get("video", VIDEO_TOKEN_ID),
        "spatial_pool_mode": POOL_MODE,
        "spatial_pool_stride": config.policy.video_pool_size,
    }


assert LLAVA_NEXT.chat_config is not None
LLAVA_NEXT_VIDEO = CheckpointFamily(
    "llava_next_video",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(
        _read_config, _write_config, build_video_normalizer(VIDEO_TOKEN_ID), image_processors.LLAVA_NEXT
    ),
    LLAVA_NEXT.tensor_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    legacy_names=LEGACY_NAMES,
    module_names=MODULE_NAMES,
    image_processor=image_processors.LLAVA_NEXT,
    has_video_processor=True,
    chat_config=ChatConfig(
        "LlavaNextVideoProcessor",
        "vicuna",
        processor_fields=LLAVA_NEXT.chat_config.processor_fields,
        tokenizer_tokens={"image_token": "image", "video_token": "video"},
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": CLIP_L_336},
)
FAMILIES.register("llava_next_video", LLAVA_NEXT_VIDEO)
