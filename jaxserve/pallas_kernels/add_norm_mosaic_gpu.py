"""Residual sum and RMSNorm in one kernel for Hopper GPUs (Mosaic GPU).

What: x + delta, and the norm of that sum, for steps of few rows. XLA makes two or three kernels of it, and in a decode
step each costs 2 to 3 us however little it does, 64 times in Llama-8B.

Why this shape: a row is held in the registers of one warpgroup, read once and written once; the only thing that its
threads share is one sum. With many rows bandwidth is what counts, and XLA may add the residual in the epilogue of the
product before it: there `reference.add_norm` is used.
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference

THREADS = 128  # of a warpgroup
VECTOR = 8  # elements of 16 bits that a thread loads at once
MOST_ROWS = 512
DTYPES = ("bfloat16", "float16")


def vector_of(size: int) -> int:
    """Most elements per load with which the threads of a warpgroup cover a row evenly; 0: none do."""
    return next((v for v in (VECTOR, 4, 2) if size % (THREADS * v) == 0), 0)


def _body(x_ref, delta_ref, weight_ref, sum_ref, out_ref, *, eps: float):
    row, size = lax.axis_index("cta"), x_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector_of(size))

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    total = (load(x_ref.at[row]) + load(delta_ref.at[row])).astype(sum_ref.dtype)
    weight = load(weight_ref)
    sum_ref.at[row][...] = total
    total = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(total * total) * (1.0 / size) + eps)
    out_ref.at[row][...] = (total * scale * weight).astype(out_ref.dtype)


# One module-level jit, so that all norms of a step share one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("eps",))
def _add_norm(x: Array, delta: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(partial(_body, eps=eps), out_type=(like, like), grid=(x.shape[0],), grid_names=("cta",))
    return kernel(x, delta, weight)


def add_norm(x: Array, delta: Array | None, weight: Array, eps: float) -> tuple[Array, Array]:
    """As `reference.add_norm`, which takes what is too large or has no even shape."""
    if delta is None or x.shape[0] > MOST_ROWS or not vector_of(x.shape[1]) or str(x.dtype) not in DTYPES:
        return reference.add_norm(x, delta, weight, eps)
    return _add_norm(x, delta, weight, eps=eps)
