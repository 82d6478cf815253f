"""Registries of components by name, open to third-party packages.

A component registers itself in its own file, as a decorator or as a call:

    @CONNECTORS.register("projector")
    class Projector(Connector[ProjectorConfig]): ...

    TASKS.register("text", TaskSpec(...))

A registry searches the source files of its packages and of all plugins for these lines, and imports a file when its
component is used. So a new component needs one new file, and listing names imports nothing.

A plugin is a module or package that registers components in the same way. Installed packages name theirs in the
entry-point group `vitrail.plugins`; `--plugin MODULE` adds one for a single run, which can be a file of the current
folder. Names that a plugin registers without such a line, for example in a loop, are known after its import. A name
that no file has imports all plugins.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import ConfigError, suggest_name

ENTRY_POINT_GROUP = "vitrail.plugins"
PLUGIN_VARIABLE = "VITRAIL_PLUGINS"  # passes `--plugin` modules on to child processes
REGISTER_LINE = re.compile(r'^@?([A-Z_]+)\.register\(\s*"([^"]+)"', re.MULTILINE)

T = TypeVar("T")


class Registry(Mapping[str, Any]):
    """Components of one kind by name.

    kind      what the components are, in errors
    symbol    name of the registry's variable in source files
    packages  packages whose files register components of this library
    """

    def __init__(self, kind: str, symbol: str, *packages: str):
        self.kind, self.symbol, self.packages = kind, symbol, packages
        self._values: dict[str, Any] = {}

    def register(self, name: str, value: Any = None) -> Callable[[T], T]:
        """Register a component; without a value, return a decorator that registers what it decorates."""

        if not re.fullmatch(r"\w[\w .+-]*", name):
            raise ConfigError(
                f"{name!r} is not a valid name of a {self.kind}", "use letters, digits, dots, dashes and underscores"
            )

        def add(component: T) -> T:
            existing = self._values.get(name)
            if existing is not None and not _is_same_component(existing, component):
                raise ConfigError(
                    f"there are two components of kind {self.kind} with the name {name!r}", "rename one of them"
                )
            self._values[name] = component
            return component

        if value is not None:
            add(value)
        return add

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the components of this library."""
        return tuple(self._find_modules(self.packages))

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Names that plugins register."""
        own = self._find_modules(self.packages)
        return tuple(name for name in {**self._find_modules(find_plugins()), **self._values} if name not in own)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own_names, *self.plugin_names))

    def __len__(self) -> int:
        return len(self.own_names) + len(self.plugin_names)

    def __contains__(self, name: object) -> bool:
        if name in self._values or name in self.own_names or name in self.plugin_names:
            return True
        load_plugins()
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if module := self._find_modules(self.packages).get(name):
                importlib.import_module(module)
            elif module := self._find_modules(find_plugins()).get(name):
                _import_plugin(module)
            else:
                load_plugins()
        if name not in self._values:
            raise ConfigError(f"there is no {self.kind} {name!r}", suggest_name(name, self, self.describe()))
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def describe(self) -> str:
        """List all names for errors and help, those of plugins last."""
        names = f"known: {', '.join(self.own_names)}"
        return f"{names}; from plugins: {', '.join(self.plugin_names)}" if self.plugin_names else names

    def _find_modules(self, packages: Iterable[str]) -> dict[str, str]:
        """Return the module that registers each name."""
        found: dict[str, str] = {}
        for package in packages:
            found |= _search_package(package).get(self.symbol, {})
        return found


def _is_same_component(one: Any, other: Any) -> bool:
    """Whether two values are one component, also when its module is imported again."""
    identities = [(getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (one, other)]
    return one is other or (None not in identities[0] and identities[0] == identities[1])


@cache
def _search_package(package: str) -> dict[str, dict[str, str]]:
    """Search a module, or a package with its sub-packages, without importing it: registry symbol → name → module."""
    if not all(part.isidentifier() for part in package.split(".")):
        raise ConfigError(f"the plugin {package!r} is not the name of a module", "write it as in an import: my_package")
    spec = importlib.util.find_spec(package.partition(".")[0])
    if spec is None or spec.origin is None:
        return {}
    top = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin).with_suffix("")
    base = top.joinpath(*package.split(".")[1:])
    found: dict[str, dict[str, str]] = {}
    for path in (base.with_suffix(".py"), *sorted(base.rglob("*.py"))):
        if path.is_file():
            parts = path.relative_to(top.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for symbol, name in REGISTER_LINE.findall(path.read_text(encoding="utf-8")):
                found.setdefault(symbol, {})[name] = module
    return found


@cache
def find_installed_plugins() -> tuple[str, ...]:
    """Return the modules of the entry-point group, without importing them."""
    return tuple(entry.module for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def find_plugins() -> tuple[str, ...]:
    """Return the modules of installed plugins, and those of `--plugin`, without importing them."""
    return tuple(dict.fromkeys([*find_installed_plugins(), *_find_named_plugins()]))


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import all plugins, and these modules, which from now on are plugins of this process and of its children."""
    named = _find_named_plugins(modules)
    for module in (*find_installed_plugins(), *named):
        _import_plugin(module)
    os.environ[PLUGIN_VARIABLE] = " ".join(named)


def _find_named_plugins(modules: Iterable[str] = ()) -> list[str]:
    """Return the modules of `--plugin`. As for `python -m`, they can be files of the current folder."""
    modules = list(dict.fromkeys([*os.environ.get(PLUGIN_VARIABLE, "").split(), *modules]))
    if modules and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return modules


def _import_plugin(module: str) -> None:
    _search_package(module)  # refuses what is not the name of a module
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the plugin {module} cannot be imported: {error}",
            "check its name, install it, or uninstall the package that declares it",
        ) from error


MODELS = Registry("model kind", "MODELS", "vitrail.models", "vitrail.backbones", "vitrail.codecs", "vitrail.encoders")
ENCODERS = Registry("encoder", "ENCODERS", "vitrail.encoders", "vitrail.codecs")
RESOLUTION_POLICIES = Registry("resolution policy", "RESOLUTION_POLICIES", "vitrail.processing")
CONNECTORS = Registry("connector", "CONNECTORS", "vitrail.connectors")
QUANTIZERS = Registry("quantizer", "QUANTIZERS", "vitrail.codecs")
DATA_SOURCES = Registry("data source", "DATA_SOURCES", "vitrail.data")
TASKS = Registry("task", "TASKS", "vitrail.tasks")
FAMILIES = Registry("checkpoint family", "FAMILIES", "vitrail.hub")
LOGGERS = Registry("logger", "LOGGERS", "vitrail.training")
SUITES = Registry("suite", "SUITES", "vitrail.evals.suites")
BENCHMARKS = Registry("benchmark", "BENCHMARKS", "vitrail.evals.suites")
TEXT_BENCHMARKS = Registry("text benchmark", "TEXT_BENCHMARKS", "vitrail.evals.suites")

RECIPE_REGISTRIES = (MODELS, ENCODERS, RESOLUTION_POLICIES, CONNECTORS, QUANTIZERS, DATA_SOURCES, TASKS)
"""Registries of the components that a recipe names."""


def describe_recipe_components() -> str:
    """List the components that a recipe can name, those of plugins included. It imports none of them."""
    return "\n\n".join(f"{registry.kind}: {', '.join(registry)}" for registry in RECIPE_REGISTRIES)
