"""From bytes to pages: what is said when there are too few."""

import pytest

from jaxserve.errors import DoesNotFit
from jaxserve.paging.kv_cache import size_pool


@pytest.mark.parametrize(
    ("budget_bytes", "have"), [(-5, "0 bytes"), (0, "0 bytes"), (1, "1 bytes"), (16 * 100, "1.56 KiB")]
)
@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "gpu_memory_utilization"])
def test_too_little_for_one_page_names_need_have_and_the_option_that_counts(option: str, budget_bytes: int, have: str):
    sizes = {"page_size": 16, "bytes_per_token": 100, "max_model_len": None, "model_max_len": 64}
    with pytest.raises(DoesNotFit) as caught:
        size_pool(budget_bytes, **sizes, option=option)
    assert caught.value.message == (
        f"the KV cache needs 2 pages of 1.56 KiB at least and {have} are left: give more memory with "
        f"--{option.replace('_', '-')}, or use a smaller model"
    )
    assert caught.value.param == option


def test_a_sequence_that_is_too_long_is_told_sizes_in_a_unit_that_shows_them():
    with pytest.raises(DoesNotFit, match=r"needs 2\.03 MiB of KV cache and 1\.00 MiB are left"):
        size_pool(2**20, page_size=16, bytes_per_token=2**10, max_model_len=2064, model_max_len=4096)


def test_more_pages_than_can_be_numbered():
    with pytest.raises(
        DoesNotFit, match=r"a KV cache of .* would have \d+ pages.*at most 2147483647.*--kv-cache-memory"
    ):
        size_pool(2**50, page_size=16, bytes_per_token=2**10, max_model_len=64, model_max_len=64)
