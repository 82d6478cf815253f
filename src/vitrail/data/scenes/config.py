"""What scenes are asked for."""

import math
from typing import Literal

from vitrail.config import Config
from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.scene import GRID
from vitrail.errors import ConfigError, nearest


class SceneConfig(Config):
    """A family of scenes. Sizes are of an object's longer side, in shares of the picture's shorter one."""

    objects: tuple[int, int] = (1, 4)  # how many, from … to
    slots: int = 0  # O; 0 is as many as there are objects at most
    sizes: tuple[float, float] = (0.2, 0.45)
    word_sizes: tuple[float, float] = (0.4, 0.8)
    frame_sizes: tuple[float, float] = (0.4, 0.65)
    overlap: float = 0.0  # of the smaller of two boxes, at most; what lies inside a frame may lie wholly over it
    visible: float = 0.4  # of every box, at least, lies under no other box
    opacity: float = 1.0  # of all objects: how far they hide what lies behind them
    motion: float = 0.0  # how far a thing moves while it is looked at, in shares of the picture's side
    tint: float = 0.3  # chance that an object is coloured
    repeat: float = 0.0  # chance that concepts repeat in a scene; otherwise all differ
    groups: int = 3  # different concepts of a scene that repeats, at most
    inside: float = 0.0  # chance of a frame with something inside it, in scenes of two objects or more
    word: float = 0.0  # chance that an object is a rendered word
    snap: int = 0  # places and sizes are whole multiples of 1/snap of the picture's side; 0 is anywhere
    ratio: tuple[int, int] = (1, 1)  # width : height of the pictures, so that sprites keep their shape
    vendors: tuple[str, ...] = ()  # whose things appear; none named is all
    names: tuple[str, ...] = ()  # which things appear, by their concepts' names or as one of `things.GROUPS`
    fonts: tuple[str, ...] = ()  # in which fonts words appear
    backgrounds: tuple[str, ...] = backgrounds.NAMES
    grounds: int = 0  # how many different ones of each kind there are; 0 is one a scene
    mirror: float = 0.0  # chance that a thing is drawn the other way round; words never are
    bend: float = 0.0  # how far a thing's proportions go astray inside its box
    shade: float = 0.0  # how far its colours do; those that are tinted keep the name of theirs
    combinations: Literal["train", "test", "all"] = "train"  # which colours a concept may wear, see `held_out`

    def __post_init__(self) -> None:
        low, high = self.objects
        if not 1 <= low <= high <= 64:
            raise ConfigError(f"scenes of {low} to {high} objects", "give a range within 1 … 64")
        if self.slots and self.slots < high:
            raise ConfigError(f"{high} objects in {self.slots} slots", f"give at least {high} slots, or 0 for as many")
        for name in ("sizes", "word_sizes", "frame_sizes"):
            least, most = getattr(self, name)
            if not 0.02 <= least <= most <= 1:
                raise ConfigError(f"{name} from {least} to {most}", "give a range within 0.02 … 1")
        for name in ("overlap", "visible", "tint", "repeat", "inside", "word", "mirror"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "give a share of 0 to 1")
        for name, most in (("bend", 0.8), ("shade", 0.4)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", f"give 0 … {most}: beyond, nobody can name a thing"
                )
        if not 0.1 <= self.opacity <= 1:
            raise ConfigError(f"opacity is {self.opacity}", "give 0.1 to 1: what is fainter nobody can name")
        if not 0 <= self.motion <= 0.5:
            raise ConfigError(f"motion is {self.motion}", "give 0 to 0.5: what goes farther leaves the picture")
        if self.visible > 0.6:
            raise ConfigError(
                f"visible is {self.visible}", "give at most 0.6: what lies inside a frame covers 0.3 of it"
            )
        if self.groups < 1:
            raise ConfigError(f"{self.groups} groups", "give at least 1")
        across = math.ceil(math.sqrt(high))
        if self.sizes[0] > 1 / across:
            raise ConfigError(
                f"{high} objects of at least {self.sizes[0]} of the side have no room",
                f"allow sizes from {math.floor(100 / across) / 100}, or fewer objects",
            )
        if self.snap and not across <= self.snap <= GRID // 8:
            raise ConfigError(f"{high} objects on a grid of {self.snap}", f"snap to {across} … {GRID // 8}, or 0")
        if min(self.ratio) < 1 or max(self.ratio) > 4 * min(self.ratio):
            raise ConfigError(f"pictures of {self.ratio[0]}:{self.ratio[1]}", "give a ratio between 1:4 and 4:1")
        if not 0 <= self.grounds <= 1 << 20:
            raise ConfigError(f"{self.grounds} different backgrounds", "give 0 for one a scene, or at most 1048576")
        if not self.backgrounds:
            raise ConfigError("no kind of background", f"choose from {', '.join(backgrounds.NAMES)}")
        for name in self.backgrounds:
            if name not in backgrounds.NAMES:
                raise ConfigError(f"no background is called {name!r}", nearest(name, backgrounds.NAMES))


PRESETS = {
    "plain": SceneConfig(),
    "relations": SceneConfig(objects=(2, 3), sizes=(0.2, 0.35)),
    "inside": SceneConfig(objects=(2, 4), sizes=(0.18, 0.32), inside=1.0),
    "counting": SceneConfig(objects=(1, 8), sizes=(0.14, 0.28), repeat=1.0, tint=0.2),
    "counting-more": SceneConfig(
        objects=(9, 12), sizes=(0.12, 0.22), repeat=1.0, tint=0.2
    ),  # 9 to 12 are counts that no other preset has
    "colours": SceneConfig(objects=(1, 4), tint=1.0),
    "small": SceneConfig(objects=(1, 6), sizes=(0.07, 0.13)),
    "crowded": SceneConfig(objects=(6, 8), sizes=(0.2, 0.4), overlap=0.35, inside=0.2, repeat=0.2),
    "transparent": SceneConfig(opacity=0.35),
    "moving": SceneConfig(motion=0.25),
    "occluded": SceneConfig(objects=(2, 4), sizes=(0.25, 0.45), overlap=0.7, visible=0.25),
    "sub-patch": SceneConfig(sizes=(0.05, 0.07)),  # below a patch where there are up to fourteen a side
    "words": SceneConfig(objects=(1, 3), sizes=(0.2, 0.35), word=0.7),
    "drawing": SceneConfig(objects=(1, 3), sizes=(0.25, 0.5), snap=8, backgrounds=("flat", "gradient")),
    "to-five": SceneConfig(objects=(1, 5), sizes=(0.2, 0.4), repeat=1.0, tint=0.2),
    "few": SceneConfig(objects=(1, 5), sizes=(0.2, 0.5), overlap=0.1, repeat=0.4, inside=0.1, word=0.1),
    "mixed": SceneConfig(objects=(1, 8), sizes=(0.12, 0.4), overlap=0.2, repeat=0.3, inside=0.2, word=0.1),
}
