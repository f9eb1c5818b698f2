"""Paged attention for NVIDIA GPUs before Hopper (Pallas Triton): a decode kernel, its combine, and a prefill kernel.

What: `reference.attention` for a step's decode rows and prompt chunks. Tensor cores of Ampere and Ada work from
registers, and Triton's pipeline of asynchronous copies feeds them; it compiles for Hopper too.

Why this shape:
  - Decode is bound by reading K and V once: a program takes one kv head and a range of a row's KV tiles (a work item);
    the query heads of that kv head, padded to the 16 rows that a tensor core takes, are all the queries there are.
  - Work items are made on the device from kv_lens, so nothing waits for the host. Their number is static, and those
    beyond the real ones end at once. Long rows are cut so that a small batch fills the card, or that one of them does
    not keep a large batch waiting; a second kernel combines their partial results, and is left out where the page
    table is too narrow for that.
  - Prefill: a program takes up to `query_tile` tokens of one chunk and one query head. Heads are innermost in the grid,
    so that programs that run together find the pages of their kv head in the L2 cache. The last tiles of a chunk, which
    see the most keys, start first. Tiles of padding tokens see no key and write zeros.
  - Blocks have sizes that are powers of 2: head dims 80 and 96 take the registers of 128, but loads beyond the head dim
    are masked, so nothing more is read. The pool stays as it is.
  - Page ids are loaded with the tile: one where a page holds a whole tile, else one per key (all of one page hit the
    same cache line). No scalar prefetch exists here, nor does a kernel of more than three grid axes.

Diary (no card of 8.x was at hand; what Triton 3.9's own compiler makes of the kernels for sm_80 and sm_89):
    v1  registers of a thread, KiB of shared memory, bytes spilled, by head dim 64, 128, 256:
        decode   72, 96 to 128, 96;  20, 38, 41;  none. So two programs or more share a multiprocessor of any of them
        prefill  196, 255, 245;  32, 64, 68;  0, 40, 0. With 4 warps: 172 spilled at 64, 296 at 256 (and kv_tile 64)
        Copies are asynchronous and of 16 bytes, also where a head of 80 is masked in a block of 128.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput, Prepared
from jaxserve.shapes import ceil_div
from jaxserve.state import KVPages

PAGE_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MIN_ROWS = 16  # of a tensor core's operand
MAX_HEADS = 64  # query heads of a decode program; a larger group takes several
MAX_SPLITS = 64  # of a row: partial results that one program combines
WHOLE, PART, NOTHING = 0, 1, 2  # an item that writes the result itself, that is one of several, that is padding
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tuning:
    """How work is cut, in tokens. `target_programs`: how many fill the card; `min_tiles`: least KV tiles of an item of
    a split row, since combining costs as much as reading some; `stages`: KV tiles in flight, the current one included.
    `interpret` runs the kernels on a CPU.
    """

    query_tile: int = 128
    kv_tile: int = 64
    stages: int = 3
    target_programs: int = 256
    min_tiles: int = 4
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("query_tile", "kv_tile"):
            if (value := getattr(self, name)) < MIN_ROWS or value.bit_count() != 1:
                raise ValueError(f"Tuning.{name} must be a power of 2 and at least {MIN_ROWS}, got {value}")
        for name in ("stages", "target_programs", "min_tiles"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"Tuning.{name} must be at least 1, got {value}")

    def query_tile_of(self, num_tokens: int) -> int:
        """A prefill region of few tokens takes smaller tiles."""
        return min(self.query_tile, max(MIN_ROWS, pl.next_power_of_2(num_tokens)))

    def cuts(self, rows: int, programs_per_row: int, longest: int) -> tuple[int, int]:
        """Most items of a row, and items beyond one per row; both static. `longest`: most KV tiles of a row.

        A batch that fills the card anyway only cuts rows that are 8 times as long as the average.
        """
        spare = max(ceil_div(self.target_programs, programs_per_row), rows // 8)
        splits = max(4, 2 * ceil_div(self.target_programs, rows * programs_per_row))
        splits = min(splits, spare + 1, MAX_SPLITS, longest // self.min_tiles)
        return (splits, spare) if splits > 1 else (1, 0)


def tuning_of(head_dim: int | None) -> Tuning:
    """So that a program fits into the 99 KiB of shared memory that cards of 8.6 and 8.9 give it, and into registers."""
    return Tuning(query_tile=64, kv_tile=32) if (head_dim or 0) > 128 else Tuning()


def unsupported(*, dtype: str | None, head_dim: int | None) -> str | None:
    """Why the kernels cannot serve a model, or None if they can. What is None is not checked. Any N, K will do."""
    if dtype is not None and dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, and the dtype is {dtype}"
    if head_dim is not None and not (16 <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0):
        return f"it takes head dims from 16 to {MAX_HEAD_DIM} that are multiples of 8, and the model's is {head_dim}"
    return None


def prepare(meta: AttentionInput, page_size: int, *, tuning: Tuning) -> AttentionInput:
    """As `reference.prepare`: works out once per step what all layers share. Use the tuning of `attention`."""
    tiles: Any = prefill_tiles(meta, tuning) if meta.num_prefill_rows else None
    return replace(meta, prepared=Prepared(*reference.write_slots(meta, page_size), tiles))


def prefill_tiles(meta: AttentionInput, tuning: Tuning) -> Array:
    """i32[n, 4] of each query tile: row, first token within the region, tokens, position of the first one.

    Tiles that no row needs hold the padding tokens: `reference.prefill_tiles` always leaves enough of them. Their first
    position is minus their number of tokens, so that they end before key 0.
    """
    num_tokens = meta.token_rows.shape[0] - meta.num_decode_rows
    query_tile = tuning.query_tile_of(num_tokens)
    tiles = reference.prefill_tiles(meta, query_tile)
    real = tiles.num_tokens > 0
    nth = jnp.arange(real.shape[0], dtype=jnp.int32) - jnp.sum(real, dtype=jnp.int32)  # of the padding tiles
    first = jnp.where(real, tiles.first_tokens, meta.cu_q_lens[-1] + nth * query_tile)
    count = jnp.where(real, tiles.num_tokens, jnp.clip(num_tokens - first, 0, query_tile))
    position = jnp.where(real, tiles.first_positions, -count)
    return jnp.stack([tiles.rows, first, count, position], axis=1).astype(jnp.int32)


class Work(NamedTuple):
    """The work items of a decode region and the rows that are split. Sizes are static: see `Tuning.cuts`."""

    items: Array  # i32[S_d + spare, 4] row, first KV tile, end KV tile, WHOLE, PART or NOTHING
    splits: Array  # i32[m, 3] rows that are split: row, first item, number of items (0: none)


def make_work(kv_lens: Array, sliding_window: int | None, kv_tile: int, min_tiles: int, cuts: tuple[int, int]) -> Work:
    """Cuts the KV tiles that each row (kv_lens i32[S_d]) needs into items of `chunk` tiles at most.

    The chunk is so large that the items fit: sum(ceil(tiles / chunk)) <= sum(tiles) / chunk + S_d <= spare + S_d.
    A row of length 0 has one item too, which writes zeros.
    """
    (max_splits, spare), rows = cuts, kv_lens.shape[0]
    begin = jnp.zeros_like(kv_lens) if sliding_window is None else jnp.maximum(0, kv_lens - sliding_window) // kv_tile
    tiles = (kv_lens + kv_tile - 1) // kv_tile - begin  # i32[S_d]
    chunk = jnp.max(tiles)
    if spare:
        most = jnp.maximum((jnp.sum(tiles) + spare - 1) // spare, (chunk + max_splits - 1) // max_splits)
        chunk = jnp.maximum(min_tiles, most)
    count = jnp.maximum(1, (tiles + chunk - 1) // jnp.maximum(chunk, 1))  # i32[S_d] items of each row
    up_to = jnp.arange(rows) <= jnp.arange(rows)[:, None]  # sums and searches compare all with all: few fusions
    ends, split_ends = (jnp.sum(jnp.where(up_to, x, 0), axis=1, dtype=jnp.int32) for x in (count, count > 1))

    def row_of(ends: Array, n: int) -> tuple[Array, Array]:
        """i32[n]: each of 0..n-1, and the row that it belongs to if a row's end at `ends`."""
        nth = jnp.arange(n, dtype=jnp.int32)
        return nth, jnp.minimum(jnp.sum(ends <= nth[:, None], axis=1, dtype=jnp.int32), rows - 1)

    item, row = row_of(ends, rows + spare)
    first = begin[row] + (item - (ends - count)[row]) * chunk
    real = item < ends[-1]
    last = jnp.where(real, jnp.minimum(first + chunk, (begin + tiles)[row]), first)
    what = jnp.where(real, jnp.where(count[row] > 1, PART, WHOLE), NOTHING)
    nth, row_split = row_of(split_ends, max(1, min(rows, spare)))
    number = jnp.where(nth < split_ends[-1], count[row_split], 0)
    return Work(
        jnp.stack([row, first, last, what], axis=1).astype(jnp.int32),
        jnp.stack([row_split, (ends - count)[row_split], number], axis=1).astype(jnp.int32),
    )


# ------------------------------------------------------------------------------------------------ inside of kernels


@dataclass(frozen=True)
class Scores:
    """How a score, in units of log2, is made of a dot product. Static."""

    scale: float
    sliding_window: int | None
    softcap: float | None

    def of(self, dots: Array) -> Array:
        if self.softcap is None:
            return dots * (self.scale * LOG2E)
        # tanh(x) = 1 - 2 / (e^2x + 1)
        e2x = jnp.exp2(dots * (2 * LOG2E * self.scale / self.softcap))
        return (self.softcap * LOG2E) * (1.0 - 2.0 / (e2x + 1.0))


class Softmax(NamedTuple):
    """Of some queries so far: f32 [rows, Hp] the sum of values, [rows] largest score in log2, [rows] sum of 2 ** s."""

    acc: Array
    m: Array
    total: Array

    def add(self, s: Array, v: Array) -> "Softmax":
        """With the scores s [rows, keys] of more keys, and their values [keys, Hp]."""
        m = jnp.maximum(self.m, jnp.max(s, axis=1))
        shrink, p = jnp.exp2(self.m - m), jnp.exp2(s - m[:, None])
        return Softmax(
            self.acc * shrink[:, None] + _dot(p.astype(v.dtype), v), m, self.total * shrink + jnp.sum(p, axis=1)
        )

    def result(self) -> Array:
        """[rows, Hp]; 0 of queries that have seen no key."""
        return self.acc * jnp.where(self.total > 0, 1.0 / jnp.where(self.total > 0, self.total, 1.0), 0.0)[:, None]


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _int(value: int) -> Array:
    return jnp.int32(value)


def _range(size: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def _columns(head_dim: int) -> tuple[Array, Array]:
    """[1, Hp]: columns of a block, and which of them are part of the head."""
    columns = _range(pl.next_power_of_2(head_dim))[None, :]
    return columns, columns < head_dim


def _fresh(sinks_ref: Any, heads: Array, padded_head_dim: int, *, first: Any = True) -> Softmax:
    """A softmax of queries of these heads (i32[rows]; those past the end are padding) that have seen no key but, where
    there are sinks and `first` is true, the sink.
    """
    acc = jnp.zeros((heads.shape[0], padded_head_dim), jnp.float32)
    m = jnp.full(heads.shape, reference.MASKED, jnp.float32)
    if sinks_ref is None:
        return Softmax(acc, m, jnp.zeros_like(m))
    known = (heads < sinks_ref.shape[0]) & first
    sinks = plt.load(sinks_ref.at[heads], mask=known, other=reference.MASKED).astype(jnp.float32)
    return Softmax(acc, jnp.maximum(sinks * LOG2E, reference.MASKED), jnp.where(known, 1.0, 0.0))


class Pages(NamedTuple):
    """The pages of one row and kv head."""

    kv: Any  # Ref [P, K, 2, page, H]
    table: Any  # Ref i32[S, W]
    row: Array
    head: Array

    def tile(self, start: Array, kv_tile: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Indices of K and of V, [kv_tile, Hp] each, of the keys from `start`, a multiple of kv_tile, on."""
        page_size, width = self.kv.shape[3], self.table.shape[1]
        within = _range(kv_tile)
        keys = start if page_size >= kv_tile else start + within
        page = self.table[self.row, jnp.minimum(lax.div(keys, _int(page_size)), width - 1)]
        place = lax.rem(keys, _int(page_size)) + (within if page_size >= kv_tile else 0)
        page = page if page_size >= kv_tile else page[:, None]
        place = place[:, None], _columns(self.kv.shape[4])[0]
        return (page, self.head, 0, *place), (page, self.head, 1, *place)

    def attend(
        self, q: Array, so_far: Softmax, start: Array, kv_tile: int, scores: Scores,
        seen: Callable[[Array], Array] | None = None, live: Callable[[Array], Array] | None = None,
    ) -> Softmax:  # fmt: skip
        """With the KV tile from `start` on: q [rows, Hp].

        seen(keys [1, kv_tile]) -> what a query attends to; live(keys [kv_tile, 1]) -> what any does, the rest may be
        NaN. None: all of them.
        """
        (k_index, v_index), real = self.tile(start, kv_tile), _columns(self.kv.shape[4])[1]
        keys = start + _range(kv_tile)
        padded = self.kv.shape[4] != q.shape[1]
        k = plt.load(self.kv.at[k_index], mask=real, other=0) if padded else plt.load(self.kv.at[k_index])
        s = scores.of(_dot(q, k.T))
        if seen is not None:
            s = jnp.where(seen(keys[None, :]), s, reference.MASKED)
        if live is None:
            v = plt.load(self.kv.at[v_index], mask=real, other=0) if padded else plt.load(self.kv.at[v_index])
        else:  # a masked value may be NaN, and 0 * NaN is NaN
            v = plt.load(self.kv.at[v_index], mask=live(keys[:, None]) & real, other=0)
        return so_far.add(s, v)


def _named(names: tuple[str, ...], refs: tuple[Any, ...]) -> dict[str, Any]:
    return dict.fromkeys(("sinks", "partial", "lse")) | dict(zip(names, refs, strict=True))


def _decode_body(*refs: Any, names: tuple[str, ...], kv_tile: int, heads_per_program: int, scores: Scores):
    """`refs` are, by `names`:

    q [T, N, H]; kv [P, K, 2, page, H]; table i32[S, W]; lens i32[S]; items i32[n, 4]; maybe sinks [N]; out [T, N, H]
    of rows with one item; where rows may be split, partial f32[n, N, H] and lse f32[n, N] of the other items: their
    result, and log2 of their sum of 2 ** s.
    """
    ref = _named(names, refs)
    (_, num_heads, head_dim), kv_heads = ref["q"].shape, ref["kv"].shape[1]
    group = num_heads // kv_heads
    blocks = ceil_div(group, heads_per_program)
    kv_head, block = lax.div(pl.program_id(0), _int(blocks)), lax.rem(pl.program_id(0), _int(blocks))
    item = pl.program_id(1)
    row, first, end, what = (ref["items"][item, i] for i in range(4))
    kv_len = ref["lens"][row]
    begin = _int(0) if scores.sliding_window is None else jnp.maximum(0, kv_len - scores.sliding_window)
    within = block * heads_per_program + _range(heads_per_program)  # of the group
    heads = jnp.where(within < group, kv_head * group + within, num_heads)
    columns, real = _columns(head_dim)
    index, real = (heads[:, None], columns), (within < group)[:, None] & real
    q = plt.load(ref["q"].at[(row, *index)], mask=real & (first < end), other=0)
    pages = Pages(ref["kv"], ref["table"], row, kv_head)
    is_first = first == lax.div(begin, _int(kv_tile))

    def live(keys: Array) -> Array:
        return (keys >= begin) & (keys < kv_len)

    def step(tile: Array, so_far: Softmax) -> Softmax:
        return pages.attend(q, so_far, tile * kv_tile, kv_tile, scores, live, live)

    softmax = lax.fori_loop(first, end, step, _fresh(ref["sinks"], heads, q.shape[1], first=is_first))
    out = softmax.result()
    plt.store(ref["out"].at[(row, *index)], out.astype(ref["out"].dtype), mask=real & (what == WHOLE))
    if ref["partial"] is not None:
        part = what == PART
        plt.store(ref["partial"].at[(item, *index)], out, mask=real & part)
        lse = softmax.m + jnp.log(jnp.where(part, softmax.total, 1.0)) * LOG2E
        plt.store(ref["lse"].at[item, heads], lse, mask=(within < group) & part)


def _combine_body(partial_ref, lse_ref, splits_ref, _, out_ref, *, max_splits: int):
    """One row that is split, and one query head: partial f32[n, N, H], lse f32[n, N], splits i32[m, 3]; out [T, N, H]
    comes with the results of the other rows.
    """
    head, nth = pl.program_id(0), pl.program_id(1)
    row, first, count = (splits_ref[nth, i] for i in range(3))
    split = _range(pl.next_power_of_2(max_splits))
    live, item = split < count, jnp.where(split < count, first + split, first)
    lse = plt.load(lse_ref.at[item, head], mask=live, other=reference.MASKED)
    weight = jnp.where(live, jnp.exp2(lse - jnp.max(lse, axis=0)), 0.0)
    columns, real = _columns(out_ref.shape[2])
    parts = plt.load(partial_ref.at[item[:, None], head, columns], mask=live[:, None] & real, other=0)
    total = jnp.maximum(jnp.sum(weight, axis=0), 1e-30)
    out = jnp.sum(parts * weight[:, None], axis=0) * (1.0 / total)
    plt.store(out_ref.at[row, head, columns[0]], out.astype(out_ref.dtype), mask=real[0] & (count > 0))


def _prefill_body(*refs: Any, names: tuple[str, ...], query_tile: int, kv_tile: int, first_token: int, scores: Scores):
    """`refs` are, by `names`: q [T, N, H]; kv [P, K, 2, page, H]; table i32[S, W]; tiles i32[n, 4]; maybe sinks [N];
    maybe `into`, where out is; out [T, N, H], from first_token on.
    """
    ref = _named(names, refs)
    (_, num_heads, head_dim), kv_heads = ref["q"].shape, ref["kv"].shape[1]
    head = pl.program_id(0)
    tile = ref["tiles"].shape[0] - 1 - pl.program_id(1)
    row, first, count, position = (ref["tiles"][tile, i] for i in range(4))
    within = _range(query_tile)
    columns, real = _columns(head_dim)
    index = ((first_token + first + within)[:, None], head, columns)
    real = (within < count)[:, None] & real
    q = plt.load(ref["q"].at[index], mask=real, other=0)
    pages = Pages(ref["kv"], ref["table"], row, lax.div(head, _int(num_heads // kv_heads)))
    window, keys_end = scores.sliding_window, position + count
    begin = _int(0) if window is None else jnp.maximum(0, position - (window - 1))
    positions = (position + within)[:, None]

    def seen(keys: Array) -> Array:
        causal = keys <= positions
        return causal if window is None else causal & (keys > positions - window)

    def live(keys: Array) -> Array:
        return (keys >= begin) & (keys < keys_end)

    def edge(tile: Array, so_far: Softmax) -> Softmax:
        return pages.attend(q, so_far, tile * kv_tile, kv_tile, scores, seen, live)

    def inner(tile: Array, so_far: Softmax) -> Softmax:  # every query sees every key
        return pages.attend(q, so_far, tile * kv_tile, kv_tile, scores)

    lowest = lax.div(begin, _int(kv_tile))
    highest = lax.div(keys_end + (kv_tile - 1), _int(kv_tile))
    softmax = _fresh(ref["sinks"], jnp.full((query_tile,), head, jnp.int32), q.shape[1])
    if window is None:
        middle = lax.div(jnp.maximum(position + 1, 0), _int(kv_tile))
        softmax = lax.fori_loop(lowest, middle, inner, softmax)
        lowest = middle
    softmax = lax.fori_loop(lowest, highest, edge, softmax)
    plt.store(ref["out"].at[index], softmax.result().astype(ref["out"].dtype), mask=real)


# ------------------------------------------------------------------------------------------------------- entries


def _call(
    body: Callable[..., None], name: str, grid: tuple[int, int], arguments: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct], tuning: Tuning, num_warps: int, into: Array | None = None, **static: Any,
) -> list[Array]:  # fmt: skip
    """Runs a body over whole arrays, by name. The first result is written into the array `into`, if that is given."""
    given = {name: array for name, array in (arguments | {"into": into}).items() if array is not None}
    return pl.pallas_call(
        partial(body, names=(*given, *results), **static),
        out_shape=list(results.values()),
        grid=grid,
        input_output_aliases={} if into is None else {len(given) - 1: 0},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=tuning.stages),
        interpret=tuning.interpret,
        name=name,
    )(*given.values())


# Module-level jits, so that all layers of a step share one traced call of each.
@partial(jax.jit, static_argnames=("num_rows", "scores", "tuning"))
def _decode(
    q: Array, kv: KVPages, table: Array, lens: Array, sinks: Array | None, *, num_rows: int, scores: Scores,
    tuning: Tuning,
) -> Array:  # fmt: skip
    (_, num_heads, head_dim), (_, kv_heads, _, page_size, _) = q.shape, kv.shape
    group = num_heads // kv_heads
    heads = min(MAX_HEADS, max(MIN_ROWS, pl.next_power_of_2(group)))
    programs = kv_heads * ceil_div(group, heads)  # of an item
    longest = ceil_div(table.shape[1] * page_size, tuning.kv_tile)
    if scores.sliding_window is not None:
        longest = min(longest, ceil_div(scores.sliding_window + tuning.kv_tile - 1, tuning.kv_tile))
    cuts = tuning.cuts(num_rows, programs, longest)
    work = make_work(lens[:num_rows], scores.sliding_window, tuning.kv_tile, tuning.min_tiles, cuts)
    items = work.items.shape[0]
    results = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if cuts[1]:
        results["partial"] = jax.ShapeDtypeStruct((items, num_heads, head_dim), jnp.float32)
        results["lse"] = jax.ShapeDtypeStruct((items, num_heads), jnp.float32)
    given = {"q": q, "kv": kv, "table": table, "lens": lens, "items": work.items, "sinks": sinks}
    out, *parts = _call(
        _decode_body, "paged_decode", (programs, items), given, results, tuning, num_warps=4,
        kv_tile=tuning.kv_tile, heads_per_program=heads, scores=scores,
    )  # fmt: skip
    if not parts:
        return out
    return pl.pallas_call(
        partial(_combine_body, max_splits=cuts[0]),
        out_shape=results["out"],
        grid=(num_heads, work.splits.shape[0]),
        input_output_aliases={3: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=tuning.interpret,
        name="combine_decode",
    )(*parts, work.splits, out)


@partial(jax.jit, static_argnames=("first_token", "scores", "tuning"))
def _prefill(
    q: Array, kv: KVPages, table: Array, tiles: Array, sinks: Array | None, decoded: Array | None, *, first_token: int,
    scores: Scores, tuning: Tuning,
) -> Array:  # fmt: skip
    """decoded [T, N, H]: has the results of the tokens before the first."""
    tokens, num_heads, head_dim = q.shape
    query_tile = tuning.query_tile_of(tokens - first_token)
    num_warps = 8 if query_tile * pl.next_power_of_2(head_dim) >= 2**13 else 4  # fewer spill registers
    given = {"q": q, "kv": kv, "table": table, "tiles": tiles, "sinks": sinks}
    (out,) = _call(
        _prefill_body, "paged_prefill", (num_heads, tiles.shape[0]), given,
        {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}, tuning, num_warps, decoded,
        query_tile=query_tile, kv_tile=tuning.kv_tile, first_token=first_token, scores=scores,
    )  # fmt: skip
    return out


def attention(
    q: Array,
    kv: KVPages,
    meta: AttentionInput,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tuning: Tuning,
) -> Array:
    """As `reference.attention`, for a meta that has been through `prepare` with the same tuning.

    sinks [N]: one more score per query head, which only adds to the softmax's denominator.

    Raises ValueError for a dtype, head dim or page size that the kernels do not take.
    """
    if reason := unsupported(dtype=str(q.dtype), head_dim=q.shape[2]):
        raise ValueError(f"attention on triton: {reason}")
    if (page_size := kv.shape[3]) not in PAGE_SIZES:
        raise ValueError(f"attention on triton: pages must hold {PAGE_SIZES} tokens, got {page_size}")
    split, scores = meta.num_decode_rows, Scores(scale, sliding_window, softcap)
    decoded = None
    if split:
        decoded = _decode(q, kv, meta.page_table, meta.kv_lens, sinks, num_rows=split, scores=scores, tuning=tuning)
    if q.shape[0] == split:
        assert decoded is not None, "a step has tokens"
        return decoded
    tiles: Any = meta.prepared.prefill_tiles
    return _prefill(q, kv, meta.page_table, tiles, sinks, decoded, first_token=split, scores=scores, tuning=tuning)
