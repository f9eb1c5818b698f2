"""The registry of attention backends: which kernels a device gets, and what they offer to the step.

To add a backend: one file `<op>_<backend>.py`, one entry in `_BACKENDS`, and its name in config.py's choices.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import Array

from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

log = logging.getLogger(__name__)

# wgmma exists on Hopper alone: Ampere and Ada lack it, Blackwell replaced it
_HOPPER = re.compile(r"\bG?H(?:20|100|200|800)\b")
# compute capability 8.0, 8.6 and 8.9
_AMPERE_OR_ADA = re.compile(
    r"NVIDIA (?:A(?:2|10|10G|10M|16|30|40|100|800)|L(?:2|4|20|40|40S)|RTX A\d+|.* Ada Generation|GeForce RTX [34]0\d0)"
    r"\b"
)


@dataclass(frozen=True)
class Backend:
    """Attention kernels of one kind for one platform. All functions are traced inside the step's jit.

    prepare(meta, page_size) -> meta: once per step, what all layers share.
    attend(qkv, kv, meta, cos, sin, *, num_heads, bias, q_norm, k_norm, eps, scale, sliding_window, softcap, sinks)
        -> [T, N, H], KVPages: `reference.rope_and_write`, then `reference.attention`. Donates `kv`; padding tokens go
        to page 0.
    halves: `rope_and_write` and `attention` as two functions, for benchmarks and tests; `attend` may be one kernel.
    add_norm(x [T, D], delta [T, D] or None, weight [D], eps) -> x + delta, its RMSNorm. delta may be float32 parts
        [n, T, D] of a product.
    parts(T, out, in) -> n: how many it is best made of; 1: none.
    gated_product(x [T, D], w [2F, D]) -> [T, F]: `reference.gated_product`.
    stored_head_dim(H): how wide a page of `kv` is; what lies past H is 0.
    lowered_for: the kind of device that kernels are lowered for where the real one is elsewhere; None: its own.
    """

    name: str
    platform: str  # "cpu", "gpu" or "tpu"
    page_sizes: tuple[int, ...]
    default_page_size: int
    prepare: Callable[[AttentionInput, int], AttentionInput]
    attend: Callable[..., tuple[Array, KVPages]]
    halves: tuple[Callable[..., tuple[Array, KVPages]], Callable[..., Array]]
    add_norm: Callable[..., tuple[Array, Array]] = reference.add_norm
    parts: Callable[[int, int, int], int] = reference.parts
    gated_product: Callable[[Array, Array], Array] = reference.gated_product
    stored_head_dim: Callable[[int], int] = lambda head_dim: head_dim
    lowered_for: str | None = None


@dataclass(frozen=True)
class Device:
    """What a backend is chosen by."""

    platform: str  # as jax's Device.platform: "cpu", "gpu" (also "cuda"), "tpu"
    kind: str  # as jax's Device.device_kind, e.g. "NVIDIA H200"
    dtype: str | None  # of the model and its KV pages; None: not known, not checked
    head_dim: int | None
    group: int | None  # query heads per kv head

    def __str__(self) -> str:
        return f"{self.kind} ({self.platform})"


def resolve_backend(
    name: str,
    platform: str,
    device_kind: str,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    group: int | None = None,
) -> Backend:
    """The backend of that name, or the best one for the device if `name` is "auto"; logs the choice.

    Raises ConfigError if there is no such backend, or if one that was asked for by name cannot run here.
    """
    device = Device("gpu" if platform in ("cuda", "rocm") else platform, device_kind, dtype, head_dim, group)
    if name != "auto":
        if name not in _BACKENDS:
            known = ", ".join(["auto", *_BACKENDS])
            raise ConfigError(f"--attention-backend must be one of {known}, got {name!r}", param="attention_backend")
        _, why_not, make = _BACKENDS[name]
        if reason := why_not(device):
            raise ConfigError(f"--attention-backend {name} cannot run: {reason}", param="attention_backend")
        log.info("attention backend: %s on %s, as asked", name, device)
        return make(device)
    for name, (its_platform, why_not, make) in _BACKENDS.items():
        if reason := why_not(device):
            # On a CPU nobody expects a GPU's kernels, and as a start's first line it reads like a fault.
            log.log(
                logging.INFO if its_platform == device.platform else logging.DEBUG, "%s passed over: %s", name, reason
            )
            continue
        log.info("attention backend: %s on %s", name, device)
        return make(device)
    raise AssertionError("the reference backend runs everywhere")


def in_turn(
    rope_and_write: Callable[..., tuple[Array, KVPages]], attention: Callable[..., Array]
) -> Callable[..., tuple[Array, KVPages]]:
    """`Backend.attend`, of its two halves."""

    def attend(
        qkv: Array, kv: KVPages, meta: AttentionInput, cos: Array, sin: Array, *,
        scale: float, sliding_window: int | None, softcap: float | None, sinks: Array | None, **projection: Any,
    ) -> tuple[Array, KVPages]:  # fmt: skip
        q, kv = rope_and_write(qkv, kv, meta, cos, sin, **projection)
        return attention(q, kv, meta, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks), kv

    return attend


def _make_reference(device: Device) -> Backend:
    tuning = reference.CPU_TUNING if device.platform == "cpu" else reference.GPU_TUNING
    halves = reference.rope_and_write, partial(reference.attention, tuning=tuning)
    return Backend(
        name="reference",
        platform=device.platform,
        page_sizes=(16, 32, 64, 128, 256),
        default_page_size=16,
        prepare=partial(reference.prepare, tuning=tuning),
        attend=in_turn(*halves),
        halves=halves,
    )


def _why_not_mosaic_gpu(device: Device) -> str | None:
    if device.platform != "gpu" or not _HOPPER.search(device.kind):
        return f"it needs an NVIDIA Hopper GPU (H100, H200, H800, H20, GH200), and this is {device}"
    from jaxserve.pallas_kernels import paged_attention_mosaic_gpu as kernel

    return kernel.unsupported(dtype=device.dtype, head_dim=device.head_dim, group=device.group)


def _make_mosaic_gpu(device: Device) -> Backend:
    from jaxserve.pallas_kernels import paged_attention_mosaic_gpu as kernel
    from jaxserve.pallas_kernels.add_norm_mosaic_gpu import add_norm, parts
    from jaxserve.pallas_kernels.gated_product_mosaic_gpu import gated_product
    from jaxserve.pallas_kernels.kernel_hash import make_kernel_hashes_stable
    from jaxserve.pallas_kernels.rope_write_mosaic_gpu import rope_and_write

    make_kernel_hashes_stable()
    return Backend(
        name="mosaic_gpu",
        platform=device.platform,
        page_sizes=kernel.PAGE_SIZES,
        default_page_size=64,
        prepare=kernel.prepare,
        attend=kernel.attend,
        halves=(rope_and_write, kernel.attention),
        add_norm=add_norm,
        parts=parts,
        gated_product=gated_product,
        stored_head_dim=kernel.stored_head_dim,
    )


def _why_not_triton(device: Device) -> str | None:
    if device.platform != "gpu" or not (_AMPERE_OR_ADA.match(device.kind) or _HOPPER.search(device.kind)):
        return f"it needs an NVIDIA Ampere, Ada or Hopper GPU (A100, L4, RTX 4090, H100, ...), and this is {device}"
    from jaxserve.pallas_kernels import paged_attention_triton as kernel

    return kernel.unsupported(dtype=device.dtype, head_dim=device.head_dim)


def _make_triton(device: Device) -> Backend:
    from jaxserve.pallas_kernels import paged_attention_triton as kernel
    from jaxserve.pallas_kernels.rope_write_triton import rope_and_write

    tuning = kernel.tuning_of(device.head_dim)
    halves = rope_and_write, partial(kernel.attention, tuning=tuning)
    return Backend(
        name="triton",
        platform=device.platform,
        page_sizes=kernel.PAGE_SIZES,
        default_page_size=64,
        prepare=partial(kernel.prepare, tuning=tuning),
        attend=in_turn(*halves),
        halves=halves,
        lowered_for="NVIDIA A100",  # JAX knows few kinds by name, and lowers these kernels alike for all
    )


def _why_not_mosaic_tpu(device: Device) -> str | None:
    needs = f"it needs a TPU v4, v5e, v5p, v6e or 7x, and this is {device}"
    if device.platform != "tpu":
        return needs
    from jaxserve.pallas_kernels import ragged_paged_attention_mosaic_tpu as kernel

    if kernel.generation_of(device.kind) is None:
        return needs
    return kernel.unsupported(dtype=device.dtype, head_dim=device.head_dim)


def _make_mosaic_tpu(device: Device) -> Backend:
    from jaxserve.pallas_kernels import ragged_paged_attention_mosaic_tpu as kernel
    from jaxserve.pallas_kernels.rope_write_mosaic_tpu import rope_and_write

    generation = kernel.generation_of(device.kind)
    assert generation is not None, "it can run here"
    tuning = kernel.TUNING[generation]
    halves = rope_and_write, partial(kernel.attention, tuning=tuning)
    return Backend(
        name="mosaic_tpu",
        platform=device.platform,
        page_sizes=kernel.PAGE_SIZES,
        default_page_size=64,
        prepare=partial(kernel.prepare, tuning=tuning),
        attend=in_turn(*halves),
        halves=halves,
        stored_head_dim=kernel.stored_head_dim,
    )


# Best first: `auto` takes the first that can run. Each: its platform, why it cannot run on a device (None: it can), how
# it is made.
_BACKENDS: dict[str, tuple[str | None, Callable[[Device], str | None], Callable[[Device], Backend]]] = {
    "mosaic_gpu": ("gpu", _why_not_mosaic_gpu, _make_mosaic_gpu),
    "triton": ("gpu", _why_not_triton, _make_triton),
    "mosaic_tpu": ("tpu", _why_not_mosaic_tpu, _make_mosaic_tpu),
    "reference": (None, lambda device: None, _make_reference),
}
