"""Finds KV pages that hold a known beginning of a sequence. Host side: hashes and page ids only, never jax.

    tokens   | t0 .. t15 | t16 .. t31 | t32 .. t40
    hashes     h0 = H(root, page 0)   h1 = H(h0, page 1)    (the last page is not full: no hash)
    index      {h0: page 7, h1: page 3}

A hash names everything up to the end of its page, so one equal hash means one equal beginning. Only full pages whose
tokens are known on the host and whose step is launched are registered: device order protects who reads them later.
Two pages may hold the same tokens (computed side by side); the first one stays in the index.
Whatever else the KV depends on (an adapter, a salt) belongs in the root of the chain.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from jaxserve.paging.page_pool import InvariantError, PagePool

HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a page: of its parent's hash and its own token ids as int32 bytes."""
    return blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], page_size: int, root: bytes = ROOT) -> None:
    """Appends to `hashes`, one per full page of `token_ids`, those that are missing."""
    done, full = len(hashes), len(token_ids) // page_size
    if full <= done:
        return
    raw = array("i", token_ids[done * page_size : full * page_size]).tobytes()
    parent = hashes[-1] if hashes else root
    page_bytes = page_size * 4
    for at in range(0, len(raw), page_bytes):
        parent = page_hash(parent, raw[at : at + page_bytes])
        hashes.append(parent)


class PrefixCache:
    """The index from hash to page. Pages stay in the pool, which tells by `on_evict` when it hands one out again."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._page_of)

    def lookup(self, hashes: list[bytes], max_pages: int) -> list[int]:
        """Pages of the longest known beginning, `max_pages` at most. The caller shares them before anything else."""
        pages = []
        for i in range(min(max_pages, len(hashes))):
            page = self._page_of.get(hashes[i])
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page_hash: bytes, page: int) -> None:
        """Makes a full, held page findable, unless another page with the same tokens already is."""
        if page_hash in self._page_of:
            return
        if page in self._hash_of:
            raise InvariantError(f"page {page} is registered under two hashes")
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        self._pool.mark_cached(page)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Makes these pages unfindable: what they hold is not to be trusted. Holders keep them."""
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is not None:
                self._evict(page)
                self._pool.unmark_cached(page)

    def reset(self) -> None:
        """Forgets every page (the weights have changed, say)."""
        self.forget(list(self._page_of))

    def _evict(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]

    def check(self) -> None:
        """Raises InvariantError unless index and pool agree about which pages are cached. O(pages)."""
        if {page: h for h, page in self._page_of.items()} != self._hash_of:
            raise InvariantError("the two directions of the prefix index differ")
        marked = {page for page in range(self._pool.num_pages) if self._pool.is_cached(page)}
        if marked != set(self._hash_of):
            raise InvariantError(f"pages marked as cached {marked} and pages in the index {set(self._hash_of)} differ")
