"""Preparation of inputs without weights: images, grids, resolution policies, tokenizers and chat templates."""

from vitrail.lazy_imports import lazy_imports

__getattr__, __dir__, __all__ = lazy_imports(__name__, __file__)
