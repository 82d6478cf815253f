"""Plots, contact sheets and HTML pages."""

from vitrail.lazy_imports import lazy_imports

__getattr__, __dir__, __all__ = lazy_imports(__name__, __file__)
