"""The safety checker of Stable Diffusion in diffusers, whose config is that of a CLIP."""

from typing import Any

from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check
from vitrail.hub.encoder_families import CLIP_VISION
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename
from vitrail.models.safety_checker import SafetyChecker, SafetyCheckerConfig
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]
DEFAULT_EMBED_DIM = 512
NAME = "StableDiffusionSafetyChecker"


def _read_config(hf_config: HFConfig) -> SafetyCheckerConfig:
    return SafetyCheckerConfig(
        image=CLIP_VISION.from_hf_config(hf_config.get("vision_config") or {}),
        embed_dim=hf_config.get("projection_dim") or DEFAULT_EMBED_DIM,
    )


def _write_config(config: SafetyCheckerConfig) -> HFConfig:
    return {
        "model_type": "clip",
        "architectures": [NAME],
        "vision_config": {"model_type": CLIP_VISION.name, **CLIP_VISION.to_hf_config(config.image)},
        "projection_dim": config.embed_dim,
    }


def _build_rules(config: SafetyCheckerConfig) -> list[TensorRule]:
    return [
        *add_prefix("image.", "vision_model.vision_model.", CLIP_VISION.tensor_rules(config.image)),
        rename("image_projection.weight", "visual_projection.weight"),
        rename("concepts", "concept_embeds"),
        rename("concepts_thresholds", "concept_embeds_weights"),
        rename("special", "special_care_embeds"),
        rename("special_thresholds", "special_care_embeds_weights"),
    ]


SAFETY_CHECKER = CheckpointFamily(
    NAME,
    SafetyChecker,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config),
    _build_rules,
    config_key="architectures",
    legacy_names=(("vision_model.vision_model.", "vision_model."),),  # of transformers 5
)
FAMILIES.register("StableDiffusionSafetyChecker", SAFETY_CHECKER)
