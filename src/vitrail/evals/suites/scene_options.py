"""Options of suites on generated scenes."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.evaluation import BatchedSuite

if TYPE_CHECKING:
    from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig


class SceneSuite(BatchedSuite):
    """A suite on generated scenes.

    count    number of scenes, or of pairs
    seed     seed of the scenes. Use one that the model is not trained on
    vendors  vendors of the sprites. May be repeated. Default: all
    atlas    sprites: emoji, or a .safetensors file
    fonts    fonts of words in the scenes. May be repeated. Default: all
    """

    count: int = 400
    seed: int = 7171
    vendors: tuple[str, ...] = ()
    atlas: str = "emoji"
    fonts: tuple[str, ...] = ()

    @property
    def scene_settings(self) -> dict[str, Any]:
        """The options of the scenes, as they are saved with the scores."""
        return {name: getattr(self, name) for name in SceneSuite.__annotations__}

    @property
    def scene_overrides(self) -> dict[str, Any]:
        """Overrides of the preset."""
        chosen = {"vendors": list(self.vendors), "fonts": list(self.fonts)}
        return {name: values for name, values in chosen.items() if values}

    def open_scenes(self, preset: str, image_size: int, changes: Mapping[str, object]) -> "SceneSource":
        """Open the scenes of a preset with changes."""
        from vitrail.data.scenes.atlas_library import open_atlas
        from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig

        scene = {**self.scene_overrides, **changes}
        config = SceneSourceConfig(atlas=self.atlas, preset=preset, scene=scene, image_size=image_size, seed=self.seed)
        return SceneSource(config, open_atlas(self.atlas))


def check_question_kinds(kinds: Iterable[str]) -> None:
    """Refuse unknown kinds of questions, and captions, which have no single correct answer."""
    from vitrail.data.language import QA_DRAFTERS

    for kind in kinds:
        if kind not in QA_DRAFTERS:
            raise ConfigError(f"there is no kind of question {kind!r}", suggest_name(kind, QA_DRAFTERS))
        if kind.startswith("caption"):
            raise ConfigError(f"answers of kind {kind!r} cannot be scored by exact match", "remove this kind")


def resolve_things(name: str, find_scenes: "Callable[[str], SceneSourceConfig]") -> list[str]:
    """Return the things of a group, or of the scenes of a recipe, which `find_scenes` finds."""
    from vitrail.data.scenes.thing_names import THING_GROUPS

    if name in THING_GROUPS:
        return [name]
    if ":" not in name:
        raise ConfigError(
            f"--things {name} is neither a group nor a source", f"give RECIPE:SOURCE, or {', '.join(THING_GROUPS)}"
        )
    found = find_scenes(name).scene_config().things
    if not found:
        raise ConfigError(f"the scenes {name} are not restricted to some things", "remove --things")
    return list(found)
