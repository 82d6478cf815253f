"""Scenes as a source of training samples: a sample is a number, and the pictures are made where they are used.

B scenes, O object slots, H, W pixels.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.data.scenes.config import PRESETS, SceneConfig
from vitrail.data.scenes.layout import Layout
from vitrail.data.scenes.looks import Looks
from vitrail.data.scenes.motion import smeared
from vitrail.data.scenes.render import render
from vitrail.data.scenes.scene import GRID, Scenes
from vitrail.data.scenes.sprites import Atlas, rows_where
from vitrail.data.scenes.things import things
from vitrail.data.views import PLAIN, ViewsConfig
from vitrail.errors import ConfigError, nearest
from vitrail.nn.replay import Replayed

SAFE = 0.05  # how far colours of a whole picture go astray before a tint has another name


class ScenesConfig(Config, tag="scenes", tag_field="kind"):
    """`atlas` is one of the library ("emoji") or a file. A preset, altered by `scene`, says what is in the scenes, and
    how things look; `views` say how whole pictures are varied in training, as far as all that is said of them stays
    true."""

    atlas: str
    preset: str = "plain"
    scene: dict[str, object] = {}
    side: int = 64
    seed: int = 0
    count: int = 1 << 30  # samples before they repeat
    views: ViewsConfig = PLAIN

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"there are no scenes {self.preset!r}", nearest(self.preset, PRESETS))
        if self.side < 8:
            raise ConfigError(f"scenes of {self.side} pixels", "give at least 8 pixels")
        if self.count < 1:
            raise ConfigError(f"{self.count} scenes", "give at least one")
        self.asked()
        untrue = [name for name in ViewsConfig.__struct_fields__ if name not in ("colour", "gamma", "focus", "noise")]
        for name in untrue:
            if getattr(self.views, name) != getattr(PLAIN, name):
                raise ConfigError(
                    f"views.{name} of scenes would give the lie to what is said of them",
                    "vary colour, gamma, focus and noise; scene.mirror, bend and shade vary things where they stand",
                )
        if (far := max(self.views.colour, *map(abs, self.views.gamma))) > SAFE:
            raise ConfigError(f"views of scenes {far:g} astray change names of colours", f"go no further than {SAFE:g}")

    def asked(self) -> SceneConfig:
        return SceneConfig.read(PRESETS[self.preset].plain() | self.scene)


class Asked(NamedTuple):
    """A scene by its number."""

    source: str
    index: int


class Drawn(NamedTuple):
    scenes: Scenes
    pixels: Tensor  # (B, 3, H, W) uint8

    @property
    def boxes(self) -> Tensor:
        """(B, O, 4) x0 y0 x1 y1 in 0…1"""
        return self.scenes.box.float() / GRID


class SceneSource:
    """item → `Asked`; `draw` makes the pictures, on whichever device the numbers lie."""

    def __init__(self, config: ScenesConfig, atlas: Atlas, name: str = "scenes"):
        self.config, self.atlas, self.name = config, atlas, name
        self._ready: dict[torch.device, tuple[Layout, Atlas, Looks]] = {}
        self.pixels = Replayed(lambda index: self.draw(index).pixels)  # uint8 (B, 3, H, W), without the truth

    @property
    def fingerprint(self) -> str:
        """Changes with the sprites there are."""
        return hashlib.sha256("\n".join(self.atlas.table.id).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, item: int) -> Asked:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return Asked(self.name, item)

    def only(self, names: Sequence[str]) -> "SceneSource":
        """The same source with things of these names alone."""
        table, known = self.atlas.table, set(names)
        concept = [table.names[c] for c in table.concept.tolist()]
        kept = [i for i, kind in enumerate(table.kind) if kind != "thing" or concept[i] in known]
        return SceneSource(self.config, self.atlas.select(kept), self.name)

    @property
    def rows(self) -> Tensor:
        """The sprites that its scenes are made of."""
        asked, table = self.config.asked(), self.atlas.table
        found = [things(table, asked.vendors, asked.names)]
        if asked.word:
            found.append(rows_where(table, ["word"], asked.fonts or None))
        if asked.inside:
            found.append(rows_where(table, ["frame"]))
        return torch.cat(found)

    def scenes(self, index: Tensor) -> Scenes:
        """What is where, before a pixel is drawn."""
        return self._on(index.device)[0](self.config.seed, index)

    def draw(self, index: Tensor) -> Drawn:
        scenes = self.scenes(index)
        return Drawn(scenes, self.render(scenes))

    def render(self, scenes: Scenes) -> Tensor:
        """uint8 (B, 3, H, W): scenes as this source draws them."""
        _, atlas, looks = self._on(scenes.box.device)
        asked, look = self.config.asked(), looks(self.config.seed, scenes)

        def draw(some: Scenes) -> Tensor:
            return render(some, atlas, self.size, opacity=asked.opacity, look=look)

        return smeared(scenes, self.config.seed, asked.motion, draw) if asked.motion else draw(scenes)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its pictures, whose shorter side is `side`."""
        width, height = self.config.asked().ratio
        side, short = self.config.side, min(width, height)
        return side * height // short, side * width // short

    def _on(self, device: torch.device) -> tuple[Layout, Atlas, Looks]:
        if device not in self._ready:
            atlas = self.atlas.to(device)
            asked = self.config.asked()
            self._ready[device] = Layout(asked, atlas.table, device), atlas, Looks(asked, atlas.table, device)
        return self._ready[device]


def by_source(samples: Sequence[Asked]) -> dict[str, Tensor]:
    """Numbers grouped by the source they belong to: what a batch of scenes is before it is drawn. Sources are in the
    order of their names, since a step is compiled anew for every other order."""
    found: dict[str, list[int]] = {}
    for name, index in samples:
        found.setdefault(name, []).append(index)
    return {name: torch.tensor(numbers) for name, numbers in sorted(found.items())}
