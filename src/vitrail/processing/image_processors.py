"""Image processors of transformers: convert between preprocessor_config.json files and model configs.

A model config here has the fields `tower`, `policy`, `mean` and `std`. Keys that a file leaves out keep the default of
the model family. Keys that describe the tower must match the tower.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from vitrail.errors import CheckpointError, ConfigError
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.image_layout import Colour
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.image_preprocessor import (
    ImagePreprocessor,
    parse_normalization,
    parse_resample,
    parse_square_size,
    resample_to_pil,
)
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.resolution_policies import (
    AnyResolutionPolicy,
    CropPolicy,
    FramedPolicy,
    LetterboxPolicy,
    LongestEdgePolicy,
    NaivePolicy,
    NativePolicy,
    TokenBudgetPolicy,
)
from vitrail.processing.slices import SlicePolicy
from vitrail.processing.split_tiles import SplitPolicy

JsonDict = dict[str, Any]
MAX_TILES = 1000
"""Maximum number of tiles that a file may request; files are untrusted."""


class HFImageProcessor(NamedTuple):
    """An image processor class of transformers.

    name           class name in transformers
    policy_types   resolution policies that the processor supports
    parse_policy   model config (with the family's default policy), file → policy
    format_policy  model config → keys of the file that describe the policy
    """

    name: str
    policy_types: tuple[type, ...]
    parse_policy: Callable[[Any, JsonDict], AnyResolutionPolicy]
    format_policy: Callable[[Any], JsonDict]

    def apply_processor_config(self, config: Any, processor_config: JsonDict) -> Any:
        """Return the model config with the settings of a processor config. Missing keys change nothing."""
        processor_config = self.to_processor_config(config) | {
            key: value for key, value in processor_config.items() if value is not None
        }
        mean, std = _parse_mean_std(processor_config)
        config = config.replace(mean=mean, std=std)
        return config.replace(
            policy=self.parse_policy(config, processor_config).replace(resample=parse_resample(processor_config))
        )

    def to_processor_config(self, config: Any) -> JsonDict:
        """Return the processor config of a model config, with all keys."""
        if config.policy is None:  # use the tower's default policy
            config = config.replace(policy=config.resolved_policy)
        policy = config.policy
        if not isinstance(policy, self.policy_types):
            raise ConfigError(
                f"{self.name} does not support the policy {type(policy).__name__}",
                f"use one of {', '.join(kind.__name__ for kind in self.policy_types)}",
            )
        return {
            "image_processor_type": self.name,
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": resample_to_pil(policy.resample),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(config.mean),
            "image_std": list(config.std),
            **self.format_policy(config),
        }


def _parse_mean_std(json_config: JsonDict) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std, rescale = parse_normalization(json_config)
    if not math.isclose(rescale, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(f"rescale_factor is {rescale}", "only a rescale_factor of 1/255 is supported")
    return mean, std


def check_match(json_config: JsonDict, **expected: Any) -> None:
    """Check that keys of the file that describe the model match the model."""
    for key, value in expected.items():
        if json_config[key] != value:
            raise CheckpointError(
                f"{key} is {json_config[key]}, and the model has {value}",
                "check that both files belong to the same model",
            )


def _check_tile_size(json_config: JsonDict, side: int) -> None:
    for key in ("size", "crop_size"):
        if key in json_config and parse_square_size(json_config[key]) != side:
            raise CheckpointError(
                f"{key} is {json_config[key]}, and the tower takes {side} pixels",
                "check that both files belong to the same model",
            )


def _square_size(side: int) -> JsonDict:
    return {"height": side, "width": side}


# ── one view ───────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_one_view(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    usual = config.policy
    if "image_size" in json_config:  # Idefics' key takes precedence
        json_config = json_config | {"size": _square_size(parse_square_size(json_config["image_size"]))}
    preprocessing = ImagePreprocessor.from_processor_config(json_config, usual.image_size)
    found = preprocessing.policy
    place = {
        "image_size": preprocessing.image_size,
        "patch_size": usual.patch_size,
        "unread_pixels": usual.unread_pixels,
    }
    if isinstance(found, CropPolicy):
        edge = None if found.shortest_edge == found.image_size else found.shortest_edge
        if not json_config.get("do_pad"):
            return CropPolicy(shortest_edge=edge, **place)
        if edge is not None:
            raise CheckpointError(f"do_pad is true, with a crop from {edge} pixels", "pad or crop, not both")
    if json_config.get("do_pad"):
        if not str(json_config["image_processor_type"]).startswith("Llava"):
            raise CheckpointError(
                f"do_pad is true in a {json_config['image_processor_type']}", "only LLaVA's padding is supported"
            )
        return LetterboxPolicy(fill_colour=mean_to_fill_colour(json_config["image_mean"]), **place)
    return NaivePolicy(**place)


def _format_one_view(config: Any) -> JsonDict:
    policy = config.policy
    padded = isinstance(policy, LetterboxPolicy)
    if padded and policy.fill_colour != mean_to_fill_colour(config.mean):
        raise ConfigError(
            f"fill_colour is {policy.fill_colour}",
            f"transformers pads with the mean, {mean_to_fill_colour(config.mean)}",
        )
    plain = ImagePreprocessor(
        CropPolicy(image_size=policy.image_size, patch_size=1) if padded else policy
    ).to_processor_config()
    return {key: plain[key] for key in ("size", "do_center_crop", "crop_size") if key in plain} | {"do_pad": padded}


def mean_to_fill_colour(mean: Sequence[float]) -> Colour:
    """Return the colour that normalizes to about zero, rounded as in transformers."""
    red, green, blue = (int(255 * level) for level in mean)
    return red, green, blue


def _parse_framed(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    _check_tile_size(json_config, config.policy.image_size)
    check_match(json_config, do_pad=True)
    return config.policy.replace(fill_colour=mean_to_fill_colour(config.mean), min_size=json_config["min_size"])


def _format_framed(config: Any) -> JsonDict:
    policy, fill = config.policy, mean_to_fill_colour(config.mean)
    if policy.fill_colour != fill:
        raise ConfigError(f"fill_colour is {policy.fill_colour}", f"transformers pads with the mean, {fill}")
    return {"size": _square_size(policy.view_size), "min_size": policy.min_size, "do_pad": True}


class TwoResolutionImageProcessor(HFImageProcessor):
    """Image processor of a tower with two input resolutions, each with its own mean and std.

    The keys `high_res_…` describe the policy. The other keys describe the low-resolution image, which the tower
    computes from the high-resolution one.
    """

    HIGH_RES_KEYS = {f"high_res_{key}": key for key in ("size", "resample", "image_mean", "image_std")}

    def apply_processor_config(self, config: Any, processor_config: JsonDict) -> Any:
        processor_config = self.to_processor_config(config) | {
            key: value for key, value in processor_config.items() if value is not None
        }
        large = processor_config | {key: processor_config[name] for name, key in self.HIGH_RES_KEYS.items()}
        policy = config.policy
        tower = config.tower
        (mean, std), (high_mean, high_std) = _parse_mean_std(processor_config), _parse_mean_std(large)
        _check_tile_size(processor_config, policy.image_size)
        _check_tile_size(large, policy.view_size)
        check_match(processor_config, do_pad=True)
        low = tower.low.replace(mean=mean, std=std)
        if (resample := parse_resample(processor_config)) == "lanczos":
            raise CheckpointError("resample is lanczos for the low-resolution image", "use bicubic or bilinear")
        return config.replace(
            tower=tower.replace(low=low, mean=high_mean, std=high_std, resample=resample),
            policy=policy.replace(
                fill_colour=mean_to_fill_colour(high_mean),
                min_size=processor_config["min_size"],
                resample=parse_resample(large),
            ),
        )

    def to_processor_config(self, config: Any) -> JsonDict:
        tower = config.tower
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        large = super().to_processor_config(SimpleNamespace(**fields | {"mean": tower.mean, "std": tower.std}))
        small = {
            "size": _square_size(config.policy.image_size),
            "resample": resample_to_pil(tower.resample),
            "image_mean": list(tower.low.mean),
            "image_std": list(tower.low.std),
        }
        return large | {name: large[key] for name, key in self.HIGH_RES_KEYS.items()} | small


def _parse_gemma3(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    if json_config.get("do_pan_and_scan"):
        raise CheckpointError("do_pan_and_scan is true", "set it to false: crops beside the image are not supported")
    return _parse_one_view(config, json_config)


def _format_gemma3(config: Any) -> JsonDict:
    return {"size": _square_size(config.policy.image_size), "do_pan_and_scan": False}


def _parse_paligemma(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    check_match(json_config, image_seq_length=config.view_grid.num_patches)
    return _parse_one_view(config, json_config)


def _format_paligemma(config: Any) -> JsonDict:
    return {"size": _square_size(config.policy.image_size), "image_seq_length": config.view_grid.num_patches}


# ── tiles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_anyres(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    _check_tile_size(json_config, config.policy.tile_size)
    check_match(json_config, image_grid_pinpoints=to_grid_pinpoints(config.policy))
    return config.policy


def _format_anyres(config: Any) -> JsonDict:
    tile = config.policy.tile_size
    return {
        "size": {"shortest_edge": tile},
        "do_center_crop": True,
        "crop_size": _square_size(tile),
        "do_pad": True,  # pads with empty views to the largest number of views in a batch
        "image_grid_pinpoints": to_grid_pinpoints(config.policy),
    }


def _format_onevision(config: Any) -> JsonDict:
    words = _format_anyres(config) | {"size": _square_size(config.policy.tile_size), "do_center_crop": False}
    return {key: value for key, value in words.items() if key != "crop_size"}


def to_grid_pinpoints(policy: AnyResPolicy) -> list[list[int]]:
    """Return the grids in pixels, as transformers stores them."""
    return [[rows * policy.tile_size, columns * policy.tile_size] for rows, columns in policy.grids]


def _parse_tiles(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    # Ignore `crop_to_patches`: released files set it to false, but InternVL's processor splits images anyway.
    _check_tile_size(json_config, config.policy.tile_size)
    if not isinstance(most := json_config["max_patches"], int) or most > MAX_TILES:
        raise CheckpointError(f"max_patches is {most!r}", f"give a number of 1 … {MAX_TILES:,}")
    return config.policy.replace(min_tiles=json_config["min_patches"], max_tiles=json_config["max_patches"])


def _format_tiles(config: Any) -> JsonDict:
    policy = config.policy
    cut = {"crop_to_patches": True, "min_patches": policy.min_tiles, "max_patches": policy.max_tiles}
    return {"size": _square_size(policy.tile_size), **cut}


def _parse_split(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    for key in ("size", "max_image_size"):
        if not isinstance(json_config[key], dict) or not isinstance(json_config[key].get("longest_edge"), int):
            raise CheckpointError(f"{key} is {json_config[key]!r}", "give a longest_edge in pixels")
    check_match(json_config, max_image_size={"longest_edge": config.policy.tile_size}, do_pad=True)
    return config.policy.replace(
        longest_edge=json_config["size"]["longest_edge"], split=bool(json_config["do_image_splitting"])
    )


def _format_split(config: Any) -> JsonDict:
    policy = config.policy
    return {
        "size": {"longest_edge": policy.longest_edge},
        "max_image_size": {"longest_edge": policy.tile_size},
        "do_image_splitting": policy.split,
        "do_pad": True,  # pads with empty views to the largest number of views in a batch
    }


class MiniCPMVImageProcessor(HFImageProcessor):
    """Image processor of MiniCPM-V, whose keys of mean and standard deviation have other names."""

    OTHER_KEYS = {"image_mean": "norm_mean", "image_std": "norm_std"}

    def apply_processor_config(self, config: Any, processor_config: JsonDict) -> Any:
        renamed = {key: processor_config[name] for key, name in self.OTHER_KEYS.items() if name in processor_config}
        return super().apply_processor_config(config, {**processor_config, **renamed})

    def to_processor_config(self, config: Any) -> JsonDict:
        processor_config = super().to_processor_config(config)
        return processor_config | {name: processor_config[key] for key, name in self.OTHER_KEYS.items()}


def _parse_slices(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    check_match(json_config, patch_size=config.policy.patch_size, slice_mode=True)
    return config.policy.replace(
        slice_size=json_config["scale_resolution"],
        max_slices=json_config["max_slice_nums"],
        numbered=bool(json_config["use_image_id"]),
    )


def _format_slices(config: Any) -> JsonDict:
    policy = config.policy
    return {
        "slice_mode": True,
        "max_slice_nums": policy.max_slices,
        "scale_resolution": policy.slice_size,
        "patch_size": policy.patch_size,
        "use_image_id": policy.numbered,
        "image_feature_size": config.connector.count_tokens(config.view_grid),
    }


def _parse_canvas(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    _check_tile_size(json_config, config.policy.tile_size)
    check_match(json_config, max_image_tiles=config.policy.max_tiles)
    return config.policy


def _format_canvas(config: Any) -> JsonDict:
    return {"size": _square_size(config.policy.tile_size), "do_pad": True, "max_image_tiles": config.policy.max_tiles}


# ── any size ───────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_native(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    policy, size = config.policy, json_config["size"]
    check_match(
        json_config,
        patch_size=policy.patch_size,
        merge_size=policy.merge_size,
        temporal_patch_size=config.tower.temporal_patch_size,
    )
    if not isinstance(size, dict):
        raise CheckpointError(f"size is {size!r}", "give shortest_edge and longest_edge, in pixels of a whole image")
    # The older keys take precedence, as in transformers.
    budget = {native: json_config.get(native, size.get(hf)) for native, hf in PIXEL_BUDGET_KEYS.items()}
    missing = [key for key, value in budget.items() if value is None]
    if missing:
        raise CheckpointError(f"size is {size}, without a {PIXEL_BUDGET_KEYS[missing[0]]}", "give both edges")
    return policy.replace(**budget)


PIXEL_BUDGET_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def _format_native(config: Any) -> JsonDict:
    policy = config.policy
    return {
        "size": {hf: getattr(policy, native) for native, hf in PIXEL_BUDGET_KEYS.items()},
        "patch_size": policy.patch_size,
        "merge_size": policy.merge_size,
        "temporal_patch_size": config.tower.temporal_patch_size,
    }


def _parse_longest_edge(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    policy, size = config.policy, json_config["size"]
    edge = size.get("longest_edge") if isinstance(size, dict) else size
    if not isinstance(edge, int) or isinstance(edge, bool) or edge < 1:
        raise CheckpointError(f"size is {size!r}", "give longest_edge, in pixels")
    if (side := parse_square_size(json_config["patch_size"])) not in (
        policy.patch_size,
        policy.patch_size * policy.merge_size,
    ):
        raise CheckpointError(
            f"patch_size is {side} pixels, but the tower has patches of {policy.patch_size}",
            "check that both files belong to the same model",
        )
    return policy.replace(longest_edge=edge)


def _format_longest_edge(config: Any) -> JsonDict:
    return {"size": {"longest_edge": config.policy.longest_edge}, "patch_size": _square_size(config.policy.patch_size)}


GEMMA4_TOKENS = (70, 140, 280, 560, 1120)
"""Numbers of tokens of an image that the processor of Gemma 4 knows."""


def _parse_token_budget(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    policy = config.policy
    check_match(json_config, patch_size=policy.patch_size, pooling_kernel_size=policy.merge_size)
    if json_config["max_soft_tokens"] not in GEMMA4_TOKENS:
        raise CheckpointError(
            f"max_soft_tokens is {json_config['max_soft_tokens']!r}", f"use one of {', '.join(map(str, GEMMA4_TOKENS))}"
        )
    return policy.replace(max_tokens=json_config["max_soft_tokens"])


def _format_token_budget(config: Any) -> JsonDict:
    policy = config.policy
    return {
        "patch_size": policy.patch_size,
        "pooling_kernel_size": policy.merge_size,
        "max_soft_tokens": policy.max_tokens,
    }


class UnnormalizedImageProcessor(HFImageProcessor):
    """Image processor of a model that maps pixels to −1 … 1 itself, so that its file has no normalization."""

    def apply_processor_config(self, config: Any, processor_config: JsonDict) -> Any:
        found = super().apply_processor_config(config, processor_config)
        if any(found.mean) or set(found.std) != {1.0}:
            raise CheckpointError(
                f"image_mean is {list(found.mean)} and image_std {list(found.std)}, but the model normalizes pixels",
                "set do_normalize to false",
            )
        return found.replace(mean=config.mean, std=config.std)

    def to_processor_config(self, config: Any) -> JsonDict:
        half = NORMALIZATIONS["half"]
        if (tuple(config.mean), tuple(config.std)) != (half.mean, half.std):
            raise ConfigError(
                f"mean is {config.mean} and std is {config.std}", f"{self.name} needs {half.mean} and {half.std}"
            )
        none = {"do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        return super().to_processor_config(config) | none


def _parse_glm4v(config: Any, json_config: JsonDict) -> AnyResolutionPolicy:
    """Read a budget of pixels that counts every frame of a temporal patch."""
    frames = config.tower.temporal_patch_size
    policy = _parse_native(config, json_config)
    assert isinstance(policy, NativePolicy)
    if policy.min_pixels % frames or policy.max_pixels % frames:
        raise CheckpointError(
            f"size is {json_config['size']}, for a temporal patch of {frames} frames", f"give multiples of {frames}"
        )
    return policy.replace(min_pixels=policy.min_pixels // frames, max_pixels=policy.max_pixels // frames)


def _format_glm4v(config: Any) -> JsonDict:
    found = _format_native(config)
    return {**found, "size": {key: config.tower.temporal_patch_size * n for key, n in found["size"].items()}}


LLAVA = HFImageProcessor(
    "LlavaImageProcessor", (CropPolicy, NaivePolicy, LetterboxPolicy), _parse_one_view, _format_one_view
)
BLIP = HFImageProcessor("BlipImageProcessor", (NaivePolicy, CropPolicy), _parse_one_view, _format_one_view)
GEMMA3 = HFImageProcessor("Gemma3ImageProcessor", (NaivePolicy,), _parse_gemma3, _format_gemma3)
PALIGEMMA = HFImageProcessor("SiglipImageProcessor", (NaivePolicy,), _parse_paligemma, _format_paligemma)
IDEFICS = HFImageProcessor("IdeficsImageProcessor", (NaivePolicy,), _parse_one_view, _format_one_view)
DEEPSEEK_VL = HFImageProcessor("DeepseekVLImageProcessor", (FramedPolicy,), _parse_framed, _format_framed)
JANUS = HFImageProcessor("JanusImageProcessor", (FramedPolicy,), _parse_framed, _format_framed)
DEEPSEEK_VL_HYBRID = TwoResolutionImageProcessor(
    "DeepseekVLHybridImageProcessor", (FramedPolicy,), _parse_framed, _format_framed
)
LLAVA_NEXT = HFImageProcessor("LlavaNextImageProcessor", (AnyResPolicy,), _parse_anyres, _format_anyres)
LLAVA_ONEVISION = HFImageProcessor("LlavaOnevisionImageProcessor", (AnyResPolicy,), _parse_anyres, _format_onevision)
INTERNVL = HFImageProcessor("GotOcr2ImageProcessor", (TilesPolicy,), _parse_tiles, _format_tiles)
IDEFICS3 = HFImageProcessor("Idefics3ImageProcessor", (SplitPolicy,), _parse_split, _format_split)
SMOLVLM = HFImageProcessor("SmolVLMImageProcessor", (SplitPolicy,), _parse_split, _format_split)
MINICPMV = MiniCPMVImageProcessor("MiniCPMVImageProcessor", (SlicePolicy,), _parse_slices, _format_slices)
MLLAMA = HFImageProcessor("MllamaImageProcessor", (CanvasPolicy,), _parse_canvas, _format_canvas)
GEMMA4 = UnnormalizedImageProcessor(
    "Gemma4ImageProcessor", (TokenBudgetPolicy,), _parse_token_budget, _format_token_budget
)
PIXTRAL = HFImageProcessor("PixtralImageProcessor", (LongestEdgePolicy,), _parse_longest_edge, _format_longest_edge)
GLM4V = HFImageProcessor("Glm4vImageProcessor", (NativePolicy,), _parse_glm4v, _format_glm4v)
QWEN_VL = HFImageProcessor("Qwen2VLImageProcessor", (NativePolicy,), _parse_native, _format_native)
