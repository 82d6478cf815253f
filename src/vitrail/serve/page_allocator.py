"""Pages of the KV cache: allocation, sharing of prefixes, and eviction.

A full page has a key: a hash of the keys of its tokens and of the page before it. A page with a key stays in the cache
after its sequence ends, until its memory is needed. A new sequence shares the pages of its longest cached prefix.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

PageKey = bytes


def hash_page(parent: PageKey, tokens: Sequence[Hashable]) -> PageKey:
    """Return the key of a full page, from the key of the page before it and the keys of its tokens."""
    return blake2b(parent + repr(tuple(tokens)).encode(), digest_size=16).digest()


class PageAllocator:
    """Allocate the pages 1 … num_pages − 1. Page 0 is for padding.

    `prefix_hits` and `prefix_queries` count the tokens that shared prefixes saved, and those that were looked up.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._keys: dict[int, PageKey] = {}  # page → key
        self._pages: dict[PageKey, int] = {}  # key → page
        self._unused: OrderedDict[int, None] = OrderedDict()  # pages with a key and no sequence, least recent first
        self.num_pages = num_pages - 1
        self.prefix_hits, self.prefix_queries = 0, 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return."""
        return len(self._free) + len(self._unused)

    @property
    def num_used(self) -> int:
        """Pages of sequences."""
        return self.num_pages - self.num_available

    def allocate(self) -> int | None:
        """Return a page for one sequence, or None. Evicts the cached page that was used least recently."""
        if self._free:
            page = self._free.pop()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            del self._pages[self._keys.pop(page)]
        else:
            return None
        self._references[page] = 1
        return page

    def find_prefix(self, keys: Sequence[PageKey]) -> list[int]:
        """Return the cached pages of the longest prefix of these page keys, without taking them."""
        found = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            found.append(page)
        return found

    def count_prefix(self, hits: int, queries: int) -> None:
        """Count the tokens of one lookup."""
        self.prefix_hits += hits
        self.prefix_queries += queries

    def share(self, pages: Sequence[int]) -> None:
        """Take cached pages for one more sequence."""
        for page in pages:
            if not self._references[page]:
                self._unused.pop(page)
            self._references[page] += 1

    def register(self, page: int, key: PageKey) -> None:
        """Give a full page its key. If another page has the same content, this one stays private."""
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Release the pages of a sequence. Its last page is evicted first, because prefixes need the first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._unused[page] = None
            else:
                self._free.append(page)

    def forget(self, pages: Sequence[int]) -> list[int]:
        """Remove the keys of pages that only one sequence has, so that no other shares them. Returns these pages."""
        own = [page for page in pages if self._references[page] == 1]
        for page in own:
            if page in self._keys:
                del self._pages[self._keys.pop(page)]
        return own

    def clear(self) -> None:
        """Forget all cached prefixes that no sequence uses."""
        while self._unused:
            page, _ = self._unused.popitem()
            del self._pages[self._keys.pop(page)]
            self._free.append(page)
