"""Scene data source: a sample is an index, and the images are rendered on the device that uses them.

Shapes: B scenes, O object slots, H × W pixels.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config, PositiveInt, Seed
from vitrail.data.augmentation import NO_AUGMENTATION, AugmentationConfig
from vitrail.data.scenes.appearance import AppearanceSampler
from vitrail.data.scenes.atlas import Atlas, find_sprites
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.config import PRESETS, SceneConfig
from vitrail.data.scenes.motion_blur import render_motion_blur
from vitrail.data.scenes.scene import GRID, SceneBatch
from vitrail.data.scenes.scene_renderer import render_scenes
from vitrail.data.scenes.scene_sampler import SceneSampler
from vitrail.data.scenes.thing_names import find_things
from vitrail.data.source_spec import DataSourceSpec, SourceContext
from vitrail.errors import ConfigError, suggest_name
from vitrail.nn.cuda_graphs import CUDAGraphFunction
from vitrail.registry import DATA_SOURCES

MAX_COLOUR_CHANGE = 0.05  # maximum colour change of a whole image that keeps colour names valid


class SceneSourceConfig(Config, tag="scenes", tag_field="kind"):
    """Configuration of a scene source.

    atlas        name in the atlas library ("emoji"), or a file
    preset       scene preset
    scene        changes to the preset
    image_size   shorter side of the images in pixels
    num_samples  samples before they repeat
    seed         seed of the scenes
    augmentation  augmentation of whole images in training; only changes that keep the ground truth valid
    """

    atlas: str
    preset: str = "plain"
    scene: dict[str, object] = {}
    image_size: int = 64
    seed: Seed = 0
    num_samples: PositiveInt = 1 << 30
    augmentation: AugmentationConfig = NO_AUGMENTATION

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown scene preset {self.preset!r}", suggest_name(self.preset, PRESETS))
        if self.image_size < 8:
            raise ConfigError(f"image_size is {self.image_size}", "give at least 8 pixels")
        self.scene_config()
        invalidating = [
            name
            for name in AugmentationConfig.__struct_fields__
            if name not in ("colour_jitter", "log_gamma", "sharpness", "max_noise")
        ]
        for name in invalidating:
            if getattr(self.augmentation, name) != getattr(NO_AUGMENTATION, name):
                raise ConfigError(
                    f"augmentation.{name} would invalidate the ground truth of scenes",
                    "use colour_jitter, log_gamma, sharpness and max_noise, or the settings of `scene`",
                )
        if (
            max_change := max(self.augmentation.colour_jitter, *map(abs, self.augmentation.log_gamma))
        ) > MAX_COLOUR_CHANGE:
            raise ConfigError(
                f"augmentation.colour_jitter and log_gamma change colours by up to {max_change:g}, which invalidates "
                f"colour names",
                f"give at most {MAX_COLOUR_CHANGE:g}",
            )

    def scene_config(self) -> SceneConfig:
        return SceneConfig.from_dict(PRESETS[self.preset].to_dict() | self.scene)


class SceneSample(NamedTuple):
    """A sample by its source and index: a number, or a row of bytes for a source that is read by data workers."""

    source: str
    index: int | Tensor


class RenderedScenes(NamedTuple):
    """Rendered scenes with their descriptions."""

    scenes: SceneBatch
    pixels: Tensor  # (B, 3, H, W) uint8

    @property
    def boxes(self) -> Tensor:
        """Boxes (B, O, 4) as x0 y0 x1 y1 in 0…1."""
        return self.scenes.box.float() / GRID


class SceneSource:
    """Dataset of `SceneSample`s. `render_indices` renders images on the device of the indices."""

    def __init__(self, config: SceneSourceConfig, atlas: Atlas, name: str = "scenes"):
        self.config, self.atlas, self.name = config, atlas, name
        self._per_device: dict[torch.device, tuple[SceneSampler, Atlas, AppearanceSampler]] = {}
        # uint8 (B, 3, H, W), without the ground truth.
        self.pixels = CUDAGraphFunction(lambda index: self.render_indices(index).pixels)

    @property
    def fingerprint(self) -> str:
        """Hash of the sprite ids."""
        return hashlib.sha256("\n".join(self.atlas.table.id).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.config.num_samples

    def __getitem__(self, item: int) -> SceneSample:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return SceneSample(self.name, item)

    def with_things(self, names: Sequence[str]) -> "SceneSource":
        """Return the same source with only the things of these names."""
        table, known = self.atlas.table, set(names)
        concept = [table.names[c] for c in table.concept.tolist()]
        selected = [i for i, kind in enumerate(table.kind) if kind != "thing" or concept[i] in known]
        return SceneSource(self.config, self.atlas.select(selected), self.name)

    @property
    def sprite_rows(self) -> Tensor:
        """Rows of the sprites that can appear in the scenes."""
        config, table = self.config.scene_config(), self.atlas.table
        found = [find_things(table, config.vendors, config.things)]
        if config.word_probability:
            found.append(find_sprites(table, ["word"], config.fonts or None))
        if config.inside_probability:
            found.append(find_sprites(table, ["frame"]))
        return torch.cat(found)

    def sample_scenes(self, index: Tensor) -> SceneBatch:
        """Sample the scene descriptions, without rendering."""
        return self._prepare(index.device)[0](self.config.seed, index)

    def render_indices(self, index: Tensor) -> RenderedScenes:
        """Sample and render the scenes of these indices."""
        scenes = self.sample_scenes(index)
        return RenderedScenes(scenes, self.render_scenes(scenes))

    def render_scenes(self, scenes: SceneBatch) -> Tensor:
        """Render scenes with the settings of this source: uint8 (B, 3, H, W)."""
        _, atlas, looks = self._prepare(scenes.box.device)
        config, look = self.config.scene_config(), looks(self.config.seed, scenes)

        def draw(some: SceneBatch) -> Tensor:
            return render_scenes(some, atlas, self.image_shape, opacity=config.opacity, appearance=look)

        return (
            render_motion_blur(scenes, self.config.seed, config.motion_blur, draw)
            if config.motion_blur
            else draw(scenes)
        )

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images. The shorter side is `image_size`."""
        width, height = self.config.scene_config().aspect_ratio
        side, short = self.config.image_size, min(width, height)
        return side * height // short, side * width // short

    def _prepare(self, device: torch.device) -> tuple[SceneSampler, Atlas, AppearanceSampler]:
        if device not in self._per_device:
            atlas = self.atlas.to(device)
            config = self.config.scene_config()
            self._per_device[device] = (
                SceneSampler(config, atlas.table, device),
                atlas,
                AppearanceSampler(config, atlas.table, device),
            )
        return self._per_device[device]


def group_by_source(samples: Sequence[SceneSample]) -> dict[str, Tensor]:
    """Group the indices of samples by source name: numbers (B,), or rows of bytes (B, bytes).

    Sources are sorted by name, because a compiled step recompiles for every other order.
    """
    found: dict[str, list[Any]] = {}
    for name, index in samples:
        found.setdefault(name, []).append(index)
    return {
        name: torch.stack(indices) if isinstance(indices[0], Tensor) else torch.tensor(indices)
        for name, indices in sorted(found.items())
    }


def _open_source(config: SceneSourceConfig, context: SourceContext) -> SceneSource:
    if config.atlas not in context.shared:
        context.shared[config.atlas] = open_atlas(config.atlas)
    return SceneSource(config, context.shared[config.atlas], context.name)


DATA_SOURCES.register(
    "scenes", DataSourceSpec(SceneSourceConfig, _open_source, ("images", "captions", "questions", "scenes"))
)
