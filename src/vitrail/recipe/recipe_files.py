"""Recipe files: where they are, their names, and their TOML. This module does not import torch."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, suggest_name
from vitrail.file_reading import parse_toml, read_text_file


def recipe_folder() -> Path:
    """Return the folder of the recipes: inside an installed package, or in the root of the repository."""
    inside = Path(__file__).parents[1] / "recipes"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def list_recipe_names() -> list[str]:
    """List the recipes that have a published result."""
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))


def list_untested_recipe_names() -> list[str]:
    """List the recipes without a published result, as untested/NAME."""
    return sorted(f"untested/{path.stem}" for path in (recipe_folder() / "untested").glob("*.toml"))


def find_recipe_file(name_or_path: str | Path) -> Path:
    """Return the file of a recipe by name or path."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = recipe_folder() / f"{name_or_path}.toml"
    if path.is_file():
        return path
    if Path(name_or_path).exists():
        raise ConfigError(f"{name_or_path} is not a recipe", "recipes are .toml files")
    names = (*list_recipe_names(), *list_untested_recipe_names())
    raise ConfigError(
        f"there is no recipe {str(name_or_path)!r}",
        suggest_name(str(name_or_path), names, f"give a .toml file, or one of {', '.join(names)}"),
    )


def read_recipe_file(name_or_path: str | Path) -> dict[str, Any]:
    """Read the TOML of a recipe as it is written."""
    path = find_recipe_file(name_or_path)
    try:
        return parse_toml(read_text_file(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct the file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", "check the file and its permissions") from None


def resolve_recipe(name_or_path: str | Path, ancestors: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe and resolve what it inherits, so that the result has no `base`, `like`, `remove` or
    `stage_defaults`.

    base            name or path of a recipe (relative to this file or to the recipe folder) that this one extends:
                    tables are merged, other values are replaced. The order of the sources of the base is kept.
    remove          dotted keys of the base to delete, such as "sources.text"
    like            in a source: another source of this recipe or of the base, which it extends; in a stage: an earlier
                    stage, or one of the base. A stage with the name of a stage of the base extends it. Such tables may
                    have a `remove` as well.
    stage_defaults  settings of all stages of this file that do not set them

    A table replaces that of the base, instead of merging, if it is called `weights` or if it has another `kind` or
    `policy`.
    """
    path = find_recipe_file(name_or_path)
    if path in ancestors:
        raise ConfigError(
            f"{path} extends itself: {' → '.join(one.stem for one in (*ancestors, path))}", "change its base"
        )
    table = read_recipe_file(path)
    _check_structure(table, path)
    base: dict[str, Any] = {}
    if "base" in table:
        local = path.parent / f"{table['base']}.toml"
        base = resolve_recipe(local if local.is_file() else table["base"], (*ancestors, path))
    defaults, stages = table.pop("stage_defaults", {}), table.pop("stages", None)
    merged = _extend(base, table, path)
    if stages is not None:
        known_stages = {stage["name"]: stage for stage in base.get("stages", []) if "name" in stage}
        merged["stages"] = []
        for stage in stages:
            merged["stages"].append(_resolve_stage(stage, known_stages, defaults, path))
            if "name" in stage:
                known_stages[stage["name"]] = merged["stages"][-1]
    known_sources = {**base.get("sources", {}), **merged.get("sources", {})}
    for name, source in merged.get("sources", {}).items():
        merged["sources"][name] = _resolve_source(source, known_sources, path, (name,))
    return merged


def _check_structure(table: dict[str, Any], path: Path) -> None:
    """Check the types of what `resolve_recipe` reads itself. The config checks the rest."""
    sources, stages = table.get("sources", {}), table.get("stages", [])
    checks = {
        "base": (isinstance(table.get("base", ""), str), "a string"),
        "stage_defaults": (isinstance(table.get("stage_defaults", {}), dict), "a table"),
        "sources": (_has_tables(sources.values() if isinstance(sources, dict) else [None]), "tables: [sources.NAME]"),
        "stages": (_has_tables(stages if isinstance(stages, list) else [None]), "a list of tables: [[stages]]"),
        "remove": (_is_list_of_strings(table.get("remove", [])), "a list of strings"),
    }
    for key, (is_right, wanted) in checks.items():
        if not is_right:
            raise ConfigError(f"{path}: {key} is not {wanted}", f"correct {key}")


def _has_tables(values: Iterable[Any]) -> bool:
    """Whether all values are tables whose `like`, `name` and `remove` have the right types."""
    return all(
        isinstance(value, dict)
        and all(isinstance(value.get(key, ""), str) for key in ("like", "name"))
        and _is_list_of_strings(value.get("remove", []))
        for value in values
    )


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def merge_tables(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Merge a table over another one, recursively; see `resolve_recipe`."""
    merged = dict(base)
    for key, value in table.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and key != "weights" and not _has_other_tag(old, value):
            merged[key] = merge_tables(old, value)
        else:
            merged[key] = value
    return merged


def _has_other_tag(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return any(tag in new and new[tag] != old.get(tag, new[tag]) for tag in ("kind", "policy"))


def _resolve_source(
    source: dict[str, Any], sources: dict[str, Any], path: Path, ancestors: tuple[str, ...]
) -> dict[str, Any]:
    if "like" not in source:
        return source
    like = source["like"]
    if like not in sources or like in ancestors:
        raise ConfigError(f"{path}: sources.{ancestors[-1]}.like is {like!r}", suggest_name(str(like), sources))
    return _extend(_resolve_source(sources[like], sources, path, (*ancestors, like)), source, path)


def _resolve_stage(
    stage: dict[str, Any], stages: dict[str, Any], defaults: dict[str, Any], path: Path
) -> dict[str, Any]:
    like = stage.get("like", stage.get("name"))
    if "like" in stage and like not in stages:
        raise ConfigError(f"{path}: stages.like is {like!r}", suggest_name(str(like), stages))
    return _extend(merge_tables(defaults, stages.get(like, {})), stage, path)


def _extend(base: dict[str, Any], table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Merge a table over the one that it names, without the removed keys."""
    base = copy.deepcopy(base)
    for key in table.get("remove", ()):
        _remove_key(base, key, path)
    return merge_tables(base, {key: value for key, value in table.items() if key not in ("base", "like", "remove")})


def _remove_key(data: dict[str, Any], key: str, path: Path) -> None:
    """Delete a value by its dotted path, whose parts may contain dots themselves."""
    node, rest = data, key
    while rest not in node:
        part = next((part for part in node if rest.startswith(f"{part}.") and isinstance(node[part], dict)), None)
        if part is None:
            raise ConfigError(f"{path}: remove names {key!r}, which the base does not have", "delete it from the list")
        node, rest = node[part], rest[len(part) + 1 :]
    del node[rest]
