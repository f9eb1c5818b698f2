"""Paged attention of a step on Hopper GPUs: one kernel for its decode rows, another for its prompt chunks.

A step of decode rows alone turns q and k and writes K and V in the decode kernel; otherwise a kernel before it does
that for all tokens.

The tensor cores take tiles of 64 swizzled columns, so other head dims are stored in pages that are wider
(`stored_head_dim`): q is padded by XLA, and what lies past the model's own head dim in the pages is 0 and stays so,
since nothing writes there. That costs KV memory and bandwidth (head dim 80 a factor of 1.6, 96 of 1.33), and no code:
unpadded pages would need swizzles of 32 and 64 bytes, whose copies and products are slower.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as decode
from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as prefill
from jaxserve.pallas_kernels import rope_write_mosaic_gpu as rope
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

PAGE_SIZES = tuple(size for size in decode.PAGE_SIZES if size in prefill.PAGE_SIZES)

HEAD_DIMS = tuple(dim for dim in decode.HEAD_DIMS if dim in prefill.HEAD_DIMS)

prepare = prefill.prepare


def stored_head_dim(head_dim: int) -> int:
    """Head dim of the pool's pages: what lies past the model's own is 0."""
    return min(wide for wide in HEAD_DIMS if wide >= head_dim)


def unsupported(*, head_dim: int | None, **model: Any) -> str | None:
    """Why the kernels cannot serve a model (dtype, head_dim, group), or None if they can."""
    if head_dim is not None:
        if reason := rope.unsupported(dtype=None, head_dim=head_dim):
            return reason
        head_dim = stored_head_dim(head_dim)
    return decode.unsupported(head_dim=head_dim, **model) or prefill.unsupported(head_dim=head_dim, **model)


def attend(
    qkv: Array, kv: KVPages, meta: AttentionInput, cos: Array, sin: Array, *,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: Array | None, num_heads: int,
    **projection: Any,
) -> tuple[Array, KVPages]:  # fmt: skip
    """As `Backend.attend`, for a meta that has been through `prepare`."""
    how: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    whole = 2 * cos.shape[1] == kv.shape[4]  # pages are no wider than heads
    if whole and qkv.shape[0] == meta.num_decode_rows and decode.takes_qkv(kv, num_heads):
        return decode.decode_qkv(
            qkv, kv, meta.page_table, meta.kv_lens, cos, sin, num_heads=num_heads, **projection, **how
        )
    q, kv = rope.rope_and_write(qkv, kv, meta, cos, sin, num_heads=num_heads, **projection)
    return attention(q, kv, meta, **how), kv


def attention(q: Array, kv: KVPages, meta: AttentionInput, **how: Any) -> Array:
    """As `reference.attention`, for a meta that has been through `prepare`."""
    split, head_dim = meta.num_decode_rows, q.shape[2]
    if room := kv.shape[4] - head_dim:
        return attention(jnp.pad(q, ((0, 0), (0, 0), (0, room))), kv, meta, **how)[:, :, :head_dim]
    if not split:
        return prefill.prefill_attention(q, kv, meta, **how)
    if q.shape[0] == split:
        return _decode(q, kv, meta, how)
    if split % prefill.ALIGN or not decode.heads_fill_tiles(q.shape[1] // kv.shape[1]):
        return jnp.concatenate(
            [_decode(q[:split], kv, meta, how), prefill.prefill_attention(q[split:], kv, meta, **how)]
        )
    out = prefill.prefill_attention(q, kv, meta, first_token=split, **how)
    return _decode(q[:split], kv, meta, how, into=out)


def _decode(q: Array, kv: KVPages, meta: AttentionInput, how: dict[str, Any], into: Array | None = None) -> Array:
    rows = q.shape[0]
    return decode.decode_attention(q, kv, meta.page_table[:rows], meta.kv_lens[:rows], into=into, **how)
