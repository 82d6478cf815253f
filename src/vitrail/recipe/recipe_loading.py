"""Loading of recipes by name or file with overrides, and transformations of loaded recipes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import set_by_path
from vitrail.models.preset_expansion import expand_part_names
from vitrail.recipe.recipe_files import resolve_recipe
from vitrail.recipe.recipe_schema import ModelConfig, Recipe, TokenizerConfig
from vitrail.training.lr_schedule import ConstantSchedule


def load_recipe(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe by name or file.

    `overrides` maps dotted keys to values. A value that is a string is parsed as TOML where that is possible.
    """
    data = resolve_recipe(name_or_path)
    for key, value in (overrides or {}).items():
        expand_part_names(data.get("model"))  # a key may point into a part that is given by a preset name
        set_by_path(data, key, value)
    return Recipe.from_dict(data)


def shrink_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with one step of two samples a stage, for smoke tests."""
    stages = tuple(
        stage.replace(
            steps=1,
            batch_size=2,
            gradient_accumulation_steps=1,
            schedule=ConstantSchedule(),
            validate=(),
            validate_every=0,
            validate_first=False,
            num_workers=0,
            compile=False,
        )
        for stage in recipe.stages
    )
    return recipe.replace(stages=stages)


def resume_from_stage(recipe: Recipe, stage: str, checkpoint: str) -> Recipe:
    """Return a recipe of the stages from `stage` on, whose model and tokenizer come from `checkpoint`.

    The checkpoint must be trained through all stages before it, such as OUT/STAGE/final of another run. Stages pass on
    only weights, so the result equals that of an uninterrupted run.
    """
    remaining = recipe.stages[recipe.stage_index(stage) :]
    used_names = {name for stage in remaining for name in (*stage.mixture.weights, *stage.validate)}
    return recipe.replace(
        stages=remaining,
        model=ModelConfig(kind=recipe.model.kind, checkpoint=checkpoint),
        tokenizer=None if recipe.tokenizer is None else TokenizerConfig(checkpoint=checkpoint),
        sources={name: source for name, source in recipe.sources.items() if name in used_names},
    )


def replace_checkpoints(recipe: Recipe, replacements: Mapping[str, str]) -> Recipe:
    """Return the recipe with checkpoints replaced by others: old name or folder → new one."""
    model, tokenizer = recipe.model, recipe.tokenizer
    parts = {
        name: part.replace(checkpoint=replacements.get(part.checkpoint, part.checkpoint))
        for name, part in model.parts.items()
    }
    model = model.replace(parts=parts, checkpoint=replacements.get(model.checkpoint or "", model.checkpoint))
    if tokenizer is not None:
        tokenizer = tokenizer.replace(checkpoint=replacements.get(tokenizer.checkpoint or "", tokenizer.checkpoint))
    return recipe.replace(model=model, tokenizer=tokenizer)
