"""How pictures become the pixels that one tower reads: ours, or what a Hugging Face folder says of itself.

C channels, H, W pixels
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vitrail.errors import CheckpointError, VitrailError
from vitrail.processing.cut import Resample
from vitrail.processing.images import NORMS, Source, load_image, to_array
from vitrail.processing.resolution import Crop, Naive

if TYPE_CHECKING:
    from torch import Tensor

FILE, WHOLE = "preprocessor_config.json", "processor_config.json"
_RESAMPLE: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


class Square(Protocol):
    """The config of a tower that is made for square pictures."""

    @property
    def image(self) -> int:
        """Pixels of a side."""
        ...


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become the pixels that a tower reads. Patches are the tower's own: the policy's are of one pixel."""

    policy: Naive | Crop
    mean: tuple[float, ...] = NORMS["half"].mean
    std: tuple[float, ...] = NORMS["half"].std
    rescale: float = 1 / 255

    @classmethod
    def own(cls, config: Square) -> "Preprocessing":
        """Of the models trained here: squashed to the tower's side, values in −1…1."""
        return cls(Naive(size=config.image, patch=1))

    @classmethod
    def read(cls, folder: Path, config: Square, *, fixed: bool = True) -> "Preprocessing":
        """What a folder says of itself; ours says nothing unless its pictures are prepared in another way than `own`.

        Unless the size is `fixed`, it may be another than the tower was made for: DINOv2 was for 518 and is shown 224.
        """
        about, file = said(folder)
        if about and ("size" in about or "max_num_patches" in about):
            with blamed(file):
                return cls.of(about, config.image if fixed else None)
        if about is None and (folder / "vitrail.json").is_file():
            return cls.own(config)
        raise CheckpointError(f"{folder} does not say how its pictures are prepared", f"put its {FILE} beside it")

    @classmethod
    def of(cls, about: dict[str, Any], wanted: int | None) -> "Preprocessing":
        """What the words of a preprocessor_config.json mean, for a tower that wants pictures of that side."""
        if "max_num_patches" in about or not isinstance(about.get("size"), dict | int):
            raise CheckpointError("pictures of no one size", "suites read models with square pictures only")
        size, crop = about["size"], side_of(about.get("crop_size")) if about.get("do_center_crop") else None
        if isinstance(size, int):  # written before sizes were dicts: the shortest edge where a crop follows
            size = {"shortest_edge": size} if crop else {"height": size, "width": size}
        side, resample = crop or side_of(size), resample_of(about)
        policy: Naive | Crop
        if crop is None and "shortest_edge" not in size:
            policy = Naive(size=side, patch=1, resample=resample)
        elif crop is not None and "shortest_edge" in size:
            policy = Crop(size=crop, edge=size["shortest_edge"], patch=1, resample=resample)
        elif crop is not None and side_of(size) == crop:
            policy = Naive(size=crop, patch=1, resample=resample)  # the crop takes all of a square
        else:
            raise CheckpointError(f"size {size} with crop {crop}", "give square pictures, cropped or squashed")
        if wanted not in (None, side):
            raise CheckpointError(
                f"it makes pictures of {side} pixels, the tower is for {wanted}", "do they belong together?"
            )
        return cls(policy, *levels_of(about))

    @property
    def side(self) -> int:
        """Pixels of a side that the tower sees."""
        return self.policy.size

    def plain(self) -> dict[str, Any]:
        """As a preprocessor_config.json says it, every choice spelt out: processors differ in what they take for
        granted."""
        square = {"height": self.side, "width": self.side}
        crop = isinstance(self.policy, Crop)
        return {
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": self.policy.edge or self.side} if isinstance(self.policy, Crop) else square,
            "resample": resample_number(self.policy.resample),
            "do_center_crop": crop,
            **({"crop_size": square} if crop else {}),
            "do_rescale": True,
            "rescale_factor": self.rescale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def __call__(self, picture: Source) -> "Tensor":
        """(C, H, W)"""
        return to_array(self.policy.apply(load_image(picture))[0], self.mean, self.std, self.rescale)


def said(folder: Path, name: str = FILE, part: str = "image_processor") -> tuple[dict[str, Any] | None, Path]:
    """What a folder says of its pictures, if anything, and the file: a preprocessor_config.json or, where a whole
    processor wrote it, the picture part of a processor_config.json, which goes first in transformers too. One that says
    nothing, {}, is how a folder of ours says that nobody knows. Of videos: another `name`, another `part`."""
    if (file := folder / WHOLE).is_file():
        found = _json(file).get(part)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(f"{file}: {part} is no JSON object", "fetch the file again")
        if found is not None:
            return found, file
    file = folder / name
    return (_json(file) if file.is_file() else None), file


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "fetch the file again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object", "fetch the file again")
    return found


@contextmanager
def blamed(file: Path | str) -> Iterator[None]:
    """Whatever is wrong is an error that names the file."""
    try:
        yield
    except VitrailError as error:
        raise type(error)(f"{file}: {error.problem}", error.remedy) from None


# ── what the words mean ────────────────────────────────────────────────────────────────────────────────────────


def side_of(size: object) -> int:
    """Of a square, however it is said."""
    if isinstance(size, int):
        return size
    if isinstance(size, dict):
        sides = {size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))}
        if len(sides) == 1 and isinstance(side := sides.pop(), int):
            return side
    raise CheckpointError(f"pictures of {size}", "only square ones are read so")


def resample_of(about: dict[str, Any]) -> Resample:
    if not about.get("do_resize", True):
        raise CheckpointError("pictures are not resized", "set do_resize and size in it")
    number = about.get("resample", 3)
    if not isinstance(number, int) or number not in _RESAMPLE:
        raise CheckpointError(f"resample {number}", f"known: {_RESAMPLE}")
    return _RESAMPLE[number]


def resample_number(name: Resample) -> int:
    return next(number for number, known in _RESAMPLE.items() if known == name)


def levels_of(about: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Mean, standard deviation, and what a pixel is multiplied with before."""
    mean, std = (0.0,) * 3, (1.0,) * 3
    if about.get("do_normalize", True):
        mean, std = (_three(about, key) for key in ("image_mean", "image_std"))
    if not all(std):
        raise CheckpointError(f"image_std is {std}", "nothing can be divided by 0")
    rescale = about.get("rescale_factor", 1 / 255) if about.get("do_rescale", True) else 1.0
    if not isinstance(rescale, float | int):
        raise CheckpointError(f"rescale_factor is {rescale!r}", "give a number")
    return mean, std, rescale


def _three(about: dict[str, Any], key: str) -> tuple[float, ...]:
    found = about.get(key)
    if not isinstance(found, list) or len(found) != 3 or not all(isinstance(x, float | int) for x in found):
        raise CheckpointError(f"{key} is {found}", "give three numbers")
    if not all(map(math.isfinite, found)):
        raise CheckpointError(f"{key} is {found}", "give three finite numbers")
    return tuple(map(float, found))
