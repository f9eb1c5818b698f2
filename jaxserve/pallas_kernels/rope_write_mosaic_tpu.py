"""Rope by XLA, and a Pallas kernel that writes K and V of a step into their pages, in place, on TPUs.

Why a kernel: XLA's scatter goes through the tokens one after the other. Why this shape: memory is tiled, and in the
pages [K, 2, page, H] a token is two rows of a tile for each kv head, which no copy can write alone. So what is read,
changed and written back is a group: K and V of 16 tokens at a multiple of 16 within a page, all kv heads. A group is of
one row of the step, so that no two visits touch the same one; groups that are filled whole are not read.

    chunk's tokens   |        5 6 7 | 8 9 10 11 ... 23 | 24 25 |
    groups           | . . . . n n n | n n n n ...   n  | n n . . . . . |
    visits              read, write        write           read, write

Visits are a ring of `depth` buffers: reads start half a ring ahead, writes have half a ring to finish. Padding tokens
are not written at all.
"""

# pyright: reportPrivateImportUsage=false

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

GROUP = 16  # tokens: rows of the widest tile, that of 2-byte types
MiB = 2**20


@dataclass(frozen=True)
class WriteTuning:
    """Of the ring of buffers."""

    ring_bytes: int = 6 * MiB
    max_depth: int = 8

    def __post_init__(self) -> None:
        if self.max_depth < 2 or self.max_depth % 2:
            raise ValueError(f"WriteTuning.max_depth must be even and at least 2, got {self.max_depth}")

    def depth(self, kv: KVPages) -> int:
        _, kv_heads, _, _, head_dim = kv.shape
        visit_bytes = 4 * GROUP * kv_heads * head_dim * kv.dtype.itemsize  # K and V, old and new
        depth = self.max_depth
        while depth > 2 and depth * visit_bytes > self.ring_bytes:
            depth //= 2
        return depth + depth % 2


class Column(NamedTuple):
    """Rows of the list of visits, i32[5, n]."""

    page: int = 0
    group: int = 1  # within the page
    begin: int = 2  # first token within the group to be written, and
    end: int = 3  # one past the last; equal: nothing to do
    source: int = 4  # the token of the region that would go to the group's first place; may be negative


COLUMN = Column()


def decode_visits(meta: AttentionInput, page_size: int) -> Array:
    """i32[5, S_d]: one group per row."""
    count = meta.num_decode_rows
    row = jnp.arange(count, dtype=jnp.int32)
    position = jnp.maximum(meta.kv_lens[:count] - 1, 0)
    place = position % page_size
    begin = place % GROUP
    end = jnp.where(meta.kv_lens[:count] > 0, begin + 1, begin)
    page = meta.page_table[row, position // page_size]
    return jnp.stack([page, place // GROUP, begin, end, row - begin]).astype(jnp.int32)


def prefill_visits(meta: AttentionInput, page_size: int) -> Array:
    """i32[5, n]: the groups of each chunk; the rest of the list is empty."""
    split, rows = meta.num_decode_rows, meta.num_prefill_rows
    begins, lens = meta.cu_q_lens[:-1], jnp.diff(meta.cu_q_lens)
    ends = meta.kv_lens[split:]  # positions
    starts = ends - lens
    first = starts // GROUP
    counts = jnp.where(lens > 0, (ends - 1) // GROUP - first + 1, 0)
    upto = jnp.cumsum(counts)
    visit = jnp.arange((meta.token_rows.shape[0] - split) // GROUP + 2 * rows, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(upto, visit, side="right", method="compare_all"), rows - 1)
    at = (first[chunk] + visit - (upto - counts)[chunk]) * GROUP  # position of the group's first place
    begin = jnp.maximum(starts[chunk] - at, 0)
    end = jnp.where(visit < upto[-1], jnp.minimum(ends[chunk] - at, GROUP), begin)
    column = jnp.clip(at // page_size, 0, meta.page_table.shape[1] - 1)
    page = meta.page_table[split + chunk, column]
    source = begins[chunk] + at - starts[chunk]
    return jnp.stack([page, at % page_size // GROUP, begin, end, source]).astype(jnp.int32)


class Writes(NamedTuple):
    """Visits of each region, i32[5, n]; None: there is no such region."""

    decode: Array | None
    prefill: Array | None


def make_writes(meta: AttentionInput, page_size: int) -> Writes:
    return Writes(
        decode_visits(meta, page_size) if meta.num_decode_rows else None,
        prefill_visits(meta, page_size) if meta.num_prefill_rows else None,
    )


def rope_and_write(
    qkv: Array, kv: KVPages, meta: AttentionInput, cos: Array, sin: Array, *, num_heads: int, **projection: Any
) -> tuple[Array, KVPages]:
    """As `reference.rope_and_write`, for pages of `stored_head_dim`. Donates `kv`."""
    _, kv_heads, _, page_size, stored = kv.shape
    q, k, v = reference.rope(qkv, cos, sin, num_heads=num_heads, num_kv_heads=kv_heads, **projection)
    new = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * kv_heads, -1)  # in the order of the pages
    new = jnp.pad(new, ((0, 0), (0, 0), (0, stored - new.shape[2]))).astype(kv.dtype)
    split = meta.num_decode_rows
    writes: Writes = meta.prepared.writes if meta.prepared else make_writes(meta, page_size)
    if writes.decode is not None:
        kv = _write(kv, new[:split], writes.decode, single=True)
    if writes.prefill is not None:
        kv = _write(kv, new[split:], writes.prefill, single=False)
    return q, kv


# One module-level jit, so that the layers of a step share one traced call.
@partial(jax.jit, static_argnames=("single", "tuning"))
def _write(kv: KVPages, new: Array, visits: Array, *, single: bool, tuning: WriteTuning = WriteTuning()) -> KVPages:
    """Puts new [tokens of a region, 2K, stored], k and v of each kv head in turn, into the pages. single: no visit
    writes more than one token.
    """
    _, kv_heads, _, _, stored = kv.shape
    depth = tuning.depth(kv)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _body,
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), in_hbm, in_hbm],
        out_specs=in_hbm,
        input_output_aliases={2: 0},
        scratch_shapes=[
            pltpu.VMEM((depth, 1 if single else GROUP, 2 * kv_heads, stored), kv.dtype),
            pltpu.VMEM((depth, kv_heads, 2, GROUP, stored), kv.dtype),
            pltpu.SemaphoreType.DMA((depth,)),
            pltpu.SemaphoreType.DMA((depth,)),
        ],
        name="kv_write_decode" if single else "kv_write_prefill",
    )(visits, new, kv)


def _body(
    visits: Any,  # i32[5, n] SMEM
    new: Any,  # [T, 2K, H] HBM
    _before: Any,  # the same memory as:
    kv: Any,  # [P, K, 2, page, H] HBM
    fresh: Any,  # [depth, 1 or GROUP, 2K, H] the tokens
    groups: Any,  # [depth, K, 2, GROUP, H] what is in the pages, and will be
    arrived: Any,  # semaphores [depth]
    left: Any,
) -> None:
    depth, width, _, head_dim = fresh.shape
    count, ahead = visits.shape[1], depth // 2

    def of(visit: Any, column: int) -> Any:
        return visits[column, visit]

    def is_real(visit: Any) -> Any:
        return of(visit, COLUMN.end) > of(visit, COLUMN.begin)

    def group_of(visit: Any) -> Any:
        at = pl.multiple_of(of(visit, COLUMN.group) * GROUP, GROUP)
        return kv.at[of(visit, COLUMN.page), :, :, pl.ds(at, GROUP)]

    def read(visit: Any, act: str) -> None:
        """Starts the copies of a visit into the ring, or waits for them."""
        place = lax.rem(visit, depth)
        begin, end = of(visit, COLUMN.begin), of(visit, COLUMN.end)
        whole = end - begin == width
        source = of(visit, COLUMN.source) + (begin if width == 1 else 0)

        def copy(a: Any, b: Any) -> None:
            getattr(pltpu.make_async_copy(a, b, arrived.at[place]), act)()

        @pl.when(end - begin < GROUP)
        def _() -> None:
            copy(group_of(visit), groups.at[place])

        @pl.when(whole)
        def _() -> None:
            copy(new.at[pl.ds(source, width)], fresh.at[place])

        @pl.when(~whole)
        def _() -> None:
            def one(j: Any, _: Any) -> None:
                copy(new.at[source + j], fresh.at[place, j])

            lax.fori_loop(begin, end, one, None)

    def write(visit: Any, act: str) -> None:
        place = lax.rem(visit, depth)
        getattr(pltpu.make_async_copy(groups.at[place], group_of(visit), left.at[place]), act)()

    def merge(visit: Any) -> None:
        place = lax.rem(visit, depth)
        old = groups[place].astype(jnp.float32)
        at = lax.broadcasted_iota(jnp.int32, old.shape, 2)
        written = (at >= of(visit, COLUMN.begin)) & (at < of(visit, COLUMN.end))
        tokens = fresh[place].astype(jnp.float32)
        tokens = tokens[0][:, None] if width == 1 else jnp.swapaxes(tokens, 0, 1)  # [2K, 1 or GROUP, H]
        tokens = tokens.reshape(*old.shape[:2], width, head_dim)
        groups[place] = jnp.where(written, tokens, old).astype(groups.dtype)

    def when(visit: Any, function: Any, *args: Any) -> None:
        """Only visits that are in the list, and not empty."""

        @pl.when(visit < count)
        def _() -> None:
            pl.when(is_real(visit))(partial(function, visit, *args))

    def work(visit: Any) -> None:
        read(visit, "wait")
        merge(visit)
        write(visit, "start")

    def fill(visit: Any, _: Any) -> None:
        when(visit, read, "start")

    def begin(visit: Any, _: Any) -> None:
        when(visit + ahead, read, "start")
        when(visit, work)

    def turn(visit: Any, _: Any) -> None:
        when(visit, write, "wait")  # its place is needed now
        when(visit + depth, read, "start")
        when(visit + depth - ahead, work)

    # three loops, because the compiler takes no index that has been negative, not even one that is not used
    lax.fori_loop(0, ahead, fill, None)
    lax.fori_loop(0, depth - ahead, begin, None)
    lax.fori_loop(0, count, turn, None)
