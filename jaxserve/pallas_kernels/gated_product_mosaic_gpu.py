"""Gate and up products of a SwiGLU block in one kernel for Hopper GPUs (Mosaic GPU).

What: silu(x @ gate.T) * (x @ up.T). XLA makes a product of it whose [T, 2F] goes to memory, and a kernel that reads
that and writes [T, F]. Here the epilogue of the product does it, in f32, and only [T, F] is written.

Why this shape: with enough tokens the card multiplies at its power limit, so the aim is cuBLAS's product and nothing on
top of it.
  - A tile of out is 128 tokens by 128 columns, so its product is 128 by 256: gate rows and up rows of w lie one after
    the other in shared memory and are the operand of one wgmma. Each of two compute warpgroups takes 64 tokens.
  - One CTA per multiprocessor goes from tile to tile. A memory warpgroup fills a ring of K steps by TMA, and is at the
    next tile's while this one's epilogue runs.
  - CTAs go in pairs, neighbours along the tokens, that share the rows of w: each fetches half of them for both.
  - Tiles are taken token tiles first within a group of token tiles, so that what runs side by side fits the L2 cache.

Diary (H200, jax 0.11.2, bfloat16, normal numbers, sustained at the card's power limit; us; beside it XLA: cuBLAS's
product with silu, and the product alone):
    Llama-8B (D 4096, F 14336), T 128: 72.1 (74.8, 72.0)    256: 105.1 (117.6, 110.6)    512: 194.7 (203.1, 191.8)
                                2048: 731 (773, 721)        8192: 2,935 (2,985, 2,836)   64: 73.1 (63.8), left to XLA
    Qwen-1.5B (D 1536, F 8960), T 256: 32.1    512: 53.1 (56.6, 51.4)    8192: 716 (768, 675)
    No pairs: 104.6 at 256, 2,954 at 8192. Pairs along the columns, which share x: 3 to 4% slower everywhere. The second
    compute warpgroup kept two K steps behind the first, so that one multiplies while the other does its epilogue: no
    difference, since it is power that limits, and no idle tensor core. Groups of 16: 2,956 at 8192.
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.add_norm_mosaic_gpu import DTYPES, MULTIPROCESSORS
from jaxserve.shapes import ceil_div

ALIGN = 8  # rows that a TMA copy of a swizzled tile moves together
TOKENS = 128  # of a tile of out
WARPGROUPS = 2  # that multiply, each half of a tile's tokens
LEAST_TOKENS = 128  # with fewer, half of a tile would be idle
STEP = 64  # of the K axis: 128 bytes, the widest swizzle
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tuning:
    """How the work is cut."""

    columns: int = 128  # of a tile of out: its product is twice as wide
    pair: bool = True  # two CTAs share w
    stages: int = 4  # K steps in flight
    group: int = 8  # token tiles (or pairs of them) that share what of w is in the L2 cache
    multiprocessors: int = MULTIPROCESSORS  # of the card: each has one CTA

    def __post_init__(self) -> None:
        if self.columns % 16 or not 16 <= self.columns <= 128:
            raise ValueError(f"Tuning.columns must be a multiple of 16 up to 128, got {self.columns}")

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return 2 if self.pair else 1

    def tiles(self, tokens: int, columns: int) -> tuple[int, int]:
        """Tiles of a cluster that cover out [tokens, columns]: how many along each axis."""
        return ceil_div(tokens, TOKENS * self.ctas), ceil_div(columns, self.columns)

    def fill(self, tokens: int, columns: int) -> float:
        """What part of all waves of tiles is needed for out [tokens, columns]."""
        clusters = self.multiprocessors // self.ctas
        waves = ceil_div(math.prod(self.tiles(tokens, columns)), clusters)
        return tokens * columns / (waves * clusters * self.ctas * TOKENS * self.columns)


def tuning_for(tokens: int, columns: int) -> Tuning:
    """The one whose waves are fullest, where narrow tiles count for a little less, and those without a pair."""

    def worth(tuning: Tuning) -> float:
        return tuning.fill(tokens, columns) * tuning.columns / (tuning.columns + 8) * (1 if tuning.pair else 0.99)

    return max((Tuning(wide, pair) for wide in (128, 112, 96, 80) for pair in (True, False)), key=worth)


def _silu(gate: Array) -> Array:
    root = lax.rsqrt(1.0 + jnp.exp2(gate * -LOG2E))  # squared, it is 1 / (1 + e^-gate) without a division
    return gate * root * root


def _body(
    x_ref,  # [T, D]
    w_ref,  # [2F, D]
    out_ref,  # [T, F]
    *,
    x_smem,  # [stages, TOKENS, STEP]
    w_smem,  # [stages, 2 * columns, STEP]
    out_smem,  # [WARPGROUPS, TOKENS / WARPGROUPS, columns]
    full,  # barrier[stages]
    free,  # barrier[stages], of all CTAs of the cluster
    tuning: Tuning,
):
    columns, stages = tuning.columns, tuning.stages
    steps, out_columns = x_ref.shape[1] // STEP, out_ref.shape[1]
    num_tiles = tuning.tiles(*out_ref.shape)
    cluster, clusters = lax.axis_index("cluster"), jnp.int32(lax.axis_size("cluster"))
    warpgroup = lax.axis_index("warpgroup")
    count = lax.div(math.prod(num_tiles) - cluster + clusters - 1, clusters)  # tiles of this cluster

    def corner(i):
        """First token and first column of this CTA's i-th tile."""
        token, column = _ordered(cluster + i * clusters, num_tiles, tuning.group)
        if tuning.pair:
            token = 2 * token + lax.axis_index("pair")
        return token * TOKENS, column * columns

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    @pl.when(warpgroup == WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(40, action="decrease")
        by_both = "pair" if tuning.pair else None

        @pl.loop(0, count)
        def _(i):
            token, column = corner(i)

            @pl.loop(0, steps)
            def _(k):
                step = i * steps + k
                slot, depth = slot_of(step), pl.ds(k * STEP, STEP)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, TOKENS), depth], x_smem.at[slot], full.at[slot])
                for first, part in ((0, 0), (out_columns, columns)):
                    source, place = pl.ds(first + column, columns), pl.ds(part, columns)
                    plgpu.copy_gmem_to_smem(
                        w_ref.at[source, depth], w_smem.at[slot, place], full.at[slot], collective_axes=by_both
                    )

        total = count * steps

        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):  # stay until the other CTA, too, is done with what it gets from here
            plgpu.barrier_wait(free.at[slot_of(step)])

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        rows = TOKENS // WARPGROUPS

        @pl.loop(0, count)
        def _(i):
            def multiply(acc, k):
                slot = slot_of(i * steps + k)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, x_smem.at[slot, pl.ds(warpgroup * rows, rows)], w_smem.at[slot].T)

            def product(acc):
                multiply(acc, 0)

                @pl.loop(1, steps)
                def _(k):
                    multiply(acc, k)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(free.at[slot_of(i * steps + k - 1)])

                return acc[...]

            both = pl.run_scoped(product, plgpu.ACC((rows, 2 * columns), jnp.float32))
            plgpu.barrier_arrive(free.at[slot_of((i + 1) * steps - 1)])
            out = (_silu(both[:, :columns]) * both[:, columns:]).astype(out_ref.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem.at[warpgroup][...] = out
            plgpu.commit_smem()
            token, column = corner(i)
            place = out_ref.at[pl.ds(token + warpgroup * rows, rows), pl.ds(column, columns)]
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], place)

        plgpu.wait_smem_to_gmem(0)


def _ordered(tile: Any, num_tiles: tuple[int, int], group: int) -> tuple[Any, Any]:
    """The tile's place: token tiles first, within groups of them."""
    tokens, columns = num_tiles
    per_group = jnp.int32(min(group, tokens) * columns)
    first = lax.div(tile, per_group) * group
    within, width = lax.rem(tile, per_group), jnp.minimum(tokens - first, group)
    return first + lax.rem(within, width), lax.div(within, width)


# One module-level jit, so that every layer of a step shares one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("tuning",))
def _gated_product(x: Array, w: Array, *, tuning: Tuning) -> Array:
    """x [T, D], T a multiple of 8; w [2F, D] -> [T, F]."""
    out_shape = (x.shape[0], w.shape[0] // 2)
    stages = tuning.stages

    def tiled(*shape: int):
        width = math.gcd(shape[-1], 64)
        transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
        return plgpu.SMEM(shape, x.dtype, transforms=transforms)

    shared = partial(plgpu.ClusterBarrier, collective_axes=("pair",)) if tuning.pair else plgpu.Barrier
    scratch = {
        "x_smem": tiled(stages, TOKENS, STEP),
        "w_smem": tiled(stages, 2 * tuning.columns, STEP),
        "out_smem": tiled(WARPGROUPS, TOKENS // WARPGROUPS, tuning.columns),
        "full": plgpu.Barrier(num_barriers=stages, num_arrivals=3),
        "free": shared(num_barriers=stages, num_arrivals=WARPGROUPS),
    }
    kernel = plgpu.kernel(
        partial(_body, tuning=tuning),
        out_type=jax.ShapeDtypeStruct(out_shape, x.dtype),
        scratch_types=scratch,
        grid=(min(tuning.multiprocessors // tuning.ctas, math.prod(tuning.tiles(*out_shape))),),
        grid_names=("cluster",),
        **({"cluster": (2,), "cluster_names": ("pair",)} if tuning.pair else {}),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="gated_product",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(x, w)


def supports(tokens: int, size: int, columns: int, dtype: str) -> bool:
    """Whether the kernel takes x [tokens, size] and w [2 * columns, size] of a dtype."""
    return tokens > 0 and size % STEP == 0 and size >= 2 * STEP and columns % 64 == 0 and dtype in DTYPES


def multiply(x: Array, w: Array, tuning: Tuning) -> Array:
    """silu(x @ gate.T) * (x @ up.T), the products and silu in f32: x [T, D], w [2F, D] = gate, then up -> [T, F].

    Raises ValueError for what `supports` denies.
    """
    tokens, size = x.shape
    if x.dtype != w.dtype or w.shape[1] != size or not supports(tokens, size, w.shape[0] // 2, str(x.dtype)):
        raise ValueError(f"gated product on mosaic_gpu: cannot multiply {x.dtype}{x.shape} by {w.dtype}{w.shape}")
    x = jnp.pad(x, ((0, -tokens % ALIGN), (0, 0)))
    return _gated_product(x, w, tuning=tuning)[:tokens]


def gated_product(x: Array, w: Array) -> Array:
    """As `reference.gated_product`, which takes what has too few tokens or no even shape."""
    (tokens, size), columns = x.shape, w.shape[0] // 2
    if tokens < LEAST_TOKENS or not supports(tokens, size, columns, str(x.dtype)):
        return reference.gated_product(x, w)
    return multiply(x, w, tuning_for(tokens, columns))
