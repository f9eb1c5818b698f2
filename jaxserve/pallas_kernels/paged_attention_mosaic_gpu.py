"""Paged attention of a step on Hopper GPUs: one kernel for its decode rows, another for its prompt chunks.

A step of decode rows alone turns q and k and writes K and V in the decode kernel; otherwise a kernel before it does
that for all tokens.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as decode
from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as prefill
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages
from jaxserve.pallas_kernels.rope_write_mosaic_gpu import rope_and_write

PAGE_SIZES = tuple(size for size in decode.PAGE_SIZES if size in prefill.PAGE_SIZES)

prepare = prefill.prepare


def unsupported(**model: Any) -> str | None:
    """Why the kernels cannot serve a model (dtype, head_dim, group), or None if they can."""
    return decode.unsupported(**model) or prefill.unsupported(**model)


def attend(
    qkv: Array, kv: KVPages, meta: AttentionInput, cos: Array, sin: Array, *,
    scale: float, sliding_window: int | None, softcap: float | None, num_heads: int, **projection: Any,
) -> tuple[Array, KVPages]:  # fmt: skip
    """As `Backend.attend`, for a meta that has been through `prepare`."""
    how: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    if qkv.shape[0] == meta.num_decode_rows and decode.takes_qkv(kv, num_heads):
        return decode.decode_qkv(
            qkv, kv, meta.page_table, meta.kv_lens, cos, sin, num_heads=num_heads, **projection, **how
        )
    q, kv = rope_and_write(qkv, kv, meta, cos, sin, num_heads=num_heads, **projection)
    return attention(q, kv, meta, **how), kv


def attention(q: Array, kv: KVPages, meta: AttentionInput, **how: Any) -> Array:
    """As `reference.attention`, for a meta that has been through `prepare`."""
    split = meta.num_decode_rows
    if q.shape[0] > split and split % prefill.ALIGN:
        return jnp.concatenate(
            [_decode(q[:split], kv, meta, how), prefill.prefill_attention(q[split:], kv, meta, **how)]
        )
    if q.shape[0] == split:
        return _decode(q, kv, meta, how)
    out = prefill.prefill_attention(q, kv, meta, first_token=split, **how)
    return out.at[:split].set(_decode(q[:split], kv, meta, how)) if split else out


def _decode(q: Array, kv: KVPages, meta: AttentionInput, how: dict[str, Any]) -> Array:
    rows = q.shape[0]
    return decode.decode_attention(q, kv, meta.page_table[:rows], meta.kv_lens[:rows], **how)
