"""Vitrail: a library for visual tokens: codecs, vision-language models, unified models and world models.

Sub-packages and functions load on first access, so that importing `vitrail` does not import torch. The import sets how
OpenMP threads wait, unless torch is already imported.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from vitrail.thread_settings import configure_threads as _configure_threads

if TYPE_CHECKING:
    from vitrail.api import evaluate, tokenize, tokenize_videos, train
    from vitrail.pipelines.loading import load

if "torch" not in sys.modules:  # OpenMP reads its variables when torch is imported
    _configure_threads()

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "load", "tokenize", "tokenize_videos", "train"]

_FUNCTIONS = {
    "evaluate": "vitrail.api", "load": "vitrail.pipelines.loading", "tokenize": "vitrail.api",
    "tokenize_videos": "vitrail.api", "train": "vitrail.api",
}  # fmt: skip
_SUBMODULES = (
    "nn", "processing", "objectives", "data", "encoders", "connectors", "codecs", "stream", "backbones", "models",
    "generate", "control", "evals", "training", "tasks", "lab", "plots", "hub", "pipelines", "search", "serve",
    "integrations", "recipe", "demo",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"vitrail.{name}")
    known = ", ".join((*_FUNCTIONS, *_SUBMODULES))
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}; it has {known}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS, *_SUBMODULES])
