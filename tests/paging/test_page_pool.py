"""The page pool and the prefix cache that lives on its free pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.paging.page_pool import InvariantError, PagePool
from jaxserve.paging.prefix_cache import PrefixCache, extend_hashes


def test_never_hands_out_the_trash_page():
    pool = PagePool(5, 4)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.num_free == 0 and pool.num_used == pool.capacity == 4


def test_too_many_pages_change_nothing():
    pool = PagePool(5, 4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(0) == []


def test_a_page_is_free_when_its_last_holder_has_gone():
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    assert pages
    pool.share(pages)
    pool.free(pages)
    assert pool.num_used == 1
    pool.free(pages)
    assert pool.num_used == 0


@pytest.mark.parametrize("page", [0, 1])
def test_freeing_what_nobody_holds_is_a_fault(page: int):
    pool = PagePool(3, 4)
    with pytest.raises(InvariantError, match=f"page {page} is freed more often"):
        pool.free([page])


def test_double_free_is_a_fault():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    assert pages
    pool.free(pages)
    with pytest.raises(InvariantError):
        pool.free(pages)


@pytest.mark.parametrize("page", [0, 1])
def test_sharing_an_empty_page_is_a_fault(page: int):
    with pytest.raises(InvariantError, match="neither used nor cached"):
        PagePool(3, 4).share([page])


def test_uncached_pages_go_first_then_the_longest_unused_and_tails_before_beginnings():
    pool = PagePool(8, 1)
    cache = PrefixCache(pool)
    first, second, plain = (pool.allocate(n) or [] for n in (3, 2, 2))
    for i, page in enumerate(first + second):
        cache.register(bytes([i]), page)
    pool.free(second)
    pool.free(plain)
    pool.free(first)
    order = [pool.allocate(1) or [] for _ in range(7)]
    assert [page for pages in order for page in pages] == plain + second[::-1] + first[::-1]


def test_a_used_page_is_never_evicted():
    pool = PagePool(4, 1)
    cache = PrefixCache(pool)
    pages = pool.allocate(2) or []
    cache.register(b"a", pages[0])
    cache.register(b"b", pages[1])
    pool.free(pages)
    pool.share(cache.lookup([b"a"], 9))
    assert pool.allocate(2) is not None
    assert pool.allocate(1) is None
    assert cache.lookup([b"a", b"b"], 9) == [pages[0]]


@pytest.mark.parametrize("sizes", [(1, 4), (4, 0)])
def test_senseless_sizes_are_refused(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="at least"):
        PagePool(*sizes)


def broken(change: str) -> PagePool:
    pool = PagePool(6, 4)
    PrefixCache(pool).register(b"a", (pool.allocate(1) or [0])[0])
    exec(change, {"pool": pool})
    return pool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pool._uncached_free.append(pool._uncached_free[0])", "twice"),
        ("pool._uncached_free.append(0)", "trash"),
        ("pool._refcounts[0] = 1", "trash"),
        ("pool._refcounts[3] = -1", "negative"),
        ("pool._refcounts[3] = 1", "differ"),
        ("pool._uncached_free.pop()", "differ"),
        ("pool._cached[3] = 1", "uncached part"),
        ("pool.free([1]); pool._cached[1] = 0", "in the cached part"),
    ],
)
def test_check_finds_broken_books(change: str, message: str):
    broken("pass").check()
    with pytest.raises(InvariantError, match=message):
        broken(change).check()


class PoolMachine(RuleBasedStateMachine):
    """Random holders of pages, some cached, against plain lists."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 2)
        self.cache = PrefixCache(self.pool)
        self.held: list[list[int]] = []
        self.contents: dict[int, list[bytes]] = {}  # page -> the chain of hashes up to it

    @rule(n=st.integers(0, 5), tokens=st.lists(st.integers(0, 1), min_size=10, max_size=10), cached=st.integers(0, 5))
    def allocate(self, n: int, tokens: list[int], cached: int) -> None:
        free = self.pool.num_free
        pages = self.pool.allocate(n)
        assert (pages is None) == (n > free)
        if pages is None:
            return
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, 2)
        for i, page in enumerate(pages):
            assert all(page not in others for others in self.held), "a used page was handed out"
            self.contents[page] = hashes[: i + 1]
        for page, page_hash in list(zip(pages, hashes, strict=False))[:cached]:
            self.cache.register(page_hash, page)
        self.held.append(pages)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=10, max_size=10), most=st.integers(0, 5))
    def share_cached(self, tokens: list[int], most: int) -> None:
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, 2)
        pages = self.cache.lookup(hashes, most)
        assert len(pages) <= most
        assert [self.contents[page] for page in pages] == [hashes[: i + 1] for i in range(len(pages))]
        free, revived = self.pool.num_free, self.pool.num_revived(pages)
        self.pool.share(pages)
        assert self.pool.num_free == free - revived
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert len(self.cache) == 0

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            self.cache.check()
            for page in range(1, self.pool.num_pages):
                assert self.pool.refcount(page) == sum(pages.count(page) for pages in self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
