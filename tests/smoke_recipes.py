"""Configs of recipes, shrunk as by `--smoke-test` of the token-scaling experiment."""

from experiments.token_scaling.run_command import SMOKE_TEST_OVERRIDES
from vitrail import recipe
from vitrail.models.vlm_config import VLMConfig


def load_smoke_config(name: str) -> VLMConfig:
    """Return the shrunk model config of a recipe."""
    own = f"{name.removeprefix('scaling-')}.model.config"
    changes = {
        f"model.config{key.removeprefix(own)}": value
        for key, value in SMOKE_TEST_OVERRIDES.items()
        if key.startswith(own)
    }
    found = recipe.load_recipe(
        name if name in recipe.list_recipe_names() else f"untested/{name}", changes
    ).build_model_config()
    assert isinstance(found, VLMConfig)
    return found
