"""LLaVA-NeXT-Video in transformers' layout: LLaVA-NeXT, and videos, of whose frames means of blocks are read."""

from typing import Any

from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.family import Family, round_trip
from vitrail.hub.habit import Habit
from vitrail.hub.llava import COPIES, LLAVA, OLDER, TILES, film_spelt, gridded, video_mark
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import processors
from vitrail.processing.anyres import AnyRes

About = dict[str, Any]

NEXT = next(row for row in LLAVA if row.name == "llava_next")
VIDEO, POOL = 32_000, "average"
TOWER: About = {  # CLIP-L/14 at 336 pixels
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
USUAL: About = {
    "image_token_index": 32_001,
    "image_grid_pinpoints": TILES,
    "vision_feature_select_strategy": "default",
    "spatial_pool_mode": POOL,
    "spatial_pool_stride": 2,
}


def _read(about: About) -> VLMConfig:
    about = USUAL | {key: value for key, value in about.items() if value is not None}
    about["vision_config"] = {"model_type": "clip_vision_model", **(about.get("vision_config") or TOWER)}
    gridded(about)
    config = NEXT.read(about)
    policy = config.policy
    assert isinstance(policy, AnyRes)
    return config.with_(policy=policy.with_(pool=_stride(about, config)), marks=video_mark(about, VIDEO))


def _stride(about: About, config: VLMConfig) -> int:
    mode, stride, side = about["spatial_pool_mode"], about["spatial_pool_stride"], config.grid.h
    if mode != POOL:
        raise CheckpointError(f"spatial_pool_mode is {mode!r}", f"known: {POOL}, which is the default")
    if type(stride) is not int or stride < 1 or side % stride:
        raise CheckpointError(
            f"spatial_pool_stride is {stride!r}, and a frame has {side} × {side} patches",
            "known: numbers that divide a frame into equal blocks",
        )
    return stride


def _write(config: VLMConfig) -> About:
    if not isinstance(config.policy, AnyRes) or config.policy.pool is None:
        raise ConfigError("LLaVA-NeXT-Video reads means of blocks of a video's frame", "set policy.pool")
    return NEXT.write(config) | {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "video_token_index": config.marks.get("video", VIDEO),
        "spatial_pool_mode": POOL,
        "spatial_pool_stride": config.policy.pool,
    }


assert NEXT.habit is not None
LLAVA_NEXT_VIDEO = Family(
    "llava_next_video",
    VLM,
    _read,
    _write,
    round_trip(_read, _write, film_spelt(VIDEO), processors.LLAVA_NEXT),
    NEXT.moves,
    copies=COPIES,
    older=OLDER,
    pictures=processors.LLAVA_NEXT,
    videos=True,
    habit=Habit(
        "LlavaNextVideoProcessor",
        "vicuna",
        fields=NEXT.habit.fields,
        tokens={"image_token": "image", "video_token": "video"},
    ),
)
