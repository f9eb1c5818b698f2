"""Paged decode attention for Hopper GPUs (Mosaic GPU): one query token per row, split over the row's KV.

What: each CTA takes one work item (a row and a range of its KV tiles) and one kv head. A memory warpgroup streams the
pages into a ring of KV tiles (TMA); a compute warpgroup keeps an online softmax and writes one partial result per
item; a small XLA fusion combines the items of a row.

Why this shape: decode reads all of K and V once and computes little, so the only aim is to keep bytes in flight.
  - Products are swapped (S^T = K Q^T, O^T = V^T P^T): the G query heads of a kv head become the narrow side of a
    wgmma (N = 8 or 16) and the 64 keys its M = 64, where the usual order would pad 4 query heads to 64.
  - Work items are made on the device from kv_lens, so nothing waits for the host. Their number is static; items
    beyond the real ones leave at once. A long row is cut into several so that a small batch fills the card too.

Diary (H200, jax 0.11.2, Llama-8B heads: N 32, K 8, H 128, bfloat16; us, floor at 4.3 TB/s in brackets):
    prototype  page 64, 4 stages, host-made items   256x2048 533 [499]   256x512 175 [125]   64x512 58 [31]
               without combine                       1x8192 25.7 [7.8]   1x512 28 [0.5]
               JAX's deprecated Triton op on the same: 923, 259, 77, 81, 65
    v1         items from kv_lens in the graph, pages of 16 to 256, window, softcap, poison-safe tails. With combine:
               256x2048 644   256x512 189   64x512 65   8x512 47   1x8192 34   1x512 22   (page 16: 5 to 15% more)
    v2         heads innermost in the grid, combine without the padded heads and with fewer splits:
               256x2048 635   256x512 162   64x512 57 (smaller shapes not timed again); the kernel alone, at 264 CTAs:
               620, 159, 56. Stages 4, 3, 2 at 264 CTAs: 256x512 164, 167, 176; 64x512 54, 56, 55
    Chains of 32 (v1) and 128 (v2) layers over permuted pages, one run each. 256x2048 is noisy: over the tunings of
    that run 635 to 713, and once 854. Next: why it stays above the prototype, direct output of rows with one item,
    a combine kernel.
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import KVPages
from jaxserve.shapes import ceil_div

KV_TILE = 64  # keys per tile: the M of a wgmma
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class DecodeTuning:
    """How the work is cut. `stages`: KV tiles in flight per CTA; `min_tiles`: least KV tiles of an item."""

    stages: int = 4
    target_ctas: int = 132  # one per multiprocessor of an H100 or H200: a ring of 128 KiB leaves no room for two
    min_tiles: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"DecodeTuning.{name} must be at least 1, got {value}")

    def stages_of(self, head_dim: int) -> int:
        """A ring of K and V tiles must fit in shared memory (227 KiB): 64 KiB per stage at head dim 256."""
        return min(self.stages, 3 if head_dim > 128 else self.stages)

    def spare_items(self, rows: int, kv_heads: int) -> int:
        """Items beyond one per row: what cutting long rows may add."""
        return max(ceil_div(self.target_ctas, kv_heads), rows // 8)

    def max_splits(self, rows: int, kv_heads: int) -> int:
        """Most items of one row: twice what fills the card if rows are equal, and 4 for the odd long one.

        The combine reads rows * max_splits partials whether they are there or not, so this cannot be generous.
        """
        return min(self.spare_items(rows, kv_heads) + 1, max(4, 2 * ceil_div(self.target_ctas, rows * kv_heads)))


class Work(NamedTuple):
    """The work items of a step, in row order. n = S + spare items, static."""

    items: Array  # i32[n, 3] row, first KV tile, end KV tile; padding items have end == first
    first_items: Array  # i32[S] first item of each row
    num_items: Array  # i32[S] how many; 0 for padding rows


def make_work(kv_lens: Array, kv_heads: int, sliding_window: int | None, tuning: DecodeTuning) -> Work:
    """Cuts the KV tiles that each row (kv_lens i32[S]) needs into items of nearly equal length.

    An item is `chunk` tiles at most, with the smallest chunk for which the items fit:
    sum(ceil(tiles / chunk)) <= sum(tiles) / chunk + S <= spare + S.
    """
    rows = kv_lens.shape[0]
    spare, max_splits = tuning.spare_items(rows, kv_heads), tuning.max_splits(rows, kv_heads)
    begin = jnp.zeros_like(kv_lens) if sliding_window is None else jnp.maximum(0, kv_lens - sliding_window) // KV_TILE
    tiles = (kv_lens + KV_TILE - 1) // KV_TILE - begin  # i32[S]
    chunk = jnp.maximum(tuning.min_tiles, (jnp.sum(tiles) + spare - 1) // spare)
    chunk = jnp.maximum(chunk, (jnp.max(tiles) + max_splits - 1) // max_splits)
    count = (tiles + chunk - 1) // chunk  # i32[S]
    end = jnp.cumsum(count)
    item = jnp.arange(rows + spare, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(end, item, side="right", method="compare_all"), rows - 1).astype(jnp.int32)
    nth = item - (end - count)[row]  # which of its row's items
    share = jnp.maximum(count[row], 1)
    bounds = [begin[row] + (nth + i) * tiles[row] // share for i in (0, 1)]
    real = item < end[-1]
    items = jnp.stack([row, *(jnp.where(real, b, 0) for b in bounds)], axis=1)
    return Work(items.astype(jnp.int32), (end - count).astype(jnp.int32), count.astype(jnp.int32))


def _body(
    q_ref,  # [S, K, Gp, H]
    k_ref,  # [P, K, page, H]
    v_ref,  # [P, K, page, H]
    items_ref,  # i32[n, 3]
    lens_ref,  # i32[S]
    table_ref,  # i32[S, W]
    o_ref,  # f32[n, K, Gp, H] out: not yet divided by the total
    m_ref,  # f32[n, K, Gp] out: running maximum, in units of log2
    total_ref,  # f32[n, K, Gp] out: sum of 2 ** (s - m)
    *,
    q_smem,  # [Gp, H]
    k_smem,  # [stages, KV_TILE, H]
    v_smem,  # [stages, KV_TILE, H]
    p_smem,  # [Gp, KV_TILE]
    o_smem,  # f32[Gp, H]
    m_smem,  # f32[Gp]
    total_smem,  # f32[Gp]
    q_full,  # barrier
    k_full,  # barrier[stages]
    v_full,  # barrier[stages]
    k_free,  # barrier[stages]
    v_free,  # barrier[stages]
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
):
    stages, _, head_dim = k_smem.shape
    group = q_smem.shape[0]
    page_size, width = k_ref.shape[2], table_ref.shape[1]
    # heads innermost: CTAs that run together read the heads of the same pages, which lie side by side
    kv_heads = jnp.int32(k_ref.shape[1])
    item, head = lax.div(lax.axis_index("cta"), kv_heads), lax.rem(lax.axis_index("cta"), kv_heads)
    row, first_tile = items_ref[item, 0], items_ref[item, 1]
    num_tiles = items_ref[item, 2] - first_tile
    kv_len = lens_ref[row]

    def load_tile(i, slot):
        if page_size >= KV_TILE:  # a tile is a piece of one page
            tiles_per_page = page_size // KV_TILE
            tile = first_tile + i
            page = table_ref[row, lax.div(tile, jnp.int32(tiles_per_page))]
            start = lax.rem(tile, jnp.int32(tiles_per_page)) * KV_TILE
            for pool, ring, full in ((k_ref, k_smem, k_full), (v_ref, v_smem, v_full)):
                source = pool.at[page, head] if tiles_per_page == 1 else pool.at[page, head, pl.ds(start, KV_TILE)]
                plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])
            return
        pages_per_tile = KV_TILE // page_size
        for j in range(pages_per_tile):
            column = jnp.minimum((first_tile + i) * pages_per_tile + j, width - 1)
            page = table_ref[row, column]
            place = pl.ds(j * page_size, page_size)
            plgpu.copy_gmem_to_smem(k_ref.at[page, head], k_smem.at[slot, place], k_full.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[page, head], v_smem.at[slot, place], v_full.at[slot])

    @pl.when((lax.axis_index("warpgroup") == 1) & (num_tiles > 0))
    def _stream():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, num_tiles)
        def _(i):
            slot = lax.rem(i, jnp.int32(stages))

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])

            load_tile(i, slot)

    def live_keys(tile, shape, layout):
        """Which keys of a tile the row attends to, along the first axis of `shape`."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * KV_TILE
        live = key < kv_len
        return live if sliding_window is None else live & (key >= kv_len - sliding_window)

    def scores(dots):
        if softcap is None:
            return dots * (scale * LOG2E)
        # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 3 digits only
        return (softcap * LOG2E) * (1.0 - 2.0 / (jnp.exp2(dots * (2 * LOG2E * scale / softcap)) + 1.0))

    def clear_dead_values(tile, slot):
        """Zeroes the V rows that nothing attends to: they may be NaN, and 0 * NaN is NaN. Only in edge tiles."""
        edge = (tile + 1) * KV_TILE > kv_len
        if sliding_window is not None:
            edge |= tile * KV_TILE < kv_len - sliding_window

        @pl.when(edge)
        def _():
            v = plgpu.load(v_smem.at[slot], layout=plgpu.Layout.WGMMA)
            live = live_keys(tile, (KV_TILE, head_dim), plgpu.Layout.WGMMA)
            v_smem.at[slot][...] = jnp.where(live, v, jnp.zeros_like(v))
            plgpu.commit_smem()

    @pl.when((lax.axis_index("warpgroup") == 0) & (num_tiles > 0))
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_full)
        plgpu.barrier_wait(q_full)
        per_head = plgpu.Layout.WGMMA.reduce(0)
        m = plgpu.layout_cast(jnp.full((group,), reference.MASKED, jnp.float32), per_head)
        total = plgpu.layout_cast(jnp.zeros((group,), jnp.float32), per_head)
        acc = plgpu.layout_cast(jnp.zeros((head_dim, group), jnp.float32), plgpu.Layout.WGMMA)

        def step(i, carry):
            acc, m, total = carry  # f32 [H, Gp], [Gp], [Gp]
            slot, tile = lax.rem(i, jnp.int32(stages)), first_tile + i
            plgpu.barrier_wait(k_full.at[slot])

            def qk(out):
                plgpu.wgmma(out, k_smem.at[slot], q_smem.T)
                return out[...]

            s = scores(pl.run_scoped(qk, plgpu.ACC((KV_TILE, group), jnp.float32)))
            plgpu.barrier_arrive(k_free.at[slot])
            s = jnp.where(live_keys(tile, s.shape, plgpu.Layout.WGMMA), s, reference.MASKED)
            m_new = jnp.maximum(m, s.max(axis=0))
            shrink = jnp.exp2(m - m_new)
            p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [1]))
            total = total * shrink + p.sum(axis=0)
            p_smem.T[...] = p.astype(p_smem.dtype)
            plgpu.commit_smem()
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
            plgpu.barrier_wait(v_full.at[slot])
            clear_dead_values(tile, slot)

            def pv(out):
                plgpu.wgmma(out, v_smem.at[slot].T, p_smem.T)
                return out[...]

            acc = acc + pl.run_scoped(pv, plgpu.ACC((head_dim, group), jnp.float32))
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, m_new, total

        acc, m, total = lax.fori_loop(0, num_tiles, step, (acc, m, total))
        o_smem.T[...] = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        m_smem[...] = m
        total_smem[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_ref.at[item, head])
        plgpu.copy_smem_to_gmem(m_smem, m_ref.at[item, head])
        plgpu.copy_smem_to_gmem(total_smem, total_ref.at[item, head])
        plgpu.wait_smem_to_gmem(0)


# One module-level jit, so that every layer of a step shares one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "softcap", "stages"))
def _partials(
    q: Array, k: Array, v: Array, items: Array, kv_lens: Array, page_table: Array, *,
    scale: float, sliding_window: int | None, softcap: float | None, stages: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q [S, K, Gp, H]; k, v [P, K, page, H]; items i32[n, 3] -> f32 [n, K, Gp, H], [n, K, Gp], [n, K, Gp]."""
    _, kv_heads, group, head_dim = q.shape
    n, dtype = items.shape[0], k.dtype
    copies_per_tile = max(1, KV_TILE // k.shape[2])

    def tiled(*shape: int, dtype: Any = dtype, columns: int = 64):
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = {
        "q_smem": tiled(group, head_dim),
        "k_smem": tiled(stages, KV_TILE, head_dim),
        "v_smem": tiled(stages, KV_TILE, head_dim),
        "p_smem": tiled(group, KV_TILE),
        "o_smem": tiled(group, head_dim, dtype=jnp.float32, columns=32),
        "m_smem": plgpu.SMEM((group,), jnp.float32),
        "total_smem": plgpu.SMEM((group,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies_per_tile),
        "v_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies_per_tile),
        "k_free": plgpu.Barrier(num_barriers=stages),
        "v_free": plgpu.Barrier(num_barriers=stages),
    }
    kernel = plgpu.kernel(
        partial(_body, scale=scale, sliding_window=sliding_window, softcap=softcap),
        out_type=[
            jax.ShapeDtypeStruct((n, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n, kv_heads, group), jnp.float32),
            jax.ShapeDtypeStruct((n, kv_heads, group), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(n * kv_heads,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    o, m, totals = kernel(q, k, v, items, kv_lens, page_table)
    return o, m, totals


def _combine(o: Array, m: Array, totals: Array, work: Work, max_splits: int) -> Array:
    """Partials f32 [n, K, G, H], [n, K, G], [n, K, G] of the items -> f32[S, K, G, H], 0 for rows without items."""
    nth = jnp.arange(max_splits, dtype=jnp.int32)
    item = jnp.minimum(work.first_items[:, None] + nth, m.shape[0] - 1)  # i32[S, max_splits]
    real = (nth < work.num_items[:, None])[..., None, None]
    m = jnp.where(real, m[item], reference.MASKED)  # memory of items that left at once is never written
    weight = jnp.exp2(m - m.max(axis=1, keepdims=True))
    total = jnp.sum(jnp.where(real, weight * totals[item], 0), axis=1)
    out = jnp.sum(jnp.where(real[..., None], weight[..., None] * o[item], 0), axis=1)
    return jnp.where(total[..., None] > 0, out / jnp.where(total > 0, total, 1)[..., None], 0)


def unsupported(*, dtype: str | None, head_dim: int | None, group: int | None) -> str | None:
    """Why the kernel cannot serve a model, or None if it can. What is None is not checked."""
    if dtype is not None and dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, and the dtype is {dtype}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"it takes head dims {', '.join(map(str, HEAD_DIMS))}, and the model's is {head_dim}"
    if group is not None and not 1 <= group <= MAX_GROUP:
        return f"it takes 1 to {MAX_GROUP} query heads per kv head, and the model has {group}"
    return None


def decode_attention(
    q: Array,
    kv: KVPages,
    page_table: Array,
    kv_lens: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tuning: DecodeTuning = DecodeTuning(),
) -> Array:
    """Attention of one query per row: q [S, N, H], page_table i32[S, W], kv_lens i32[S] -> [S, N, H].

    Rows of length 0 get 0. Raises ValueError for shapes that the kernel does not take (see `unsupported`).
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = kv.k.shape
    group = heads // kv_heads
    if reason := unsupported(dtype=str(kv.k.dtype), head_dim=head_dim, group=group):
        raise ValueError(f"paged decode on mosaic_gpu: {reason}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"paged decode on mosaic_gpu: page size must be one of {PAGE_SIZES}, got {page_size}")
    work = make_work(kv_lens, kv_heads, sliding_window, tuning)
    qs = q.reshape(rows, kv_heads, group, head_dim).astype(kv.k.dtype)
    qs = jnp.pad(qs, ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
    o, m, totals = _partials(
        qs, kv.k, kv.v, work.items, kv_lens, page_table,
        scale=scale, sliding_window=sliding_window, softcap=softcap, stages=tuning.stages_of(head_dim),
    )  # fmt: skip
    o, m, totals = (x[:, :, :group] for x in (o, m, totals))
    return _combine(o, m, totals, work, tuning.max_splits(rows, kv_heads)).reshape(q.shape).astype(q.dtype)
