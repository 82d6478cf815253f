"""Find pictures in a folder by words or by another picture."""

from vitrail.search.find import Query, find
from vitrail.search.index import Entry, Eye, Index, update

__all__ = ["Entry", "Eye", "Index", "Query", "find", "update"]
