"""Find pictures in a folder by words or by another picture."""

from vitrail.search.index import Entry, Eye, Index, update
from vitrail.search.query import Query, find

__all__ = ["Entry", "Eye", "Index", "Query", "find", "update"]
