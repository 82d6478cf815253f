"""LLaVA-OneVision in transformers' layout: LLaVA-NeXT with a bound on its tiles' tokens, and videos."""

import re
from typing import Any

from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.family import Family, round_trip
from vitrail.hub.habit import Habit, Words
from vitrail.hub.llava import COPIES, LLAVA, OLDER, film_spelt, gridded, video_mark
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import processors
from vitrail.processing.anyres import GRIDS_ONEVISION, AnyRes

About = dict[str, Any]

NEXT = next(row for row in LLAVA if row.name == "llava_next")
VIDEO, NINE = 151_647, "anyres_max_9"
TOWER: About = {  # SigLIP-so400m without its last block
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
USUAL: About = {"image_token_index": 151_646, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def _read(about: About) -> VLMConfig:
    about = USUAL | {key: value for key, value in about.items() if value is not None}
    about["vision_config"] = {"model_type": "siglip_vision_model", **(about.get("vision_config") or TOWER)}
    about["text_config"] = {"model_type": "qwen2", **about.get("text_config", {})}
    about.setdefault("image_grid_pinpoints", [[384 * rows, 384 * columns] for rows, columns in GRIDS_ONEVISION])
    gridded(about)
    config = NEXT.read(about)
    policy = config.policy
    assert isinstance(policy, AnyRes)
    return config.with_(
        policy=policy.with_(max_tiles=_tiles(about.get("vision_aspect_ratio", NINE))),
        marks=video_mark(about, VIDEO),
    )


def _tiles(said: Any) -> int:
    found = re.fullmatch(r"anyres_max_(\d{1,4})", str(said))
    if found is None:
        raise CheckpointError(
            f"vision_aspect_ratio is {said!r}", f"known: {NINE}, or another number of tiles that tokens are bound to"
        )
    return int(found[1])


def _write(config: VLMConfig) -> About:
    return NEXT.write(config) | {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "video_token_index": config.marks.get("video", VIDEO),
        "vision_aspect_ratio": _bound(config),
    }


def _bound(config: VLMConfig) -> str:
    if not isinstance(config.policy, AnyRes) or config.policy.max_tiles is None:
        raise ConfigError("LLaVA-OneVision bounds the tokens of a picture's tiles", "set policy.max_tiles")
    return f"anyres_max_{config.policy.max_tiles}"


def _told(config: Any, words: Words) -> About:
    """By these the processor counts tokens; those of a CLS, which is not read, it takes away again."""
    return {
        "num_image_tokens": config.tower.side**2 + config.tower.prefix,
        "vision_feature_select_strategy": "default" if config.tower.prefix else "full",
        "vision_aspect_ratio": _bound(config),
        **{f"{mark}_token": words[mark] for mark in ("image", "video") if mark in words},
    }


LLAVA_ONEVISION = Family(
    "llava_onevision",
    VLM,
    _read,
    _write,
    round_trip(_read, _write, film_spelt(VIDEO), processors.LLAVA_ONEVISION),
    NEXT.moves,
    copies=COPIES,
    older=OLDER,
    pictures=processors.LLAVA_ONEVISION,
    videos=True,
    habit=Habit(
        "LlavaOnevisionProcessor",
        "chatml",
        fields=_told,
        tokens={"image_token": "image", "video_token": "video"},
    ),
)
