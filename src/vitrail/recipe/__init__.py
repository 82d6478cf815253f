"""Recipes: trainings described in TOML. Load, check, build, train and sweep them."""

from vitrail.lazy_imports import lazy_imports

__getattr__, __dir__, __all__ = lazy_imports(__name__, __file__)
