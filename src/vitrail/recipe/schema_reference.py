"""The JSON schema of recipes, for editors."""

from typing import Any, get_type_hints

import msgspec

from vitrail.config import Config, list_registered_configs
from vitrail.recipe.recipe_schema import Recipe
from vitrail.registry import MODELS, TASKS

INHERITANCE_KEYS: dict[str, Any] = {
    "base": {"type": "string", "description": "recipe that this one extends"},
    "remove": {"type": "array", "items": {"type": "string"}, "description": "dotted keys of the base to delete"},
    "stage_defaults": {"$ref": "#/$defs/StageConfig", "description": "settings of all stages that do not set them"},
}
LIKE_KEY = {"type": "string", "description": "source or stage of this recipe or of the base that this one extends"}


def build_json_schema() -> dict[str, Any]:
    """Build the JSON schema of recipe files: recipes, task settings and model configs.

    Only `name` and `description` are required: other keys can be inherited by `base`, `like` and `stage_defaults`.
    """
    sources = _source_configs()
    types = [Recipe, *sources, *_task_settings().values(), *_model_configs().values()]
    (reference, *_), components = msgspec.json.schema_components(
        types, schema_hook=_registered_schema, ref_template="#/$defs/{name}"
    )
    for name, component in components.items():
        component.pop("required", None)
        if name in ("StageConfig", *(source.__name__ for source in sources)):
            component["properties"] |= {"like": LIKE_KEY, "remove": INHERITANCE_KEYS["remove"]}
    recipe = components["Recipe"]
    recipe["properties"] |= INHERITANCE_KEYS
    recipe["required"] = ["name", "description"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **reference, "$defs": components}


def _registered_schema(field_type: type) -> dict[str, Any]:
    """The schema of a field that accepts the configs of a registry."""
    choices = [{"$ref": f"#/$defs/{config.__name__}"} for config in list_registered_configs(field_type)]
    return {"anyOf": choices} if choices else {"description": "any value"}


def _source_configs() -> list[type[Config]]:
    return list_registered_configs(get_type_hints(Recipe)["sources"].__args__[1])


def _task_settings() -> dict[str, type[Config]]:
    return {name: task.settings_config for name, task in TASKS.items() if task.settings_config is not Config}


def _model_configs() -> dict[str, type[Config]]:
    return {kind: model.Config for kind, model in MODELS.items()}
