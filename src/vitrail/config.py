"""Base class of all configs: frozen typed structs that reject unknown keys and wrong types."""

import contextlib
import copy
import functools
import inspect
import json
import operator
import re
import tomllib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

import msgspec

from vitrail.errors import ConfigError, ConfigKeyError, join_keys, suggest_name
from vitrail.registry import Registry

MAX_LAYERS, MAX_WORKERS = 10_000, 1024
# Types of fields with a range. An error names the range, and the JSON schema of recipes contains it.
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
FractionBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
OptionalLayerCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
WorkerCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_WORKERS)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _TypeCheckedMeta(type(msgspec.Struct)):
    """Metaclass that checks field types before `__post_init__` runs.

    msgspec checks the types of decoded data, but not of arguments that Python code passes. Without this check, a
    misspelt choice would silently select some branch.
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> type:
        own = namespace.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: "Config") -> None:
                _check_types(self)
                try:
                    own(self)
                except ArithmeticError as error:  # a size of 0 or beyond all limits, in one of the sums
                    zeros = [
                        name for name in self.__struct_fields__ if type(x := getattr(self, name)) is int and x == 0
                    ]
                    raise ConfigError(
                        f"the sizes of {type(self).__name__} do not fit together: {error}",
                        f"use 1 or more for {' or '.join(zeros)}" if zeros else "use smaller sizes",
                    ) from None

            namespace["__post_init__"] = checked
        return super().__new__(mcls, name, bases, namespace, **options)


class Config(msgspec.Struct, metaclass=_TypeCheckedMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of every config.

    Field types and choices are always checked. Subclasses check other constraints in `__post_init__` and raise
    `ConfigError`. `from_dict` builds a config from a TOML table or JSON object, `to_dict` converts it back, and
    `replace` returns a changed copy, which is checked again.
    """

    def __post_init__(self) -> None:
        """Check nothing beyond the types."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        try:
            return msgspec.convert(data, cls, dec_hook=convert_registered)
        except msgspec.ValidationError as error:
            raise _explain(error, data, cls) from None
        except ConfigKeyError:
            raise
        except ConfigError as error:  # of a nested `__post_init__`; msgspec adds no path
            raise _add_key(error, cls, ".".join(_find_invalid(data, [cls]))) from None

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    def replace(self, **changes: Any) -> Self:
        unknown = set(changes) - set(self.__struct_fields__)
        if unknown:
            name = sorted(unknown)[0]
            raise ConfigError(
                f"{type(self).__name__} has no field {name!r}", suggest_name(name, self.__struct_fields__)
            )
        return msgspec.structs.replace(self, **changes)


class _RegisteredConfigMeta(type):
    """Metaclass of field types that accept every config of a registry."""

    registry: Registry
    base: type[Config]
    tag_field: str
    get_config: Callable[[Any], type[Config]]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.base) and value.__struct_config__.tag in cls.registry


def make_registered_type(
    registry: Registry, base: type[Config], get_config: Callable[[Any], type[Config]], tag_field: str = "kind"
) -> Any:
    """Return a field type that accepts the configs of all components of a registry, plugins included.

    It takes the place of a union of config classes. `get_config` returns the config class of a component.
    """
    namespace = {"registry": registry, "base": base, "tag_field": tag_field, "get_config": staticmethod(get_config)}
    return _RegisteredConfigMeta(base.__name__, (), namespace)


def list_registered_configs(field_type: Any) -> list[type[Config]]:
    """Return the configs that a field type of `make_registered_type` accepts; none for other types."""
    if not isinstance(field_type, _RegisteredConfigMeta):
        return []
    return [field_type.get_config(component) for component in field_type.registry.values()]


def convert_registered(field_type: type, value: Any) -> Any:
    """Decoding hook of msgspec: convert a table to the config that its tag names in a registry, and a str to a Path."""
    if field_type is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(field_type, _RegisteredConfigMeta):
        return value  # msgspec checks its type
    if isinstance(value, field_type) or not isinstance(value, dict):
        return value
    try:
        return _convert_tagged(field_type, value)
    except ConfigError as error:
        raise ValueError from error  # msgspec adds the path


def _convert_tagged(field_type: _RegisteredConfigMeta, value: dict[str, Any]) -> Config:
    tag_field, registry = field_type.tag_field, field_type.registry
    if tag_field not in value:
        raise ConfigKeyError(
            field_type.base, tag_field, f"{{key}} of the {registry.kind} is missing", registry.describe()
        )
    if value[tag_field] not in registry:
        remedy = suggest_name(str(value[tag_field]), registry, registry.describe())
        raise ConfigKeyError(
            field_type.base, tag_field, f"{{key}}: there is no {registry.kind} {value[tag_field]!r}", remedy
        )
    return field_type.get_config(registry[value[tag_field]]).from_dict(value)


def describe_fields(config: type[Config]) -> dict[str, str]:
    """Read the descriptions of fields from docstrings: lines of a field, two spaces or more, and its description."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        last = ""
        for line in inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines():
            start = re.match(r"(\w+) {2,}(\S.*)", line)
            if start and start[1] in config.__struct_fields__:
                last = start[1]
                found[last] = start[2]
            elif last and line.startswith("  "):
                found[last] += f" {line.strip()}"
            else:
                last = ""
    return found


class ConfigOption(NamedTuple):
    """A field of a config as an option of a command or a function."""

    name: str
    type: Any
    default: Any
    description: str

    @property
    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT


def list_options(config: type[Config]) -> list[ConfigOption]:
    """List the fields of a config: those of the class first, then those of its base classes."""
    descriptions, fields = describe_fields(config), {each.name: each for each in msgspec.structs.fields(config)}
    names = (name for cls in config.__mro__ for name in inspect.get_annotations(cls) if name in fields)
    return [
        ConfigOption(name, fields[name].type, fields[name].default, descriptions.get(name, ""))
        for name in dict.fromkeys(names)
    ]


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(cls)]


def _check_types(config: Config) -> None:
    for name, field_type in _fields(type(config)):
        value = getattr(config, name)
        try:
            converted = msgspec.convert(value, field_type, dec_hook=convert_registered)
        except msgspec.ValidationError as error:
            if isinstance(cause := _find_cause(error), ConfigError):
                raise cause from None
            if remedy := _describe_range(field_type):
                raise ConfigError(f"{type(config).__name__}.{name} is {value!r}", remedy) from None
            types = (field_type, *get_args(field_type))
            choices = [repr(c) for t in types if get_origin(t) is Literal for c in get_args(t)]
            remedy = f"choose from {', '.join(choices)}" if choices and isinstance(value, str) else ""
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: {error}", remedy) from None
        if converted is not value:  # a list for a tuple, an int for a float
            msgspec.structs.force_setattr(config, name, converted)


def _explain(error: msgspec.ValidationError, data: dict[str, Any], cls: type) -> ConfigError:
    """Convert an error of msgspec: name the full key, the expected type or the choices, and the closest name."""
    text = str(error)
    where = re.search(r"at `\$\.?(.*)`", text)
    path = where.group(1) if where else ""
    key, value = _locate(data, cls, path)
    cause = _find_cause(error)
    if isinstance(cause, ConfigKeyError):
        return cause.move_to(cls, key)
    if isinstance(cause, ConfigError):
        return _add_key(cause, cls, key)
    if unknown := re.search(r"unknown field `(.+?)`", text):
        name = unknown.group(1)
        remedy = suggest_name(name, _fields_at(cls, path))
        return ConfigKeyError(cls, join_keys(key, name), "{config} has no key '{key}'", remedy)
    if missing := re.search(r"missing required field `(.+?)`", text):
        return ConfigKeyError(cls, join_keys(key, missing.group(1)), "{config}: {key} is missing", "set {key}")
    if re.search(r"Expected `(int|float)` [<>]", text):
        *parents, last = _steps(path) or [""]
        ranges = filter(None, map(_describe_range, _field_types_at(cls, parents, last)))
        return ConfigKeyError(cls, key, f"{{key}} is {_format_value(value)}", next(ranges, "correct {key}"))
    if expected := re.search(r"Expected `(.+?)`, got", text):
        kinds = " or ".join(_TYPE_NAMES.get(kind.strip(), kind.strip()) for kind in expected.group(1).split("|"))
        return ConfigKeyError(cls, key, f"{{key}}: expected {kinds}, got {_format_value(value)}", "correct {key}")
    if "Invalid" in text:
        *parents, last = _steps(path) or [""]
        choices = _tags_at(cls, path) or _choices_at(cls, parents, last)
        remedy = suggest_name(str(value), choices) if choices else "correct {key}"
        return ConfigKeyError(cls, key, f"{{key}}: {_format_value(value)} is not a valid value", remedy)
    return ConfigError(f"{cls.__name__}: {text}", f"correct {key}" if key else "")


def _add_key(error: ConfigError, cls: type, key: str) -> ConfigError:
    """Put the dotted key of a table before an error of its `__post_init__`, if the error does not name it."""
    if not key or error.problem.startswith(key):
        return error
    return ConfigKeyError(cls, key, f"{{key}}: {error.problem}", error.remedy)


def _find_invalid(value: Any, candidates: list[Any]) -> list[str]:
    """Return the keys of the innermost value that none of the candidate types accepts."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, child in rows:
        fields = [part for one in candidates for part in _field_types(one, str(key))]
        types = fields or [part for one in candidates for part in _parts(one) if part not in (str, Ellipsis)]
        if types and not _is_valid(child, types):
            return [str(key), *_find_invalid(child, types)]
    return []


def _find_cause(error: msgspec.ValidationError) -> BaseException | None:
    """Return the error of a `__post_init__`, or of a registered config, that `convert_registered` wraps."""
    cause = error.__cause__
    return cause.__cause__ if type(cause) is ValueError else cause


_TYPE_NAMES = {
    "array": "a list", "object": "a table", "str": "a string", "int": "a whole number", "float": "a number",
    "bool": "true or false", "null": "nothing",
}  # fmt: skip


def _format_value(value: Any) -> str:
    """Format a value of plain data for an error: strings in double quotes, tables and lists shortened."""
    return f"{json.dumps(value, ensure_ascii=False, default=str):.80}"


def _locate(data: Any, cls: Any, path: str) -> tuple[str, Any]:
    """Return the dotted key and the value at a path of msgspec, which writes […] for every key of a dict."""
    candidates, keys, node = [cls], [], data
    for step in re.findall(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+", path):
        if step == "[...]" and isinstance(node, dict):
            candidates = [part for one in candidates for part in _parts(one) if part is not str]
            key = next((key for key, value in node.items() if not _is_valid(value, candidates)), None)
            if key is None:
                break
        else:
            key = int(step[1:-1]) if step[0] == "[" else step
            find = _parts if step[0] == "[" else partial(_field_types, name=step)
            candidates = [part for one in candidates for part in find(one)]
        keys.append(str(key))
        node = node.get(key) if isinstance(node, dict) else node[int(key)] if isinstance(node, list | tuple) else None
    return ".".join(keys), node


def _parts(field_type: Any) -> list[Any]:
    """Return the arguments of a generic type, through unions."""
    if get_origin(field_type) in (Union, types.UnionType):
        return [inner for part in get_args(field_type) for inner in _parts(part)]
    return list(get_args(field_type))


def _field_types(field_type: Any, name: str) -> list[Any]:
    return [f.type for struct in _structs(field_type) for f in msgspec.structs.fields(struct) if f.name == name]


def _is_valid(value: Any, candidates: list[Any]) -> bool:
    try:
        msgspec.convert(
            value, functools.reduce(operator.or_, candidates) if candidates else Any, dec_hook=convert_registered
        )
    except (msgspec.ValidationError, ConfigError):
        return False
    return True


def _choices_at(cls: type, parents: list[str], name: str) -> list[str]:
    """Return the choices of a field with literal values."""
    field_types = _field_types_at(cls, parents, name)
    return [str(choice) for one in field_types for part in (one, *get_args(one)) for choice in _literals(part)]


def _field_types_at(cls: type, parents: list[str], name: str) -> list[Any]:
    return [f.type for node in _nodes_at(cls, parents) for f in msgspec.structs.fields(node) if f.name == name]


def _describe_range(field_type: Any) -> str:
    """Return the remedy for a number out of the range of a field; empty if the field has none."""
    for part in (field_type, *get_args(field_type)):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta):
                kind = "a whole number" if get_args(part)[0] is int else "a number"
                return f"give {kind} {_format_bounds(meta)}"
    return ""


def _format_bounds(meta: msgspec.Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"of {meta.ge:,} … {meta.le:,}"
    limits = (("above", meta.gt), ("of at least", meta.ge), ("below", meta.lt), ("of at most", meta.le))
    return " and ".join(f"{words} {limit:,}" for words, limit in limits if limit is not None)


def _literals(field_type: Any) -> list[Any]:
    return list(get_args(field_type)) if get_origin(field_type) is Literal else []


def _fields_at(cls: type, path: str) -> tuple[str, ...]:
    """Return the field names of every struct that can stand at `path`, written as msgspec prints it."""
    return tuple(dict.fromkeys(name for node in _nodes_at(cls, _steps(path)) for name in node.__struct_fields__))


def _tags_at(cls: type, path: str) -> list[str]:
    """Return the tags of the structs that can stand at the end of `path`, or [] if `path` names no tag."""
    *parents, last = _steps(path) or [""]
    configs = [node.__struct_config__ for node in _nodes_at(cls, parents)]
    return [str(config.tag) for config in configs if config.tag_field == last]


def _steps(path: str) -> list[str]:
    return list(filter(None, re.split(r"\.|\[.*?\]", path)))


def _nodes_at(cls: type, steps: list[str]) -> list[Any]:
    nodes: list[Any] = [cls]
    for step in steps:
        types = [f.type for node in nodes for f in msgspec.structs.fields(node) if f.name == step]
        nodes = [struct for field_type in types for struct in _structs(field_type)]
    return nodes


def _structs(field_type: Any) -> list[type]:
    """Return all structs inside a type: dict[str, A | B] contains two."""
    if isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
        return [field_type]
    return [struct for part in get_args(field_type) for struct in _structs(part)]


def check_name(name: str, key: str, reserved: tuple[str, ...] = ()) -> None:
    """Refuse a name that is not safe as the name of a file or folder, or that is reserved."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", name) or name.endswith(".") or ".." in name:
        raise ConfigError(
            f"{key} is {name!r:.120}, which is not a valid name",
            "use 1 to 100 letters, digits, dots, dashes and underscores; the first one is a letter or a digit",
        )
    if name.lower() in reserved:
        raise ConfigError(f"{key} is {name!r}, which is reserved", f"choose another name than {', '.join(reserved)}")


def set_by_path(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one value of nested data by its dotted path. A number in the path indexes a list.

    A string value is parsed as TOML; if that fails, the string itself is stored.
    """
    if isinstance(value, str):
        for text in (value, value.replace("\n", " ")):  # an inline table may span several lines
            with contextlib.suppress(ValueError):  # not TOML, or more than one value
                [value] = tomllib.loads("value = " + text).values()
                break
    *parents, last = key.split(".")
    node: Any = data
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise ConfigError(f"key {key!r} does not exist: no {part!r}", "count lists from 0: stages.0.steps")
    if isinstance(node, list):
        if not (last.isdigit() and int(last) < len(node)):
            raise ConfigError(f"key {key!r} does not exist: no {last!r}")
        node[int(last)] = copy.deepcopy(value)
    else:
        node[last] = copy.deepcopy(value)  # a copy: later changes must not reach the caller's value
