"""Paged attention of a step on Hopper GPUs: one kernel for its decode rows, another for its prompt chunks."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as decode
from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as prefill
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages

PAGE_SIZES = tuple(size for size in decode.PAGE_SIZES if size in prefill.PAGE_SIZES)

prepare = prefill.prepare


def unsupported(**model: Any) -> str | None:
    """Why the kernels cannot serve a model (dtype, head_dim, group), or None if they can."""
    return decode.unsupported(**model) or prefill.unsupported(**model)


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
