"""Image preprocessing of vision towers, read from and written to Hugging Face configs.

Images become squares of one size, or keep their aspect ratio for NaFlex towers.

Shapes: C channels, H × W pixels.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vitrail.errors import CheckpointError, VitrailError
from vitrail.file_reading import read_json_file
from vitrail.processing.image_layout import Resample
from vitrail.processing.image_loading import NORMALIZATIONS, ImageSource, load_image, to_pixel_values
from vitrail.processing.resolution_policies import CropPolicy, NaFlexPolicy, NaivePolicy

if TYPE_CHECKING:
    from torch import Tensor

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
_RESAMPLE: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's constants


class ImageInputConfig(Protocol):
    """Protocol of tower configs: the side of a square input image, and of a patch, in pixels.

    A config with a true `keeps_aspect_ratio` takes images of any size in whole patches.
    """

    @property
    def image_size(self) -> int: ...

    @property
    def patch_size(self) -> int: ...


@dataclass(frozen=True)
class ImagePreprocessor:
    """Resize, crop and normalize images for a tower.

    The policy of square images has a patch size of one pixel, because the tower itself makes the patches.
    """

    policy: NaivePolicy | CropPolicy | NaFlexPolicy
    mean: tuple[float, ...] = NORMALIZATIONS["half"].mean
    std: tuple[float, ...] = NORMALIZATIONS["half"].std
    rescale: float = 1 / 255

    @classmethod
    def default(cls, config: ImageInputConfig) -> "ImagePreprocessor":
        """Return the preprocessing of models trained with Vitrail, with values in −1…1.

        Images are squashed to the image size, or keep their aspect ratio for a NaFlex tower.
        """
        if _keeps_aspect_ratio(config):
            return cls(build_naflex_policy(config))
        return cls(NaivePolicy(image_size=config.image_size, patch_size=1))

    @classmethod
    def from_folder(
        cls, folder: Path, config: ImageInputConfig, *, require_tower_size: bool = True
    ) -> "ImagePreprocessor":
        """Read the preprocessing of a model folder.

        A Vitrail folder without a preprocessor config uses `default`. With `require_tower_size=False`, the image size
        may differ from the tower's: DINOv2 was trained at 518 pixels and is evaluated at 224.
        """
        processor_config, file = read_preprocessor_config(folder)
        if processor_config and ("size" in processor_config or "max_num_patches" in processor_config):
            with name_file_in_errors(file):
                if "max_num_patches" in processor_config:
                    return cls._from_naflex_config(processor_config, config)
                return cls.from_processor_config(processor_config, config.image_size if require_tower_size else None)
        if processor_config is None and (folder / "vitrail.json").is_file():
            return cls.default(config)
        raise CheckpointError(f"{folder} has no image preprocessor config", f"add its {PREPROCESSOR_FILE}")

    @classmethod
    def from_processor_config(cls, processor_config: dict[str, Any], image_size: int | None) -> "ImagePreprocessor":
        """Parse a preprocessor_config.json, for a tower with this image size (None: any size)."""
        if "max_num_patches" in processor_config or not isinstance(processor_config.get("size"), dict | int):
            raise CheckpointError(
                "the preprocessor config has no fixed image size", "use a model with square images of one size"
            )
        size = processor_config["size"]
        crop = parse_square_size(processor_config.get("crop_size")) if processor_config.get("do_center_crop") else None
        if isinstance(size, int):  # old configs: an int is the shortest edge if a crop follows
            size = {"shortest_edge": size} if crop else {"height": size, "width": size}
        side, resample = crop or parse_square_size(size), parse_resample(processor_config)
        policy: NaivePolicy | CropPolicy
        if crop is None and "shortest_edge" not in size:
            policy = NaivePolicy(image_size=side, patch_size=1, resample=resample)
        elif crop is not None and "shortest_edge" in size:
            policy = CropPolicy(image_size=crop, shortest_edge=size["shortest_edge"], patch_size=1, resample=resample)
        elif crop is not None and parse_square_size(size) == crop:
            policy = NaivePolicy(image_size=crop, patch_size=1, resample=resample)  # the crop covers the whole square
        else:
            raise CheckpointError(f"size {size} with crop_size {crop} is not supported", "give a square size")
        if image_size not in (None, side):
            raise CheckpointError(
                f"the preprocessor makes images of {side} pixels, and the tower takes {image_size}",
                "check that both files belong to the same model",
            )
        return cls(policy, *parse_normalization(processor_config))

    @classmethod
    def _from_naflex_config(cls, processor_config: dict[str, Any], config: ImageInputConfig) -> "ImagePreprocessor":
        """Parse the config of a Siglip2ImageProcessor."""
        if not _keeps_aspect_ratio(config):
            raise CheckpointError(
                "the preprocessor keeps the aspect ratio (max_num_patches), and the tower takes square images",
                "check that both files belong to the same model",
            )
        patch_size, most = processor_config.get("patch_size", 16), processor_config["max_num_patches"]
        if patch_size != config.patch_size or type(most) is not int or most < 1:
            raise CheckpointError(
                f"patch_size is {patch_size!r} and max_num_patches is {most!r}, and the tower has patches of "
                f"{config.patch_size} pixels",
                "check that both files belong to the same model",
            )
        resample = parse_resample({"resample": 2, **processor_config})
        policy = NaFlexPolicy(patch_size=patch_size, max_patches=most, resample=resample)
        return cls(policy, *parse_normalization({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **processor_config}))

    @property
    def image_size(self) -> int:
        """Side of the tower's input in pixels, for a square image."""
        if isinstance(self.policy, NaFlexPolicy):
            return math.isqrt(self.policy.max_patches) * self.policy.patch_size
        return self.policy.image_size

    def to_processor_config(self) -> dict[str, Any]:
        """Return the preprocessor_config.json with all keys, because processors differ in their defaults."""
        if isinstance(self.policy, NaFlexPolicy):
            return {
                "do_convert_rgb": True,
                "do_resize": True,
                "patch_size": self.policy.patch_size,
                "max_num_patches": self.policy.max_patches,
                "resample": resample_to_pil(self.policy.resample),
                "do_rescale": True,
                "rescale_factor": self.rescale,
                "do_normalize": True,
                "image_mean": list(self.mean),
                "image_std": list(self.std),
            }
        square = {"height": self.image_size, "width": self.image_size}
        crop = isinstance(self.policy, CropPolicy)
        return {
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": self.policy.shortest_edge or self.image_size}
            if isinstance(self.policy, CropPolicy)
            else square,
            "resample": resample_to_pil(self.policy.resample),
            "do_center_crop": crop,
            **({"crop_size": square} if crop else {}),
            "do_rescale": True,
            "rescale_factor": self.rescale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def __call__(self, image: ImageSource) -> "Tensor":
        """Return the normalized pixels (C, H, W) of an image; H and W of a NaFlex tower differ between images."""
        return to_pixel_values(self.policy.apply(load_image(image))[0], self.mean, self.std, self.rescale)


def _keeps_aspect_ratio(config: ImageInputConfig) -> bool:
    return bool(getattr(config, "keeps_aspect_ratio", False))


def build_naflex_policy(config: ImageInputConfig, max_patches: int | None = None) -> NaFlexPolicy:
    """Build the policy of a NaFlex tower; by default with as many patches as its native image has."""
    if max_patches is None:
        max_patches = (config.image_size // config.patch_size) ** 2
    return NaFlexPolicy(patch_size=config.patch_size, max_patches=max_patches)


def read_preprocessor_config(
    folder: Path, file_name: str = PREPROCESSOR_FILE, section: str = "image_processor"
) -> tuple[dict[str, Any] | None, Path]:
    """Return the image preprocessor config of a model folder, or None, and the file.

    The image section of processor_config.json takes precedence over preprocessor_config.json, as in transformers. An
    empty config {} in a Vitrail folder means that the preprocessing is unknown. For videos, pass another `file_name`
    and `section`.
    """
    if (file := folder / PROCESSOR_FILE).is_file():
        found = _read_json(file).get(section)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(f"{file}: {section} is not a JSON object", "download the file again")
        if found is not None:
            return found, file
    file = folder / file_name
    return (_read_json(file) if file.is_file() else None), file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = read_json_file(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "download the file again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object", "download the file again")
    return found


@contextmanager
def name_file_in_errors(file: Path | str) -> Iterator[None]:
    """Prefix the message of any `VitrailError` with the file name."""
    try:
        yield
    except VitrailError as error:
        raise error.with_prefix(file) from None


# ── parsing ────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_square_size(size: object) -> int:
    """Return the side of a square size, given as an int, a height and width, or a shortest edge."""
    if isinstance(size, int):
        return size
    if isinstance(size, dict):
        sides = {size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))}
        if len(sides) == 1 and isinstance(side := sides.pop(), int):
            return side
    raise CheckpointError(f"size {size} is not square", "give a square size")


def parse_resample(processor_config: dict[str, Any]) -> Resample:
    if not processor_config.get("do_resize", True):
        raise CheckpointError("do_resize is false", "set do_resize and size")
    number = processor_config.get("resample", 3)
    if not isinstance(number, int) or number not in _RESAMPLE:
        raise CheckpointError(f"resample {number} is not supported", f"supported: {_RESAMPLE}")
    return _RESAMPLE[number]


def resample_to_pil(name: Resample) -> int:
    return next(number for number, known in _RESAMPLE.items() if known == name)


def parse_normalization(processor_config: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Return the mean, the standard deviation and the rescale factor of a preprocessor config."""
    mean, std = (0.0,) * 3, (1.0,) * 3
    if processor_config.get("do_normalize", True):
        mean, std = (_parse_three_floats(processor_config, key) for key in ("image_mean", "image_std"))
    if not all(std):
        raise CheckpointError(f"image_std is {std}", "give values other than 0")
    rescale = processor_config.get("rescale_factor", 1 / 255) if processor_config.get("do_rescale", True) else 1.0
    if not isinstance(rescale, float | int):
        raise CheckpointError(f"rescale_factor is {rescale!r}", "give a number")
    return mean, std, rescale


def _parse_three_floats(config: dict[str, Any], key: str) -> tuple[float, ...]:
    found = config.get(key)
    if not isinstance(found, list) or len(found) != 3 or not all(isinstance(x, float | int) for x in found):
        raise CheckpointError(f"{key} is {found}", "give three numbers")
    if not all(map(math.isfinite, found)):
        raise CheckpointError(f"{key} is {found}", "give three finite numbers")
    return tuple(map(float, found))
