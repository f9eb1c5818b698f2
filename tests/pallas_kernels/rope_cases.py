"""Steps whose merged projection is to be rotated and written, and what must come of it."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from kernel_cases import Case, make_step

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

# The arithmetic is float32 and rounded once: half a unit in the last place, and a little.
RELATIVE = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}


@dataclass(frozen=True)
class RopeCase:
    """A step as `Case` describes it, and what belongs to the projection."""

    case: Case
    bias: bool = False
    norm: bool = False

    def __str__(self) -> str:
        return str(self.case) + "_bias" * self.bias + "_norm" * self.norm


@dataclass
class RopeStep:
    qkv: jnp.ndarray  # [T, (N + 2K) * H]; NaN for padding tokens
    kv: KVPages
    meta: AttentionInput
    cos: jnp.ndarray  # f32[T, H/2]
    sin: jnp.ndarray
    weights: dict[str, jnp.ndarray]  # bias, q_norm, k_norm
    options: dict[str, Any]  # static

    @property
    def arguments(self) -> tuple:
        return self.qkv, self.kv, self.meta, self.cos, self.sin, self.weights


def make_rope_step(rope_case: RopeCase, *, seed: int = 0) -> RopeStep:
    case, rng, step = rope_case.case, np.random.default_rng(seed), make_step(rope_case.case)
    K, H = case.kv_heads, case.head_dim
    N, T = K * case.group, len(step.meta.token_rows)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(case.dtype)

    qkv = normal(T, (N + 2 * K) * H)
    padding = step.meta.token_rows == step.meta.page_table.shape[0]
    angles = step.meta.positions[:, None] * 10_000.0 ** -(np.arange(H // 2) / (H // 2))
    weights = {"bias": normal((N + 2 * K) * H)} if rope_case.bias else {}
    weights |= {"q_norm": 1 + normal(H), "k_norm": 1 + normal(H)} if rope_case.norm else {}
    return RopeStep(
        qkv=jnp.where(padding[:, None], jnp.nan, qkv), kv=step.kv, meta=step.meta,
        cos=1.25 * jnp.cos(angles).astype(jnp.float32), sin=1.25 * jnp.sin(angles).astype(jnp.float32),
        weights=weights, options={"num_heads": N, "eps": 1e-6 if rope_case.norm else 0.0},
    )  # fmt: skip


def expected(step: RopeStep) -> tuple[np.ndarray, np.ndarray]:
    """f64 q [T, N, H] and the pool, page 0 as it was: what padding tokens leave there is no one's business."""

    def f64(x: jnp.ndarray) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32), np.float64)

    (_, K, _, page, H), N = step.kv.shape, step.options["num_heads"]
    x = (f64(step.qkv) + (f64(step.weights["bias"]) if "bias" in step.weights else 0)).reshape(-1, N + 2 * K, H)
    q, k, v = x[:, :N], x[:, N : N + K], x[:, N + K :]
    cos, sin = f64(step.cos)[:, None], f64(step.sin)[:, None]

    def turn(x: np.ndarray, weight: str) -> np.ndarray:
        if weight in step.weights:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + step.options["eps"]) * f64(step.weights[weight])
        a, b = x[..., : H // 2], x[..., H // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k, pool = turn(q, "q_norm"), turn(k, "k_norm"), f64(step.kv).copy()
    table, rows = np.asarray(step.meta.page_table), np.asarray(step.meta.token_rows)
    for t, (row, position) in enumerate(zip(rows, np.asarray(step.meta.positions), strict=True)):
        if row < len(table):
            pool[table[row, position // page], :, :, position % page] = np.stack([k[t], v[t]], axis=1)
    return q, pool


def worst(got: tuple[jnp.ndarray, KVPages], step: RopeStep, dtype: str) -> float:
    """Largest error of q of real tokens and of the pool, in units of what is allowed; inf where one is NaN alone."""
    q, kv = got
    real = np.asarray(step.meta.token_rows) < step.meta.page_table.shape[0]
    want_q, want_kv = expected(step)
    pool = np.array(kv.astype(jnp.float32), np.float64)
    pool[0, :, :, 0] = want_kv[0, :, :, 0]  # of page 0, all but the place that padding tokens are written to
    most = 0.0
    for x, want in ((np.asarray(q.astype(jnp.float32), np.float64)[real], want_q[real]), (pool, want_kv)):
        assert x.shape == want.shape
        if (np.isnan(x) != np.isnan(want)).any():
            return float("inf")
        # rotated sums may cancel: what is lost then is relative to the terms, in float32
        error = np.abs(x - want) / (RELATIVE[dtype] * np.abs(want) + 1e-5)
        most = max(most, float(np.nanmax(error, initial=0)))
    return most


def qkv_error(out: jnp.ndarray, kv: KVPages, step: RopeStep, case: Case) -> float:
    """Largest difference of attention's output [S, N, H] and of the new K and V to the reference, for decode rows."""

    def f32(x: jnp.ndarray) -> jnp.ndarray:
        return x.astype(jnp.float32)

    weights = {name: f32(x) for name, x in step.weights.items()}
    q, want = reference.rope_and_write(step.qkv, step.kv, step.meta, step.cos, step.sin, **weights, **step.options)
    expected_out = reference.attention(f32(q), f32(want), step.meta, **case.options)
    real = np.asarray(step.meta.kv_lens) > 0
    errors = [np.abs(np.asarray(f32(out) - expected_out))[real].max(), np.abs(np.asarray(f32(out)))[~real].sum()]
    pool, want_pool = (np.asarray(f32(x))[1:] for x in (kv, want))  # page 0: padding's
    if (np.isnan(pool) != np.isnan(want_pool)).any():
        return float("inf")
    errors.append(np.nanmax(np.abs(pool - want_pool)) / 4)  # one rounding of values up to 4
    return float(np.max(errors))


def _step(tokens: int, **how: Any) -> Case:
    """Steps of 1, 3, 8 and 20 tokens: decode rows, chunks, padding of both kinds; positions at page edges."""
    rows: dict[str, Any] = {
        1: {"decode": (17,)},
        3: {"decode": (16, 0, 65)},
        8: {"decode": (3,), "prefill": ((7, 68),)},
        20: {"decode": (64, 0), "prefill": ((13, 30), (0, 0), (3, 3)), "prefill_padding": 2},
    }[tokens]
    return Case(**rows, **how)


def _case(tokens: int, page: int, head_dim: int, kv_heads: int, group: int, dtype: str, extras: str = "") -> RopeCase:
    case = _step(tokens, page_size=page, head_dim=head_dim, kv_heads=kv_heads, group=group, dtype=dtype)
    return RopeCase(case, bias="bias" in extras, norm="norm" in extras)


# Every head dim, kv heads of every kind of layout, groups that are and are not powers of 2, each extra.
ROPE_MATRIX = [
    _case(1, 16, 64, 1, 1, "float32"),
    _case(3, 64, 64, 8, 3, "float32", "bias"),
    _case(8, 16, 64, 2, 7, "bfloat16", "norm"),
    _case(20, 64, 64, 3, 3, "float16", "bias norm"),
    _case(1, 64, 128, 8, 4, "bfloat16"),
    _case(3, 16, 128, 2, 6, "bfloat16", "bias"),
    _case(8, 64, 128, 8, 1, "float32", "norm"),
    _case(20, 16, 128, 1, 7, "bfloat16", "bias norm"),
    _case(1, 16, 256, 2, 3, "float16", "bias"),
    _case(8, 64, 256, 1, 6, "bfloat16"),
    _case(20, 16, 256, 8, 1, "bfloat16", "norm"),
    _case(3, 64, 96, 2, 5, "float16", "norm"),
    _case(8, 16, 80, 1, 3, "bfloat16", "bias norm"),
]
