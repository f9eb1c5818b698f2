"""Which KV pages are free, which are used, and by how many. Host side: page ids only, never jax.

    page 0              trash: padding writes there; never handed out, never counted
    refcount > 0        used; every holder counts one
    refcount == 0       free, in the order in which pages are handed out:

        uncached (last freed first)             cached (least recently freed first)
        [ 7  3  12 ]                         -> [ 9  4  5 ]
          nothing in them is of use               still readable by a prefix hit, which takes them out of the list

A page is `cached` while the prefix cache can find it. It stops being so when it is handed out again (`on_evict`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class InvariantError(RuntimeError):
    """The bookkeeping of pages or sequences contradicts itself: a bug in jaxserve, never the user's fault."""


class PagePool:
    """Free list and refcounts of `num_pages` pages of `page_size` tokens, page 0 (trash) included."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages and 1 token per page at least, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.capacity = num_pages - 1  # pages that can be handed out
        self.on_evict: Callable[[int], None] | None = None
        self._refcounts = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._uncached_free = list(range(num_pages - 1, 0, -1))  # a stack: the last is handed out first
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # the first is handed out first

    @property
    def num_free(self) -> int:
        return len(self._uncached_free) + len(self._cached_free)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def is_cached(self, page: int) -> bool:
        return bool(self._cached[page])

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages with refcount 1, or None (and nothing changed) if fewer are free."""
        if n > self.num_free:
            return None
        pages = []
        for _ in range(n):
            if self._uncached_free:
                page = self._uncached_free.pop()
            else:
                page, _ = self._cached_free.popitem(last=False)
                self._cached[page] = 0
                if self.on_evict:
                    self.on_evict(page)
            self._refcounts[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page: used ones, or free ones that are still cached."""
        for page in pages:
            if self._refcounts[page] == 0:
                if page not in self._cached_free:
                    raise InvariantError(f"page {page} is shared but neither used nor cached")
                del self._cached_free[page]
            self._refcounts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less for each page of a sequence, given in order: its tail is evicted before its beginning."""
        for page in reversed(pages):
            count = self._refcounts[page] - 1
            if count < 0:
                raise InvariantError(f"page {page} is freed more often than it was allocated and shared")
            self._refcounts[page] = count
            if count == 0:
                if self._cached[page]:
                    self._cached_free[page] = None
                else:
                    self._uncached_free.append(page)

    def num_revived(self, pages: Iterable[int]) -> int:
        """How many of `pages` are free now, so that sharing them takes them from `num_free`."""
        refcounts = self._refcounts
        return sum(refcounts[page] == 0 for page in pages)

    def mark_cached(self, page: int) -> None:
        """The prefix cache can find this (used) page from now on."""
        if self._refcounts[page] == 0:
            raise InvariantError(f"page {page} is cached but nobody holds it")
        self._cached[page] = 1

    def unmark_cached(self, page: int) -> None:
        """The prefix cache has forgotten this page; a free one is handed out before any cached one."""
        self._cached[page] = 0
        if page in self._cached_free:
            del self._cached_free[page]
            self._uncached_free.append(page)

    def check(self) -> None:
        """Raises InvariantError unless the picture at the top of this file holds. O(pages)."""
        free = self._uncached_free + list(self._cached_free)
        if len(set(free)) != len(free):
            raise InvariantError("a page is in the free list twice")
        if self._refcounts[0] or self._cached[0] or 0 in free:
            raise InvariantError("page 0 is the trash page and must stay out of use")
        if any(count < 0 for count in self._refcounts):
            raise InvariantError("a refcount is negative")
        unused = [page for page in range(1, self.num_pages) if self._refcounts[page] == 0]
        if sorted(free) != unused:
            raise InvariantError(f"free list {sorted(free)} and pages without a holder {unused} differ")
        if any(self._cached[page] for page in self._uncached_free):
            raise InvariantError("a cached page is in the uncached part of the free list")
        if not all(self._cached[page] for page in self._cached_free):
            raise InvariantError("an uncached page is in the cached part of the free list")
