"""Formatting of nested data as TOML, as the recipes are written."""

import json
from typing import Any

LINE_LENGTH = 160
HEADERS = {("model", "parts"), ("model", "config")}  # sub-tables with a header


def format_toml(data: dict[str, Any]) -> str:
    """Format a recipe. The order of keys is kept within every table."""
    return "\n".join(_format_table(data, ())).strip() + "\n"


def format_value(value: Any) -> str:
    """Format a value on one line."""
    if isinstance(value, dict):
        entries = ", ".join(f"{format_key(key)} = {format_value(one)}" for key, one in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    # JSON and TOML write strings, numbers and booleans alike, except for the control character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_key(key: str) -> str:
    """Format a key, quoted if it contains other characters than letters, digits, - and _."""
    return key if key and all(c.isalnum() or c in "-_" for c in key) and key.isascii() else format_value(key)


def _format_table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Format a table below its header: values, then sub-tables with headers of their own (`HEADERS`)."""
    lines, later = [], []
    for key, value in _without_none(table).items():
        if (*path, key) in HEADERS or (not path and _is_table(value)):
            later.append((key, value))
        else:
            lines += _format_entry(format_key(key), value)
    for key, value in later:
        name = ".".join(map(format_key, (*path, key)))
        if isinstance(value, list):
            for one in value:
                lines += ["", f"[[{name}]]", *_format_table(one, (*path, key))]
        else:
            body = _format_table(value, (*path, key))
            has_values = bool(body) and body[0] != ""  # sub-tables start with an empty line
            lines += ["", f"[{name}]", *body] if has_values or not body else body
    return lines


def _format_entry(name: str, value: Any) -> list[str]:
    """Format an entry on one line, or a table that is too long for one as several dotted keys."""
    line = f"{name} = {format_value(value)}"
    if len(line) <= LINE_LENGTH or not isinstance(value, dict):
        return [line]
    return [line for key, one in value.items() for line in _format_entry(f"{name}.{format_key(key)}", one)]


def _is_table(value: Any) -> bool:
    """Whether a top-level value gets a header: a table, or a list of tables."""
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list | tuple) else value
