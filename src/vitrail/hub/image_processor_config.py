"""Image processor config of a model: kept with a model when it is loaded, saved and exported with it.

A model trained here takes images resized to the tower's image size, or with their aspect ratio for a NaFlex tower, with
values in −1 … 1, and has no config attached.
A loaded model keeps the config of its folder unchanged. If an external folder has none, the preprocessing is unknown,
which is kept too, so that an export does not claim anything.

Vision-language models attach nothing: their own config describes the preprocessing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitrail.encoders import HybridTower, MultiTower, ViT
from vitrail.errors import ConfigError
from vitrail.evals.image_feature_extractor import ImageTower, find_image_tower
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.hub.safetensors_files import read_json, write_json
from vitrail.processing import video_sampling
from vitrail.processing.image_loading import NORMALIZATIONS, Normalization
from vitrail.processing.image_preprocessor import (
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    ImagePreprocessor,
    parse_normalization,
    read_preprocessor_config,
)

# attribute of a model: the image processor config, {} if unknown, missing if trained here
ATTRIBUTE = "image_processor_config"

# Families → image processor of transformers.
PROCESSOR_CLASSES = {
    "clip": "CLIPImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip_vision_model": "SiglipImageProcessor",
    "siglip2": "Siglip2ImageProcessor",
    "siglip2_vision_model": "Siglip2ImageProcessor",
    "vit": "ViTImageProcessor",
    "ViTForImageClassification": "ViTImageProcessor",
    "dinov2": "BitImageProcessor",
    "dinov2_with_registers": "BitImageProcessor",
    "dinov3_vit": "DINOv3ViTImageProcessor",
    "aimv2_vision_model": "CLIPImageProcessor",
    "eva02": "BitImageProcessor",  # timm reads config.json instead
}
IMAGE_ONLY_KEYS = (
    "image_processor_type",
    "crop_to_patches",
    "min_patches",
    "max_patches",
    "image_grid_pinpoints",
    "do_pad",
    "do_image_splitting",
)
"""Keys that do not apply to videos."""
TIMM_KEYS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # image preprocessing in a timm config


def attach_image_processor(model: nn.Module, folder: Path, *, native: bool) -> None:
    """Attach the image processor config of a native or external folder to a model."""
    if find_image_tower(model) is None or not folder.is_dir():
        return
    processor_config = read_preprocessor_config(folder)[0]
    if processor_config is None and not native:
        timm = read_json(folder / "config.json").get("pretrained_cfg") or {}
        timm_config = {key: timm[key] for key in TIMM_KEYS if key in timm}
        processor_config = {"timm": timm_config} if timm_config else {}
    if processor_config is not None:
        setattr(model, ATTRIBUTE, processor_config)


NATIVE_NORMALIZATION = NORMALIZATIONS["half"]  # of all models trained here


def list_vision_towers(model: nn.Module) -> list[tuple[nn.Module, Normalization]]:
    """Return the vision towers of a vision-language model with their pixel normalization.

    Combined towers are listed one by one. SAM is left out, because no training starts from it.
    """
    vlm: Any = model
    tower, config = vlm.tower, vlm.config
    if isinstance(tower, MultiTower):
        return [
            (part, Normalization(tower_config.mean, tower_config.std))
            for part, tower_config in zip(tower.towers, tower.config.towers, strict=True)
        ]
    if isinstance(tower, HybridTower):
        return [(tower.low, Normalization(tower.config.low.mean, tower.config.low.std))]
    return [(tower, Normalization(config.mean, config.std))]


def read_normalization(model: nn.Module, part: nn.Module | None = None) -> Normalization | None:
    """Return mean and std of a model, or of one part, for pixels in 0 … 1. None if unknown."""
    config: Any = getattr(model, "config", None)
    processor_config = getattr(model, ATTRIBUTE, None)
    if hasattr(config, "policy"):
        matches = (
            normalization
            for tower, normalization in list_vision_towers(model)
            if part is not None and part in set(tower.modules())
        )
        return next(matches, Normalization(config.mean, config.std))
    if processor_config is None:
        return NATIVE_NORMALIZATION
    if "timm" in processor_config and "image_mean" not in processor_config:
        processor_config = {
            f"image_{key}": list(processor_config["timm"][key])
            for key in ("mean", "std")
            if key in processor_config["timm"]
        }
    if "image_mean" not in processor_config and processor_config.get("do_normalize", True):
        return None
    mean, std, rescale = parse_normalization(processor_config)
    scale = 255 * rescale
    return Normalization(tuple(x / scale for x in mean), tuple(x / scale for x in std))


def fold_normalization(
    model: nn.Module, tower: Any, normalization: Normalization, reinitialized: Sequence[str] = ()
) -> None:
    """Fold a change of pixel normalization into the first layer of a loaded tower, so that its features stay the same.

    wanted         the normalization of training
    reinitialized  parts of the tower that start from new weights; they must not be needed to hold the change

    Removes the attached image processor config, which no longer applies.
    """
    current = read_normalization(model, tower)
    if hasattr(model, ATTRIBUTE):
        delattr(model, ATTRIBUTE)
    if current is None:
        sys.stderr.write("warning: the normalization of the initial checkpoint is unknown; pixels are used unchanged\n")
        return
    if current == NATIVE_NORMALIZATION:  # for any number of channels
        current = Normalization(*(level[:1] * len(normalization.mean) for level in NATIVE_NORMALIZATION))
    scale = [w / f for w, f in zip(normalization.std, current.std, strict=True)]
    offset = [(w - f) / s for w, f, s in zip(normalization.mean, current.mean, current.std, strict=True)]
    if np.allclose(scale, 1) and np.allclose(offset, 0):
        return
    if not isinstance(tower, ViT):
        raise ConfigError(
            f"a {type(tower).__name__} with mean {current.mean} and std {current.std} cannot take other pixels",
            f"start from one with mean {normalization.mean} and std {normalization.std}",
        )
    if "positions" in reinitialized and tower.embed.proj.bias is None:
        raise ConfigError(
            "the normalization changes, and the reinitialized position embedding would have to hold the change",
            f"start from a tower with mean {normalization.mean} and std {normalization.std}",
        )
    tower.fold_normalization(scale, offset)


def match_normalization(
    model: nn.Module, target: nn.Module, source_model: nn.Module, source: nn.Module, reinitialized: Sequence[str]
) -> None:
    """Fold the normalization of a model into the towers of the weights that one of its parts starts from.

    target is a part of `model`; source is the matching part of `source_model`.
    """
    tower, config = find_image_tower(source_model), getattr(source_model, "config", None)
    towers = [vision_tower for vision_tower, _ in list_vision_towers(source_model)] if hasattr(config, "policy") else []
    for vision_tower in towers + ([tower] if isinstance(tower, nn.Module) else []):
        path = next((name for name, part in source.named_modules() if part is vision_tower), None)
        if path is not None or source in set(vision_tower.modules()):
            fold_normalization(
                source_model,
                vision_tower,
                read_normalization(model, target.get_submodule(path or "")) or NATIVE_NORMALIZATION,
                reinitialized,
            )


def save_image_processor(model: nn.Module, folder: Path) -> None:
    """Save the attached image processor config, if there is one."""
    if find_image_tower(model) is not None:
        _write_processor_file(folder, getattr(model, ATTRIBUTE, None))


def export_image_processor(
    model: nn.Module, folder: Path, family: CheckpointFamily, config: dict[str, Any]
) -> dict[str, Any]:
    """Write the image and video processor files of an export. Returns config.json, which timm reads instead."""
    if family.image_processor is not None:
        native_config: Any = model.config
        _write_processor_file(
            folder,
            family.image_processor.to_processor_config(native_config) if native_config.tower.channels == 3 else None,
        )
        if family.has_video_processor and native_config.tower.channels == 3:
            video_config = (
                family.image_processor.to_processor_config(native_config)
                | native_config.resolved_video_sampling.to_processor_config()
            )
            write_json(
                folder / video_sampling.VIDEO_PROCESSOR_FILE,
                {key: video_config[key] for key in video_config if key not in IMAGE_ONLY_KEYS},
            )
        return config
    tower = find_image_tower(model)
    if tower is None:
        return config
    processor_config = getattr(model, ATTRIBUTE, None)
    if processor_config is None:
        processor_config = _build_native_config(tower, family.name)
    _write_processor_file(folder, {key: value for key, value in processor_config.items() if key != "timm"} or None)
    if "timm" in processor_config and "pretrained_cfg" in config:
        return config | {"pretrained_cfg": config["pretrained_cfg"] | processor_config["timm"]}
    return config


def _build_native_config(tower: ImageTower, family: str) -> dict[str, Any]:
    if family not in PROCESSOR_CLASSES or tower.config.channels != 3:
        return {}
    preprocessing = ImagePreprocessor.default(tower.config)
    timm = {
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "squash",
    }
    return {"image_processor_type": PROCESSOR_CLASSES[family], **preprocessing.to_processor_config(), "timm": timm}


def _write_processor_file(folder: Path, processor_config: dict[str, Any] | None) -> None:
    for file in (
        PREPROCESSOR_FILE,
        PROCESSOR_FILE,
        video_sampling.VIDEO_PROCESSOR_FILE,
    ):  # of an earlier model in this folder
        (folder / file).unlink(missing_ok=True)
    if processor_config is not None:
        write_json(folder / PREPROCESSOR_FILE, processor_config)
