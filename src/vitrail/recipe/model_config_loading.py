"""Load the config of a model by any name: a preset, a folder, a file, a shipped model or a recipe."""

from pathlib import Path
from typing import NamedTuple

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_info import list_bundled_models, read_config
from vitrail.lab.cost_ledger import MODEL_KINDS, PRESETS, get_preset
from vitrail.lab.system_specs import SYSTEM_SPECS
from vitrail.recipe.recipe_files import list_recipe_names, list_untested_recipe_names
from vitrail.recipe.recipe_loading import load_recipe

LEDGER_PARTS = ("vlm", "codec", "image", "tower")  # parts of training models that the ledger supports


class ResolvedConfig(NamedTuple):
    """A config, and the part of the named model that it describes, or ""."""

    config: Config
    part: str = ""


def load_model_config(name: str) -> ResolvedConfig:
    """Load the config of a preset, a folder, a file, a shipped model or a recipe.

    For a model that the ledger does not support, it is the config of the part that the ledger supports.
    """
    if name not in PRESETS and (name in list_bundled_models() or Path(name).exists()):
        return ResolvedConfig(read_config(name))
    if name in (*list_recipe_names(), *list_untested_recipe_names()):
        return _load_recipe_config(name)
    if name in SYSTEM_SPECS and name not in PRESETS:
        raise ConfigError(f"{name} is a system of several models", f"use vitrail ledger {name} --all")
    return ResolvedConfig(get_preset(name))


def _load_recipe_config(name: str) -> ResolvedConfig:
    chosen = load_recipe(name)
    config = chosen.build_model_config() if chosen.model.checkpoint is None else read_config(chosen.model.checkpoint)
    if type(config) in MODEL_KINDS:
        return ResolvedConfig(config)
    for part in LEDGER_PARTS:
        found = getattr(config, part, None)
        if isinstance(found, Config) and type(found) in MODEL_KINDS:
            return ResolvedConfig(found, f"the {part} of the {type(config).__name__.removesuffix('Config')}")
    return ResolvedConfig(config)
