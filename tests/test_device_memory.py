"""What is said when a device's memory runs out."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.device_memory import Advice, room_for, smaller_kv_cache
from jaxserve.errors import DoesNotFit

ADVICE = Advice("take less", "max_num_seqs")


def mesh_of(*stats: dict[str, int] | None) -> Any:
    return SimpleNamespace(local_devices=[SimpleNamespace(memory_stats=lambda each=each: each) for each in stats])


def allocate(kept: int) -> None:
    kept_meanwhile = jnp.zeros(kept)
    raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory, after {kept_meanwhile.size}\nand more lines")


def test_figures_are_of_the_fullest_device():
    stats = [{"bytes_in_use": size * 2**30, "bytes_limit": 4 * 2**30} for size in (1, 3, 2)]
    with pytest.raises(DoesNotFit) as caught, room_for("the pages", mesh_of(*stats), ADVICE):
        allocate(8)
    assert caught.value.message == (
        "a device has no room for the pages (3.00 GiB of the 4.00 GiB that jaxserve may take are in use; "
        "RESOURCE_EXHAUSTED: Out of memory, after 8): take less"
    )
    assert caught.value.param == "max_num_seqs"


def test_what_was_allocated_before_is_freed_while_the_error_is_still_there():
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(DoesNotFit) as caught, room_for("the pages", mesh_of(None), ADVICE):
        allocate(12345)
    assert not [array for array in jax.live_arrays() if id(array) not in before and array.size == 12345]
    assert caught.value.__cause__ is not None


def test_other_errors_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), room_for("the pages", mesh_of(None), ADVICE):
        raise jax.errors.JaxRuntimeError("INTERNAL: anything")


def test_advice_names_the_option_that_sized_the_kv_cache():
    asked, shared = smaller_kv_cache(3 * 2**30, None), smaller_kv_cache(3 * 2**30, 0.9)
    assert asked == Advice(
        "ask for a KV cache of less than 3.00 GiB with --kv-cache-memory-bytes", "kv_cache_memory_bytes"
    )
    assert shared.param == "gpu_memory_utilization" and "--gpu-memory-utilization below 0.9" in shared.text
