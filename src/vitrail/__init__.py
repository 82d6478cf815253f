"""Vitrail: a workbench for visual tokens.

Importing the package is cheap: rooms load when they are first named, so `vitrail --help` never waits for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = (
    "nn", "processing", "objectives", "data", "encoders", "stream", "backbones", "models", "generate", "train", "tasks",
    "show", "lab", "hub", "play", "studio", "talker", "recipe",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "load":  # a model that reads and draws, one to talk to, or a world to play in, ready to hand
        return importlib.import_module("vitrail.ready").load
    if name in _ROOMS:
        return importlib.import_module(f"vitrail.{name}")
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}; its rooms are {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), "load", *_ROOMS])
