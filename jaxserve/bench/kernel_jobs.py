"""Chains of one kernel, to be timed on the device of this machine, and what that device does at best.

A job is many layers in one program, each with the KV pool of another layer, so that nothing is found in the L2 cache
that a model would not find there, and so that launching the program costs little of a layer.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.deployment import Deployment
from jaxserve.models.layers import rope_tables
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.shapes import ceil_div

MIN_SECONDS = 0.02  # of queued calls, timed together
REPEATS = 5
MAX_QUEUED = 10
LAYERS, LARGE_LAYERS, CPU_LAYERS = 96, 8, 2  # of a chain; LARGE from LARGE_TOKENS on
LARGE_TOKENS = 1024
POOL_BYTES = 4e9  # of all pools of a chain, unless two take more
MAX_POOLS = 32
MAX_MODEL_LEN = 4096  # at least; sets how wide page tables are

# op(x, pool, meta, extras) -> (what a layer gives, the pool). Extras: arrays by name.
Op = Callable[[Array, Any, AttentionInput, dict[str, Array]], tuple[Any, Any]]


class Job(NamedTuple):
    """A chain of `layers` times one kernel."""

    kernel: str
    shape: str
    op: Op
    x: Any  # shapes: what every layer starts from
    pool: Any  # of one layer; None: it takes none
    pools: int
    meta: AttentionInput
    extras: dict[str, Any]  # shapes
    layers: int
    work: float  # of one layer: bytes, or FLOP
    unit: str  # of `work` per second, in units of 10 ** 12: "TB/s" or "TFLOP/s"
    page_size: int
    prepare: Callable[[AttentionInput, int], AttentionInput]

    def chain(self, pools: list[Any], x: Array, meta: AttentionInput, extras: dict[str, Array]) -> tuple[list, Array]:
        """Donates `pools`. What a layer gives goes through a barrier together with the next one's input, so that XLA
        neither drops nor merges anything, nor runs layers side by side.
        """
        pools, results, meta = list(pools), [], self.prepare(meta, self.page_size)
        for i in range(self.layers):
            if results:
                x, results[-1] = lax.optimization_barrier((x, results[-1]))
            result, pools[i % len(pools)] = self.op(x, pools[i % len(pools)], meta, extras)
            results.append(result)
        kept = jax.tree.leaves(lax.optimization_barrier(results))
        return pools, sum((a.ravel()[0].astype(jnp.float32) for a in kept), jnp.float32(0))

    def arguments(self) -> tuple[Any, ...]:
        return [self.pool] * self.pools, self.x, self.meta, self.extras


def time_jobs(jobs: Sequence[Job]) -> Iterator[float]:
    """us per layer of each: compiled side by side, run one after the other, since pools are large."""
    programs = [jax.jit(job.chain, donate_argnums=0).lower(*job.arguments()) for job in jobs]
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(program.compile) for program in programs]
        for job, future in zip(jobs, futures, strict=True):
            yield _time_us(future.result(), job) / job.layers


def _time_us(call: Callable[..., Any], job: Job) -> float:
    """Of one call. Calls are queued, so that the dispatch of all but the first is hidden."""
    pools, x, meta, extras = job.arguments()
    pools, x, extras = (jax.tree.map(_numbers, tree) for tree in (pools, x, extras))
    return time_us(call, pools, x, meta, extras)


def _numbers(like: Any) -> Array:
    """Numbers from -1 to 1 that look like no others; quickly compiled."""
    return _waves(like.shape, like.dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _waves(shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.sin(12.9898 * lax.iota(jnp.float32, math.prod(shape))).astype(dtype).reshape(shape)


def time_us(call: Callable[..., Any], donated: Any, *rest: Any) -> float:
    """Median over a few rounds, of call(donated, *rest) -> (donated, result)."""

    def run(count: int, donated: Any) -> tuple[float, Any]:
        start_s = time.perf_counter()
        result = None
        for _ in range(count):
            donated, result = call(donated, *rest)
        jax.block_until_ready(result)
        return (time.perf_counter() - start_s) / count, donated

    _, donated = run(1, donated)
    once_s, donated = run(1, donated)
    count, rounds = int(np.clip(MIN_SECONDS / once_s, 1, MAX_QUEUED)), []
    for _ in range(REPEATS):
        taken_s, donated = run(count, donated)
        rounds.append(taken_s)
    return float(np.median(rounds)) * 1e6


# ------------------------------------------------------------------------------------------------------- ceilings


class Ceilings(NamedTuple):
    """What the device does at best, measured: the faster of reading and copying an array, and a square product."""

    tb_per_s: float
    tflop_per_s: float

    def of(self, unit: str) -> float:
        return self.tb_per_s if unit == "TB/s" else self.tflop_per_s


def measure_ceilings(dtype: str) -> Ceilings:
    large = jax.devices()[0].platform != "cpu"
    size, side = (2**29, 8192) if large else (2**24, 1024)
    words = jnp.zeros(size // 2, jnp.uint32)  # an addition of which costs nothing
    read_us = time_us(jax.jit(lambda _, a: (_, jnp.max(a))), None, words)
    copy_us = time_us(jax.jit(lambda a: (a + 1, jnp.zeros(())), donate_argnums=0), words)
    tb_per_s = max(2 * size / read_us, 4 * size / copy_us) / 1e6
    a = b = _waves((side, side), jnp.dtype(dtype))
    product = jax.jit(lambda _, a, b: (_, jnp.dot(a, b.T)))
    product_us = time_us(product, None, a, b)
    return Ceilings(tb_per_s, 2 * side**3 / product_us / 1e6)


# ----------------------------------------------------------------------------------------------------------- jobs


def rows_of(deployment: Deployment, lens: int, new: int, rows: int, *, decode: bool) -> tuple[AttentionInput, int]:
    """A step of `rows` rows of `lens` tokens, `new` of them computed by it, over permuted pages; pages of the pool."""
    page_size = deployment.page_size
    own = ceil_div(lens, page_size)
    num_pages, width = 1 + rows * own, max(own, MAX_MODEL_LEN // page_size)
    pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    table = np.zeros((rows, width), np.int32)
    table[:, :own] = pages.reshape(rows, own)
    return AttentionInput(
        page_table=jnp.asarray(table),
        kv_lens=jnp.full(rows, lens, jnp.int32),
        positions=jnp.tile(jnp.arange(lens - new, lens, dtype=jnp.int32), rows),
        token_rows=jnp.repeat(jnp.arange(rows, dtype=jnp.int32), new),
        cu_q_lens=jnp.zeros(1, jnp.int32) if decode else jnp.arange(rows + 1, dtype=jnp.int32) * new,
        num_decode_rows=rows if decode else 0,
    ), num_pages


def job(deployment: Deployment, kernel: str, shape: str, op: Op, **how: Any) -> Job:
    """A job with the parts that most of them share: `meta`, `num_pages`, `columns` of x, `work` and `unit`."""
    model, dtype, meta = deployment.model, jnp.dtype(deployment.dtype), how["meta"]
    tokens, num_pages = meta.token_rows.shape[0], how["num_pages"]
    head_dim = deployment.backend.stored_head_dim(model.head_dim)
    pool = jax.ShapeDtypeStruct((num_pages, model.num_kv_heads, 2, deployment.page_size, head_dim), dtype)
    pool_bytes = pool.size * dtype.itemsize
    layers = LAYERS if tokens < LARGE_TOKENS else LARGE_LAYERS
    if deployment.backend.platform == "cpu":  # where compiling costs more, and launching nothing
        layers = CPU_LAYERS
    return Job(
        kernel, shape, op,
        x=jax.ShapeDtypeStruct((tokens, *how["columns"]), dtype),
        pool=pool,
        pools=min(int(np.clip(POOL_BYTES / pool_bytes, 2, MAX_POOLS)), layers),
        meta=meta,
        extras=how.get("extras", {}),
        layers=layers,
        work=how["work"], unit=how["unit"],
        page_size=deployment.page_size,
        prepare=deployment.backend.prepare,
    )  # fmt: skip


def attention_job(
    deployment: Deployment, rows: int, new: int, context: int, *, decode: bool,
    attention: Callable[..., Array] | None = None,
) -> Job:  # fmt: skip
    """Attention alone, with q and the pages as they are: of decode rows (`new` is 1), or of chunks of `new` tokens
    with `context` before them. `attention`: another than the backend's.
    """
    model, dtype = deployment.model, jnp.dtype(deployment.dtype)
    (meta, num_pages), window = rows_of(deployment, context + new, new, rows, decode=decode), model.sliding_windows[0]
    attention = attention or deployment.backend.halves[1]
    how = {"scale": model.attention_scale, "sliding_window": window}

    def op(q: Array, kv: Any, meta: AttentionInput, _: Any) -> tuple[Array, Any]:
        return attention(q, kv, meta, **how), kv

    seen = np.arange(context + 1, context + new + 1)  # keys of each token
    seen = seen if window is None else np.minimum(seen, window)
    flop = 4.0 * rows * model.num_heads * model.head_dim * float(seen.sum())
    kv_bytes = 2.0 * rows * model.num_kv_heads * model.head_dim * int(seen.max()) * dtype.itemsize
    name = f"{rows} x {context + new}" if decode else f"{rows} x {new} + {context}"
    return job(
        deployment, f"{'decode' if decode else 'prefill'} attention", name, op, meta=meta, num_pages=num_pages,
        columns=(model.num_heads, model.head_dim),
        work=kv_bytes if decode else flop, unit="TB/s" if decode else "TFLOP/s",
    )  # fmt: skip


def _projection(deployment: Deployment, meta: AttentionInput) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes with qkv: arrays (shapes), and static options."""
    model, dtype = deployment.model, jnp.dtype(deployment.dtype)
    cos, sin = jax.eval_shape(partial(rope_tables, model), meta.positions)
    extras = {"cos": cos, "sin": sin}
    if model.qkv_bias:
        extras["bias"] = jax.ShapeDtypeStruct((model.qkv_size,), dtype)
    if model.qk_norm:
        extras |= dict.fromkeys(("q_norm", "k_norm"), jax.ShapeDtypeStruct((model.head_dim,), dtype))
    return extras, {"num_heads": model.num_heads, "eps": model.norm_eps}


def layer_job(deployment: Deployment, rows: int, context: int) -> Job:
    """All that a backend does of a decode layer: bias, norm, rope, KV write and attention."""
    model, dtype = deployment.model, jnp.dtype(deployment.dtype)
    meta, num_pages = rows_of(deployment, context, 1, rows, decode=True)
    extras, options = _projection(deployment, meta)
    window = model.sliding_windows[0]
    options |= {"scale": model.attention_scale, "sliding_window": window, "softcap": None, "sinks": None}

    def op(qkv: Array, kv: Any, meta: AttentionInput, extras: dict[str, Array]) -> tuple[Array, Any]:
        given: dict[str, Any] = dict.fromkeys(("bias", "q_norm", "k_norm")) | extras
        return deployment.backend.attend(qkv, kv, meta, given.pop("cos"), given.pop("sin"), **given, **options)

    seen = context if window is None else min(context, window)
    kv_bytes = 2.0 * rows * model.num_kv_heads * model.head_dim * seen * dtype.itemsize
    return job(
        deployment, "decode: rope, write, attention", f"{rows} x {context}", op, meta=meta, num_pages=num_pages,
        columns=(model.qkv_size,), extras=extras, work=kv_bytes, unit="TB/s",
    )  # fmt: skip


def rope_job(
    deployment: Deployment, tokens: int, rope_and_write: Callable[..., tuple[Array, Any]] | None = None
) -> Job:
    """Bias, norm, rope and KV write, of decode rows or, from LARGE_TOKENS on, of one chunk. `rope_and_write`: another
    than the backend's.
    """
    rope_and_write = rope_and_write or deployment.backend.halves[0]
    model, decode = deployment.model, tokens < LARGE_TOKENS
    meta, num_pages = rows_of(deployment, *((17, 1, tokens) if decode else (tokens, tokens, 1)), decode=decode)
    extras, options = _projection(deployment, meta)

    def op(qkv: Array, kv: Any, meta: AttentionInput, extras: dict[str, Array]) -> tuple[Array, Any]:
        given = dict(extras)
        return rope_and_write(qkv, kv, meta, given.pop("cos"), given.pop("sin"), **given, **options)

    moved = 2.0 * tokens * model.qkv_size * jnp.dtype(deployment.dtype).itemsize + 4.0 * tokens * model.head_dim
    return job(
        deployment, "rope and write", f"{tokens}", op, meta=meta, num_pages=num_pages, columns=(model.qkv_size,),
        extras=extras, work=moved, unit="TB/s",
    )  # fmt: skip


def norm_job(deployment: Deployment, tokens: int) -> Job:
    """Residual and RMSNorm after the MLP, whose product comes in as many parts as the backend wants."""
    model, dtype, backend = deployment.model, jnp.dtype(deployment.dtype), deployment.backend
    meta, num_pages = rows_of(deployment, 1, 1, tokens, decode=True)
    size, parts = tokens * model.hidden_size, backend.parts(tokens, model.hidden_size, model.ffn_size)
    delta = jax.ShapeDtypeStruct((tokens, model.hidden_size), dtype)
    if parts > 1:
        delta = jax.ShapeDtypeStruct((parts, *delta.shape), jnp.float32)

    def op(x: Array, pool: Any, _: AttentionInput, extras: dict[str, Array]) -> tuple[Any, Any]:
        return backend.add_norm(x, extras["delta"], extras["weight"], model.norm_eps), pool

    made = job(
        deployment, "residual and norm", f"{tokens} x {model.hidden_size}" + f", {parts} parts" * (parts > 1), op,
        meta=meta, num_pages=num_pages, columns=(model.hidden_size,), unit="TB/s",
        work=3.0 * size * dtype.itemsize + delta.size * delta.dtype.itemsize,
        extras={"delta": delta, "weight": jax.ShapeDtypeStruct((model.hidden_size,), dtype)},
    )  # fmt: skip
    return made._replace(pool=None, pools=1, prepare=lambda meta, _: meta)


def gated_job(deployment: Deployment, tokens: int) -> Job:
    """The products with gate and up, and the activation; the weights stand where others have a layer's KV pages."""
    model, dtype, backend = deployment.model, jnp.dtype(deployment.dtype), deployment.backend
    meta, num_pages = rows_of(deployment, 1, 1, tokens, decode=True)
    weights = jax.ShapeDtypeStruct((2 * model.ffn_size, model.hidden_size), dtype)

    def op(x: Array, w: Any, _: AttentionInput, __: dict[str, Array]) -> tuple[Array, Any]:
        return backend.gated_product(x, w), w

    made = job(
        deployment, "gate, up and silu", f"{tokens} x {model.hidden_size} x {model.ffn_size}", op, meta=meta,
        num_pages=num_pages, columns=(model.hidden_size,), unit="TFLOP/s", work=2.0 * tokens * weights.size,
    )  # fmt: skip
    pools = min(int(np.clip(POOL_BYTES / (weights.size * dtype.itemsize), 2, MAX_POOLS)), made.layers)
    return made._replace(pool=weights, pools=pools, prepare=lambda meta, _: meta)


def all_jobs(
    deployment: Deployment,
    decode: Iterable[tuple[int, int]],
    prefill: Iterable[tuple[int, int, int]],
    tokens: Sequence[int],
) -> Iterator[Job]:
    """The kernel table: (rows, context) of decode steps; (chunks, tokens, context) of prefill; tokens of the rest."""
    for rows, context in decode:
        yield attention_job(deployment, rows, 1, context - 1, decode=True)
        yield layer_job(deployment, rows, context)
    for chunks, new, context in prefill:
        yield attention_job(deployment, chunks, new, context, decode=False)
    yield from (make(deployment, count) for make in (rope_job, norm_job, gated_job) for count in tokens)
