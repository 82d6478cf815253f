"""`vitrail recipes`: list, show and copy recipes, and print their JSON schema. Listing does not import torch."""

import shutil
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail import recipe as recipes
from vitrail.errors import ConfigError

app = App(
    name="recipes",
    help="List, show and copy recipes, and print their JSON schema.\n\n"
    "Example: vitrail recipes show mini-vlm --resolved",
)


@app.default
def print_recipes() -> None:
    """List the recipes with their stages. Recipes without a published result come last."""
    trained, others = recipes.list_recipe_names(), recipes.list_untested_recipe_names()
    width = max(map(len, (*trained, *others)))
    for name in (*trained, *others):
        if name in others[:1]:
            print("\nwithout a published result:")
        row = recipes.resolve_recipe(name)
        stages = ", ".join(f"{stage['name']} {stage['steps']:,} steps" for stage in row["stages"])
        print(f"{name:{width}}  {row['description']} ({stages})")


@app.command(name="show", help_epilogue="Example: vitrail recipes show mini-vlm --resolved stages.0.steps=10")
def show_recipe(recipe: str, /, *overrides: str, resolved: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print a recipe as TOML.

    Parameters
    ----------
    recipe
        Name of a recipe or a .toml file.
    overrides
        Settings to change, as key=value with dotted keys. Needs --resolved.
    resolved
        Resolve bases and presets, and print all settings with their defaults.
    """
    if overrides and not resolved:
        raise ConfigError("overrides need --resolved", "add --resolved")
    if not resolved:
        print(recipes.find_recipe_file(recipe).read_text(encoding="utf-8"), end="")
        return
    from vitrail.cli.train_command import parse_overrides
    from vitrail.recipe.toml_format import format_toml

    print(format_toml(recipes.load_recipe(recipe, parse_overrides(overrides)).to_dict()), end="")


@app.command(name="copy", help_epilogue="Example: vitrail recipes copy mini-vlm my-vlm.toml")
def copy_recipe(recipe: str, file: Path, /) -> None:
    """Copy a recipe to a file of your own.

    Parameters
    ----------
    recipe
        Name of a recipe or a .toml file.
    file
        The .toml file to write. It must not exist.
    """
    source = recipes.find_recipe_file(recipe)
    if file.suffix != ".toml":
        raise ConfigError(f"{file} is not a .toml file", f"use {file.with_suffix('.toml').name}")
    if file.exists():
        raise ConfigError(f"{file} already exists", "remove it first, or give another file")
    try:
        shutil.copyfile(source, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "give another file") from None
    print(f"{file}: train it with vitrail train {file} --out out/{file.stem}")


@app.command(name="schema", help_epilogue="Example: vitrail recipes schema -o recipe.schema.json")
def print_schema(*, out: Annotated[Path | None, Parameter(alias="-o")] = None) -> None:
    """Print the JSON schema of recipes, for editors that check and complete TOML.

    Parameters
    ----------
    out
        A file to write the schema to.
    """
    import json

    from vitrail.recipe.schema_reference import build_json_schema

    text = json.dumps(build_json_schema(), indent=1, ensure_ascii=False)
    if out is None:
        print(text)
        return
    out.write_text(text + "\n", encoding="utf-8")
    print(out)
