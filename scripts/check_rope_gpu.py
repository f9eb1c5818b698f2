"""Checks and times the fused rope and KV write on the GPU of this machine: check_kernels_gpu.py --rope."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_cases import Case  # pyright: ignore
from rope_cases import ROPE_MATRIX, RopeCase, make_rope_step, worst  # pyright: ignore

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels import rope_write_mosaic_gpu as kernel
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages, Prepared

COPY_BYTES_PER_S = 4.3e12  # of an H200
HEADS = {"Llama-8B": (32, 8, 128, False), "Qwen-1.5B": (12, 2, 128, True)}  # N, K, H, bias
TOKENS = (1, 8, 64, 256, 8192)
PAGE, POOLS, QUEUED = 64, 4, 10
TUNINGS = {
    "mosaic_gpu": kernel.RopeTuning(),
    "a CTA per piece": kernel.RopeTuning(spread_up_to_ctas=10**9),
    "a CTA per token": kernel.RopeTuning(spread_up_to_ctas=0),
}

# Those of the interpreter's tests that differ on a card: every thread layout, each extra; and many tokens.
_MANY = Case(decode=tuple(range(1, 300)), page_size=64, head_dim=128, group=4, kv_heads=8, dtype="bfloat16")
CASES = [*ROPE_MATRIX[1:], RopeCase(_MANY), RopeCase(_MANY, bias=True, norm=True)]


def compile_all(jobs: list[tuple[Callable[..., Any], tuple]], **options: Any) -> list[Callable[..., Any]]:
    """Compiles (function, arguments) on all cores; gives what calls each."""
    with ThreadPoolExecutor() as threads:
        lowered = [jax.jit(function, **options).lower(*arguments) for function, arguments in jobs]
        return list(threads.map(lambda low: low.compile(), lowered))


def check_cases() -> bool:
    print("\n## Largest difference to the float64 oracle, in units of what rounding once allows\n")
    print("| case | error |\n|---|---|")
    with jax.default_device(jax.devices("cpu")[0]):
        steps = [make_rope_step(case) for case in CASES]
    jobs = []
    for step in steps:
        for tuning in (kernel.RopeTuning(), kernel.RopeTuning(0)):

            def run(qkv: Any, kv: Any, meta: Any, cos: Any, sin: Any, weights: Any, step: Any = step, t: Any = tuning):
                return kernel.rope_and_write(qkv, kv, meta, cos, sin, **weights, **step.options, tuning=t)

            jobs.append((run, jax.device_put(step.arguments, jax.devices()[0])))
    calls, good = compile_all(jobs), True
    for i, step in enumerate(steps):
        errors = []
        for call, (_, arguments) in zip(calls[2 * i : 2 * i + 2], jobs[2 * i : 2 * i + 2], strict=True):
            q, kv = jax.device_get(call(*arguments))
            errors.append(worst((q, KVPages(*kv)), step, CASES[i].case.dtype))
        passed = max(errors) < 1
        good &= passed
        print(f"| {CASES[i]} | {errors[0]:.2f}, {errors[1]:.2f} |" + ("" if passed else " **OFF**"), flush=True)
    return good


def layers_of(tokens: int) -> int:
    return 6 if tokens > 1024 else 96  # one launch costs as much as ten small layers


def timing_job(heads: tuple[int, int, int, bool], tokens: int, tuning: kernel.RopeTuning | None):
    """A chain of layers over a few pools, and its arguments. `tuning` None: the reference.

    The queries of a layer go through a barrier together with the next one's input, so that XLA neither drops nor
    merges anything.
    """
    N, K, H, has_bias = heads
    decode = tokens <= 1024
    num_pages = 1 + (tokens if decode else -(-tokens // PAGE))
    rng = np.random.default_rng(0)
    pages = 1 + rng.permutation(num_pages - 1)[: tokens if decode else None]
    places = rng.integers(0, PAGE, tokens) if decode else np.arange(tokens) % PAGE
    pages = pages if decode else np.repeat(pages, PAGE)[:tokens]
    slots = Prepared(jnp.asarray(pages, jnp.int32), jnp.asarray(places, jnp.int32), None)

    @jax.jit
    def layer(x: Any, kv: KVPages, slots: Prepared, cos: Any, sin: Any, bias: Any) -> Any:
        unused: Any = None
        meta = AttentionInput(unused, unused, unused, unused, unused, 0, slots)
        if tuning is None:
            return reference.rope_and_write(x, kv, meta, cos, sin, num_heads=N, bias=bias)
        return kernel.rope_and_write(x, kv, meta, cos, sin, num_heads=N, bias=bias, tuning=tuning)

    def chain(pools: list[KVPages], x: Any, slots: Prepared, cos: Any, sin: Any, bias: Any) -> Any:
        pools, queries = list(pools), []
        for i in range(layers_of(tokens)):
            if queries:
                x, queries[-1] = lax.optimization_barrier((x, queries[-1]))
            q, pools[i % POOLS] = layer(x, pools[i % POOLS], slots, cos, sin, bias)
            queries.append(q)
        return pools, sum(q[0, 0, 0] for q in lax.optimization_barrier(queries))

    def random(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(np.resize(rng.standard_normal(2**16, np.float32).astype(dtype), shape))

    x, cos, sin = random(tokens, (N + 2 * K) * H), *(random(tokens, H // 2, dtype=jnp.float32) for _ in range(2))
    pools = [KVPages(*(jnp.zeros((num_pages, K, PAGE, H), jnp.bfloat16) for _ in range(2))) for _ in range(POOLS)]
    return chain, (pools, x, slots, cos, sin, random((N + 2 * K) * H) if has_bias else None)


def time_us(call: Callable[..., Any], arguments: tuple, layers: int) -> float:
    """Per layer. Calls are queued, so that their dispatch is hidden."""
    pools, *rest = arguments
    times = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(QUEUED):
            pools, out = call(pools, *rest)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])) / QUEUED / layers * 1e6


def time_layers() -> None:
    print("\n## Rope and KV write, us per layer (bfloat16, page 64)\n")
    columns = [*TUNINGS, "reference (XLA)"]
    print(f"| heads | tokens | floor | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    cells = [(name, tokens) for name in HEADS for tokens in TOKENS]
    jobs = [timing_job(HEADS[name], t, tuning) for name, t in cells for tuning in (*TUNINGS.values(), None)]
    calls = compile_all(jobs, donate_argnums=0)
    for i, (name, tokens) in enumerate(cells):
        N, K, H, _ = HEADS[name]
        floor = 2 * 2 * tokens * (N + 2 * K) * H / COPY_BYTES_PER_S * 1e6
        own = range(i * len(columns), (i + 1) * len(columns))
        us = [time_us(calls[j], jobs[j][1], layers_of(tokens)) for j in own]
        print(f"| {name} | {tokens} | {floor:.1f} | {' | '.join(f'{u:.1f}' for u in us)} |", flush=True)


def check_rope() -> bool:
    """True if every case is right."""
    good = check_cases()
    time_layers()
    return good
