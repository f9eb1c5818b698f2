"""From bytes to pages: what is said when there are too few."""

import pytest

from jaxserve.errors import DoesNotFit
from jaxserve.paging.kv_cache import size_pool


@pytest.mark.parametrize("budget_bytes", [-5, 0, 1, 16 * 100, 2 * 16 * 100 - 1])
def test_too_little_for_one_page_names_need_have_and_both_options(budget_bytes: int):
    with pytest.raises(DoesNotFit) as caught:
        size_pool(budget_bytes, page_size=16, bytes_per_token=100, max_model_len=None, model_max_len=64)
    for word in ("2 pages of 1600 bytes", f" {max(budget_bytes, 0)} bytes:", "--kv-cache-memory-bytes"):
        assert word in caught.value.message
