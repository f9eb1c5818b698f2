"""From bytes to pages: how large the KV pool is, and what fits into it."""

import logging
from dataclasses import dataclass

from jaxserve.config import size_text
from jaxserve.errors import DoesNotFit
from jaxserve.shapes import ceil_div

log = logging.getLogger(__name__)

GiB = 2**30
MAX_PAGES = 2**31 - 1  # page ids are int32


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of an engine: pages include page 0, the trash page that padding writes to."""

    num_pages: int
    page_size: int
    page_bytes: int
    max_model_len: int  # the longest sequence that this engine takes

    @property
    def num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_pages - 1} pages of {self.page_size} tokens = {self.num_tokens} tokens "
            f"({size_text(self.nbytes)}); {self.num_tokens / self.max_model_len:.1f} sequences "
            f"of max_model_len {self.max_model_len} fit"
        )


def size_pool(
    budget_bytes: int,
    *,
    page_size: int,
    bytes_per_token: int,
    max_model_len: int | None,
    model_max_len: int,
    option: str = "kv_cache_memory_bytes",
) -> PoolSize:
    """How many pages a byte budget, which `option` sets, holds; `max_model_len` None takes the longest that fits.

    Raises DoesNotFit if one sequence of max_model_len tokens is more than the budget.
    """
    flag = f"--{option.replace('_', '-')}"
    page_bytes = page_size * bytes_per_token
    num_pages = budget_bytes // page_bytes
    longest = max(num_pages - 1, 0) * page_size
    if longest < 2:
        raise DoesNotFit(
            f"the KV cache needs 2 pages of {size_text(page_bytes)} at least and {size_text(max(budget_bytes, 0))} are "
            f"left: give more memory with {flag}, or use a smaller model",
            param=option,
        )
    if num_pages > MAX_PAGES:
        raise DoesNotFit(
            f"a KV cache of {size_text(budget_bytes)} would have {num_pages} pages of {page_size} tokens, and at most "
            f"{MAX_PAGES} are possible: ask for less with --kv-cache-memory-bytes",
            param="kv_cache_memory_bytes",
        )
    if max_model_len is None:
        max_model_len = min(longest, model_max_len)
        if max_model_len < model_max_len:
            log.info("max_model_len is %d: the longest that fits (the model's own is %d)", max_model_len, model_max_len)
    need = (ceil_div(max_model_len, page_size) + 1) * page_bytes
    if need > num_pages * page_bytes:
        raise DoesNotFit(
            f"one sequence of --max-model-len {max_model_len} needs {size_text(need)} of KV cache and "
            f"{size_text(budget_bytes)} are left; the longest that fits is {longest}: pass --max-model-len {longest} "
            f"(or auto), or give more memory with {flag}",
            param="max_model_len",
        )
    return PoolSize(num_pages, page_size, page_bytes, max_model_len)
