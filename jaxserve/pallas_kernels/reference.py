"""Paged attention in plain jnp: the contract of every kernel, the oracle of their tests, and the CPU path.

One step packs T tokens: first `num_decode_rows` decode rows of exactly one token each (row i is token i), then the
prefill region, where each row owns a contiguous chunk bounded by `cu_q_lens`:

    tokens   | d0 d1 d2 ... | p0 p0 p0 p0 p1 p1 p2 p2 p2 ... padding |
    rows     | 0  1  2  ... | S_d ......  S_d+1  S_d+2 ..            |

Queries are cut into tiles that never cross a row: one token per tile in the decode region, `query_tile` tokens in the
prefill region. A tile walks the pages of its row in KV tiles with an online softmax, from the first one that its
sliding window needs to the last one that causality allows; trip counts are dynamic, so time follows the tokens that
are there and not the width of the page table.

Nothing outside of a row may leak into it: pages that no row uses, the rest of a row's last page, and padding tokens
may hold anything, NaN included.

Measured on 2 cores (float32, K 3, G 3, H 64, page 16), us per layer, rows x context; write_kv takes 3 us (32 tokens):
    v1  one gather of the whole table width        1x64 46   8x64 187   32x64 510   32x256 4889   32x1024 19576
    v2  KV tiles sized to stay in cache            1x64 52   8x64 171   32x64 452   32x256 2080   32x1024  8694
    v3  K and V in one pool (this): the same, beside v2 on a faster host 32x256 1530 to 1530; write_kv and its launch 14
        to 11
That is the rate at which these cores copy memory (10 GB/s), so a dot of any operand order, or scores as a fused
multiply-reduce, changes little; a loop over single rows was 2 to 4 times slower. Prefill of 256 tokens: 2.4 ms.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.shapes import ceil_div
from jaxserve.state import KVPages

MASKED = -1e30  # a score nothing attends to; finite, so that a wholly masked KV tile gives no NaN


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "kv_lens", "positions", "token_rows", "cu_q_lens", "prepared"],
    meta_fields=["num_decode_rows"],
)
@dataclass(frozen=True)
class AttentionInput:
    """Where the tokens of a step live. Shared by all layers; S = S_d + S_p rows, T = S_d + T_p tokens."""

    page_table: Array  # i32[S, W]; entries past a row's last page: any valid page id
    kv_lens: Array  # i32[S] tokens of a row, those of this step included; 0 for padding rows
    positions: Array  # i32[T] position of each token in its row
    token_rows: Array  # i32[T] row of each token; S for padding tokens
    cu_q_lens: Array  # i32[S_p + 1] bounds of each prefill row's chunk within the prefill region
    num_decode_rows: int  # S_d, static
    prepared: Any = None  # what `Backend.prepare` works out once per step, in its backend's own type

    @property
    def num_prefill_rows(self) -> int:
        return self.page_table.shape[0] - self.num_decode_rows


class Tiles(NamedTuple):
    """Query tiles: up to `query_tile` consecutive tokens of one row each."""

    rows: Array  # i32[n] index into the page table
    first_tokens: Array  # i32[n] index of the first token among the region's queries
    num_tokens: Array  # i32[n] 0: padding tile
    first_positions: Array  # i32[n] position of the first token in its row


@dataclass(frozen=True)
class Tuning:
    """Sizes in tokens. The defaults are for CPU, where a KV tile should stay in the second-level cache."""

    query_tile: int = 32
    prefill_kv_tile: int = 64
    tiles_per_pass: int = 1  # query tiles computed together: 1 on CPU, many on a GPU
    decode_kv_tile: int = 64  # at least; grows to `decode_tokens_per_pass` for few rows
    max_decode_kv_tile: int = 128
    decode_tokens_per_pass: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"Tuning.{name} must be at least 1, got {value}")

    def decode_kv_tile_of(self, num_rows: int) -> int:
        """KV tile of a decode region of `num_rows` rows: large for few rows, where the loop itself costs most."""
        return max(self.decode_kv_tile, min(self.max_decode_kv_tile, self.decode_tokens_per_pass // num_rows))


CPU_TUNING = Tuning()
GPU_TUNING = Tuning(
    query_tile=128, prefill_kv_tile=512, tiles_per_pass=32, decode_kv_tile=512, max_decode_kv_tile=2048,
    decode_tokens_per_pass=65536,
)  # fmt: skip


class Prepared(NamedTuple):
    """What all layers of a step share."""

    write_pages: Array  # i32[T] page that a token's K and V go to
    write_offsets: Array  # i32[T] its place in that page
    prefill_tiles: Tiles | None  # None: no prefill region


def write_slots(meta: AttentionInput, page_size: int) -> tuple[Array, Array]:
    """Page (i32[T]) and place in it (i32[T]) of each token; padding tokens get page 0."""
    num_rows, width = meta.page_table.shape
    real = (meta.token_rows >= 0) & (meta.token_rows < num_rows)
    row = jnp.where(real, meta.token_rows, 0)
    column = jnp.clip(meta.positions // page_size, 0, width - 1)
    pages = jnp.where(real, meta.page_table[row, column], 0)
    return pages, jnp.where(real, meta.positions % page_size, 0)


def prefill_tiles(meta: AttentionInput, query_tile: int) -> Tiles:
    """Cuts the prefill region into ceil(T_p / query_tile) + S_p tiles (a static bound; the rest is padding)."""
    num_tokens = meta.token_rows.shape[0] - meta.num_decode_rows
    num_rows = meta.num_prefill_rows
    starts, q_lens = meta.cu_q_lens[:-1], jnp.diff(meta.cu_q_lens)  # i32[S_p] both
    ends = jnp.cumsum((q_lens + query_tile - 1) // query_tile)  # i32[S_p] tiles up to and with this row
    tile = jnp.arange(ceil_div(num_tokens, query_tile) + num_rows, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_rows - 1)
    offset = (tile - jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])[row]) * query_tile  # tokens into the chunk
    kv_lens = meta.kv_lens[meta.num_decode_rows :]
    return Tiles(
        rows=meta.num_decode_rows + row,
        first_tokens=starts[row] + offset,
        num_tokens=jnp.where(tile < ends[-1], jnp.minimum(query_tile, q_lens[row] - offset), 0),
        first_positions=kv_lens[row] - q_lens[row] + offset,
    )


def prepare(meta: AttentionInput, page_size: int, *, tuning: Tuning = CPU_TUNING) -> AttentionInput:
    """Works out once per step what all layers share. Use the tuning that attention is called with."""
    tiles = prefill_tiles(meta, tuning.query_tile) if meta.num_prefill_rows else None
    return replace(meta, prepared=Prepared(*write_slots(meta, page_size), tiles))


def write_kv(kv: KVPages, k: Array, v: Array, meta: AttentionInput) -> KVPages:
    """Donates `kv`: puts k, v [T, K, H] of this step's tokens into their pages. Padding tokens go to page 0."""
    if meta.prepared:
        pages, offsets = meta.prepared.write_pages, meta.prepared.write_offsets
    else:
        pages, offsets = write_slots(meta, kv.shape[3])
    for i, new in enumerate((k, v)):
        kv = kv.at[pages, :, i, offsets].set(new.astype(kv.dtype), mode="promise_in_bounds")
    return kv


def rope_and_write(
    qkv: Array, kv: KVPages, meta: AttentionInput, cos: Array, sin: Array, *, num_heads: int, **projection: Any
) -> tuple[Array, KVPages]:
    """Donates `kv`: from the merged projection to q [T, N, H], and this step's k and v in their pages. See `rope`."""
    q, k, v = rope(qkv, cos, sin, num_heads=num_heads, num_kv_heads=kv.shape[1], **projection)
    return q, write_kv(kv, k, v, meta)


def rope(
    qkv: Array,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
) -> tuple[Array, Array, Array]:
    """qkv [T, (N + 2K) * H], in this order, to q [T, N, H], k and v [T, K, H].

    Adds bias (a row of qkv); RMSNorm over each head (arXiv:1910.07467) with the weights q_norm, k_norm [H]; rotates
    (x[i], x[i + H/2]) by the angle of the position (arXiv:2104.09864, the half-split layout of HF), given as cos, sin
    f32[T, H/2]. All in float32, rounded once at the end.
    """
    x = qkv.astype(jnp.float32)
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    x = x.reshape(x.shape[0], num_heads + 2 * num_kv_heads, -1)
    qk, v = x[:, : num_heads + num_kv_heads], x[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        weight = jnp.repeat(jnp.stack([q_norm, k_norm]), np.array([num_heads, num_kv_heads]), axis=0)
        qk = qk * lax.rsqrt(jnp.mean(jnp.square(qk), axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    a, b = jnp.split(qk, 2, axis=-1)  # q and k together: one pass on a CPU
    cos, sin = cos[:, None], sin[:, None]
    qk = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(qkv.dtype)
    return qk[:, :num_heads], qk[:, num_heads:], v.astype(qkv.dtype)


def add_norm(x: Array, delta: Array | None, weight: Array, eps: float) -> tuple[Array, Array]:
    """x + delta [T, D] (None: x), and its RMSNorm (arXiv:1910.07467) with weight [D], in float32 and rounded once.

    delta may be float32 parts [n, T, D] of what is to be added.
    """
    if delta is not None and delta.ndim == 3:
        delta = jnp.sum(delta, axis=0).astype(x.dtype)
    x = x if delta is None else x + delta
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x, (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def gated_product(x: Array, w: Array) -> Array:
    """SwiGLU before its last product (arXiv:2002.05202): silu(x @ gate.T) * (x @ up.T) of x [T, D] -> [T, F].

    w [2F, D] are the rows of gate, then those of up.
    """
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    both = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=x.dtype)
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def parts(rows: int, out: int, size: int) -> int:
    """Into how many parts a product of x [rows, size] and w [out, size] is split for `add_norm` to add up: one."""
    return 1


def attention(
    q: Array,
    kv: KVPages,
    meta: AttentionInput,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tuning: Tuning = CPU_TUNING,
) -> Array:
    """Causal grouped-query attention of q [T, N, H] over the pages of each token's row -> [T, N, H].

    K and V of this step's tokens must be in the pages already. Query head n reads kv head n // G. A token at
    position i attends to positions (i - sliding_window, i]. Scores are q.k * scale, then softcap * tanh(s / softcap),
    and kept in float32. Padding tokens get 0.

    sinks [N] (arXiv:2309.17453, learned as in gpt-oss): one more score per query head, neither scaled nor capped nor
    out of any window, that every token attends to and whose value is 0: a term of the softmax's denominator alone.
    """
    masks = Masks(scale, sliding_window, softcap)
    split = meta.num_decode_rows
    parts = []
    if split:
        parts.append(decode_attention(q[:split], kv, meta, masks, sinks, tuning))
    if q.shape[0] > split:
        parts.append(prefill_attention(q[split:], kv, meta, masks, sinks, tuning))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@dataclass(frozen=True)
class Masks:
    """How a score is made of a dot product, and which scores count."""

    scale: float
    sliding_window: int | None
    softcap: float | None

    def scores(self, dots: Array) -> Array:
        s = dots * self.scale
        return s if self.softcap is None else self.softcap * jnp.tanh(s / self.softcap)


def start_of(sinks: Array, shape: tuple[int, ...]) -> Array:
    """sinks [N] in a shape and in float32: where the largest score of a softmax starts, and the sum at 1.

    Finite also where a sink is -inf: the first real score then shrinks that sum to 0.
    """
    return jnp.maximum(sinks.astype(jnp.float32), MASKED).reshape(shape)


def decode_attention(
    q: Array, kv: KVPages, meta: AttentionInput, masks: Masks, sinks: Array | None, tuning: Tuning
) -> Array:
    """The decode region: q [S_d, N, H], one query per row -> [S_d, N, H]."""
    rows = q.shape[0]
    lens = meta.kv_lens[:rows]
    kv_tile = tuning.decode_kv_tile_of(rows)
    table = meta.page_table[:rows]
    return _attend(q[:, None], kv, table, lens - 1, jnp.minimum(lens, 1), masks, sinks, kv_tile)[:, 0]


def prefill_attention(
    q: Array, kv: KVPages, meta: AttentionInput, masks: Masks, sinks: Array | None, tuning: Tuning
) -> Array:
    """The prefill region: q [T_p, N, H], ragged chunks -> [T_p, N, H]. Tiles beyond the real ones cost nothing."""
    num_tokens = q.shape[0]
    tiles = (meta.prepared and meta.prepared.prefill_tiles) or prefill_tiles(meta, tuning.query_tile)
    per_pass = min(tuning.tiles_per_pass, tiles.rows.shape[0])
    padding = -tiles.rows.shape[0] % per_pass
    tiles = Tiles(*(jnp.pad(x, (0, padding)) for x in tiles))
    within = jnp.arange(tuning.query_tile, dtype=jnp.int32)

    def one_pass(i: Array, out: Array) -> Array:
        now = Tiles(*(lax.dynamic_slice_in_dim(x, i * per_pass, per_pass) for x in tiles))
        token = now.first_tokens[:, None] + within  # i32[tiles, query_tile]
        q_tiles = q.at[token].get(mode="clip")  # [tiles, query_tile, N, H]
        table = meta.page_table[now.rows]
        o = _attend(q_tiles, kv, table, now.first_positions, now.num_tokens, masks, sinks, tuning.prefill_kv_tile)
        token = jnp.where(within < now.num_tokens[:, None], token, num_tokens)  # dropped past a tile's tokens
        return out.at[token].set(o, mode="drop")

    passes = (jnp.sum(tiles.num_tokens > 0) + per_pass - 1) // per_pass
    return lax.fori_loop(0, passes, one_pass, jnp.zeros_like(q))


def _attend(
    q: Array, kv: KVPages, table: Array, first_positions: Array, num_tokens: Array, masks: Masks,
    sinks: Array | None, kv_tile: int,
) -> Array:  # fmt: skip
    """Attention of C query tiles, each with its own row of pages.

    q [C, t, N, H]; table i32[C, W]; first_positions i32[C], num_tokens i32[C] (0..t) -> [C, t, N, H], 0 for padding.
    """
    num_tiles, t, heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = kv.shape
    group = heads // kv_heads
    pages_per_tile = max(1, min(kv_tile // page_size, table.shape[1]))
    kv_tile = pages_per_tile * page_size
    # one row of the product per (token, head of the group): [C, K, t * G, H]
    qs = q.reshape(num_tiles, t, kv_heads, group, head_dim).swapaxes(1, 2)
    qs = qs.reshape(num_tiles, kv_heads, t * group, head_dim)
    position = first_positions[:, None] + jnp.arange(t, dtype=jnp.int32)  # i32[C, t]
    ends = first_positions + num_tokens  # i32[C] one past the last key that any token of the tile may see
    begins = jnp.zeros_like(ends)
    if masks.sliding_window is not None:
        begins = jnp.maximum(0, first_positions - (masks.sliding_window - 1))
    first_kv_tile = begins // kv_tile  # i32[C]
    trips = jnp.max(jnp.where(num_tokens > 0, (ends + kv_tile - 1) // kv_tile - first_kv_tile, 0))

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, m, total = carry  # f32 [C, K, t * G, H], [C, K, t * G], [C, K, t * G]
        start = (first_kv_tile + i) * kv_tile  # i32[C] position of the first key
        k, v = _gather(kv, table, start // page_size, pages_per_tile)  # [C, K, kv_tile, H]
        key = start[:, None] + jnp.arange(kv_tile, dtype=jnp.int32)  # i32[C, kv_tile]
        live = (key >= begins[:, None]) & (key < ends[:, None])
        v = jnp.where(live[:, None, :, None], v, 0)  # a masked V may be NaN, and 0 * NaN is NaN
        seen = live[:, None] & (key[:, None] <= position[:, :, None])  # bool[C, t, kv_tile]
        if masks.sliding_window is not None:
            seen &= key[:, None] > position[:, :, None] - masks.sliding_window
        seen = jnp.repeat(seen, group, axis=1)[:, None] if t > 1 else seen[:, None]
        s = jnp.einsum("ckqh,ckbh->ckqb", qs, k, preferred_element_type=jnp.float32)
        s = jnp.where(seen, masks.scores(s), MASKED)
        m_new = jnp.maximum(m, s.max(axis=-1))
        p = jnp.exp(s - m_new[..., None])
        shrink = jnp.exp(m - m_new)
        o = jnp.einsum("ckqb,ckbh->ckqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return acc * shrink[..., None] + o, m_new, total * shrink + p.sum(axis=-1)

    total = jnp.zeros((num_tiles, kv_heads, t * group), jnp.float32)
    acc, m = jnp.zeros((*total.shape, head_dim), jnp.float32), jnp.full_like(total, MASKED)
    if sinks is not None:  # the first score
        m, total = jnp.tile(start_of(sinks, (kv_heads, group)), (num_tiles, 1, t)), total + 1
    acc, _, total = lax.fori_loop(0, trips, step, (acc, m, total))
    # a wholly masked KV tile adds 1 per key to `total`, and the first real score shrinks that to 0
    out = (acc / total[..., None]).reshape(num_tiles, kv_heads, t, group, head_dim).swapaxes(1, 2)
    real = jnp.arange(t, dtype=jnp.int32) < num_tokens[:, None]  # bool[C, t]
    return jnp.where(real[..., None, None], out.reshape(q.shape), 0).astype(q.dtype)


def _gather(kv: KVPages, table: Array, first_page: Array, num_pages: int) -> tuple[Array, Array]:
    """`num_pages` pages of each row from its `first_page` (i32[C]) on: K, V [C, K, num_pages * page, H].

    Indexing (page, kv head, K or V) as one gives that order without a transpose.
    """
    pool_pages, kv_heads, _, page_size, head_dim = kv.shape
    column = first_page[:, None] + jnp.arange(num_pages, dtype=jnp.int32)
    column = jnp.minimum(column, table.shape[1] - 1)
    row = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    page = table.at[row, column].get(mode="promise_in_bounds")  # i32[C, num_pages]
    piece = 2 * (page[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None])
    pieces = kv.reshape(pool_pages * kv_heads * 2, page_size * head_dim)
    shape = (table.shape[0], kv_heads, num_pages * page_size, head_dim)
    k, v = (pieces.at[piece + i].get(mode="promise_in_bounds").reshape(shape) for i in range(2))
    return k, v
