"""The one way to configure: frozen typed structs that refuse what they do not know."""

import contextlib
import copy
import functools
import re
import tomllib
from typing import Any, Literal, Self, get_args, get_origin

import msgspec

from vitrail.errors import ConfigError, nearest


class _Checked(type(msgspec.Struct)):
    """Checks the types of a struct's fields before its own `__post_init__`: msgspec does so for data it reads, not for
    what Python code passes, and a misspelt choice would silently take some branch."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> type:
        own = namespace.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: "Config") -> None:
                _check_types(self)
                own(self)

            namespace["__post_init__"] = checked
        return super().__new__(mcls, name, bases, namespace, **options)


class Config(msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config.

    Types and choices are checked however a config is made. Subclasses check the rest in `__post_init__` and raise
    `ConfigError`; `read` turns plain data (a TOML table, a JSON object) into a config, `plain` turns it back, and
    `with_` makes an altered copy that is checked again.
    """

    def __post_init__(self) -> None:
        """Nothing beyond the types."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise _explain(error, data, cls) from None

    def plain(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    def with_(self, **changes: Any) -> Self:
        unknown = set(changes) - set(self.__struct_fields__)
        if unknown:
            name = sorted(unknown)[0]
            raise ConfigError(f"{type(self).__name__} has no field {name!r}", nearest(name, self.__struct_fields__))
        return msgspec.structs.replace(self, **changes)


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(cls)]


def _check_types(config: Config) -> None:
    for name, kind in _fields(type(config)):
        value = getattr(config, name)
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            choices = [repr(c) for k in (kind, *get_args(kind)) if get_origin(k) is Literal for c in get_args(k)]
            remedy = f"choose from {', '.join(choices)}" if choices and isinstance(value, str) else ""
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: {error}", remedy) from None
        if converted is not value:  # a list for a tuple, an int for a float
            msgspec.structs.force_setattr(config, name, converted)


def _explain(error: msgspec.ValidationError, data: dict[str, Any], cls: type) -> ConfigError:
    """msgspec's message carries the path; add the nearest known name to an unknown field."""
    text = str(error)
    unknown = re.search(r"unknown field `(.+?)`", text)
    where = re.search(r"at `\$\.?(.*)`", text)
    path = where.group(1) if where else ""
    if unknown is None:
        # An error raised by a nested __post_init__ already says what to do.
        if isinstance(error.__cause__, ConfigError):
            return error.__cause__
        wrong = re.search(r"Invalid value '(.*)' - at", text)
        kinds = [] if wrong is None else _tags_at(cls, path)
        remedy = nearest(wrong.group(1), kinds) if wrong and kinds else ""
        typed = re.sub(r"\[(\d+)\]", r".\1", path)  # as it is given on the command line
        return ConfigError(f"{cls.__name__}: {text}", remedy or (f"mend {typed}" if typed else ""))
    name = unknown.group(1)
    full = f"{path}.{name}" if path else name
    return ConfigError(f"{cls.__name__} has no key {full!r}", nearest(name, _fields_at(cls, path)))


def _fields_at(cls: type, path: str) -> tuple[str, ...]:
    """Field names of the struct that `path` (as msgspec prints it) leads to, or of all that it may lead to."""
    return tuple(dict.fromkeys(name for node in _nodes_at(cls, _steps(path)) for name in node.__struct_fields__))


def _tags_at(cls: type, path: str) -> list[str]:
    """The kinds of structs that the tag at the end of `path` chooses among; [] where that is none."""
    *way, last = _steps(path) or [""]
    configs = [node.__struct_config__ for node in _nodes_at(cls, way)]
    return [str(config.tag) for config in configs if config.tag_field == last]


def _steps(path: str) -> list[str]:
    return list(filter(None, re.split(r"\.|\[.*?\]", path)))


def _nodes_at(cls: type, steps: list[str]) -> list[Any]:
    nodes: list[Any] = [cls]
    for step in steps:
        kinds = [f.type for node in nodes for f in msgspec.structs.fields(node) if f.name == step]
        nodes = [struct for kind in kinds for struct in _structs(kind)]
    return nodes


def _structs(kind: Any) -> list[type]:
    """The structs in a type, however deep: dict[str, A | B] holds two."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in _structs(part)]


def lay(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one value by its dotted path; a number counts into a list. A text is TOML, or a string as it stands."""
    if isinstance(value, str):
        for text in (value, value.replace("\n", " ")):  # a long table may stand on several lines
            with contextlib.suppress(ValueError):  # no TOML, or more than one value
                [value] = tomllib.loads("value = " + text).values()
                break
    *way, last = key.split(".")
    node: Any = data
    for part in way:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise ConfigError(f"{key!r} leads nowhere: no {part!r}", "lists are counted from 0: stages.0.steps")
    if isinstance(node, list):
        if not (last.isdigit() and int(last) < len(node)):
            raise ConfigError(f"{key!r} leads nowhere: no {last!r}")
        node[int(last)] = copy.deepcopy(value)
    else:
        node[last] = copy.deepcopy(value)  # what is laid over it later is none of the caller's
