"""`jaxserve bench kernels`: how fast the attention backend's kernels are, beside what the device does at best.

Weights are not needed: MODEL may be a folder with a config.json alone. Prints Markdown, or writes JSON.
"""

import argparse
import re
from dataclasses import fields, replace
from typing import Any

from jaxserve.bench.report import add_output_json_argument, write_json
from jaxserve.config import EngineConfig, add_arguments, from_arguments
from jaxserve.errors import ConfigError

# Options of the engine that decide over kernels or name the model.
TAKEN = ("model", "revision", "dtype", "page_size", "attention_backend")
WITHOUT = tuple(f.name for f in fields(EngineConfig) if f.name not in TAKEN)
KINDS = {  # flag -> pattern of its values, the pattern in words, default, doc
    "decode": (r"(\d+)x(\d+)", "ROWSxCONTEXT", "256x2048 256x512 64x2048 64x512 8x512 1x8192 1x512", "decode steps"),
    "prefill": (
        r"(\d+)x(\d+)\+(\d+)", "CHUNKSxTOKENS+CONTEXT", "1x8192+0 16x512+2048 16x512+0",
        "prompt chunks, with the tokens before each",
    ),
    "tokens": (r"(\d+)", "N", "1 8 64 256 8192", "tokens of a step, for rope, norm and the MLP's first products"),
}  # fmt: skip
HEAD = ("kernel", "shape", "us", "rate", "unit", "of the best")


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    for flag, (_, shape, default, doc) in KINDS.items():
        doc = f"{doc} (default: {default})"
        group.add_argument(f"--{flag}", metavar=shape, nargs="*", default=default.split(), help=doc)
    add_output_json_argument(group)
    add_arguments(parser, EngineConfig, without=WITHOUT)


def sizes(flag: str, words: list[str]) -> list[tuple[int, ...]]:
    """`16x512+2048` to (16, 512, 2048); raises ConfigError."""
    pattern, shape, _, _ = KINDS[flag]
    found = []
    for word in words:
        match = re.fullmatch(pattern, word)
        numbers = tuple(map(int, match.groups())) if match else ()
        if not numbers or min(numbers[:2]) < 1:
            raise ConfigError(f"--{flag} takes {shape}, with numbers of at least 1, got {word!r}", param=flag)
        found.append(numbers)
    return found


def run_kernels(args: argparse.Namespace) -> int:
    wanted: dict[str, list[Any]] = {flag: sizes(flag, getattr(args, flag)) for flag in KINDS}
    config = replace(from_arguments(args, EngineConfig), load_format="dummy")  # no weights are needed
    import jax  # after the options are checked

    from jaxserve.bench import kernel_jobs
    from jaxserve.checkpoint import Checkpoint
    from jaxserve.deployment import resolve_deployment

    device = jax.devices()[0]
    deployment = resolve_deployment(config, Checkpoint.open(config).config, device.platform, device.device_kind)
    ceilings = kernel_jobs.measure_ceilings(deployment.dtype)
    model = deployment.model
    facts = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "backend": deployment.backend.name,
        "model": config.model,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "dtype": deployment.dtype,
        "page_size": deployment.page_size,
        "memory_tb_per_s": ceilings.tb_per_s,
        "product_tflop_per_s": ceilings.tflop_per_s,
    }
    print(
        f"Kernels of {facts['backend']} on {facts['device']}, jax {facts['jax']}: {config.model} (N, K, H "
        f"{facts['heads']}), {deployment.dtype}, page {deployment.page_size}. Best: memory "
        f"{ceilings.tb_per_s:.3g} TB/s, a product {ceilings.tflop_per_s:.4g} TFLOP/s.\n"
    )
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    jobs = list(kernel_jobs.all_jobs(deployment, wanted["decode"], wanted["prefill"], [n for (n,) in wanted["tokens"]]))
    rows = []
    for job, us in zip(jobs, kernel_jobs.time_jobs(jobs), strict=True):
        rate = job.work / us / 1e6
        share = rate / ceilings.of(job.unit)
        rows.append(
            {"kernel": job.kernel, "shape": job.shape, "us": us, "rate": rate, "unit": job.unit, "share": share}
        )
        print(f"| {job.kernel} | {job.shape} | {us:.1f} | {rate:.3g} | {job.unit} | {share:.0%} |", flush=True)
    if args.output_json:
        write_json(args.output_json, facts | {"kernels": rows})
    return 0
