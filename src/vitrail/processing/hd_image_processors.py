"""Image processors of Phi-3-vision and Phi-4-multimodal, whose views are tiles of a padded canvas and a view of it.

The files name no filter of the tiles, which is bilinear. `resample` is that of the whole view, which is bicubic.
"""

from typing import Any

from vitrail.errors import CheckpointError, ConfigError
from vitrail.processing.hd_tiles import MAX_TILES, DynamicHDPolicy, HDTransformPolicy
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.image_preprocessor import parse_resample, parse_square_size, resample_to_pil
from vitrail.processing.image_processors import HFImageProcessor, JsonDict
from vitrail.processing.resolution_policies import AnyResolutionPolicy

# Settings of the speech processor, which the published files hold too.
AUDIO_SETTINGS = {
    "feature_extractor_type": "Phi4MMAudioFeatureExtractor",
    "audio_compression_rate": 8,
    "audio_downsample_rate": 1,
    "audio_feat_stride": 1,
}


class CanvasImageProcessor(HFImageProcessor):
    """Image processor with one filter for tiles and another for the whole view."""

    def apply_processor_config(self, config: Any, processor_config: JsonDict) -> Any:
        if processor_config.get("resample") is not None and parse_resample(processor_config) != "bicubic":
            raise CheckpointError(f"resample is {processor_config['resample']}", "use 3 (bicubic)")
        own = {"resample": resample_to_pil(config.policy.resample)}
        return super().apply_processor_config(config, {**processor_config, **own})

    def to_processor_config(self, config: Any) -> JsonDict:
        written, policy = super().to_processor_config(config), config.policy
        usual = type(policy)()
        for key in ("resample", "fill_colour"):
            if getattr(policy, key) != getattr(usual, key):
                raise ConfigError(
                    f"policy.{key} is {getattr(policy, key)!r}", f"{self.name} needs {getattr(usual, key)!r}"
                )
        return written | {"resample": resample_to_pil("bicubic")}


def _check_tile_count(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TILES:
        raise CheckpointError(f"{name} is {value!r}", f"give a number of 1 … {MAX_TILES:,}")
    return value


def _parse_hd_transform(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    if json_config["num_img_tokens"] != config.view_grid.num_tokens:
        raise CheckpointError(
            f"num_img_tokens is {json_config['num_img_tokens']!r}, and a view has {config.view_grid.num_tokens} tokens",
            "check that both files belong to the same model",
        )
    return config.policy.replace(max_tiles=_check_tile_count("num_crops", json_config["num_crops"]))


def _format_hd_transform(config: Any) -> JsonDict:
    return {"num_crops": config.policy.max_tiles, "num_img_tokens": config.view_grid.num_tokens}


def _parse_dynamic_hd(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    policy = config.policy
    own = {"size": policy.tile_size, "patch_size": policy.patch_size}
    for key, value in own.items():
        if parse_square_size(json_config.get(key, value)) != value:
            raise CheckpointError(
                f"{key} is {json_config[key]}, and the tower has {value} pixels",
                "check that both files belong to the same model",
            )
    return policy.replace(max_tiles=_check_tile_count("dynamic_hd", json_config["dynamic_hd"]))


def _format_phi4_multimodal(config: Any) -> JsonDict:
    policy = config.policy
    size = {"height": policy.tile_size, "width": policy.tile_size}
    return {"size": size, "patch_size": policy.patch_size, "dynamic_hd": policy.max_tiles}


def _format_phi4mm(config: Any) -> JsonDict:
    half = NORMALIZATIONS["half"]
    if (tuple(config.mean), tuple(config.std)) != (half.mean, half.std):
        raise ConfigError(
            f"mean is {config.mean} and std is {config.std}", f"Phi4MMImageProcessor needs {half.mean} and {half.std}"
        )
    return {"dynamic_hd": config.policy.max_tiles, **AUDIO_SETTINGS}


PHI3_V = CanvasImageProcessor("Phi3VImageProcessor", (HDTransformPolicy,), _parse_hd_transform, _format_hd_transform)
PHI4MM = CanvasImageProcessor("Phi4MMImageProcessor", (DynamicHDPolicy,), _parse_dynamic_hd, _format_phi4mm)
PHI4_MULTIMODAL = CanvasImageProcessor(
    "Phi4MultimodalImageProcessor", (DynamicHDPolicy,), _parse_dynamic_hd, _format_phi4_multimodal
)
