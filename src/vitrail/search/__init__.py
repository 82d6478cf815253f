"""Search the images of a folder by text or by example image."""

from vitrail.search.image_index import ImageEmbedder, ImageIndex, IndexEntry, update_index
from vitrail.search.query import SearchQuery, find_nearest

__all__ = ["ImageEmbedder", "ImageIndex", "IndexEntry", "SearchQuery", "find_nearest", "update_index"]
