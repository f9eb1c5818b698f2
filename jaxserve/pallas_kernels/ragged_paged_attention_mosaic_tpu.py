"""Ragged paged attention for TPUs (Pallas): decode rows and prompt chunks over the pages of their rows.

What: one kernel, called for the decode region with blocks of one token, and for the prefill region with blocks of
`block_tokens`. A grid step is a visit: the queries of one block, all heads, against all keys of one row. A block that
several chunks share is visited once for each, and each visit replaces the output of its own tokens.

    packed tokens | row 3 ........ | row 4 . | row 5 ................... | padding |
    blocks        |        0        |        1        |        2        |        3        |
    visits         (0, 3)     (0, 4)  (1, 4)  (1, 5)    (2, 5)            (3, 5)    (3, -)

Why this shape:
  - Blocks are aligned, so that Pallas moves queries and output in and out by itself, and no copy starts at a token that
    the tiling of memory does not allow. The price: chunks much shorter than a block leave rows of its product empty.
  - Queries come as [blocks, K, G * tokens, H]: all query heads of a kv head are rows of one product, so that K and V
    are read once for all of them and any G works. XLA changes to that order and back: two passes over q.
  - A page takes one copy, K and V of all kv heads: [K, 2, page, H] lies in one piece. Tiles of several pages are double
    buffered, across visits too: the last tile of a visit is computed while the first one of the next arrives.
  - The list of visits is in scalar memory from the start. The page table does not fit there, so Pallas moves its rows
    there as it moves queries: that of the visit at work, and that of the next one, for the pages that are copied ahead.
  - Only pages that a visit needs are copied: from the first one in its window to the last one that causality allows.
    The rest of a tile holds anything; so do keys past a row's last: scores are masked, and V is zeroed where it is not
    of the row, in the tiles at an edge only.

Memory is tiled by 128 lanes, so head dims are rounded up to multiples of 128 in the pool: `stored_head_dim`.

Diary (no TPU at hand: compiled by libtpu 0.0.50 for v4, v5e, v5p and v6e, and run in the interpreter):
    v1  one core; v4 and v5p have two
    v2  K and V in one pool: a page takes one copy instead of two. Decode of 4 rows of 2k tokens with one kv head, pages
        of 16, 64 and 256, and tables for 128k moves 1.06, 1.03 and 1.06 times the bytes that it needs.
        A table that is in scalar memory as a whole may take 1 MiB less 2 KiB, on each chip: i32[64, 1024] compiles
        (pages of 128 at 128k), and [256, 1024], [64, 8192] (pages of 16) and [256, 8192] do not. By rows, each in two
        buffers for its visit and two for the one before, any number of rows does, of up to 64,000 pages. v1 copied the
        rows by itself, each once: more code, and 1.03 instead of 1.06
"""

# pyright: reportPrivateImportUsage=false

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import MASKED, AttentionInput
from jaxserve.pallas_kernels.rope_write_mosaic_tpu import Writes, make_writes
from jaxserve.shapes import ceil_div
from jaxserve.state import KVPages

LANES = 128
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
DTYPES = ("bfloat16", "float32")
SMEM_BYTES = 2**20 - 2**12  # of scalar memory, on all chips; the compiler takes up to 2 KiB
TABLE_ROWS = 4  # of the page table that are there at once: for the visits at work and to come, two buffers each
SCORE_ARRAYS = 4  # float32 arrays of a product's scores that live at once
MiB = 2**20


@dataclass(frozen=True)
class Tuning:
    """Sizes for a chip. The defaults are for the smallest fast memory (VMEM), that of a v4."""

    vmem_bytes: int = 16 * MiB  # of the kernel, the compiler's own included
    block_tokens: int = 32  # of the prefill region; a power of 2
    max_kv_tile: int = 512  # tokens

    def __post_init__(self) -> None:
        if self.block_tokens < 16 or self.block_tokens.bit_count() != 1:
            raise ValueError(f"Tuning.block_tokens must be a power of 2 and at least 16, got {self.block_tokens}")
        if self.vmem_bytes < MiB:
            raise ValueError(f"Tuning.vmem_bytes must be at least {MiB}, got {self.vmem_bytes}")

    def pages_per_tile(self, kv: KVPages, score_rows: int) -> int:
        """As many as a quarter of the memory holds twice; and so that scores fit into a quarter too."""
        _, kv_heads, _, page_size, head_dim = kv.shape
        page_bytes = 2 * kv_heads * page_size * head_dim * kv.dtype.itemsize
        quarter = self.vmem_bytes // 4
        most = min(self.max_kv_tile, quarter // (SCORE_ARRAYS * 4 * score_rows)) // page_size
        return max(1, min(most, quarter // (2 * page_bytes)))

    def check(self, q: Array, kv: KVPages, table: Array, visits: Array, tile: int, score_rows: int) -> None:
        """Raises ConfigError if the kernel's arrays do not fit: sizes of pages are the user's choice."""
        width = table.shape[2]
        scalars = 4 * (TABLE_ROWS * width + 8 * ceil_div(visits.shape[1], LANES) * LANES)
        if scalars > SMEM_BYTES:
            raise ConfigError(
                f"attention on mosaic_tpu needs {scalars / 1024:.0f} KiB of scalar memory and may take "
                f"{SMEM_BYTES // 1024}: rows have up to {width} pages of {kv.shape[3]} tokens; "
                "a larger --page-size or a smaller --max-model-len needs less",
                param="page_size",
            )
        _, kv_heads, rows, head_dim = q.shape
        rows = ceil_div(rows, 16) * 16
        queries = kv_heads * rows * (4 * head_dim * q.dtype.itemsize + 4 * (head_dim + 2 * LANES))
        tiles = 4 * kv_heads * tile * head_dim * kv.dtype.itemsize
        need = queries + tiles + SCORE_ARRAYS * 4 * score_rows * tile
        if need > self.vmem_bytes:
            raise ConfigError(
                f"attention on mosaic_tpu needs {need / MiB:.1f} MiB of VMEM and may take {self.vmem_bytes / MiB:.1f}: "
                f"{kv_heads} kv heads, {rows} rows of queries for each, pages of {kv.shape[3]} tokens; "
                "a smaller --page-size needs less",
                param="page_size",
            )


TUNING = {  # by generation; v5e and v6e have 128 MiB of VMEM, v5p and TPU7x have 64
    "v4": Tuning(),
    "v5e": Tuning(64 * MiB, 128),
    "v5p": Tuning(40 * MiB, 128),
    "v6e": Tuning(64 * MiB, 128),
    "7x": Tuning(40 * MiB, 128),
}


def generation_of(device_kind: str) -> str | None:
    """The key of TUNING for jax's Device.device_kind; None: not known."""
    match = re.fullmatch(r"TPU ?(v4|v5e|v5 ?lite|v5p?|v6e|v6 ?lite|v?7x?)", device_kind)
    if not match:
        return None
    name = match[1].replace(" ", "")
    return {"v5lite": "v5e", "v6lite": "v6e", "v5": "v5p", "v7": "7x", "v7x": "7x", "7": "7x"}.get(name, name)


class Column(NamedTuple):
    """Rows of i32[6, n + 1]; the last entry only ends the list: 0, and no visit after it."""

    row: int = 0  # of the page table
    block: int = 1
    begin: int = 2  # first token within the block, and
    end: int = 3  # one past the last; equal: nothing to attend to
    position: int = 4  # of the block's first token, if it were of this row: may be negative
    next: int = 5  # the first visit at or after this one that has something to attend to


COLUMN = Column()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "decode", "prefill", "writes"],
    meta_fields=["block_tokens"],
)
@dataclass(frozen=True)
class Work:
    """What all layers of a step share: `AttentionInput.prepared` on TPUs."""

    table: Array  # i32[S, 1, W], W a multiple of 128
    decode: Array | None  # visits of the decode region, i32[6, S_d + 1]; None: there is no such region
    prefill: Array | None
    writes: Writes
    block_tokens: int  # of the prefill region


def stored_head_dim(head_dim: int) -> int:
    """Head dim of the pool's pages: what lies past the model's own is 0."""
    return ceil_div(head_dim, LANES) * LANES


def unsupported(*, dtype: str | None, head_dim: int | None) -> str | None:
    """Why the kernel cannot serve a model, or None if it can. What is None is not checked. Any N, K will do."""
    if dtype is not None and dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, and the dtype is {dtype}"
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, and the model's is {head_dim}"
    return None


def decode_visits(meta: AttentionInput) -> Array:
    """i32[6, S_d + 1]: each row is a block of its own."""
    lens = meta.kv_lens[: meta.num_decode_rows]
    row = jnp.arange(meta.num_decode_rows, dtype=jnp.int32)
    return _listed(row, row, jnp.zeros_like(row), jnp.minimum(lens, 1), lens - 1)


def prefill_visits(meta: AttentionInput, block_tokens: int) -> Array:
    """Cuts the prefill region at block ends and at chunk ends; each block has a visit, also one of padding alone."""
    num_rows, num_tokens = meta.num_prefill_rows, meta.token_rows.shape[0] - meta.num_decode_rows
    blocks = ceil_div(num_tokens, block_tokens)
    begins = meta.cu_q_lens  # i32[S_p + 1]; the last chunk is the padding, up to the last block's end
    ends = jnp.append(meta.cu_q_lens[1:], blocks * block_tokens)
    kv_lens = jnp.append(meta.kv_lens[meta.num_decode_rows :], 0)
    first = begins // block_tokens
    counts = jnp.where(ends > begins, (ends - 1) // block_tokens - first + 1, 0)
    upto = jnp.cumsum(counts)
    visit = jnp.arange(blocks + num_rows, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(upto, visit, side="right", method="compare_all"), num_rows)
    block = jnp.minimum(first[chunk] + visit - (upto - counts)[chunk], blocks - 1)  # unused ones stay at the last block
    start = block * block_tokens
    real = (visit < upto[-1]) & (chunk < num_rows)
    begin = jnp.where(real, jnp.maximum(begins[chunk] - start, 0), 0)
    end = jnp.where(real, jnp.minimum(ends[chunk] - start, block_tokens), 0)
    position = kv_lens[chunk] - ends[chunk] + start
    row = meta.num_decode_rows + jnp.minimum(chunk, num_rows - 1)
    return _listed(row, block, begin, end, position)


def _listed(row: Array, block: Array, begin: Array, end: Array, position: Array) -> Array:
    count = row.shape[0]
    index = jnp.where(end > begin, jnp.arange(count, dtype=jnp.int32), count)
    following = jnp.append(lax.cummin(index, reverse=True), count)
    visits = jnp.pad(jnp.stack([row, block, begin, end, position]), ((0, 0), (0, 1)))
    return jnp.concatenate([visits, following[None]]).astype(jnp.int32)


def prepare(meta: AttentionInput, page_size: int, *, tuning: Tuning = Tuning()) -> AttentionInput:
    """Works out once per step what all layers share. Use the tuning that attention is called with."""
    table = jnp.pad(meta.page_table, ((0, 0), (0, -meta.page_table.shape[1] % LANES)))[:, None]
    work = Work(
        table=table,
        decode=decode_visits(meta) if meta.num_decode_rows else None,
        prefill=prefill_visits(meta, tuning.block_tokens) if meta.num_prefill_rows else None,
        writes=make_writes(meta, page_size),
        block_tokens=tuning.block_tokens,
    )
    return replace(meta, prepared=work)


def attention(
    q: Array,
    kv: KVPages,
    meta: AttentionInput,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tuning: Tuning = Tuning(),
) -> Array:
    """As `reference.attention`, for pages of `stored_head_dim`. Raises ValueError for what the kernel does not take."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, _, page_size, stored = kv.shape
    name, wide = "attention on mosaic_tpu", stored_head_dim(head_dim)
    if reason := unsupported(dtype=str(q.dtype), head_dim=head_dim):
        raise ValueError(f"{name}: {reason}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{name}: page size must be one of {PAGE_SIZES}, got {page_size}")
    if stored != wide:
        raise ValueError(f"{name}: pages of head dim {head_dim} must be {wide} wide, got {stored}")
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads are no multiple of {kv_heads} kv heads")
    work: Work = meta.prepared or prepare(meta, page_size, tuning=tuning).prepared
    masks = reference.Masks(scale, sliding_window, softcap)
    split, parts = meta.num_decode_rows, []
    if sinks is not None:
        sinks = reference.start_of(sinks, (kv_heads, heads // kv_heads, 1))
    for part, visits, size in ((q[:split], work.decode, 1), (q[split:], work.prefill, work.block_tokens)):
        if count := part.shape[0]:
            o = _attend(_to_blocks(part, kv_heads, size, stored), visits, work.table, kv, sinks, size, masks, tuning)
            parts.append(_from_blocks(o, size, heads)[:count, :, :head_dim])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _to_blocks(q: Array, kv_heads: int, block_tokens: int, stored: int) -> Array:
    """[T, N, H] to [blocks, K, G * tokens, stored]."""
    tokens, heads, head_dim = q.shape
    blocks = ceil_div(tokens, block_tokens)
    q = jnp.pad(q, ((0, blocks * block_tokens - tokens), (0, 0), (0, stored - head_dim)))
    q = q.reshape(blocks, block_tokens, kv_heads, heads // kv_heads, stored).transpose(0, 2, 3, 1, 4)
    return q.reshape(blocks, kv_heads, -1, stored)


def _from_blocks(o: Array, block_tokens: int, heads: int) -> Array:
    blocks, kv_heads, _, stored = o.shape
    o = o.reshape(blocks, kv_heads, heads // kv_heads, block_tokens, stored).transpose(0, 3, 1, 2, 4)
    return o.reshape(blocks * block_tokens, heads, stored)


# One module-level jit, so that the layers of a step share one traced call.
@partial(jax.jit, static_argnames=("block_tokens", "masks", "tuning"))
def _attend(
    q: Array, visits: Array, table: Array, kv: KVPages, sinks: Array | None, block_tokens: int, masks: reference.Masks,
    tuning: Tuning,
) -> Array:  # fmt: skip
    _, kv_heads, query_rows, head_dim = q.shape
    together = kv_heads if block_tokens == 1 else 1  # kv heads of one product: all, where each has few rows
    score_rows = together * ceil_div(query_rows, 8) * 8
    pages_per_tile = tuning.pages_per_tile(kv, score_rows)
    tile = pages_per_tile * kv.shape[3]
    tuning.check(q, kv, table, visits, tile, score_rows)
    block = pl.BlockSpec((1, kv_heads, query_rows, head_dim), lambda i, visits: (visits[COLUMN.block, i], 0, 0, 0))

    def row_of(ahead: int) -> pl.BlockSpec:
        """The row of the first visit at or after the one at work, or the one after, that has something to attend to."""

        def index(i: Any, visits: Any) -> tuple[Any, int, int]:
            return visits[COLUMN.row, visits[COLUMN.next, i + ahead]], 0, 0

        return pl.BlockSpec((1, 1, table.shape[2]), index, memory_space=pltpu.SMEM)

    column = pltpu.VMEM((kv_heads, query_rows, 1), jnp.float32)
    scratch = [
        pltpu.VMEM((2, kv_heads, 2, tile, head_dim), kv.dtype),
        column,
        column,
        pltpu.VMEM(q.shape[1:], jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    body = partial(_body, pages_per_tile=pages_per_tile, block_tokens=block_tokens, together=together, masks=masks)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(visits.shape[1] - 1,),
            in_specs=[
                block,
                row_of(0),
                row_of(1),
                pl.BlockSpec(memory_space=pltpu.HBM),
                None if sinks is None else pl.BlockSpec(memory_space=pltpu.VMEM),
            ],
            out_specs=block,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=tuning.vmem_bytes),
        name=f"ragged_paged_attention_{block_tokens}",
    )(visits, q, table, table, kv, sinks)


def _body(
    visits: Any,  # i32[6, n + 1] SMEM
    q: Any,  # [1, K, R, H], R = G * block_tokens: row r is token r % block_tokens
    own_pages: Any,  # i32[1, 1, W] SMEM: of the visit's row, or of the first one's to come
    next_pages: Any,  # of the row of the next visit that has something to attend to
    kv: Any,  # [P, K, 2, page, H] HBM
    sinks: Any,  # f32[K, G, 1]; None: there are none
    out: Any,  # [1, K, R, H]
    tiles: Any,  # [2, K, 2, tile, H]
    top: Any,  # f32[K, R, 1] largest score so far
    total: Any,  # f32[K, R, 1]
    acc: Any,  # f32[K, R, H]
    turn: Any,  # i32[1] SMEM: which tile arrives next
    arrived: Any,  # semaphores [2]
    *,
    pages_per_tile: int,
    block_tokens: int,
    together: int,
    masks: reference.Masks,
) -> None:
    _, kv_heads, rows, head_dim = q.shape
    page_size = kv.shape[3]
    tile_tokens = pages_per_tile * page_size
    count = pl.num_programs(0)
    me = pl.program_id(0)

    def keys_of(visit: Any) -> tuple[Any, Any]:
        """First key that a visit attends to, and one past the last."""
        position, end = visits[COLUMN.position, visit], position_end(visit)
        if masks.sliding_window is None:
            return jnp.int32(0), end
        return jnp.maximum(0, position + visits[COLUMN.begin, visit] - (masks.sliding_window - 1)), end

    def position_end(visit: Any) -> Any:
        return visits[COLUMN.position, visit] + visits[COLUMN.end, visit]

    def first_tile(visit: Any) -> Any:
        return lax.div(keys_of(visit)[0], tile_tokens)

    def tile_copies(visit: Any, tile: Any, place: Any, pages: Any | None) -> None:
        """Starts the copies of a tile's pages, or waits for them if `pages` is None."""
        begin, end = keys_of(visit)
        first = lax.max(lax.div(begin, page_size), tile * pages_per_tile)
        last = lax.min(lax.div(end + page_size - 1, page_size), (tile + 1) * pages_per_tile)

        def one(column: Any, _: Any) -> None:
            page = 0 if pages is None else pages[0, 0, column]
            at = pl.ds(pl.multiple_of((column - tile * pages_per_tile) * page_size, page_size), page_size)
            copy = pltpu.make_async_copy(kv.at[page], tiles.at[place, :, :, at], arrived.at[place])
            copy.wait() if pages is None else copy.start()

        lax.fori_loop(first, last, one, None)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision)

    def attend_tile(start: Any, place: Any) -> None:
        shape = (together, rows, tile_tokens)
        key = start + lax.broadcasted_iota(jnp.int32, shape, 2)
        token = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 1), block_tokens)
        position = visits[COLUMN.position, me] + token
        seen = key <= position
        if masks.sliding_window is not None:
            seen &= key > position - masks.sliding_window

        def some_heads(i: Any, _: Any) -> None:
            at = pl.ds(i * together, together)
            s = dot(q[0, at], tiles[place, at, 0], (((2,), (2,)), ((0,), (0,))))
            s = jnp.where(seen, masks.scores(s), MASKED)
            before = top[at]
            now = jnp.maximum(before, s.max(axis=2, keepdims=True))
            p, shrink = jnp.exp(s - now), jnp.exp(before - now)
            top[at] = now
            total[at] = total[at] * shrink + p.sum(axis=2, keepdims=True)
            v = tiles[place, at, 1]
            acc[at] = acc[at] * shrink + dot(p.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))))

        lax.fori_loop(0, kv_heads // together, some_heads, None)

    @pl.when(me == 0)
    def _begin() -> None:
        turn[0] = 0
        visit = visits[COLUMN.next, 0]

        @pl.when(visit < count)
        def _() -> None:
            tile_copies(visit, first_tile(visit), 0, own_pages)

    @pl.when((me == 0) | (visits[COLUMN.block, me] != visits[COLUMN.block, lax.max(me - 1, 0)]))
    def _first_of_block() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(visits[COLUMN.end, me] > visits[COLUMN.begin, me])
    def _visit() -> None:
        after = visits[COLUMN.next, me + 1]
        begin, end = keys_of(me)
        last = lax.div(end + tile_tokens - 1, tile_tokens)
        if sinks is None:
            top[...] = jnp.full_like(top, MASKED)
            total[...] = jnp.zeros_like(total)
        else:
            for g in range(rows // block_tokens):
                own = pl.ds(g * block_tokens, block_tokens)
                top[:, own] = jnp.broadcast_to(sinks[:, g : g + 1], (kv_heads, block_tokens, 1))
            total[...] = jnp.ones_like(total)
        acc[...] = jnp.zeros_like(acc)

        def one(tile: Any, place: Any) -> Any:
            @pl.when(tile + 1 < last)
            def _() -> None:
                tile_copies(me, tile + 1, 1 - place, own_pages)

            @pl.when((tile + 1 == last) & (after < count))
            def _() -> None:
                tile_copies(after, first_tile(after), 1 - place, next_pages)

            tile_copies(me, tile, place, None)
            start = tile * tile_tokens

            @pl.when((start < begin) | (start + tile_tokens > end))
            def _clear() -> None:
                v = tiles[place, :, 1]
                key = start + lax.broadcasted_iota(jnp.int32, v.shape, 1)
                own = (key >= begin) & (key < end)
                tiles[place, :, 1] = jnp.where(own, v.astype(jnp.float32), 0).astype(v.dtype)

            attend_tile(start, place)
            return 1 - place

        turn[0] = lax.fori_loop(lax.div(begin, tile_tokens), last, one, turn[0])
        token = lax.rem(lax.broadcasted_iota(jnp.int32, acc.shape, 1), block_tokens)
        mine = (token >= visits[COLUMN.begin, me]) & (token < visits[COLUMN.end, me])
        out[0] = jnp.where(mine, acc[...] / total[...], out[0].astype(jnp.float32)).astype(out.dtype)
