"""Bias, head norm, rope and KV write in one kernel for NVIDIA GPUs before Hopper (Pallas Triton).

What: `reference.rope_and_write`. XLA makes several fusions of it and two scatters, which are slow: of a decode step of
256 rows they take a seventh.

Why this shape: a program takes some heads of one token, both halves of each, so that norm and rotation need nothing
else. Every head goes through the same arithmetic and then to where it belongs: q, a page of K or a page of V.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

HALF_HEAD_ELEMENTS = 1024  # of a program: what 128 threads load at once, 8 elements each


def _body(*refs: Any, names: tuple[str, ...], heads_per_program: int, num_heads: int, num_kv_heads: int, eps: float):
    """`refs` are, by `names`:

    qkv [T, N + 2K, H]; pages, places i32[T], where K and V go; cos, sin f32[T, H/2]; maybe bias [N + 2K, H], q_norm and
    k_norm [H]; kv_before: kv as it was; out: q [T, N, H]; kv [P, K, 2, page, H], in place.
    """
    ref = dict(zip(names, refs, strict=True))
    half_dim = ref["cos"].shape[1]
    token = pl.program_id(1)
    head = pl.program_id(0) * heads_per_program + lax.iota(jnp.int32, heads_per_program)
    column = lax.iota(jnp.int32, pl.next_power_of_2(half_dim))
    known = column < half_dim
    live = (head < num_heads + 2 * num_kv_heads)[:, None] & known[None, :]
    columns = (column, column + half_dim)  # of both halves

    def load(at: Any, mask: Array) -> Array:
        return plt.load(at, mask=mask, other=0).astype(jnp.float32)

    def of_heads(ref: Any, *before: Any) -> list[Array]:
        return [load(ref.at[(*before, head[:, None], half[None, :])], live) for half in columns]

    raw = of_heads(ref["qkv"], token)
    if "bias" in ref:
        raw = [x + bias for x, bias in zip(raw, of_heads(ref["bias"]), strict=True)]
    low, high = raw
    if "q_norm" in ref:
        size = jnp.sum(low * low + high * high, axis=1) * (1.0 / (2 * half_dim))
        size, is_q = lax.rsqrt(size + eps)[:, None], (head < num_heads)[:, None]
        low, high = (
            x * size * jnp.where(is_q, *(load(ref[norm].at[half], known)[None, :] for norm in ("q_norm", "k_norm")))
            for x, half in zip((low, high), columns, strict=True)
        )
    cos, sin = (load(ref[name].at[token, column], known)[None, :] for name in ("cos", "sin"))
    turned = (low * cos - high * sin, high * cos + low * sin)
    page, place = ref["pages"][token], ref["places"][token]
    kinds = (  # q, k and v: values, the first head of each and one past its last one
        (turned, 0, num_heads),
        (turned, num_heads, num_heads + num_kv_heads),
        (raw, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads),
    )
    for kind, (values, begin, end) in enumerate(kinds):
        mine = (head >= begin) & (head < end)
        own = jnp.where(mine, head - begin, end - begin)[:, None]
        for x, half in zip(values, columns, strict=True):
            half = half[None, :]
            at = ref["q"].at[token, own, half] if kind == 0 else ref["kv"].at[page, own, kind - 1, place, half]
            plt.store(at, x.astype(at.dtype), mask=mine[:, None] & known[None, :])


# A module-level jit, so that all layers of a step share one traced call.
@partial(jax.jit, static_argnames=("num_heads", "eps", "interpret"))
def _rope_and_write(
    arrays: dict[str, Array], kv: KVPages, *, num_heads: int, eps: float, interpret: bool
) -> tuple[Array, KVPages]:
    tokens, all_heads, head_dim = arrays["qkv"].shape
    half = pl.next_power_of_2(head_dim // 2)
    heads = min(pl.next_power_of_2(all_heads), max(1, HALF_HEAD_ELEMENTS // half))
    q = jax.ShapeDtypeStruct((tokens, num_heads, head_dim), arrays["qkv"].dtype)
    given = arrays | {"kv_before": kv}
    q, kv = pl.pallas_call(
        partial(
            _body, names=(*given, "q", "kv"), heads_per_program=heads, num_heads=num_heads, num_kv_heads=kv.shape[1],
            eps=eps,
        ),
        out_shape=(q, jax.ShapeDtypeStruct(kv.shape, kv.dtype)),
        grid=(pl.cdiv(all_heads, heads), tokens),
        input_output_aliases={len(arrays): 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rope_and_write",
    )(*given.values())  # fmt: skip
    return q, kv


def rope_and_write(
    qkv: Array,
    kv: KVPages,
    meta: AttentionInput,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, KVPages]:
    """Donates `kv`. As `reference.rope_and_write`, for a meta that has been through `prepare`.

    `interpret` runs the kernel on a CPU.
    """
    all_heads = num_heads + 2 * kv.shape[1]
    shape = (-1, all_heads, qkv.shape[1] // all_heads)
    extras = {"bias": None if bias is None else bias.reshape(shape[1:]), "q_norm": q_norm, "k_norm": k_norm}
    arrays = {
        "qkv": qkv.reshape(shape), "pages": meta.prepared.write_pages, "places": meta.prepared.write_offsets,
        "cos": cos, "sin": sin, **{name: x for name, x in extras.items() if x is not None},
    }  # fmt: skip
    return _rope_and_write(arrays, kv, num_heads=num_heads, eps=eps, interpret=interpret)
