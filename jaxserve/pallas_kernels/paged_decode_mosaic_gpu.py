"""Paged decode attention for Hopper GPUs (Mosaic GPU): one query token per row, split over the row's KV.

What: each CTA is a worker of one kv head, with an equal share of the batch's KV tiles: rows one after the other, the
first and last of which it may have in part. A memory warpgroup streams the pages into a ring of KV tiles (TMA), without
a break between rows; a compute warpgroup keeps an online softmax. Who has a whole row writes its result; the parts of
a row that is split are partial results, which a second, small kernel combines in place.

Why this shape: decode reads all of K and V once and computes little, so the only aim is to keep bytes in flight.
  - Products are swapped (S^T = K Q^T, O^T = V^T P^T): the G query heads of a kv head become the narrow side of a
    wgmma (N = 8 or 16) and the 64 keys its M = 64, where the usual order would pad 4 query heads to 64.
  - Heads that fill up 8 or 16 are not in memory: G is a dimension of its own, the TMA loads zeros beyond its end and
    drops what is stored there. G > 8 is two halves, since a tile of 16 rows is two pieces of 8 (an odd G is padded).
  - The shares are made on the device from kv_lens, so nothing waits for the host. A long row is cut into several parts
    so that a small batch fills the card too; where no row can be long enough for that, there is no second kernel.
  - A batch that fills the card gets a ring that lets two CTAs share a multiprocessor: one streams while the other
    starts a row or ends it. So no registers are moved between warpgroups.

Diary (H200, jax 0.11.2, Llama-8B heads: N 32, K 8, H 128, bfloat16; us, floor at 4.3 TB/s in brackets):
    prototype  page 64, 4 stages, host-made items   256x2048 533 [499]   256x512 175 [125]   64x512 58 [31]
               without combine                       1x8192 25.7 [7.8]   1x512 28 [0.5]
               JAX's deprecated Triton op on the same: 923, 259, 77, 81, 65
    v1         items from kv_lens in the graph, pages of 16 to 256, window, softcap, poison-safe tails. With combine:
               256x2048 644   256x512 189   64x512 65   8x512 47   1x8192 34   1x512 22   (page 16: 5 to 15% more)
    v2         heads innermost in the grid, combine without the padded heads and with fewer splits:
               256x2048 635   256x512 162   64x512 57 (smaller shapes not timed again); the kernel alone, at 264 CTAs:
               620, 159, 56. Stages 4, 3, 2 at 264 CTAs: 256x512 164, 167, 176; 64x512 54, 56, 55
    v2, traced kernel, then XLA's padding of q and combine: 8 rows 5.3 + 1.4 + 4; 256x430 147 + 5 + 7 [105];
               256x430 of Qwen-1.5B (N 12, K 2) 47 + 5 + 7 [26]
    v3         q as it is, results written directly, a combine kernel, heavy items first, two CTAs per multiprocessor,
               items of at least 4 tiles. With combine: 256x2048 490   256x512 141   64x512 45   8x512 19   1x8192 24
               1x512 20; of Qwen-1.5B 256x512 48, 64x512 24, 8x512 19, 1x512 18. Chains of small calls hold launch gaps
               that a step does not: traced in a step at 8 rows, rope + decode + combine take 3 x 3.7. Right with
               overlap (programmatic dependent launch) too; whether that is faster is not timed
    v4         takes the merged projection: bias, norm, rope and KV write in the same CTA, while pages stream in. A step
               of Qwen-1.5B at 8 rows has 28 kernels fewer; with residual and norm in one 1.64 to 1.57 ms on the device
    v5         workers that take rows one after the other, instead of a CTA for each item; no overlap (it was no gain).
               From the projection, beside v4 in one run: 256x640 174 to 171   256x2048 512 to 519   64x640 52 to 51
               64x256 29 to 27   8x512 20.5 to 17.3   1x512 16.6 to 13.3   1x32768 64 to 49
    v6         a worker's first row and pages are in its cut, the combine asks for parts before it knows their number,
               sums are added up across the warps once per row, and where the ring is long two tiles share a step.
               Beside v5 in chains of layers with their products (cuBLAS), what attention adds to a layer:
               8 rows of 320 15.2 to 13.8   1x320 11.4 to 10.5   256x576 149 to 146   64x320 29.5 to 28.9; Qwen-1.5B
               8x320 13.3 to 11.0   1x320 11.0 to 9.3   64x320 19.7 to 18.4   256x640 53.2 to 51.8. Two tiles in a step
               of the short ring 256x576 151; one or three CTAs per multiprocessor 150, 153
    v7         the combine in registers; small batches in parts of 2 tiles instead of 4. The same chains, first with 4:
               1x256 9.5 to 8.7; Qwen-1.5B 8x256 8.6 to 6.8   8x128 9.8 to 6.8   8x1024 9.1 to 8.7   1x256 8.7 to 7.6.
               Where more CTAs have a row 4 are better: 8x256 9.9 to 10.8
    Chains of 32 (v1) and 128 (v2) layers over permuted pages, one run each. 256x2048 is noisy: over the tunings of
    that run 635 to 713, and once 854.
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.add_norm_mosaic_gpu import MULTIPROCESSORS, THREADS
from jaxserve.shapes import ceil_div
from jaxserve.state import KVPages

KV_TILE = 64  # keys per tile: the M of a wgmma
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
HEAD_ROWS = 8  # query heads of a tile: the least N of a wgmma, and what a TMA of the swizzled layout moves together
MAX_SPLITS = 64  # partial results of a row
SMEM_BYTES = 227 * 1024  # shared memory that CTAs of a multiprocessor have for their arrays ...
RING_BYTES = 192 * 1024  # ... and what KV tiles may take of that
COMBINE_CTAS = 2 * MULTIPROCESSORS
SHORT = 64  # KV tiles of a row that holds up nothing where each worker has ROWS_EACH rows
ROWS_EACH = 4
LOG2E = math.log2(math.e)


class Cuts(NamedTuple):
    """How the KV tiles of a batch are shared out, static."""

    workers: int  # CTAs for each kv head
    each: int  # CTAs that share a multiprocessor
    stages: int  # KV tiles in flight per CTA
    min_tiles: int  # KV tiles that are worth a CTA of their own
    max_splits: int  # most workers of one row

    @property
    def at_once(self) -> int:
        """KV tiles of a row that share a step of the softmax: fewer steps, but tiles stay in the ring for longer."""
        return 2 if self.stages >= 4 else 1

    @property
    def slots_per_row(self) -> int:
        """Room for partial results of each row that is split; the combine loads 8 at once."""
        return ceil_div(self.max_splits, 8) * 8


@dataclass(frozen=True)
class DecodeTuning:
    """How the work is cut.

    `ctas_each`: CTAs on each multiprocessor (None: two where a batch fills the card, so that one computes or starts on
    a row while the other streams); `stages`: KV tiles in flight per CTA (None: all that fit); `min_tiles`: KV tiles
    that are worth a CTA of their own, since the combine costs as much as streaming some (None: fewer where so few CTAs
    have a row that memory waits for them); `multiprocessors`: the card's.
    """

    ctas_each: int | None = None
    stages: int | None = None
    min_tiles: int | None = None
    multiprocessors: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        for name in ("ctas_each", "stages", "min_tiles", "multiprocessors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"DecodeTuning.{name} must be at least 1, got {value}")

    def cuts(self, rows: int, kv_heads: int, head_dim: int, longest: int) -> Cuts:
        """`longest`: most KV tiles that a row can have."""
        tile_bytes = tile_size(head_dim)
        each = self.ctas_each or (2 if rows * kv_heads > self.multiprocessors and tile_bytes <= 2**15 else 1)
        workers = max(1, each * self.multiprocessors // kv_heads)
        most = RING_BYTES // each // tile_bytes
        stages = min(self.stages or most, most)
        few = 4 * rows * kv_heads <= self.multiprocessors and longest > 4
        min_tiles = self.min_tiles or (2 if few else 4)
        splits = min(workers, MAX_SPLITS, ceil_div(longest, min_tiles) + 1)
        if longest < 2 * max(min_tiles // 2, 1) or longest <= SHORT and rows >= ROWS_EACH * workers:
            splits = 1
        return Cuts(workers, each, stages, min_tiles, splits)


def tile_size(head_dim: int) -> int:
    """Bytes of K and V of a tile."""
    return 2 * 2 * KV_TILE * head_dim


def longest_row(width: int, page_size: int, sliding_window: int | None) -> int:
    """Most KV tiles that a row of `width` pages needs, a static bound."""
    tiles = ceil_div(width * page_size, KV_TILE)
    return tiles if sliding_window is None else min(tiles, ceil_div(sliding_window + KV_TILE - 1, KV_TILE))


WHOLE = -1  # slot of a row that one worker takes


class Part(NamedTuple):
    """What a worker takes of a row, scalars of the kernel."""

    row: Array
    kv_len: Array
    first: Array  # its first KV tile
    last: Array  # the KV tile after its last
    has_last: Array  # whether that is the row's last: who takes it adds the new token, or the sinks
    slot: Array  # of its partial result, or WHOLE


class Work(NamedTuple):
    """Who does what in a step. Worker w takes what lies between its cut and the next one, the same for each kv head.

    A cut is (row, KV tiles of that row before it, offset, the row's length, pages of the first KV tile after it):
    worker w leaves its partial result of that row in slot w + offset. The slots of the nth row that is split begin at
    n * slots_per_row. What a worker starts with is all in its cut: each look elsewhere first would take as long as
    memory takes to answer.
    """

    kv_lens: Array  # i32[S]
    cuts: Array  # i32[workers + 1, 4 + pages of a KV tile]
    splits: Array  # i32[m, 2] rows that are split, and into how many; (0, 1) where there are no more
    num_splits: Array  # i32[1] how many of those are real


def make_work(kv_lens: Array, page_table: Array, page_size: int, sliding_window: int | None, cuts: Cuts) -> Work:
    """Shares the KV tiles that the rows need (kv_lens i32[S]) equally among the workers, row after row.

    A row costs its tiles and one more, for what is done once per row. Where no row is much more than a share, cuts move
    to the nearest begin of a row, unless that is half a share away: then nothing is to be combined, and who ends early
    leaves memory to the others. A row of length 0 has no tiles, and is some worker's too, which writes zeros. Sums and
    searches compare all with all, since those are few fusions; a sort would split the step's CUDA graph.
    """
    rows, workers = kv_lens.shape[0], cuts.workers
    begins = _begin_of(kv_lens, sliding_window)
    tiles = _end_of(kv_lens) - begins  # i32[S]
    up_to = jnp.arange(rows) <= jnp.arange(rows)[:, None]
    ends = jnp.sum(jnp.where(up_to, tiles + 1, 0), axis=1, dtype=jnp.int32)  # i32[S] of each row's costs
    least = cuts.min_tiles
    if cuts.max_splits > 1:
        least = jnp.maximum(least, -(-(jnp.max(tiles) + 1) // (cuts.max_splits - 1)))
    total = jnp.maximum(ends[-1], workers * least)
    share, cut_of = total // workers, jnp.arange(workers + 1, dtype=jnp.int32)
    at = cut_of * share + jnp.minimum(cut_of, total % workers)
    row = jnp.sum(ends <= at[:, None], axis=1, dtype=jnp.int32)  # i32[workers + 1]; S: past the last one
    mine = jnp.minimum(row, rows - 1)
    size, before = tiles[mine], jnp.maximum(at - (ends - tiles)[mine], 0)
    inside = row < rows
    if cuts.max_splits > 1:
        near = jnp.where(jnp.max(tiles) < share + share // 4, share // 2, cuts.min_tiles // 2)
        splits = inside & (jnp.minimum(before, size - before) >= jnp.maximum(near, 1))
    else:
        splits = jnp.zeros_like(inside)
    row = jnp.where(inside & ~splits & (2 * before > size), row + 1, jnp.minimum(row, rows))
    before = jnp.where(splits, before, 0)
    first = splits & ~jnp.pad(splits[:-1] & (row[:-1] == row[1:]), (1, 0))  # of the cuts in its row
    nth = jnp.sum(first & (row < row[:, None]), axis=1, dtype=jnp.int32)  # rows before that are split
    begun_by = jnp.max(jnp.where(first & (row == row[:, None]), jnp.arange(workers + 1) - 1, 0), axis=1)
    mine = jnp.minimum(row, rows - 1)
    key = (begins[mine] + before) * KV_TILE
    columns = [(key + j * page_size) // page_size for j in range(max(1, KV_TILE // page_size))]
    pages = [page_table[mine, jnp.minimum(column, page_table.shape[1] - 1)] for column in columns]
    cut = jnp.stack([row, before, nth * cuts.slots_per_row - begun_by, kv_lens[mine], *pages], axis=1)
    of_split = splits & (nth == jnp.arange(max(1, min(rows, workers - 1)))[:, None])  # [m, workers + 1]
    split_rows = jnp.stack([jnp.max(jnp.where(of_split, row, 0), axis=1), 1 + jnp.sum(of_split, axis=1)], axis=1)
    num_splits = jnp.sum(first, dtype=jnp.int32)[None]
    return Work(kv_lens, cut.astype(jnp.int32), split_rows.astype(jnp.int32), num_splits)


def _begin_of(kv_len: Any, sliding_window: int | None) -> Any:
    """The first KV tile that a row needs."""
    return kv_len * 0 if sliding_window is None else lax.div(jnp.maximum(kv_len - sliding_window, 0), KV_TILE)


def _end_of(kv_len: Any) -> Any:
    """The KV tile after a row's last."""
    return lax.div(kv_len + (KV_TILE - 1), KV_TILE)


def _body(
    *refs: Any,
    names: tuple[str, ...],
    q_smem,  # [Gp, H], and the result at the end
    k_smem,  # [stages, KV_TILE, H]
    v_smem,  # [stages, KV_TILE, H]
    p_smem,  # [at_once, Gp, KV_TILE]
    o_smem,  # f32[Gp, H]; None: no row is split
    lse_smem,  # f32[Gp]; None: no row is split
    raw_smem,  # [2, Gp + 2, H] of the new token: q, k, v as the projection left them, and their bias; None: q is given
    q_full,  # barrier
    k_full,  # barrier[stages]
    v_full,  # barrier[stages]
    k_free,  # barrier[stages]
    v_free,  # barrier[stages]
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    eps: float,
):
    """`refs` are, by `names`:

    q [S, K, halves, G / halves, H]; or qkv [S, N + 2K, H], cos, sin f32[S, H/2] and maybe bias [N + 2K, H], q_norm,
    k_norm [H]; maybe sinks f32[K, Gp], in units of log2;
    kv [P, K, 2, page, H], in place: with qkv the new token's k and v are written there; kv_lens i32[S]; cuts
    i32[workers + 1, ...]; table i32[S, W]; out, as q: rows that one worker takes; partial f32[slots, K, Gp, H] out:
    result of a part of a row; lse f32[slots, K, Gp] out: log2 of its sum of 2 ** s.
    """
    ref = dict(zip(names, refs, strict=True))
    kv_ref, lens_ref, cuts_ref, table_ref, out_ref = (ref[name] for name in ("kv", "kv_lens", "cuts", "table", "out"))
    fused = "qkv" in ref
    stages, _, head_dim = k_smem.shape
    group, halves, per_half = q_smem.shape[0], out_ref.shape[2], out_ref.shape[3]
    page_size, (rows, width) = kv_ref.shape[3], table_ref.shape
    # heads innermost: CTAs that run together read the heads of the same pages, which lie side by side
    cta, kv_heads = lax.axis_index("cta"), jnp.int32(kv_ref.shape[1])
    worker, head = lax.div(cta, kv_heads), lax.rem(cta, kv_heads)
    heads = pl.ds(lax.rem(cta, jnp.int32(1)), HEAD_ROWS)  # a start that is not static: heads beyond G are 0, or dropped
    first_row, first_before, first_offset, first_len, *first_pages = (
        cuts_ref[worker, i] for i in range(cuts_ref.shape[1])
    )
    last_row, last_before, last_offset = (cuts_ref[worker + 1, i] for i in range(3))

    def for_each_row(do: Callable[[Part, Array], None]) -> Array:
        """Calls `do` with this worker's part of each of its rows, and how many tiles it has taken before. Returns how
        many it has taken.
        """

        def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            taken, kv_len = carry
            row = first_row + i
            following = lens_ref[jnp.minimum(row + 1, rows - 1)]  # asked for before it is needed
            begin, end = _begin_of(kv_len, sliding_window), _end_of(kv_len)
            first = begin + jnp.where(i == 0, first_before, 0)
            last = jnp.where(row == last_row, begin + last_before, end)
            offset = jnp.where(row == last_row, last_offset, first_offset)
            slot = jnp.where((first > begin) | (last < end), worker + offset, WHOLE)
            do(Part(row, kv_len, first, last, has_last=(kv_len > 0) & (last == end), slot=slot), taken)
            return taken + (last - first), following

        count = last_row - first_row + (last_before > 0)
        return lax.fori_loop(0, count, one, (jnp.int32(0), first_len))[0]

    def stage_of(i):
        return lax.rem(i, jnp.int32(stages))

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _stream():
        size = min(page_size, KV_TILE)  # keys per copy
        copies = KV_TILE // size

        def stream(part: Part, taken: Array) -> None:
            @pl.loop(part.first, part.last)
            def _(tile):
                i, key = taken + (tile - part.first), tile * KV_TILE
                stage = stage_of(i)

                def look_up(row=part.row, key=key):
                    columns = [lax.div(key + j * size, jnp.int32(page_size)) for j in range(copies)]
                    return [table_ref[row, jnp.minimum(column, width - 1)] for column in columns]

                # page ids first: their latency hides behind the wait for the stage
                at_cut = (part.row == first_row) & (tile == part.first)
                pages = lax.cond(at_cut, lambda: first_pages, look_up)
                for which, (ring, full, free) in enumerate(((k_smem, k_full, k_free), (v_smem, v_full, v_free))):

                    @pl.when(i >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[stage])

                    for j, page in enumerate(pages):
                        source = kv_ref.at[page, head, which]
                        if size < page_size:
                            source = kv_ref.at[page, head, which, pl.ds(lax.rem(key, jnp.int32(page_size)), size)]
                        plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(j * size, size)], full.at[stage])

        taken = for_each_row(stream)

        @pl.loop(jnp.maximum(taken - stages, 0), taken)
        def _(i):  # leave no phase unseen: the interpreter checks that
            for free in (k_free, v_free):
                plgpu.barrier_wait(free.at[stage_of(i)])

    def stored(part: Part) -> Array:
        """Tokens of a row that are in its pages; the new one of a projection is not."""
        return part.kv_len - 1 if fused else part.kv_len

    def live_keys(part: Part, tile, shape, layout):
        """Which keys of a tile the row attends to, along the first axis of `shape`."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * KV_TILE
        live = key < stored(part)
        return live if sliding_window is None else live & (key >= part.kv_len - sliding_window)

    def scores(dots):
        if softcap is None:
            return dots * (scale * LOG2E)
        # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 3 digits only
        return (softcap * LOG2E) * (1.0 - 2.0 / (jnp.exp2(dots * (2 * LOG2E * scale / softcap)) + 1.0))

    def clear_dead_values(part: Part, tile, stage):
        """Zeroes the V rows that nothing attends to: they may be NaN, and 0 * NaN is NaN. Only in edge tiles."""
        edge = (tile + 1) * KV_TILE > stored(part)
        if sliding_window is not None:
            edge |= tile * KV_TILE < part.kv_len - sliding_window

        @pl.when(edge)
        def _():
            v = plgpu.load(v_smem.at[stage], layout=plgpu.Layout.WGMMA)
            live = live_keys(part, tile, (KV_TILE, head_dim), plgpu.Layout.WGMMA)
            v_smem.at[stage][...] = jnp.where(live, v, jnp.zeros_like(v))
            plgpu.commit_smem()

    per_head, per_place = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

    def load_q(row: Array) -> None:
        for half in range(halves):
            places = q_smem.at[pl.ds(half * HEAD_ROWS, HEAD_ROWS)]
            plgpu.copy_gmem_to_smem(ref["q"].at[row, head, half, heads], places, q_full)
        plgpu.barrier_wait(q_full)

    def columns(i: int):
        """The half of a head that is turned together with the other one."""
        return pl.ds(i * (head_dim // 2), head_dim // 2)

    def take_new_token(part: Part) -> tuple[Array, Array]:
        """Turns q and k, sends k and v to their page; returns v [H] and the token's scores [Gp]. k is one column for
        each query head, all equal.
        """
        row, dtype, heads_before = part.row, q_smem.dtype, kv_heads * halves * per_half
        given = [ref["qkv"].at[row], ref["bias"]] if "bias" in ref else [ref["qkv"].at[row]]
        for raw, source in enumerate(given):
            # heads beyond this kv head's are someone else's: nobody looks at what they become
            for half in range(halves):
                heads = pl.ds((head * halves + half) * per_half, HEAD_ROWS)
                plgpu.copy_gmem_to_smem(source.at[heads], raw_smem.at[raw, pl.ds(half * HEAD_ROWS, HEAD_ROWS)], q_full)
            for i in range(2):
                place = heads_before + i * kv_heads + head
                plgpu.copy_gmem_to_smem(source.at[place], raw_smem.at[raw, group + i], q_full)
        shape = (head_dim // 2, group)

        def along(x: Any) -> Array:
            """x [H/2] for each head."""
            x = plgpu.load(x, layout=per_place, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(x, shape, [0])

        cos, sin = (along(ref[name].at[row]) for name in ("cos", "sin"))
        plgpu.barrier_wait(q_full)

        def turn(lo: Array, hi: Array, norm: str) -> list[Array]:
            """Norm, if there is one, and rope: [H/2, Gp] twice."""
            if norm in ref:
                size = (lo * lo + hi * hi).sum(axis=0)
                size = lax.broadcast_in_dim(lax.rsqrt(size * (1.0 / head_dim) + eps), shape, [1])
                lo, hi = (x * size * along(ref[norm].at[columns(i)]) for i, x in enumerate((lo, hi)))
            return [(lo * cos - hi * sin).astype(dtype), (hi * cos + lo * sin).astype(dtype)]

        def load(layout: Any, rows: Any, places: Any = slice(None)) -> Array:
            """Of these rows, with their bias."""
            parts = [raw_smem.at[raw, rows, places] for raw in range(len(given))]
            parts = [part.T if len(part.shape) == 2 else part for part in parts]
            parts = [plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32) for part in parts]
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        lo, hi = (load(plgpu.Layout.WGMMA, pl.ds(0, group), columns(i)) for i in range(2))
        q = turn(lo, hi, "q_norm")
        lo, hi = (lax.broadcast_in_dim(load(per_place, group, columns(i)), shape, [0]) for i in range(2))
        k = turn(lo, hi, "k_norm")
        v = load(per_place, group + 1).astype(dtype)
        lo, hi = (x.astype(jnp.float32) * y.astype(jnp.float32) for x, y in zip(q, k, strict=True))
        for i in range(2):
            q_smem.at[:, columns(i)].T[...] = plgpu.layout_cast(q[i], plgpu.Layout.WGMMA_TRANSPOSED)
            raw_smem.at[0, group, columns(i)][...] = k[i].astype(jnp.float32).max(axis=1).astype(dtype)
        if "bias" in ref:
            raw_smem.at[0, group + 1][...] = v
        plgpu.commit_smem()

        @pl.when(part.has_last)
        def _():
            column, at = (op(stored(part), jnp.int32(page_size)) for op in (lax.div, lax.rem))
            page = table_ref[row, jnp.minimum(column, width - 1)]
            for i in range(2):
                plgpu.copy_smem_to_gmem(raw_smem.at[0, group + i], kv_ref.at[page, head, i, at])

        return v.astype(jnp.float32), scores((lo + hi).sum(axis=0))

    def attend(part: Part, taken: Array) -> None:
        m = plgpu.layout_cast(jnp.full((group,), reference.MASKED, jnp.float32), per_head)
        # of the sum of 2 ** (s - m) what each place of a tile has added: it is summed up at the end
        total = plgpu.layout_cast(jnp.zeros((KV_TILE, group), jnp.float32), plgpu.Layout.WGMMA)
        acc = plgpu.layout_cast(jnp.zeros((head_dim, group), jnp.float32), plgpu.Layout.WGMMA)
        if fused:  # of a row without tokens too: whatever that gives is not used
            v, s = take_new_token(part)
            m = jnp.where(lax.broadcast_in_dim(part.has_last, m.shape, []), s, m)
            total = jnp.where(lax.broadcast_in_dim(part.has_last, total.shape, []), 1.0 / KV_TILE, total)
            v = lax.broadcast_in_dim(v, acc.shape, [0])
            acc = jnp.where(lax.broadcast_in_dim(part.has_last, acc.shape, []), v, acc)
        else:
            load_q(part.row)
        if "sinks" in ref:  # one more score, for who takes the row's last tile
            sink = plgpu.load(ref["sinks"].at[head], layout=per_head, optimized=False)
            sink = jnp.where(lax.broadcast_in_dim(part.has_last, m.shape, []), sink, reference.MASKED)
            m, before = jnp.maximum(m, sink), m
            shrink = jnp.exp2(before - m)
            more = jnp.exp2(sink - m) * (1.0 / KV_TILE)
            total = total * lax.broadcast_in_dim(shrink, total.shape, [1])
            total = total + lax.broadcast_in_dim(more, total.shape, [1])
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])

        def step(tiles: list[Any], carry: Any) -> Any:
            """The softmax goes on by these tiles."""
            acc, m, total = carry  # f32 [H, Gp], [Gp] in units of log2, [KV_TILE, Gp]
            stages = [stage_of(taken + (tile - part.first)) for tile in tiles]
            for stage in stages:
                plgpu.barrier_wait(k_full.at[stage])

            def qk(*outs):
                for stage, out in zip(stages, outs, strict=True):
                    plgpu.wgmma(out, k_smem.at[stage], q_smem.T)
                return [out[...] for out in outs]

            dots = pl.run_scoped(qk, *[plgpu.ACC((KV_TILE, group), jnp.float32)] * len(tiles))
            for stage in stages:
                plgpu.barrier_arrive(k_free.at[stage])
            s = [
                jnp.where(live_keys(part, tile, x.shape, plgpu.Layout.WGMMA), scores(x), reference.MASKED)
                for tile, x in zip(tiles, dots, strict=True)
            ]
            m_new = jnp.maximum(m, functools.reduce(jnp.maximum, s).max(axis=0))
            shrink = jnp.exp2(m - m_new)
            p = [jnp.exp2(x - lax.broadcast_in_dim(m_new, x.shape, [1])) for x in s]
            total = total * lax.broadcast_in_dim(shrink, total.shape, [1]) + functools.reduce(operator.add, p)
            for i, x in enumerate(p):
                p_smem.at[i].T[...] = x.astype(p_smem.dtype)
            plgpu.commit_smem()
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
            for tile, stage in zip(tiles, stages, strict=True):
                plgpu.barrier_wait(v_full.at[stage])
                clear_dead_values(part, tile, stage)

            def pv(out):
                for i, stage in enumerate(stages):
                    plgpu.wgmma(out, v_smem.at[stage].T, p_smem.at[i].T)
                return out[...]

            acc = acc + pl.run_scoped(pv, plgpu.ACC((head_dim, group), jnp.float32))
            for stage in stages:
                plgpu.barrier_arrive(v_free.at[stage])
            return acc, m_new, total

        def step_of(tiles: int, begin: Any) -> Callable[[Any, Any], Any]:
            return lambda i, carry: step([begin + i * tiles + j for j in range(tiles)], carry)

        count = part.last - part.first
        at_once, carry = p_smem.shape[0], (acc, m, total)
        turns = lax.div(count, jnp.int32(at_once))
        carry = lax.fori_loop(0, turns, step_of(at_once, part.first), carry)
        if at_once > 1:
            rest = part.first + turns * at_once
            carry = lax.fori_loop(0, part.last - rest, step_of(1, rest), carry)
        acc, m, total = carry
        total = total.sum(axis=0)
        inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        out = acc * lax.broadcast_in_dim(inverse, acc.shape, [1])

        @pl.when(part.slot == WHOLE)
        def _():
            q_smem.T[...] = plgpu.layout_cast(out.astype(q_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            for half in range(halves):
                places = q_smem.at[pl.ds(half * HEAD_ROWS, HEAD_ROWS)]
                plgpu.copy_smem_to_gmem(places, out_ref.at[part.row, head, half, heads])

        if "partial" in ref:

            @pl.when(part.slot != WHOLE)
            def _():
                o_smem.T[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
                lse_smem[...] = m + jnp.log(total) * LOG2E
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, ref["partial"].at[part.slot, head])
                plgpu.copy_smem_to_gmem(lse_smem, ref["lse"].at[part.slot, head])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute():
        for_each_row(attend)


def _combine(
    splits_ref,  # i32[m, 2]
    num_splits_ref,  # i32[1]
    o_ref,  # f32[slots, K, Gp * H]
    lse_ref,  # f32[slots, K, Gp]
    out_ref,  # [S, K, halves, G / halves, H] in place: the rows that are split
    *,
    out_smem,  # [heads of a unit * H]
    slots_per_row: int,
    ctas: int,
):
    """Weighs the partial results of one row and one query head at a time, or two if they are narrower than a warpgroup.

    All that a unit needs for up to 8 parts is asked for at once, before their number is known.
    """
    _, kv_heads, halves, per_half, head_dim = out_ref.shape
    (size,) = out_smem.shape
    at_once = size // head_dim
    units_per_half = ceil_div(per_half, at_once)
    units = kv_heads * halves * units_per_half  # of a row
    cta, layout = lax.axis_index("cta"), plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)
    turns = jnp.int32(1)
    if splits_ref.shape[0] * units > ctas:
        turns = lax.div(num_splits_ref[0] * units - cta + (ctas - 1), jnp.int32(ctas))

    def along(values: list[Array]) -> Array:
        """A number for each head, along their columns."""
        wide = [lax.broadcast_in_dim(value, (size,), []) for value in values]
        if at_once == 1:
            return wide[0]
        return jnp.where(plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) < head_dim, *wide)

    @pl.loop(0, turns)
    def _(i):
        unit, parts = cta + i * ctas, []
        for whole in (units, halves * units_per_half, units_per_half):
            parts.append(lax.div(unit, jnp.int32(whole)))
            unit = lax.rem(unit, jnp.int32(whole))
        (nth, kv_head, half), first = parts, unit * at_once
        place = half * HEAD_ROWS + first  # of the first head among the Gp of a partial result
        row, count = splits_ref[nth, 0], splits_ref[nth, 1]

        def take(block: Any, state: tuple[Array, list[Array], list[Array]]) -> tuple[Array, list[Array], list[Array]]:
            """Takes up to 8 parts in: (their weighed sum, the largest log2 and the sum of the weights by head)."""
            acc, tops, totals = state
            slots = [nth * slots_per_row + block * 8 + j for j in range(8)]
            found = [
                plgpu.load(o_ref.at[slot, kv_head, pl.ds(place * head_dim, size)], layout=layout, optimized=False)
                for slot in slots
            ]
            lse = [[lse_ref[slot, kv_head, place + j] for slot in slots] for j in range(at_once)]
            live = [block * 8 + j < count for j in range(8)]  # other slots hold anything
            lse = [[jnp.where(is_live, x, reference.MASKED) for is_live, x in zip(live, own)] for own in lse]
            new_tops = [functools.reduce(jnp.maximum, own, top) for own, top in zip(lse, tops)]
            shrinks = [jnp.exp2(top - new) for top, new in zip(tops, new_tops)]
            weights = [[jnp.exp2(x - top) for x in own] for own, top in zip(lse, new_tops)]
            acc = acc * along(shrinks)
            for j, x in enumerate(found):
                x = jnp.where(lax.broadcast_in_dim(live[j], (size,), []), x, 0.0)
                acc = acc + x * along([own[j] for own in weights])
            totals = [sum(own, total * shrink) for own, total, shrink in zip(weights, totals, shrinks)]
            return acc, new_tops, totals

        zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)
        state = take(jnp.int32(0), (zeros, [jnp.float32(reference.MASKED)] * at_once, [jnp.float32(0)] * at_once))
        acc, _, totals = lax.fori_loop(1, lax.div(count + 7, jnp.int32(8)), take, state)
        out_smem[...] = (acc * along([1.0 / total for total in totals])).astype(out_smem.dtype)
        plgpu.commit_smem()
        for j in range(at_once):

            @pl.when((count > 1) & (first + j < per_half))
            def _(j=j):
                place = out_ref.at[row, kv_head, half, first + j]
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(j * head_dim, head_dim)], place)

        plgpu.wait_smem_to_gmem(0)


def _tiled(*shape: int, dtype: Any, columns: int | None = None):
    """Shared memory as wgmma wants it, and swizzled so that no reading of columns has bank conflicts."""
    size = jnp.dtype(dtype).itemsize
    columns = columns or 128 // size
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size))
    )


# One module-level jit, so that every layer of a step shares one traced call, two kernels and one compilation of each.
@partial(jax.jit, static_argnames=("cuts", "scale", "sliding_window", "softcap", "eps"))
def _attend(
    kv: KVPages, work: Work, page_table: Array, given: dict[str, Array], *,
    cuts: Cuts, scale: float, sliding_window: int | None, softcap: float | None, eps: float,
) -> tuple[Array, KVPages]:  # fmt: skip
    """`given`: q, or qkv and what belongs to it, as `_body` names them -> out, as q there; kv with the new tokens.

    `given` may have an array `out` of more rows, which the results are written into, and which is donated.
    """
    (_, kv_heads, _, page_size, head_dim), dtype = kv.shape, kv.dtype
    fused = "qkv" in given
    rows = page_table.shape[0]
    if fused:
        per_kv_head = given["qkv"].shape[1] // kv_heads - 2
        halves = ceil_div(per_kv_head, HEAD_ROWS)
        per_half = per_kv_head // halves
    else:
        _, _, halves, per_half, _ = given["q"].shape
    group = halves * HEAD_ROWS
    copies_per_tile = max(1, KV_TILE // page_size)
    stages = cuts.stages
    into: Any = jax.new_ref(given["out"]) if "out" in given else None
    out_type = {}
    if into is None:
        out_type["out"] = jax.ShapeDtypeStruct((rows, kv_heads, halves, per_half, head_dim), dtype)
    if cuts.max_splits > 1:
        slots = work.splits.shape[0] * cuts.slots_per_row
        out_type["partial"] = jax.ShapeDtypeStruct((slots, kv_heads, group, head_dim), jnp.float32)
        out_type["lse"] = jax.ShapeDtypeStruct((slots, kv_heads, group), jnp.float32)
    scratch: dict[str, Any] = {
        "q_smem": _tiled(group, head_dim, dtype=dtype),
        "k_smem": _tiled(stages, KV_TILE, head_dim, dtype=dtype),
        "v_smem": _tiled(stages, KV_TILE, head_dim, dtype=dtype),
        "p_smem": _tiled(cuts.at_once, group, KV_TILE, dtype=dtype),
        "o_smem": _tiled(group, head_dim, dtype=jnp.float32) if cuts.max_splits > 1 else None,
        "lse_smem": plgpu.SMEM((group,), jnp.float32) if cuts.max_splits > 1 else None,
        "raw_smem": plgpu.SMEM((2, group + 2, head_dim), dtype) if fused else None,
        "q_full": plgpu.Barrier(num_arrivals=(halves + 2) * (1 + ("bias" in given)) if fused else halves),
        "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies_per_tile),
        "v_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies_per_tile),
        "k_free": plgpu.Barrier(num_barriers=stages),
        "v_free": plgpu.Barrier(num_barriers=stages),
    }
    pages: Any = jax.new_ref(kv) if fused else kv
    operands = given | ({} if into is None else {"out": into})
    operands |= {"kv": pages, "kv_lens": work.kv_lens, "cuts": work.cuts, "table": page_table}
    kernel = plgpu.kernel(
        partial(
            _body, names=(*operands, *out_type), scale=scale, sliding_window=sliding_window, softcap=softcap, eps=eps,
        ),
        out_type=list(out_type.values()),
        scratch_types=scratch,
        grid=(cuts.workers * kv_heads,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip
    results = dict(zip(out_type, kernel(*operands.values()), strict=True))
    if fused:
        kv = jax.freeze(pages)
    out: Any = jax.new_ref(results["out"]) if into is None else into
    if "partial" not in results:
        return jax.freeze(out), kv
    size = max(head_dim, THREADS)
    units = work.splits.shape[0] * kv_heads * halves * ceil_div(per_half, size // head_dim)
    ctas = min(COMBINE_CTAS, units)
    combine = plgpu.kernel(
        partial(_combine, slots_per_row=cuts.slots_per_row, ctas=ctas),
        out_type=(),
        scratch_types={"out_smem": plgpu.SMEM((size,), dtype)},
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    partial_results = results["partial"].reshape(*results["partial"].shape[:2], -1)
    combine(work.splits, work.num_splits, partial_results, results["lse"], out)
    return jax.freeze(out), kv


def unsupported(*, dtype: str | None, head_dim: int | None, group: int | None) -> str | None:
    """Why the kernel cannot serve a model, or None if it can. What is None is not checked."""
    if dtype is not None and dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, and the dtype is {dtype}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"it takes head dims {', '.join(map(str, HEAD_DIMS))}, and the model's is {head_dim}"
    if group is not None and not 1 <= group <= MAX_GROUP:
        return f"it takes 1 to {MAX_GROUP} query heads per kv head, and the model has {group}"
    return None


def decode_work(
    kv_lens: Array,
    page_table: Array,
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    sliding_window: int | None = None,
    tuning: DecodeTuning = DecodeTuning(),
) -> Work:
    """What `decode_attention` makes of kv_lens i32[S] and page_table i32[S, W] if it is not given: once per step."""
    rows, width = page_table.shape
    cuts = tuning.cuts(rows, kv_heads, head_dim, longest_row(width, page_size, sliding_window))
    return make_work(kv_lens, page_table, page_size, sliding_window, cuts)


def decode_attention(
    q: Array,
    kv: KVPages,
    page_table: Array,
    kv_lens: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tuning: DecodeTuning = DecodeTuning(),
    work: Work | None = None,
    into: Array | None = None,
) -> Array:
    """Attention of one query per row: q [S, N, H], page_table i32[S, W], kv_lens i32[S] -> [S, N, H].

    `into` [T, N, H] of kv's dtype, which is donated: it is returned instead, with the result in its first S tokens; for
    groups that `heads_fill_tiles`.
    Rows of length 0 get 0. `work` is that of `decode_work` with the same window and tuning. Raises ValueError for
    shapes that the kernel does not take (see `unsupported`).
    """
    rows, heads, head_dim = q.shape
    group = heads // kv.shape[1]
    halves = ceil_div(group, HEAD_ROWS)
    cuts = _cuts(kv, page_table, group, tuning, sliding_window, fused=False)
    if work is None:
        work = make_work(kv_lens, page_table, kv.shape[3], sliding_window, cuts)
    qs = q.reshape(rows, -1, group, head_dim).astype(kv.dtype)
    if group % halves:
        qs = jnp.pad(qs, ((0, 0), (0, 0), (0, 1), (0, 0)))
    given = {"q": qs.reshape(rows, -1, halves, qs.shape[2] // halves, head_dim)} | _padded_sinks(sinks, kv, heads)
    if into is not None:
        given["out"] = into.reshape(into.shape[0], *given["q"].shape[1:])
    out, _ = _attend(
        kv, work, page_table, given,
        cuts=cuts, scale=scale, sliding_window=sliding_window, softcap=softcap, eps=0.0,
    )  # fmt: skip
    if into is not None:
        return out.reshape(into.shape)
    return out.reshape(rows, -1, qs.shape[2], head_dim)[:, :, :group].reshape(q.shape).astype(q.dtype)


def heads_fill_tiles(group: int) -> bool:
    """Whether the query heads of a kv head are halves of the same size: an odd group of more than 8 is padded."""
    return not group % ceil_div(group, HEAD_ROWS)


def takes_qkv(kv: KVPages, num_heads: int) -> bool:
    """Whether `decode_qkv` can be used: turning q needs halves of a head that fill the 64 places of a tile."""
    return kv.shape[4] % (2 * KV_TILE) == 0 and heads_fill_tiles(num_heads // kv.shape[1])


def decode_qkv(
    qkv: Array,
    kv: KVPages,
    page_table: Array,
    kv_lens: Array,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tuning: DecodeTuning = DecodeTuning(),
) -> tuple[Array, KVPages]:
    """From the merged projection of one token per row to the output of attention [S, N, H]; donates `kv`.

    Does what `reference.rope_and_write` and `decode_attention` do, with cos and sin f32[S, H/2], in one kernel: each of
    its CTAs turns the query heads that it needs, and the one that takes a row's last tile adds the new token and
    writes its k and v. The page that it streams does not have them yet: there they count as dead. Needs `takes_qkv`.
    """
    rows, (_, kv_heads, _, _, head_dim) = qkv.shape[0], kv.shape
    cuts = _cuts(kv, page_table, num_heads // kv_heads, tuning, sliding_window, fused=True)
    given = {"qkv": qkv.reshape(rows, -1, head_dim), "cos": cos, "sin": sin}
    given |= {"bias": bias.reshape(-1, head_dim)} if bias is not None else {}
    given |= {name: x for name, x in (("q_norm", q_norm), ("k_norm", k_norm)) if x is not None}
    given |= _padded_sinks(sinks, kv, num_heads)
    out, kv = _attend(
        kv, make_work(kv_lens, page_table, kv.shape[3], sliding_window, cuts), page_table, given,
        cuts=cuts, scale=scale, sliding_window=sliding_window, softcap=softcap, eps=eps,
    )  # fmt: skip
    return out.reshape(rows, num_heads, head_dim), kv


def _padded_sinks(sinks: Array | None, kv: KVPages, num_heads: int) -> dict[str, Array]:
    """sinks [N] as `_body` takes them: a tile's places beyond the heads of a half are 0."""
    if sinks is None:
        return {}
    kv_heads = kv.shape[1]
    group = num_heads // kv_heads
    halves = ceil_div(group, HEAD_ROWS)
    sinks = reference.start_of(sinks, (kv_heads, group)) * LOG2E
    sinks = jnp.pad(sinks, ((0, 0), (0, group % halves))).reshape(kv_heads, halves, -1)
    return {"sinks": jnp.pad(sinks, ((0, 0), (0, 0), (0, HEAD_ROWS - sinks.shape[2]))).reshape(kv_heads, -1)}


def _cuts(
    kv: KVPages, page_table: Array, group: int, tuning: DecodeTuning, sliding_window: int | None, *, fused: bool
) -> Cuts:
    """Those of `tuning`, with a shorter ring where large heads take the shared memory. `fused`: from the projection.

    Raises ValueError for shapes that the kernel does not take.
    """
    _, kv_heads, _, page_size, head_dim = kv.shape
    if reason := unsupported(dtype=str(kv.dtype), head_dim=head_dim, group=group):
        raise ValueError(f"paged decode on mosaic_gpu: {reason}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"paged decode on mosaic_gpu: page size must be one of {PAGE_SIZES}, got {page_size}")
    rows, width = page_table.shape
    cuts = tuning.cuts(rows, kv_heads, head_dim, longest_row(width, page_size, sliding_window))
    heads = ceil_div(group, HEAD_ROWS) * HEAD_ROWS
    taken = 2 * heads * head_dim + cuts.at_once * 2 * heads * KV_TILE + 4096  # q, P; barriers and what aligning takes
    taken += (cuts.max_splits > 1) * 4 * heads * head_dim + fused * 2 * 2 * (heads + 2) * head_dim  # partial out; qkv
    stages = min(cuts.stages, (SMEM_BYTES // cuts.each - taken) // tile_size(head_dim))
    if stages < 1:
        raise ValueError(f"DecodeTuning.ctas_each: no KV tile fits the shared memory of each of {cuts.each} CTAs")
    return cuts._replace(stages=stages)
