#!/usr/bin/env python3
"""Checks the attention kernels on the GPU of this machine against a float64 oracle; prints Markdown.

    python scripts/check_kernels_gpu.py [--backend mosaic_gpu | triton] [--only decode | prefill | rope] [--sweep]

The cases are a selection of those of `scripts/test -m gpu`, compiled all at once, on all cores: about a minute each.
Exits 1 if one is off. `--sweep` also times other tunings of the Hopper kernels; `jaxserve bench kernels` times those
that are used.
"""

import argparse
import json
import sys
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
from kernel_cases import (  # noqa: E402  # pyright: ignore
    DECODE_MATRIX,
    PREFILL_MATRIX,
    TOLERANCE,
    Case,
    make_step,
    narrowed,
    widened,
)
from need_gpu import check_platform  # noqa: E402
from rope_cases import ROPE_MATRIX, RopeCase, make_rope_step, worst  # noqa: E402  # pyright: ignore

from jaxserve.bench.kernel_jobs import Job, attention_job, rope_job, time_jobs  # noqa: E402
from jaxserve.config import EngineConfig  # noqa: E402
from jaxserve.deployment import Deployment, resolve_deployment  # noqa: E402
from jaxserve.pallas_kernels import paged_decode_mosaic_gpu, paged_prefill_mosaic_gpu, rope_write_mosaic_gpu  # noqa: E402
from jaxserve.pallas_kernels.ops import Backend, resolve_backend  # noqa: E402
from jaxserve.pallas_kernels.reference import AttentionInput  # noqa: E402
from jaxserve.state import KVPages  # noqa: E402

KINDS = ("decode", "prefill", "rope")
MODELS = ("llama-8b", "qwen-1.5b")
DECODE_SHAPES = [(256, 2048), (256, 512), (64, 512), (8, 512), (1, 8192), (1, 512)]  # rows, context
PREFILL_SHAPES = [(1, 8192, 0), (16, 512, 2048), (16, 512, 0)]  # chunks, tokens of each, context of each
ROPE_TOKENS = (1, 8, 64, 256, 8192)
# Every thread layout, each extra; and many tokens. Not the case that is float32 alone.
_MANY = Case(decode=tuple(range(1, 300)), page_size=64, head_dim=128, group=4, kv_heads=8, dtype="bfloat16")
ROPE_CASES = [*ROPE_MATRIX[1:], RopeCase(_MANY), RopeCase(_MANY, bias=True, norm=True)]


def compile_all(jobs: Iterable[tuple[Callable[..., Any], tuple]]) -> list[Callable[[], Any]]:
    """Compiles (function, arguments) on all cores; gives what calls each."""
    jobs = list(jobs)
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda lowered: lowered.compile(), [jax.jit(f).lower(*args) for f, args in jobs]))
    return [partial(run, *args) for run, (_, args) in zip(compiled, jobs, strict=True)]


def backend_of(name: str, case: Case) -> Backend:
    device = jax.devices()[0]
    shapes = {"dtype": case.dtype, "head_dim": case.head_dim, "group": case.group}
    return resolve_backend(name, device.platform, device.device_kind, **shapes)


def check_attention(title: str, name: str, cases: list[Case]) -> bool:
    """Whether what the backend gives is near the oracle."""

    def attend(q: Any, kv: KVPages, meta: AttentionInput, backend: Backend, options: Any) -> Any:
        return backend.halves[1](q, kv, backend.prepare(meta, kv.shape[3]), **options)

    print(f"\n## {title}: largest difference to the float64 oracle\n\n| case | error | limit |\n|---|---|---|")
    steps = [make_step(case) for case in cases]
    good, jobs = True, []
    for step in steps:
        backend = backend_of(name, step.case)
        kv = widened(step.kv, backend.stored_head_dim(step.case.head_dim))
        jobs.append((partial(attend, backend=backend, options=step.case.options), (step.q, kv, step.meta)))
    for step, call in zip(steps, compile_all(jobs), strict=True):
        got, want = np.asarray(call().astype(jnp.float32), np.float64), step.expected()
        error, limit = float(np.abs(got - want).max()), TOLERANCE[step.case.dtype]
        good &= error < limit
        print(f"| {step.case} | {error:.1e} | {limit:g} |" + ("" if error < limit else " **OFF**"), flush=True)
        if not error < limit:
            off = np.argwhere(~(np.abs(got - want).max(axis=2) < limit))
            print(f"  {len(off)} (token, head) pairs are off, first and last: {off[:4].tolist()} {off[-4:].tolist()}")
    return good


def check_rope(name: str) -> bool:
    """Whether q and the pages are what rounding once allows."""
    print("\n## Rope and KV write: largest difference to the float64 oracle, in units of what rounding once allows\n")
    print("| case | error |\n|---|---|")
    with jax.default_device(jax.devices("cpu")[0]):
        steps = [make_rope_step(case) for case in ROPE_CASES]
    jobs = []
    for step in steps:
        case = Case(dtype="bfloat16", head_dim=step.kv.shape[4])  # float32 cases too: this half takes them
        backend = backend_of(name, case)

        def run(qkv: Any, kv: Any, meta: Any, cos: Any, sin: Any, weights: Any, step: Any = step, b: Any = backend):
            return b.halves[0](qkv, kv, b.prepare(meta, kv.shape[3]), cos, sin, **weights, **step.options)

        kv = widened(step.kv, backend.stored_head_dim(case.head_dim))
        jobs.append((run, jax.device_put((step.qkv, kv, *step.arguments[2:]), jax.devices()[0])))
    good = True
    for case, step, call in zip(ROPE_CASES, steps, compile_all(jobs), strict=True):
        q, kv = jax.device_get(call())
        error = worst((q, narrowed(kv, case.case.head_dim)), step, case.case.dtype)
        good &= error < 1
        print(f"| {case} | {error:.2f} |" + ("" if error < 1 else " **OFF**"), flush=True)
    return good


# ---------------------------------------------------------------------------------------------------- other tunings


def deployments() -> dict[str, Deployment]:
    device, config = jax.devices()[0], EngineConfig(attention_backend="mosaic_gpu")
    shapes = {name: json.loads((ROOT / "scripts/shapes" / name / "config.json").read_text()) for name in MODELS}
    return {name: resolve_deployment(config, hf, device.platform, device.device_kind) for name, hf in shapes.items()}


def print_times(jobs: list[tuple[str, str, Job]]) -> None:
    print("| model | shape | tuning | us | rate |\n|---|---|---|---|---|")
    for (model, tuning, job), us in zip(jobs, time_jobs([job for *_, job in jobs]), strict=True):
        rate = f"{job.work / us / 1e6:.3g} {job.unit}"
        print(f"| {model} | {job.kernel} {job.shape} | {tuning} | {us:.1f} | {rate} |", flush=True)


def sweep_decode() -> None:
    kernel, new = paged_decode_mosaic_gpu, paged_decode_mosaic_gpu.DecodeTuning
    tunings = {
        "as is": new(),
        "one CTA each": new(ctas_each=1),
        "two": new(ctas_each=2),
        "2 stages": new(stages=2),
        "min tiles 2": new(min_tiles=2),
        "4": new(min_tiles=4),
        "8": new(min_tiles=8),
    }

    def attention(tuning: Any) -> Callable[..., Any]:
        return lambda q, kv, meta, **how: kernel.decode_attention(
            q, kv, meta.page_table, meta.kv_lens, tuning=tuning, **how
        )

    print_times(
        [
            (name, words, attention_job(at, rows, 1, context - 1, decode=True, attention=attention(tuning)))
            for name, at in deployments().items()
            for rows, context in DECODE_SHAPES
            for words, tuning in tunings.items()
        ]
    )


def sweep_prefill() -> None:
    kernel, new = paged_prefill_mosaic_gpu, paged_prefill_mosaic_gpu.PrefillTuning
    tunings = {
        "as is": new(),
        "kv tile 64, 4 stages": new(kv_tile=64, stages=4),
        "kv tile 64, 5 stages": new(kv_tile=64, stages=5),
        "no turns": new(take_turns=False),
        "P in shared memory": new(p_in_registers=False),
    }
    print_times(
        [
            (name, words, attention_job(
                at, *shape, decode=False, attention=partial(kernel.prefill_attention, tuning=tuning)
            ))
            for name, at in deployments().items()
            for shape in PREFILL_SHAPES
            for words, tuning in tunings.items()
        ]
    )  # fmt: skip


def sweep_rope() -> None:
    kernel, new = rope_write_mosaic_gpu, rope_write_mosaic_gpu.RopeTuning
    tunings = {
        "as is": new(),
        "a CTA per piece": new(spread_up_to_ctas=10**9),
        "a CTA per token": new(spread_up_to_ctas=0),
    }
    print_times(
        [
            (name, words, rope_job(at, tokens, rope_and_write=partial(kernel.rope_and_write, tuning=tuning)))
            for name, at in deployments().items()
            for tokens in ROPE_TOKENS
            for words, tuning in tunings.items()
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="mosaic_gpu", choices=("mosaic_gpu", "triton", "reference"))
    parser.add_argument("--only", choices=KINDS, help="one of the kernels")
    parser.add_argument("--sweep", action="store_true", help="also time other tunings (of mosaic_gpu)")
    args = parser.parse_args()
    if args.sweep and args.backend != "mosaic_gpu":
        parser.error("--sweep is for --backend mosaic_gpu")
    check_platform(jax.devices()[0].platform)
    print(f"# Kernels of {args.backend} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    check = {
        "decode": partial(check_attention, "Decode", args.backend, DECODE_MATRIX),
        "prefill": partial(check_attention, "Prefill", args.backend, PREFILL_MATRIX),
        "rope": partial(check_rope, args.backend),
    }
    sweep = {"decode": sweep_decode, "prefill": sweep_prefill, "rope": sweep_rope}
    good = True
    for kind in (args.only,) if args.only else KINDS:
        good &= check[kind]()
        if args.sweep:
            print(f"\n## Tunings: {kind}\n")
            sweep[kind]()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
