"""A device's memory that runs out: an error with figures, and what can be done about it."""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxserve.config import size_text
from jaxserve.errors import DoesNotFit


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do where there is no room, and the option that it speaks of, if it is one."""

    text: str
    param: str | None = None


MORE_FOR_WEIGHTS = Advice(
    "give more of it with --gpu-memory-utilization, use more devices (--tensor-parallel-size), weights in 8 bits "
    "(--quantization) or a smaller model",
    "gpu_memory_utilization",
)
SMALLER_STEPS = Advice("take smaller steps with --max-num-batched-tokens or --max-num-seqs", "max_num_batched_tokens")
AFTER_SLEEP = Advice(
    "the engine is still asleep; others may have taken memory meanwhile: free it and wake up again, or start anew with "
    "less"
)


def smaller_kv_cache(size_bytes: int, share: float | None) -> Advice:
    """What leaves more for the rest, where the KV cache has that size. share: of --gpu-memory-utilization, if that
    decided over it.
    """
    less = f"ask for a KV cache of less than {size_text(size_bytes)} with --kv-cache-memory-bytes"
    if share is None:
        return Advice(less, "kv_cache_memory_bytes")
    others = f"if others use the device too, leave them more with a --gpu-memory-utilization below {share:g}"
    return Advice(f"{others}; or {less}", "gpu_memory_utilization")


@contextlib.contextmanager
def room_for(what: str, mesh: Mesh, advice: Advice) -> Iterator[None]:
    """A context in which `what` is allocated on the devices of `mesh`. Raises DoesNotFit if one has no room for it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what they had allocated would live as long as the error
        said = str(error).splitlines()[0]
        message = f"a device has no room for {what} ({_in_use(mesh)}{said}): {advice.text}"
        raise DoesNotFit(message, param=advice.param) from error


def is_exhausted(error: Exception) -> bool:
    """Whether it says that there is not enough memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _in_use(mesh: Mesh) -> str:
    """Of the fullest device. A CPU does not tell."""
    found = [stats for device in mesh.local_devices if (stats := device.memory_stats())]
    if not found:
        return ""
    fullest = max(found, key=lambda stats: stats["bytes_in_use"])
    used, limit = (size_text(fullest[name]) for name in ("bytes_in_use", "bytes_limit"))
    return f"{used} of the {limit} that jaxserve may take are in use; "
