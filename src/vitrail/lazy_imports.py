"""Public names of a package that are imported on first access, so that importing the package stays fast."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_imports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    The names are the imports of its stub, `__init__.pyi`, which type checkers and editors read.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(modules)

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def list_names() -> list[str]:
        return names

    return import_name, list_names, names
