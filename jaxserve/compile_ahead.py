"""`jaxserve compile`: compiles a deployment for a slice of TPUs on any CPU host, and says whether it fits.

Prints what a chip's memory holds, then for each program its memory, what XLA counts, and the best time that the chip
allows. If the deployment does not fit: what is missing, and the nearest ones that do.
"""

import argparse
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig, add_arguments, cache_dir, compile_only, from_arguments
from jaxserve.errors import ConfigError, DoesNotFit
from jaxserve.logs import setup_logging
from jaxserve.shapes import Bucket
from jaxserve.tpu_topology import GiB, MiB, parse_topology

if TYPE_CHECKING:
    from jaxserve.fit import Compiled, Fit
    from jaxserve.paging.kv_cache import PoolSize

# Options of the engine that decide over no program.
WITHOUT = (
    "tokenizer", "chat_template", "reasoning_parser", "generation_config", "load_format", "enable_prefix_caching",
    "max_num_mixed_tokens", "scheduling_policy", "max_queue_len", "request_timeout", "enforce_eager", "seed",
)  # fmt: skip
CONTEXT_TOKENS = 1024

HEAD = ("program", "rows", "prompt tokens", "HBM GiB", "free GiB", "VMEM MiB", "GFLOP", "GB touched", "best ms",
        "bound by", "tokens/s", "compiled in s")  # fmt: skip


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("compile")
    group.add_argument("--topology", metavar="NAME", help="TPUs to compile for: v5e-1, v6e-8, v5p-16, ...; needed")
    group.add_argument(
        "--context-len",
        metavar="N",
        type=int,
        default=CONTEXT_TOKENS,
        help=f"tokens that each decode row has before it, for its best time (default: {CONTEXT_TOKENS})",
    )
    add_arguments(parser, EngineConfig, without=WITHOUT)


def run_compile(args: argparse.Namespace) -> int:
    if args.topology is None:
        raise ConfigError("--topology is needed: the TPUs to compile for, such as v5e-8 or v5p-16", param="topology")
    if args.context_len < 1:
        raise ConfigError(f"--context-len must be at least 1, got {args.context_len}", param="context_len")
    topology = parse_topology(args.topology)
    config = replace(from_arguments(args, EngineConfig), load_format="dummy")  # no weights are needed
    setup_logging()
    compile_only()
    import jax

    from jaxserve.checkpoint import Checkpoint
    from jaxserve.fit import Fit, nearest
    from jaxserve.step_cache import use_compile_cache

    use_compile_cache()
    # What is kept here is for TPUs. A compiler without one cannot read it, and JAX says so each time.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
    hf = Checkpoint.open(config).config
    fit = Fit(config, hf, topology)
    print(fit.what, flush=True)
    try:
        pool = fit.pool()
        print("\n".join(("", *memory_lines(fit, pool), "")), flush=True)
        print_rows(HEAD, (row(compiled, fit) for compiled in fit.compile(pool, args.context_len)))
    except DoesNotFit as error:
        others = ", or ".join(nearest(config, hf, topology))
        advice = f"; it fits with {others}" if others else ""
        raise DoesNotFit(f"{fit.what} does not fit: {error.message}{advice}", param=error.param) from None
    compiled = jax.config.jax_compilation_cache_dir or "no cache (it cannot be written to)"
    print(f"\nIt fits. Traced programs for these TPUs are in {cache_dir() / 'steps'}, compiled ones in {compiled}.")
    if topology.num_hosts > 1:
        print(f"{topology.name} has {topology.num_hosts} hosts, and jaxserve serves from the devices of one.")
    return 0


def memory_lines(fit: "Fit", pool: "PoolSize") -> Iterator[str]:
    """What a chip's memory holds, in GiB."""
    from jaxserve.programs import HEADROOM_BYTES

    needs, hbm = fit.programs.needs, fit.topology.chip.hbm_bytes
    yield "GiB of each chip"
    for size, name in (
        (hbm, "that programs may use"),
        (hbm - fit.share_bytes, f"left alone (--gpu-memory-utilization {fit.config.gpu_memory_utilization:g})"),
        (fit.weight_bytes, "weights"),
        (needs.slots, f"slots of {fit.deployment.max_num_seqs} sequences"),
        (needs.step, "temporary memory and results of the largest step, twice, and inputs of all"),
        (needs.code, f"code of {len(fit.programs.keys)} programs, estimated from three"),
        (HEADROOM_BYTES, "for the runtime"),
        (pool.nbytes, f"{pool}"),
    ):
        yield f"{size / GiB:8.2f}  {name}"


def row(compiled: "Compiled", fit: "Fit") -> tuple[str, ...]:
    """One line of the table."""
    kind, size = compiled.key
    rows, prompt = (size.rows, size.prefill_tokens) if isinstance(size, Bucket) else (size, 0)
    tokens = size.tokens if isinstance(size, Bucket) else size
    best_s = compiled.best.seconds
    return (
        kind.value, str(rows), str(prompt or ""), f"{compiled.hbm_bytes / GiB:.2f}",
        f"{(fit.topology.chip.hbm_bytes - compiled.hbm_bytes) / GiB:.2f}", f"{compiled.vmem_bytes / MiB:.0f}",
        f"{compiled.flops / 1e9:.4g}", f"{compiled.touched_bytes / 1e9:.4g}", f"{best_s * 1e3:.4g}",
        compiled.best.bound, f"{tokens / best_s:.0f}" if kind.value != "draw" else "", f"{compiled.compile_s:.1f}",
    )  # fmt: skip


def print_rows(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    """A Markdown table, line by line as it comes."""
    widths = [max(len(name), 7) for name in head]
    for cells in (head, tuple("-" * (width - 1) + ":" for width in widths)):
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths)) + " |")
    for cells in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths)) + " |", flush=True)
