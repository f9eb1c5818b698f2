"""Residual sum and RMSNorm in one kernel for Hopper GPUs (Mosaic GPU).

What: x + delta, and the norm of that sum, for steps of few rows. XLA makes two or three kernels of it, and in a decode
step each costs 2 to 3 us however little it does, 64 times in Llama-8B. delta may come in parts: a product with few rows
and outputs fills the card only if it is split along its inputs. XLA splits such products too, and spends a kernel on
each sum; here the sum costs nothing of its own.

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
from jaxserve.shapes import ceil_div

THREADS = 128  # of a warpgroup
VECTOR = 8  # elements of 16 bits that a thread loads at once
MOST_ROWS = 512
DTYPES = ("bfloat16", "float16")
MULTIPROCESSORS = 132  # of an H100 SXM, H200 or GH200
MOST_PARTS = 8


def vector_of(size: int) -> int:
    """Most elements per load with which the threads of a warpgroup cover a row evenly; 0: none do."""
    return next((v for v in (VECTOR, 4, 2) if size % (THREADS * v) == 0), 0)


def _body(x_ref, delta_ref, weight_ref, sum_ref, out_ref, *, eps: float):
    row, size = lax.axis_index("cta"), x_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector_of(size))

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    if len(delta_ref.shape) == 2:
        delta = load(delta_ref.at[row])
    else:
        parts = [load(delta_ref.at[i, row]) for i in range(delta_ref.shape[0])]
        delta = sum(parts[1:], parts[0]).astype(x_ref.dtype).astype(jnp.float32)  # as one product would be rounded
    total = (load(x_ref.at[row]) + delta).astype(sum_ref.dtype)
    weight = load(weight_ref)
    sum_ref.at[row][...] = total
    total = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(total * total) * (1.0 / size) + eps)
    out_ref.at[row][...] = (total * scale * weight).astype(out_ref.dtype)


# One module-level jit, so that all norms of a step share one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("eps",))
def _add_norm(x: Array, delta: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(
        partial(_body, eps=eps), out_type=(like, like), grid=(x.shape[0],), grid_names=("cta",), kernel_name="add_norm"
    )
    return kernel(x, delta, weight)


def parts(rows: int, out: int, size: int) -> int:
    """Into how many parts a product of x [rows, size] and w [out, size] is split for `add_norm` to add up.

    Measured on an H200 (docs/benchmarks.md): with more rows, or narrower matrices, XLA's own way is the faster one; a
    single row is best split into half as many.
    """
    count, tiles = 1, ceil_div(out, 64) * (2 if rows == 1 else 1)
    if rows > (128 if out >= 4096 else 32) or not vector_of(out):
        return count
    while tiles * count <= MULTIPROCESSORS and count < MOST_PARTS and size % (2 * count * 64) == 0:
        count *= 2
    return count


def add_norm(x: Array, delta: Array | None, weight: Array, eps: float) -> tuple[Array, Array]:
    """As `reference.add_norm`, which takes what is too large or has no even shape."""
    if delta is None or x.shape[0] > MOST_ROWS or not vector_of(x.shape[1]) or str(x.dtype) not in DTYPES:
        return reference.add_norm(x, delta, weight, eps)
    return _add_norm(x, delta, weight, eps=eps)
