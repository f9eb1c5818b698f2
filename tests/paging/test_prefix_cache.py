"""Hash chains, and what the index finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.paging.page_pool import InvariantError, PagePool
from jaxserve.paging.prefix_cache import PrefixCache, extend_hashes


def hashes_of(tokens: list[int], page_size: int = 4, **root: bytes) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, page_size, **root)
    return hashes


def filled(tokens: list[int], num_pages: int = 10) -> tuple[PagePool, PrefixCache, list[int]]:
    pool = PagePool(num_pages, 4)
    cache = PrefixCache(pool)
    hashes = hashes_of(tokens)
    pages = pool.allocate(len(hashes)) or []
    for page_hash, page in zip(hashes, pages, strict=True):
        cache.register(page_hash, page)
    return pool, cache, pages


def test_only_full_pages_have_a_hash():
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_a_chain_grown_in_steps_is_the_chain_made_at_once(tokens: list[int], cuts: list[int]):
    grown: list[bytes] = []
    for cut in sorted(cuts):
        extend_hashes(grown, tokens[:cut], 4)
    extend_hashes(grown, tokens, 4)
    assert grown == hashes_of(tokens)


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_equal_hash_means_equal_beginning(a: list[int], b: list[int]):
    for i, (x, y) in enumerate(zip(hashes_of(a), hashes_of(b), strict=True)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_the_same_page_after_another_beginning_is_another_page():
    _, cache, _ = filled([1, 1, 1, 1, 2, 2, 2, 2])
    assert cache.lookup(hashes_of([9, 9, 9, 9, 2, 2, 2, 2]), 9) == []
    assert cache.lookup(hashes_of([2, 2, 2, 2]), 9) == []


def test_other_roots_share_nothing():
    """Report 41: an adapter or a salt in the root of the chain keeps equal prompts apart."""
    tokens = list(range(12))
    _, cache, pages = filled(tokens)
    assert cache.lookup(hashes_of(tokens), 9) == pages
    assert cache.lookup(hashes_of(tokens, root=b"adapter"), 9) == []
    assert not set(hashes_of(tokens, root=b"salt a")) & set(hashes_of(tokens, root=b"salt b"))


def test_finds_the_longest_run_and_no_more_than_asked():
    tokens = list(range(16))
    _, cache, pages = filled(tokens)
    assert cache.lookup(hashes_of(tokens), 9) == pages
    assert cache.lookup(hashes_of(tokens), 3) == pages[:3]
    assert cache.lookup(hashes_of(tokens[:10] + [99] * 6), 9) == pages[:2]


def test_the_first_of_two_equal_pages_stays():
    pool, cache, pages = filled([1, 2, 3, 4])
    (twin,) = pool.allocate(1) or []
    cache.register(hashes_of([1, 2, 3, 4])[0], twin)
    assert cache.lookup(hashes_of([1, 2, 3, 4]), 1) == pages
    pool.free([twin])
    cache.check()
    pool.check()


def test_a_page_handed_out_again_is_forgotten():
    pool, cache, pages = filled(list(range(8)), num_pages=3)
    pool.free(pages)
    assert pool.allocate(1) == [pages[1]]
    assert cache.lookup(hashes_of(list(range(8))), 9) == pages[:1]
    cache.check()


def test_forgotten_pages_stay_with_their_holders():
    pool, cache, pages = filled(list(range(8)))
    cache.forget(hashes_of(list(range(4))) + [b"never seen"])
    assert cache.lookup(hashes_of(list(range(8))), 9) == []
    assert pool.num_used == 2
    pool.free(pages)
    cache.check()
    pool.check()


def test_reset_forgets_free_and_used_pages():
    pool, cache, pages = filled(list(range(12)))
    pool.free(pages[1:])
    cache.reset()
    assert len(cache) == 0 and cache.lookup(hashes_of(list(range(12))), 9) == []
    cache.check()
    pool.check()


def test_one_page_under_two_hashes_is_a_fault():
    _, cache, pages = filled([1, 2, 3, 4])
    with pytest.raises(InvariantError, match="two hashes"):
        cache.register(b"other", pages[0])


def test_check_finds_a_broken_index():
    pool, cache, pages = filled(list(range(8)))
    pool.unmark_cached(pages[0])
    with pytest.raises(InvariantError, match="marked as cached"):
        cache.check()
    _, cache, pages = filled(list(range(8)))
    del cache._hash_of[pages[0]]
    with pytest.raises(InvariantError, match="two directions"):
        cache.check()
