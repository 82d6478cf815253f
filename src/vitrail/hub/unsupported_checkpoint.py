"""Errors for checkpoints that are not supported. They name the real class and the nearest supported family."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from vitrail.backbones.decoder import Decoder
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm import VLM

HFConfig = Mapping[str, Any]

VISION_KEYS = (
    "vision_config",
    "visual",
    "vision_tower",
    "vision_tower_cfg",
    "vision_backbone_id",
    "mm_vision_tower",
    "image_token_id",
    "thinker_config",
)  # of vision-language models
FEATURE_KEYS = ("input_features", "output_features")  # of a LeRobot policy
MAX_NAMED_FAMILIES = 12
MIN_SIMILARITY = 0.6
MIN_CLASS_SIMILARITY = 0.7  # all classes of diffusers end alike


def build_unsupported_error(
    hf_config: HFConfig, file: Path, families: Mapping[str, CheckpointFamily]
) -> CheckpointError:
    """Build the error for a config of no family."""
    if "type" in hf_config and any(key in hf_config for key in FEATURE_KEYS):
        return CheckpointError(
            f"{file} is a LeRobot policy of type {hf_config['type']!r}, which is not supported",
            "load it with lerobot",
        )
    if isinstance(name := hf_config.get("_class_name"), str):
        return CheckpointError(
            f"{file} has the class {name}, which is not supported", suggest_family(name, hf_config, families)
        )
    architectures = _list_architectures(hf_config)
    key = "architecture" if "architecture" in hf_config and "model_type" not in hf_config else "model_type"
    if hf_config.get(key) is None:
        return CheckpointError(
            f"{file} has no model_type, _class_name or architecture",
            "add the model_type of the original config, or give the folder of a checkpoint",
        )
    suffix = f" ({architectures[0]})" if architectures else ""
    if hf_config.get("is_encoder_decoder"):  # such as BART
        kind, names = _list_candidates(hf_config, families)
        return CheckpointError(
            f"{file} is the encoder-decoder model {hf_config[key]!r}{suffix}, which is not supported",
            f"use a model with a decoder only; {_format_candidates(kind, names)}",
        )
    return CheckpointError(
        f"{file} has the unknown {key} {hf_config[key]!r}{suffix}",
        suggest_family(str(hf_config[key]), hf_config, families),
    )


def suggest_family(name: str, hf_config: HFConfig, families: Mapping[str, CheckpointFamily]) -> str:
    """Return the remedy: the nearest supported family of the same kind, or all of them."""
    kind, names = _list_candidates(hf_config, families)
    similarity = {candidate: SequenceMatcher(None, name.lower(), candidate.lower()).ratio() for candidate in names}
    nearest = max(similarity, key=lambda candidate: similarity[candidate])
    if similarity[nearest] >= (MIN_CLASS_SIMILARITY if "_class_name" in hf_config else MIN_SIMILARITY):
        return f"the nearest supported family is {nearest}"
    return _format_candidates(kind, names)


def _format_candidates(kind: str, names: list[str]) -> str:
    others = f" and {len(names) - MAX_NAMED_FAMILIES} more (docs/models.md)" if len(names) > MAX_NAMED_FAMILIES else ""
    return f"supported {kind}: {', '.join(names[:MAX_NAMED_FAMILIES])}{others}"


def _list_candidates(hf_config: HFConfig, families: Mapping[str, CheckpointFamily]) -> tuple[str, list[str]]:
    """Return the kind of an unknown model, as far as its config tells, and the families of this kind."""
    if "_class_name" in hf_config:
        names = [name for name, family in families.items() if family.config_key == "_class_name"]
        return "classes of diffusers", names
    if any(key in hf_config for key in VISION_KEYS):
        kind, classes = "vision-language models", (VLM, CrossAttentionVLM)
    elif "vocab_size" in hf_config:
        kind, classes = "language models", (Decoder,)
    else:
        return "families", list(families)
    return kind, [name for name, family in families.items() if issubclass(family.model_class, classes)]


def _list_architectures(hf_config: HFConfig) -> list[str]:
    names = hf_config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
