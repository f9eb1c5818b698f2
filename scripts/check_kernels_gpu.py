#!/usr/bin/env python3
"""Checks and times the attention kernels on the GPU of this machine; prints Markdown.

    python scripts/check_kernels_gpu.py [--skip-matrix] [--sweep] [--prefill | --decode]
    python scripts/check_kernels_gpu.py --rope

The matrix is that of `scripts/test -m gpu`, against a float64 oracle; `--decode` takes a selection of it. Times are per
layer, in a jitted chain of layers with a KV pool each, so that nothing is found in the L2 cache. Exits 1 if a case is
off. `--prefill` or `--decode` alone takes about a minute, since it compiles everything at once, on all cores.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pallas_kernels")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from kernel_cases import (  # noqa: E402  # pyright: ignore
    DECODE_MATRIX,
    GPU_MATRIX,
    PREFILL_MATRIX,
    TOLERANCE,
    Step,
    error_of,
    make_step,
    widened,
)

from jaxserve.pallas_kernels import paged_attention_mosaic_gpu as mosaic_gpu  # noqa: E402
from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as kernel  # noqa: E402
from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as prefill_kernel  # noqa: E402
from jaxserve.pallas_kernels import reference  # noqa: E402
from jaxserve.pallas_kernels.kernel_hash import make_kernel_hashes_stable  # noqa: E402
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages  # noqa: E402

COPY_BYTES_PER_S = 4.3e12  # of an H200
MINE = {"mosaic_gpu": kernel.DecodeTuning()}
MIN_LAYERS = 96  # of a timed chain: one launch costs as much as ten small layers
MAX_MODEL_LEN = 4096  # at least; sets how wide page tables are
HEADS = {"Llama-8B": (32, 8, 128), "Qwen-1.5B": (12, 2, 128)}  # N, K, H
SHAPES = {  # rows, context
    "Llama-8B": [(256, 2048), (256, 512), (64, 512), (8, 512), (1, 8192), (1, 512)],
    "Qwen-1.5B": [(256, 512), (64, 512), (8, 512), (1, 512)],
}
PREFILL_SHAPES = [(1, 8192, 0), (16, 512, 2048), (16, 512, 0)]  # chunks, tokens of each, context of each
PREFILL_LAYERS = 8  # of a timed chain


def check_matrix() -> bool:
    print("\n## Largest difference to the float64 oracle\n")
    print("| case | mosaic_gpu | reference | limit |\n|---|---|---|---|")
    good = True
    for i, case in enumerate(GPU_MATRIX):
        step = make_step(case)
        errors = []
        # the reference compiles slowly here and has its own tests: every fifth case, and those with a prefill region
        for module in (mosaic_gpu, reference) if i % 5 == 0 or case.prefill else (mosaic_gpu,):

            @jax.jit
            def run(q: Any, kv: KVPages, meta: AttentionInput, module: Any = module, case: Any = case) -> Any:
                return module.attention(q, kv, module.prepare(meta, kv.k.shape[2]), **case.options)

            kv = widened(step.kv, mosaic_gpu.stored_head_dim(case.head_dim)) if module is mosaic_gpu else step.kv
            errors.append(error_of(run(step.q, kv, step.meta), step))
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


class DecodeJob(NamedTuple):
    run: Callable[..., Any]
    args: tuple  # shapes of q, the pools; the step
    layers: int


def decode_job(
    heads: tuple[int, int, int], shape: tuple[int, int], page_size: int, tuning: kernel.DecodeTuning | None
) -> DecodeJob:
    """A chain of layers, over the pools of up to 32 that fit in 4 GB. `tuning` None: the reference, 2 layers."""
    (n, k, h), (rows, context) = heads, shape
    num_pages = rows * -(-context // page_size) + 1
    pool: Any = jax.ShapeDtypeStruct((num_pages, k, page_size, h), jnp.bfloat16)
    pools = int(np.clip(4e9 // (4 * num_pages * page_size * k * h), 2, 32)) if tuning else 2
    rounds = -(-MIN_LAYERS // pools) if tuning else 1
    meta = decode_meta(rows, context, page_size, num_pages)
    unused = max(0, MAX_MODEL_LEN // page_size - meta.page_table.shape[1])
    meta = dataclasses.replace(meta, page_table=jnp.pad(meta.page_table, ((0, 0), (0, unused))))

    def chain(q: Any, pools: list[KVPages], meta: AttentionInput) -> Any:
        if tuning is None:
            attend = partial(reference.attention, meta=meta, tuning=reference.GPU_TUNING)
        else:
            table, lens = meta.page_table, meta.kv_lens
            work = kernel.decode_work(lens, table, kv_heads=k, page_size=page_size, tuning=tuning)
            attend = partial(kernel.decode_attention, page_table=table, kv_lens=lens, tuning=tuning, work=work)
        for kv in pools * rounds:
            q = attend(q, kv, scale=h**-0.5)
        return q

    q = jax.ShapeDtypeStruct((rows, n, h), jnp.bfloat16)
    return DecodeJob(chain, (q, [KVPages(pool, pool)] * pools, meta), pools * rounds)


def time_jobs(jobs: list[DecodeJob]) -> Iterator[float]:
    """us per layer of each, one after the other, since pools are large."""
    new = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype), static_argnums=1)
    for job, call in zip(jobs, compile_all([job[:2] for job in jobs]), strict=True):
        q, pools, meta = job.args
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(pools) + 1))
        args = new(next(keys), q), [KVPages(*(new(next(keys), pool) for pool in kv)) for kv in pools], meta
        yield time_s(partial(call.func, *args)) / job.layers * 1e6
        del args


def time_decode(
    tunings: dict[str, kernel.DecodeTuning] = MINE, page_sizes: tuple[int, ...] = (64,), compare: bool = False
) -> None:
    """us per layer with each tuning, and of the reference too if asked."""
    options = {**tunings, **({"reference (XLA)": None} if compare else {})}
    print("\n## Decode, us per layer (bfloat16)\n")
    print(f"| heads | page | batch, context | floor | {' | TB/s | '.join(options)} | TB/s |")
    print("|---|---|---|---|" + "---|---|" * len(options))
    cells = [(name, page, shape) for page in page_sizes for name in HEADS for shape in SHAPES[name]]
    jobs = [decode_job(HEADS[name], shape, page, tuning) for name, page, shape in cells for tuning in options.values()]
    times = time_jobs(jobs)
    for name, page, (rows, context) in cells:
        kv_bytes = 4 * rows * context * HEADS[name][1] * HEADS[name][2]
        print(f"| {name} | {page} | {rows}, {context} | {kv_bytes / COPY_BYTES_PER_S * 1e6:.1f} ", end="")
        for _ in options:
            us = next(times)
            print(f"| {us:.1f} | {kv_bytes / us / 1e6:.2f} ", end="", flush=True)
        print("|")


def compile_all(jobs: Iterable[tuple[Callable[..., Any], tuple]]) -> list[Callable[[], Any]]:
    """Compiles (function, arguments) on all cores; gives what calls each."""
    jobs = list(jobs)
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda lowered: lowered.compile(), [jax.jit(f).lower(*args) for f, args in jobs]))
    return [partial(run, *args) for run, (_, args) in zip(compiled, jobs, strict=True)]


def check_decode() -> bool:
    def attend(q: Any, kv: KVPages, meta: AttentionInput, tuning: Any, options: Any) -> Any:
        return kernel.decode_attention(q, kv, meta.page_table, meta.kv_lens, tuning=tuning, **options)

    good = True
    for title, cases, tuning in (
        ("Decode", DECODE_MATRIX, kernel.DecodeTuning()),
        ("Decode with overlap", DECODE_MATRIX[2::3], kernel.DecodeTuning(overlap=True)),
    ):
        steps = [make_step(case) for case in cases]
        runs = [partial(attend, tuning=tuning, options=step.case.options) for step in steps]
        good &= check_steps(title, steps, runs)
    return good


def check_prefill() -> bool:
    def attend(q: Any, kv: KVPages, meta: AttentionInput, split: int, options: Any) -> Any:
        meta = prefill_kernel.prepare(meta, kv.k.shape[2])
        return prefill_kernel.prefill_attention(q, kv, meta, first_token=split, **options)

    steps = [make_step(case) for case in PREFILL_MATRIX]
    runs = [partial(attend, split=len(step.case.decode), options=step.case.options) for step in steps]
    return check_steps("Prefill", steps, runs)


def check_steps(title: str, steps: list[Step], runs: list[Callable[..., Any]]) -> bool:
    """Whether what each run(q, kv, meta) gives is near the oracle. Not looked at: the decode rows of mixed steps."""
    print(f"\n## {title}: largest difference to the float64 oracle\n\n| case | error | limit |\n|---|---|---|")
    good, jobs = True, [(run, (step.q, step.kv, step.meta)) for run, step in zip(runs, steps, strict=True)]
    for step, call in zip(steps, compile_all(jobs), strict=True):
        first = len(step.case.decode) if step.case.prefill else 0
        got, want = np.asarray(call().astype(jnp.float32), np.float64)[first:], step.expected()[first:]
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


def sweep_decode() -> None:
    new = kernel.DecodeTuning
    tunings = {
        "as is": new(),
        "overlap": new(overlap=True),
        "2 stages": new(stages=2),
        "3": new(stages=3),
        "6": new(stages=6),  # one CTA per multiprocessor
        "min tiles 2": new(min_tiles=2),
        "8": new(min_tiles=8),
        "264 CTAs": new(target_ctas=264),
    }
    time_decode(tunings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-matrix", action="store_true", help="time only")
    parser.add_argument("--sweep", action="store_true", help="also try other tunings")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--prefill", action="store_true", help="the prefill kernel only")
    only.add_argument("--decode", action="store_true", help="the decode kernel only")
    only.add_argument("--rope", action="store_true", help="the fused rope and KV write only")
    args = parser.parse_args()
    print(f"# Attention kernels on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    make_kernel_hashes_stable()
    if args.rope:
        from check_rope_gpu import check_rope  # pyright: ignore

        return 0 if check_rope() else 1
    good = True
    if not args.prefill:
        good &= args.skip_matrix or (check_decode() if args.decode else check_matrix())
        if args.sweep:
            sweep_decode()
        elif args.decode:
            time_decode()
        else:
            time_decode(MINE, (64, 16), compare=True)
    if not args.decode:
        good &= args.skip_matrix or check_prefill()
        time_prefill()
        if args.sweep:
            sweep_prefill()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
