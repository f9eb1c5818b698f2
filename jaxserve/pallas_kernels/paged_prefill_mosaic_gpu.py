"""Ragged paged prefill attention for Hopper GPUs (Mosaic GPU): chunks of prompts over the pages of their rows.

What: each CTA takes one query tile (up to 128 consecutive tokens of one row) and one query head. A memory warpgroup
streams the row's pages into a ring of KV tiles (TMA); two compute warpgroups of 64 tokens each keep an online softmax
over them and take turns at the tensor cores: while one multiplies, the other does its softmax.

Why this shape: prefill is bound by the tensor cores and by exp2, so the aim is large wgmmas without a break.
  - One query head per CTA, not the G heads of a kv head packed side by side: what flows from the L2 cache into shared
    memory depends on the rows of a tile alone (128 either way), packing would save memory traffic only, and that is
    1 byte per 100 FLOP already, since CTAs of all heads of one tile run side by side and find each other's K and V in
    the L2 cache. In return any G works, masks are plain, and 128 tokens of a chunk never mix with a second head. The
    price: chunks much shorter than 64 tokens leave rows of the wgmma empty.
  - A query tile starts at a multiple of 8 tokens of the packed axis, wherever its chunk starts:

        packed tokens   | .. row 3 | row 4 ............................. | row 5 ..
        8-token groups  |       |       |       |  ..  |       |       |       |
        tiles of row 4          [ tile, first rows dead ][ tile, last rows dead ]

    since TMA copies of the swizzled layout that wgmma needs move whole groups of 8 rows, and a copy that starts within
    a group is silently wrong on hardware. What a neighbour's rows give is not stored: whole groups leave by TMA, the
    rows of the up to two split groups of a tile one by one.
  - Tiles are made on the device from cu_q_lens and kv_lens, once per step, heaviest first, so that the light ones fill
    the gaps at the end. Their number is static; tiles beyond the real ones leave at once. Padding tokens get tiles
    without keys, which write zeros.
  - KV tiles beyond the diagonal or before the window are never loaded; only those at an edge are masked. Keys past the
    row's last may be NaN: their scores are masked and their V rows zeroed in shared memory.

Diary (H200, jax 0.11.2, bfloat16, page 64; us per layer and TFLOP/s below the diagonal, XLA reference in brackets):
    v1 Llama-8B heads   1x8192 974, 564 [10989, 50]   16x512 + 2048 context 622, 497 [5135, 60]   16x512 184, 187 [1597]
       Qwen-1.5B heads  1x8192 379, 544 [4819, 43]    16x512 + 2048 context 247, 469 [2355, 49]   16x512 88, 146 [875]
    Predicted 55% and 45% of the 790 TFLOP/s of a plain product for the first two; 71% and 63% measured. Short prompts
    expose each CTA's start and end. Next: persistent CTAs that fetch the next Q, Q K^T of tile i + 1 before the softmax
    of tile i.
    v2 tables of the tiles made once per step, results of decode in the same array. Llama-8B heads: 878, 573, 140 us
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput, Prepared
from jaxserve.shapes import ceil_div
from jaxserve.state import KVPages

ALIGN = 8  # rows that a TMA copy of a swizzled tile moves together
WG_ROWS = 64  # query tokens of a warpgroup: the M of a wgmma
QUERY_TILE = 2 * WG_ROWS
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 128, 256)
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class PrefillTuning:
    """How a CTA works. None: what suits the head dim (see `of`)."""

    kv_tile: int | None = None  # keys per KV tile
    stages: int | None = None  # KV tiles in flight
    take_turns: bool = True  # the compute warpgroups alternate between tensor cores and softmax
    p_in_registers: bool = True  # False: P goes through shared memory; slower, and what the interpreter can run

    def __post_init__(self) -> None:
        if self.kv_tile not in (None, 64, 128, 256):
            raise ValueError(f"PrefillTuning.kv_tile must be 64, 128 or 256, got {self.kv_tile}")
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"PrefillTuning.stages must be at least 1, got {self.stages}")

    def of(self, head_dim: int) -> "PrefillTuning":
        """Without None. Registers hold S [64, kv_tile] and O [64, H] of a warpgroup; 227 KiB hold Q and the ring."""
        kv_tile, stages = {64: (128, 4), 128: (128, 2), 256: (64, 2)}[head_dim]
        return replace(self, kv_tile=self.kv_tile or kv_tile, stages=self.stages or stages)


class PrefillWork(NamedTuple):
    """The query tiles of a step, heaviest first. n is static: see `max_tiles`."""

    tiles: Array  # i32[n, 4] row, first token in the prefill region, tokens, position of the first; see `make_work`


def max_tiles(num_tokens: int, num_rows: int) -> int:
    """A chunk of c tokens is cut into (c + 7 + 127) / 128 tiles at most; padding tokens are one more chunk."""
    return (num_tokens + (num_rows + 1) * (ALIGN - 1 + QUERY_TILE - 1)) // QUERY_TILE


def make_work(meta: AttentionInput, sliding_window: int | None = None) -> PrefillWork:
    """Cuts each chunk at multiples of 128 tokens, counted from the multiple of 8 at or before its start.

    Padding tokens make tiles whose first position is minus their number of tokens, so that they end before key 0.
    The window only matters for the order of the tiles.
    """
    num_tokens, num_rows = meta.token_rows.shape[0] - meta.num_decode_rows, meta.num_prefill_rows
    begins = meta.cu_q_lens  # i32[S_p + 1] of each chunk; the last one holds the padding
    lens = jnp.diff(begins, append=jnp.full(1, num_tokens, begins.dtype))
    kv_lens = jnp.append(meta.kv_lens[meta.num_decode_rows :], 0)
    bases = begins // ALIGN * ALIGN
    counts = jnp.where(lens > 0, (begins + lens - bases + QUERY_TILE - 1) // QUERY_TILE, 0)
    ends = jnp.cumsum(counts)
    tile = jnp.arange(max_tiles(num_tokens, num_rows), dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_rows)
    cut = bases[chunk] + (tile - (ends - counts)[chunk]) * QUERY_TILE
    first = jnp.maximum(cut, begins[chunk])
    last = jnp.minimum(cut + QUERY_TILE, begins[chunk] + lens[chunk])  # one past
    real, padding = tile < ends[-1], chunk == num_rows
    count = jnp.where(real, last - first, 0)
    position = jnp.where(padding, -count, kv_lens[chunk] - lens[chunk] + first - begins[chunk])
    row = meta.num_decode_rows + jnp.minimum(chunk, num_rows - 1)
    keys = position + count
    if sliding_window is not None:
        keys = jnp.minimum(keys, count + sliding_window)
    weight = jnp.where(real, keys, -1)
    # heaviest first, by counting who goes before whom: a sort would split the step's CUDA graph
    before = (weight[:, None] > weight) | ((weight[:, None] == weight) & (tile[:, None] < tile))
    place = jnp.sum(before, axis=0, dtype=jnp.int32)
    tiles = jnp.stack([row, first, count, position], axis=1).astype(jnp.int32)
    return PrefillWork(jnp.zeros_like(tiles).at[place].set(tiles, unique_indices=True))


def prepare(meta: AttentionInput, page_size: int) -> AttentionInput:
    """As `reference.prepare`: works out once per step what all layers share, for this kernel."""
    work: Any = make_work(meta) if meta.num_prefill_rows else None
    return replace(meta, prepared=Prepared(*reference.write_slots(meta, page_size), work))


def _body(
    q_ref,  # [T, N, H]
    kv_ref,  # [P, K, 2, page, H]
    tiles_ref,  # i32[n, 4]
    lens_ref,  # i32[S]
    table_ref,  # i32[S, W]
    *refs,  # f32[N] sinks, if there are any; [T, N, H] out
    q_smem,  # [2, WG_ROWS, H], and O at the end
    k_smem,  # [stages, kv_tile, H]
    v_smem,  # [stages, kv_tile, H]
    rows_smem,  # [WG_ROWS, 2, 64] 64 columns of O, row by row
    p_smem,  # [2, WG_ROWS, kv_tile]; None: P stays in registers
    q_full,  # barrier[2]
    k_full,  # barrier[stages]
    v_full,  # barrier[stages]
    k_free,  # barrier[stages]
    v_free,  # barrier[stages]
    turn,  # barrier; None: no turns
    first_token: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
):
    *sinks_ref, o_ref = refs
    stages, kv_tile, head_dim = k_smem.shape
    page_size, width = kv_ref.shape[3], table_ref.shape[1]
    num_tokens, heads, _ = q_ref.shape
    # heads innermost: CTAs that run together read the same pages, and find them in the L2 cache
    cta, num_heads = lax.axis_index("cta"), jnp.int32(heads)
    tile, head = lax.div(cta, num_heads), lax.rem(cta, num_heads)
    kv_head = lax.div(head, jnp.int32(heads // kv_ref.shape[1]))
    row, count, first_position = tiles_ref[tile, 0], tiles_ref[tile, 2], tiles_ref[tile, 3]
    first = first_token + tiles_ref[tile, 1]
    start = jnp.minimum(lax.div(first, jnp.int32(ALIGN)) * ALIGN, num_tokens - QUERY_TILE)
    low = first - start  # rows [low, low + count) of the tile are live
    end_key = first_position + count  # one past the last key that any row sees
    begin_key = jnp.int32(0) if sliding_window is None else jnp.maximum(0, first_position - (sliding_window - 1))
    begin = lax.div(begin_key, jnp.int32(kv_tile))
    num_steps = lax.div(end_key + (kv_tile - 1), jnp.int32(kv_tile)) - begin

    def slot_of(i):
        return lax.rem(i, jnp.int32(stages))

    @pl.when((lax.axis_index("warpgroup") == 2) & (count > 0))
    def _stream():
        plgpu.set_max_registers(40, action="decrease")
        size = min(page_size, kv_tile)  # keys per copy
        copies = kv_tile // size

        @pl.loop(0, num_steps)
        def _(i):
            slot = slot_of(i)
            key = (begin + i) * kv_tile
            # page ids first: their latency hides behind the wait for the slot
            columns = [lax.div(key + j * size, jnp.int32(page_size)) for j in range(copies)]
            pages = [table_ref[row, jnp.minimum(column, width - 1)] for column in columns]
            for which, (ring, full, free) in enumerate(((k_smem, k_full, k_free), (v_smem, v_full, v_free))):

                @pl.when(i >= stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[slot])

                for j, page in enumerate(pages):
                    source = kv_ref.at[page, kv_head, which]
                    if size < page_size:
                        place = lax.rem(key + j * size, jnp.int32(page_size))
                        source = kv_ref.at[page, kv_head, which, pl.ds(place, size)]
                    plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(j * size, size)], full.at[slot])

        @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
        def _(i):  # leave no phase unseen: the interpreter checks that
            for free in (k_free, v_free):
                plgpu.barrier_wait(free.at[slot_of(i)])

    @pl.when((lax.axis_index("warpgroup") < 2) & (count > 0))
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        wg, kv_len = lax.axis_index("warpgroup"), lens_ref[row]
        wg_start = start + wg * WG_ROWS
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(wg_start, WG_ROWS), head], q_smem.at[wg], q_full.at[wg])
        # this warpgroup's live rows [low_row, end_row) and their positions; row 0 is at position base
        low_row, end_row = (jnp.clip(x - wg * WG_ROWS, 0, WG_ROWS) for x in (low, low + count))
        base = first_position - low + wg * WG_ROWS
        # its KV tiles, from `begin` on: [0, lower) masked, [lower, upper) not, [upper, end) masked, the rest not seen

        def to_steps(keys):
            return lax.div(keys, jnp.int32(kv_tile)) - begin

        end = jnp.where(end_row > low_row, to_steps(base + end_row + (kv_tile - 1)), 0)
        end = jnp.clip(end, 0, num_steps)
        upper = jnp.clip(to_steps(base + low_row + 1), 0, end)
        lower = jnp.int32(0)
        if sliding_window is not None:
            lower = jnp.clip(to_steps(base + end_row - sliding_window + (kv_tile - 1)), 0, upper)

        def change_turns():
            if turn is not None:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def scores(dots):
            """In units of log2, save for a factor that is left to the exponent."""
            if softcap is None:
                return dots, scale * LOG2E
            # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 3 digits only
            return 1.0 - 2.0 / (jnp.exp2(dots * (2 * LOG2E * scale / softcap)) + 1.0), softcap * LOG2E

        def mask(s, i):
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + (begin + i) * kv_tile
            position = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA) + base
            seen = key <= position
            if sliding_window is not None:
                seen &= key > position - sliding_window
            return jnp.where(seen, s, -jnp.inf)

        def clear_dead_values(i, slot):
            """Zeroes the V rows that nothing attends to: they may be NaN, and 0 * NaN is NaN.

            Both warpgroups do so, each before its own product; live rows get the values that they have.
            """
            key = (begin + i) * kv_tile
            edge = key + kv_tile > kv_len
            if sliding_window is not None:
                edge |= key < begin_key

            @pl.when(edge)
            def _():
                for top in range(0, kv_tile, 64):
                    part = v_smem.at[slot, pl.ds(top, 64)]
                    v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                    own = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA) + (key + top)
                    part[...] = jnp.where((own >= begin_key) & (own < kv_len), v, jnp.zeros_like(v))
                plgpu.commit_smem()

        def step(masked, i, carry):
            acc, m, total = carry  # f32 [WG_ROWS, H], [WG_ROWS] in units of log2, [WG_ROWS]
            slot = slot_of(i)

            def qk(out):
                plgpu.wgmma(out, q_smem.at[wg], k_smem.at[slot].T)
                change_turns()
                return out[...]

            s = pl.run_scoped(qk, plgpu.ACC((WG_ROWS, kv_tile), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            s, factor = scores(s)
            if masked:
                s = mask(s, i)
            m_new = jnp.maximum(m, s.max(axis=1) * factor)
            shrink = jnp.exp2(m - m_new)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            total = total * shrink
            p16 = p.astype(v_smem.dtype)
            if head_dim <= 128:  # where registers allow it, sum up before the other warpgroup gets its turn
                total = total + p.sum(axis=1)
                acc, total, m_new, p16 = lax.optimization_barrier((acc, total, m_new, p16))
            if turn is not None:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[slot])
            if masked:
                clear_dead_values(i, slot)
            if turn is not None:
                plgpu.barrier_wait(turn)
            if head_dim > 128:
                total = total + p.sum(axis=1)

            def wait_for_next_k():
                @pl.when(i + 1 < end)
                def _():
                    plgpu.barrier_wait(k_full.at[slot_of(i + 1)])

            def pv(out):
                if p_smem is None:
                    plgpu.wgmma(out, p16, v_smem.at[slot])
                else:
                    plgpu.wgmma(out, p_smem.at[wg], v_smem.at[slot])
                wait_for_next_k()

            if p_smem is None:
                acc = pl.run_state(pv)(plgpu.ACC.init(acc))
            else:
                p_smem.at[wg][...] = p16
                plgpu.commit_smem()
                acc = acc + pl.run_scoped(lambda out: (pv(out), out[...])[1], plgpu.ACC(acc.shape, jnp.float32))
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, m_new, total

        def store_rows(ref, value):
            if hasattr(plgpu, "store"):  # jax 0.12 wants to hear that bank conflicts are all right
                plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                ref[...] = value

        def pass_over(i, _):
            """A KV tile that the other warpgroup alone needs."""
            slot = slot_of(i)
            for full, free in ((k_full, k_free), (v_full, v_free)):
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])
            change_turns()
            change_turns()

        per_row = plgpu.Layout.WGMMA.reduce(1)
        m, total = (sinks_ref[0][head] * LOG2E, 1.0) if sinks_ref else (reference.MASKED, 0.0)
        carry = (
            plgpu.layout_cast(jnp.zeros((WG_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WG_ROWS,), m, jnp.float32), per_row),
            plgpu.layout_cast(jnp.full((WG_ROWS,), total, jnp.float32), per_row),
        )
        plgpu.barrier_wait(q_full.at[wg])

        @pl.when(end > 0)
        def _():
            plgpu.barrier_wait(k_full.at[0])

        pl.when(wg == 1)(change_turns)
        if sliding_window is not None:
            carry = lax.fori_loop(0, lower, partial(step, True), carry)
        carry = lax.fori_loop(lower, upper, partial(step, False), carry)
        carry = lax.fori_loop(upper, end, partial(step, True), carry)
        lax.fori_loop(end, num_steps, pass_over, None)
        pl.when(wg == 0)(change_turns)

        acc, _, total = carry
        inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        out = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
        out16 = out.astype(q_smem.dtype)
        q_smem.at[wg][...] = out16
        plgpu.commit_smem()
        whole = (low_row == 0) & (end_row == WG_ROWS)

        @pl.when(whole)
        def _():
            plgpu.copy_smem_to_gmem(q_smem.at[wg], o_ref.at[pl.ds(wg_start, WG_ROWS), head])

        @pl.when(jnp.logical_not(whole))
        def _():
            for top in range(0, WG_ROWS, ALIGN):

                @pl.when((top >= low_row) & (top + ALIGN <= end_row))
                def _(top=top):
                    group = q_smem.at[wg, pl.ds(top, ALIGN)]
                    plgpu.copy_smem_to_gmem(group, o_ref.at[pl.ds(wg_start + top, ALIGN), head])

            # the live rows of groups that are not whole
            head_end = jnp.minimum(lax.div(low_row + (ALIGN - 1), jnp.int32(ALIGN)) * ALIGN, end_row)
            tail_begin = jnp.maximum(lax.div(end_row, jnp.int32(ALIGN)) * ALIGN, head_end)

            @pl.when((low_row < head_end) | (tail_begin < end_row))
            def _():
                for left in range(0, head_dim, 64):
                    columns = pl.ds(left, 64)
                    for i in range(0, 64, 8):  # 8 columns at a time: wider ones make layout inference stumble
                        store_rows(rows_smem.at[:, wg, pl.ds(i, 8)], out16[:, left + i : left + i + 8])
                    plgpu.commit_smem()
                    for begin_row, stop_row in ((low_row, head_end), (tail_begin, end_row)):

                        @pl.loop(begin_row, stop_row)
                        def _(r, columns=columns):
                            plgpu.copy_smem_to_gmem(rows_smem.at[r, wg], o_ref.at[wg_start + r, head, columns])

                    plgpu.wait_smem_to_gmem(0)

        plgpu.wait_smem_to_gmem(0)


# One module-level jit, so that every layer of a step shares one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("first_token", "scale", "sliding_window", "softcap", "tuning"))
def _attend(
    q: Array, kv: KVPages, tiles: Array, kv_lens: Array, page_table: Array, sinks: Array | None, *,
    first_token: int, scale: float, sliding_window: int | None, softcap: float | None, tuning: PrefillTuning,
) -> Array:  # fmt: skip
    """q [T, N, H], T a multiple of 8 and at least 128; tiles i32[n, 4] -> [T, N, H]."""
    _, heads, head_dim = q.shape
    dtype, kv_tile, stages = kv.dtype, tuning.kv_tile, tuning.stages
    assert kv_tile and stages
    copies = max(1, kv_tile // kv.shape[3])

    def tiled(*shape: int):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = {
        "q_smem": tiled(2, WG_ROWS, head_dim),
        "k_smem": tiled(stages, kv_tile, head_dim),
        "v_smem": tiled(stages, kv_tile, head_dim),
        "rows_smem": plgpu.SMEM((WG_ROWS, 2, 64), dtype),
        "p_smem": None if tuning.p_in_registers else tiled(2, WG_ROWS, kv_tile),
        "q_full": plgpu.Barrier(num_barriers=2),
        "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        "v_full": plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        "k_free": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "v_free": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "turn": plgpu.Barrier(num_arrivals=2) if tuning.take_turns else None,
    }
    kernel = plgpu.kernel(
        partial(_body, first_token=first_token, scale=scale, sliding_window=sliding_window, softcap=softcap),
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=scratch,
        grid=(tiles.shape[0] * heads,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(q, kv, tiles, kv_lens, page_table, *([] if sinks is None else [sinks]))


def unsupported(*, dtype: str | None, head_dim: int | None, group: int | None) -> str | None:
    """Why the kernel cannot serve a model, or None if it can. What is None is not checked. Any group will do."""
    del group
    if dtype is not None and dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, and the dtype is {dtype}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"it takes head dims {', '.join(map(str, HEAD_DIMS))}, and the model's is {head_dim}"
    return None


def prefill_attention(
    q: Array,
    kv: KVPages,
    meta: AttentionInput,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    first_token: int = 0,
    tuning: PrefillTuning = PrefillTuning(),
) -> Array:
    """Attention of the prefill region: q [first_token + T_p, N, H] -> the same shape; padding tokens get 0.

    `first_token`, a multiple of 8, spares a step that also has decode rows the copy of its prefill queries: pass the
    queries of all tokens, and overwrite the output of the first ones, which is undefined. Tiles come from `prepare` of
    this module if meta has been through it. Raises ValueError for shapes that the kernel does not take.
    """
    tokens, heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = kv.shape
    name = "paged prefill on mosaic_gpu"
    if reason := unsupported(dtype=str(kv.dtype), head_dim=head_dim, group=heads // kv_heads):
        raise ValueError(f"{name}: {reason}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{name}: page size must be one of {PAGE_SIZES}, got {page_size}")
    region = meta.token_rows.shape[0] - meta.num_decode_rows
    if first_token % ALIGN or tokens != first_token + region:
        raise ValueError(f"{name}: {tokens} queries are not {first_token} (a multiple of {ALIGN}) and {region} more")
    work = meta.prepared and meta.prepared.prefill_tiles
    if not isinstance(work, PrefillWork):
        work = make_work(meta, sliding_window)
    padding = max(QUERY_TILE, ceil_div(tokens, ALIGN) * ALIGN) - tokens
    qs = q.astype(kv.dtype)
    if padding:
        qs = jnp.pad(qs, ((0, padding), (0, 0), (0, 0)))
    if sinks is not None:
        sinks = reference.start_of(sinks, (heads,))
    out = _attend(
        qs, kv, work.tiles, meta.kv_lens, meta.page_table, sinks, first_token=first_token, scale=scale,
        sliding_window=sliding_window, softcap=softcap, tuning=tuning.of(head_dim),
    )  # fmt: skip
    return out[:tokens].astype(q.dtype)
