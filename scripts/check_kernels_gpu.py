#!/usr/bin/env python3
"""Checks and times the attention kernels on the GPU of this machine; prints Markdown.

    python scripts/check_kernels_gpu.py [--skip-matrix] [--sweep] [--prefill | --decode]

The matrix is that of `scripts/test -m gpu`, against a float64 oracle. Times are per layer, in a jitted chain of layers
with a KV pool each, so that nothing is found in the L2 cache. Exits 1 if a case is off. `--prefill` alone takes less
than a minute, since it compiles everything at once, on all cores.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pallas_kernels")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from kernel_cases import GPU_MATRIX, PREFILL_MATRIX, TOLERANCE, error_of, make_step  # noqa: E402  # pyright: ignore

from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as kernel  # noqa: E402
from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as prefill_kernel  # noqa: E402
from jaxserve.pallas_kernels import reference  # noqa: E402
from jaxserve.pallas_kernels.kernel_hash import make_kernel_hashes_stable  # noqa: E402
from jaxserve.pallas_kernels.ops import Backend, resolve_backend  # noqa: E402
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages  # noqa: E402

COPY_BYTES_PER_S = 4.3e12  # of an H200
MIN_LAYERS = 32  # of a timed chain; more takes long to compile
HEADS = {"Llama-8B": (32, 8, 128), "Qwen-1.5B": (12, 2, 128)}  # N, K, H
SHAPES = [(256, 2048), (256, 512), (64, 512), (8, 512), (1, 8192), (1, 512)]
PREFILL_SHAPES = [(1, 8192, 0), (16, 512, 2048), (16, 512, 0)]  # chunks, tokens of each, context of each
PREFILL_LAYERS = 8  # of a timed chain


def backend_of(name: str, case: Any = None) -> Backend:
    device = jax.devices()[0]
    shapes = {"dtype": case.dtype, "head_dim": case.head_dim, "group": case.group} if case else {}
    return resolve_backend(name, device.platform, device.device_kind, **shapes)


def check_matrix() -> bool:
    print("\n## Largest difference to the float64 oracle\n")
    print("| case | mosaic_gpu | reference | limit |\n|---|---|---|---|")
    good = True
    for i, case in enumerate(GPU_MATRIX):
        step = make_step(case)
        errors = []
        # the reference compiles slowly here and has its own tests: every fifth case, and those with a prefill region
        for name in ("mosaic_gpu", "reference") if i % 5 == 0 or case.prefill else ("mosaic_gpu",):
            backend = backend_of(name, case)

            @jax.jit
            def run(q: Any, kv: KVPages, meta: AttentionInput, backend: Backend = backend, case: Any = case) -> Any:
                return backend.attention(q, kv, backend.prepare(meta, kv.k.shape[2]), **case.options)

            errors.append(error_of(run(step.q, step.kv, step.meta), step))
        limit = TOLERANCE[case.dtype]
        passed = all(e < limit for e in errors)
        good &= passed
        shown = [f"{e:.1e}" for e in errors] + [""] * (2 - len(errors))
        print(f"| {case} | {' | '.join(shown)} | {limit:g} |" + ("" if passed else " **OFF**"), flush=True)
    return good


def decode_meta(rows: int, context: int, page_size: int, num_pages: int) -> AttentionInput:
    width = -(-context // page_size)
    pages = np.random.default_rng(0).permutation(num_pages - 1)[: rows * width] + 1
    return AttentionInput(
        page_table=jnp.asarray(pages.reshape(rows, width), jnp.int32),
        kv_lens=jnp.full(rows, context, jnp.int32),
        positions=jnp.full(rows, context - 1, jnp.int32),
        token_rows=jnp.arange(rows, dtype=jnp.int32),
        cu_q_lens=jnp.zeros(1, jnp.int32),
        num_decode_rows=rows,
    )


def time_s(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median wall time of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def make_layers(
    rows: int, context: int, page_size: int, heads: tuple[int, int, int]
) -> tuple[jax.Array, list[KVPages]]:
    """Queries [S, N, H] and the pools of enough layers to overflow the L2 cache."""
    n, k, h = heads
    num_pages = rows * -(-context // page_size) + 1
    layer_bytes = 2 * 2 * num_pages * page_size * k * h
    layers = int(np.clip(4e9 // layer_bytes, 2, 32))
    shape = (num_pages, k, page_size, h)
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    new = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    pools = [KVPages(new(keys[2 * i]), new(keys[2 * i + 1])) for i in range(layers)]
    return jax.random.normal(jax.random.key(1), (rows, n, h), jnp.bfloat16), pools


def time_layers(attend: Callable[..., Any], q: jax.Array, pools: list[KVPages], meta: AttentionInput) -> float:
    """us per layer of a chain of layers; long, since one launch costs as much as ten small layers."""
    rounds = max(1, MIN_LAYERS // len(pools)) if len(pools) > 4 else 1

    @jax.jit
    def chain(q: Any, pools: list[KVPages], meta: AttentionInput) -> Any:
        for kv in pools * rounds:
            q = attend(q, kv, meta)
        return q

    return time_s(lambda: chain(q, pools, meta)) / len(pools) / rounds * 1e6


def time_decode() -> None:
    print("\n## Decode, us per layer (bfloat16)\n")
    print("| heads | page | batch, context | floor | mosaic_gpu | TB/s | reference (XLA) | KV write (XLA) |")
    print("|---|---|---|---|---|---|---|---|")
    for name, heads in HEADS.items():
        for page_size in (64, 16):
            for rows, context in SHAPES:
                q, pools = make_layers(rows, context, page_size, heads)
                meta = decode_meta(rows, context, page_size, pools[0].k.shape[0])
                kv_bytes = 4 * rows * context * heads[1] * heads[2]
                scale = heads[2] ** -0.5
                us, xla_us = (
                    time_layers(partial(backend_of(b).attention, scale=scale), q, pools[:most], meta)
                    for b, most in (("mosaic_gpu", 32), ("reference", 4))
                )
                write_us = time_write(q[:, : heads[1]], pools, meta)
                floor_us, rate = kv_bytes / COPY_BYTES_PER_S * 1e6, kv_bytes / us / 1e6
                print(f"| {name} | {page_size} | {rows}, {context} | {floor_us:.1f} | {us:.1f} | {rate:.2f} ", end="")
                print(f"| {xla_us:.1f} | {write_us:.1f} |", flush=True)


def time_write(new: jax.Array, pools: list[KVPages], meta: AttentionInput) -> float:
    """us per layer of writing one token per row. Donates the pools."""
    write = jax.jit(lambda pools: [reference.write_kv(kv, new, new, meta) for kv in pools], donate_argnums=0)
    held = [pools]

    def call() -> Any:
        held[0] = write(held[0])
        return held[0]

    return time_s(call) / len(pools) * 1e6


def compile_all(jobs: Iterable[tuple[Callable[..., Any], tuple]]) -> list[Callable[[], Any]]:
    """Compiles (function, arguments) on all cores; gives what calls each."""
    jobs = list(jobs)
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda lowered: lowered.compile(), [jax.jit(f).lower(*args) for f, args in jobs]))
    return [partial(run, *args) for run, (_, args) in zip(compiled, jobs, strict=True)]


def check_prefill() -> bool:
    print("\n## Prefill: largest difference to the float64 oracle\n\n| case | error | limit |\n|---|---|---|")
    steps, jobs = [make_step(case) for case in PREFILL_MATRIX], []
    for step in steps:
        split = len(step.case.decode)

        def run(q: Any, kv: KVPages, meta: AttentionInput, split: int = split, options: Any = step.case.options) -> Any:
            meta = prefill_kernel.prepare(meta, kv.k.shape[2])
            return prefill_kernel.prefill_attention(q, kv, meta, first_token=split, **options)[split:]

        jobs.append((run, (step.q, step.kv, step.meta)))
    good = True
    for step, call in zip(steps, compile_all(jobs), strict=True):
        got, want = np.asarray(call().astype(jnp.float32), np.float64), step.expected()[len(step.case.decode) :]
        error, limit = float(np.abs(got - want).max()), TOLERANCE[step.case.dtype]
        good &= error < limit
        print(f"| {step.case} | {error:.1e} | {limit:g} |" + ("" if error < limit else " **OFF**"), flush=True)
        if not error < limit:
            off = np.argwhere(~(np.abs(got - want).max(axis=2) < limit))
            print(f"  {len(off)} (token, head) pairs are off, first and last: {off[:4].tolist()} {off[-4:].tolist()}")
    return good


def prefill_meta(chunks: int, tokens: int, context: int, page_size: int, num_pages: int) -> AttentionInput:
    rows = decode_meta(chunks, context + tokens, page_size, num_pages)
    return dataclasses.replace(
        rows,
        positions=jnp.tile(jnp.arange(context, context + tokens, dtype=jnp.int32), chunks),
        token_rows=jnp.repeat(jnp.arange(chunks, dtype=jnp.int32), tokens),
        cu_q_lens=jnp.arange(chunks + 1, dtype=jnp.int32) * tokens,
        num_decode_rows=0,
    )


def prefill_job(
    heads: tuple[int, int, int], shape: tuple[int, int, int], tuning: Any, layers: int = PREFILL_LAYERS
) -> tuple[Callable[..., Any], tuple]:
    """A chain of layers of prefill over two pools in turn. `tuning` None: the reference."""
    (n, k, h), (chunks, tokens, context) = heads, shape
    num_pages = chunks * -(-(tokens + context) // 64) + 1
    keys = jax.random.split(jax.random.key(0), 5)
    new = jax.jit(lambda key: jax.random.normal(key, (num_pages, k, 64, h), jnp.bfloat16))
    pools = [KVPages(new(keys[i]), new(keys[i + 1])) for i in (0, 2)]
    q = jax.random.normal(keys[4], (chunks * tokens, n, h), jnp.bfloat16)

    def chain(q: Any, pools: list[KVPages], meta: AttentionInput) -> Any:
        if tuning is None:
            meta = reference.prepare(meta, 64, tuning=reference.GPU_TUNING)
            attend = partial(reference.attention, tuning=reference.GPU_TUNING)
        else:
            meta = prefill_kernel.prepare(meta, 64)
            attend = partial(prefill_kernel.prefill_attention, tuning=tuning)
        for i in range(layers):
            q = attend(q, pools[i % 2], meta, scale=h**-0.5)
        return q

    return chain, (q, pools, prefill_meta(chunks, tokens, context, 64, num_pages))


def causal_flops(heads: tuple[int, int, int], shape: tuple[int, int, int]) -> float:
    chunks, tokens, context = shape
    return 4.0 * heads[0] * heads[2] * chunks * tokens * (context + (tokens + 1) / 2)


def time_prefill() -> None:
    print("\n## Prefill, us per layer (bfloat16, page 64; FLOP below the diagonal only)\n")
    print("| heads | chunks x tokens + context | mosaic_gpu | TFLOP/s | reference (XLA) | TFLOP/s |")
    print("|---|---|---|---|---|---|")
    cells = [(name, shape) for name in HEADS for shape in PREFILL_SHAPES]
    ours = [prefill_job(HEADS[name], shape, prefill_kernel.PrefillTuning()) for name, shape in cells]
    theirs = [prefill_job(HEADS[name], shape, None, layers=1) for name, shape in cells]
    calls = compile_all(ours + theirs)
    for (name, shape), call, reference_call in zip(cells, calls[: len(cells)], calls[len(cells) :], strict=True):
        flops = causal_flops(HEADS[name], shape)
        us, xla_us = time_s(call) / PREFILL_LAYERS * 1e6, time_s(reference_call, repeats=2) * 1e6
        chunks, tokens, context = shape
        print(f"| {name} | {chunks} x {tokens} + {context} | {us:.0f} | {flops / us / 1e6:.0f} ", end="")
        print(f"| {xla_us:.0f} | {flops / xla_us / 1e6:.0f} |", flush=True)


def sweep_prefill() -> None:
    print("\n## Prefill tunings, us per layer (page 64)\n")
    print("| N, K, H | chunks x tokens + context | tuning | us | TFLOP/s |\n|---|---|---|---|---|")
    new = prefill_kernel.PrefillTuning
    tunings = {
        64: [new(), new(kv_tile=128, stages=2), new(kv_tile=64, stages=6)],
        128: [new(), new(kv_tile=64, stages=4), new(kv_tile=64, stages=5)],
        256: [new(), new(stages=1)],
    }
    cells = [
        (heads, shape, tuning)
        for heads in ((32, 8, 128), (32, 8, 64), (16, 4, 256))
        for shape in (PREFILL_SHAPES if heads[2] == 128 else PREFILL_SHAPES[:1])
        for tuning in [*tunings[heads[2]], new(take_turns=False), new(p_in_registers=False)]
    ]
    for (heads, shape, tuning), call in zip(cells, compile_all(prefill_job(*cell) for cell in cells), strict=True):
        us, own = time_s(call) / PREFILL_LAYERS * 1e6, tuning.of(heads[2])
        how = f"kv_tile {own.kv_tile}, stages {own.stages}"
        how += "" if own.take_turns else ", no turns"
        how += "" if own.p_in_registers else ", P in shared memory"
        rate = causal_flops(heads, shape) / us / 1e6
        print(f"| {heads} | {shape[0]} x {shape[1]} + {shape[2]} | {how} | {us:.0f} | {rate:.0f} |", flush=True)


def sweep() -> None:
    print("\n## Tuning, us per layer (page 64)\n\n| heads | batch, context | stages | CTAs | min tiles | us |")
    print("|---|---|---|---|---|---|")
    for name, heads in HEADS.items():
        for rows, context in ((256, 512), (64, 512), (8, 512), (1, 8192), (1, 512)):
            q, pools = make_layers(rows, context, 64, heads)
            meta = decode_meta(rows, context, 64, pools[0].k.shape[0])
            for stages, ctas, tiles in [(4, 264, 2), (3, 264, 2), (2, 264, 2), (4, 132, 2), (3, 132, 2), (3, 132, 1)]:
                tuning = kernel.DecodeTuning(stages=stages, target_ctas=ctas, min_tiles=tiles)

                def attend(q: Any, kv: KVPages, m: AttentionInput, tuning: Any = tuning) -> Any:
                    return kernel.decode_attention(q, kv, m.page_table, m.kv_lens, scale=0.1, tuning=tuning)

                us = time_layers(attend, q, pools, meta)
                print(f"| {name} | {rows}, {context} | {stages} | {ctas} | {tiles} | {us:.1f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-matrix", action="store_true", help="time only")
    parser.add_argument("--sweep", action="store_true", help="also try other tunings")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--prefill", action="store_true", help="the prefill kernel only")
    only.add_argument("--decode", action="store_true", help="the decode kernel only")
    args = parser.parse_args()
    print(f"# Attention kernels on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    make_kernel_hashes_stable()
    good = True
    if not args.prefill:
        good &= args.skip_matrix or check_matrix()
        time_decode()
        if args.sweep:
            sweep()
    if not args.decode:
        good &= args.skip_matrix or check_prefill()
        time_prefill()
        if args.sweep:
            sweep_prefill()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
