"""Training tasks: a model with its losses. `task(batch)` returns the losses by name."""

from vitrail.lazy_imports import lazy_imports

__getattr__, __dir__, __all__ = lazy_imports(__name__, __file__)
