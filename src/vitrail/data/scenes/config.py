"""Configuration of scenes, and presets."""

import math
import tomllib
from pathlib import Path
from typing import Literal

from vitrail.config import Config, Fraction, PositiveInt
from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.scene import GRID
from vitrail.errors import ConfigError, suggest_name


class SceneConfig(Config):
    """Distribution of scenes. Sizes are those of an object's longer side, as fractions of the image's shorter side.

    objects             least and largest number of objects
    slots               number of slots; 0 for the largest number of objects
    sizes               least and largest size of a thing
    word_sizes          least and largest size of a word
    frame_sizes         least and largest size of a frame
    max_overlap         largest overlap, as a fraction of the smaller of two boxes; an object inside a frame may
                        overlap it fully
    min_visible         fraction of each box that no other box covers
    opacity             opacity of all objects
    motion_blur         length of the motion blur, as a fraction of the image size
    tint_probability    probability that an object is tinted
    repeat_probability  probability that concepts repeat in a scene; otherwise all concepts differ
    max_groups          largest number of different concepts in a scene with repetition
    inside_probability  probability of a frame with an object inside, in scenes of two or more objects
    word_probability    probability that an object is a rendered word
    grid_size           positions and sizes are multiples of 1/grid_size of the image size; 0 for no grid
    aspect_ratio        width : height of the images; sprites keep their aspect ratio
    vendors             vendors of the things; empty for all
    things              concepts of the things, or groups of `thing_names.THING_GROUPS`; empty for all
    fonts               fonts of the words; empty for all
    backgrounds         kinds of backgrounds
    num_backgrounds     different backgrounds per kind; 0 for one per scene
    flip_probability    probability that a thing is flipped horizontally; words are never flipped
    shape_jitter        strength of random distortion inside the box
    colour_jitter       strength of random colour changes; tinted objects keep their colour name
    combinations        allowed colours of a concept, see `find_held_out_colour`
    """

    objects: tuple[int, int] = (1, 4)
    slots: int = 0
    sizes: tuple[float, float] = (0.2, 0.45)
    word_sizes: tuple[float, float] = (0.4, 0.8)
    frame_sizes: tuple[float, float] = (0.4, 0.65)
    max_overlap: Fraction = 0.0
    min_visible: Fraction = 0.4
    opacity: float = 1.0
    motion_blur: float = 0.0
    tint_probability: Fraction = 0.3
    repeat_probability: Fraction = 0.0
    max_groups: PositiveInt = 3
    inside_probability: Fraction = 0.0
    word_probability: Fraction = 0.0
    grid_size: int = 0
    aspect_ratio: tuple[int, int] = (1, 1)
    vendors: tuple[str, ...] = ()
    things: tuple[str, ...] = ()
    fonts: tuple[str, ...] = ()
    backgrounds: tuple[str, ...] = backgrounds.BACKGROUND_NAMES
    num_backgrounds: int = 0
    flip_probability: Fraction = 0.0
    shape_jitter: float = 0.0
    colour_jitter: float = 0.0
    combinations: Literal["train", "test", "all"] = "train"

    def __post_init__(self) -> None:
        low, high = self.objects
        if not 1 <= low <= high <= 64:
            raise ConfigError(f"objects is {low} to {high}", "give a range within 1 … 64")
        if self.slots and self.slots < high:
            raise ConfigError(f"slots is {self.slots}, for up to {high} objects", f"give at least {high} slots, or 0")
        for name in ("sizes", "word_sizes", "frame_sizes"):
            least, most = getattr(self, name)
            if not 0.02 <= least <= most <= 1:
                raise ConfigError(f"{name} is {least} to {most}", "give a range within 0.02 … 1")
        for name, most in (("shape_jitter", 0.8), ("colour_jitter", 0.4)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", f"give 0 … {most}; above, objects are unrecognizable"
                )
        if not 0.1 <= self.opacity <= 1:
            raise ConfigError(f"opacity is {self.opacity}", "give 0.1 to 1; below, objects are unrecognizable")
        if not 0 <= self.motion_blur <= 0.5:
            raise ConfigError(f"motion_blur is {self.motion_blur}", "give 0 to 0.5; above, objects leave the image")
        if self.min_visible > 0.6:
            raise ConfigError(
                f"min_visible is {self.min_visible}", "give at most 0.6: an object inside a frame covers 0.3 of it"
            )
        across = math.ceil(math.sqrt(high))
        if self.sizes[0] > 1 / across:
            raise ConfigError(
                f"{high} objects of size {self.sizes[0]} or more do not fit into an image",
                f"allow sizes from {math.floor(100 / across) / 100}, or fewer objects",
            )
        if self.grid_size and not across <= self.grid_size <= GRID // 8:
            raise ConfigError(
                f"grid_size is {self.grid_size}, for up to {high} objects", f"give {across} … {GRID // 8}, or 0"
            )
        if min(self.aspect_ratio) < 1 or max(self.aspect_ratio) > 4 * min(self.aspect_ratio):
            raise ConfigError(f"aspect_ratio is {self.aspect_ratio[0]}:{self.aspect_ratio[1]}", "give 1:4 to 4:1")
        if not 0 <= self.num_backgrounds <= 1 << 20:
            raise ConfigError(
                f"num_backgrounds is {self.num_backgrounds}", "give 0 for one per scene, or at most 1048576"
            )
        if not self.backgrounds:
            raise ConfigError("backgrounds is empty", f"choose from {', '.join(backgrounds.BACKGROUND_NAMES)}")
        for name in self.backgrounds:
            if name not in backgrounds.BACKGROUND_NAMES:
                raise ConfigError(f"unknown background {name!r}", suggest_name(name, backgrounds.BACKGROUND_NAMES))


_ROWS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: SceneConfig.from_dict(row) for name, row in _ROWS.items()}
