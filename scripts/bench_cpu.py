"""Figures on this machine's CPU with the demo model, side by side in one run. Prints Markdown for docs/benchmarks.md.

    .venv/bin/python scripts/bench_cpu.py --transformers-python /path/to/python/with/torch/and/transformers

Measures, with the same token-id prompts, greedy, all with weights of --dtype:
    engine        LLM.generate() in a process of its own, ids only: the step and its bookkeeping, no text, no HTTP
    server        streaming completions through `jaxserve serve`, by `jaxserve bench serve` at nice 10, right after one
                  request that is not counted (the others have just had the caches)
    Transformers  generate() with torch and the same weights: one prompt at a time, and a static batch of 8
    start         `jaxserve serve` to the first 200 of /health: with an empty compile cache, and again
Tokens per second are output tokens over the whole time of a run, prefill included; each figure is the median of
--repeats runs, after one that is not counted.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.datasets import RandomLengths, random_samples
from jaxserve.checkpoint import Checkpoint
from jaxserve.collect_env import lines as environment_lines
from jaxserve.config import HUGE_PAGES, EngineConfig, cache_dir

CONCURRENCY = (1, 8, 16, 32)
STATIC_BATCH = 8
VOCAB_SIZE = 49152  # of the demo model
READY_TIMEOUT_S = 600
CLIENT_NICE = 10  # the load generator shares two cores with the server: it must not take them from it
ENV = {"JAX_PLATFORMS": "cpu", **HUGE_PAGES}  # what `jaxserve serve` gives its engine, for the engine alone too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python", metavar="PATH", help="Python with torch and transformers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each figure (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, help="(default: 1 8 16 32)")
    parser.add_argument("--engine-only", action="store_true", help=argparse.SUPPRESS)  # how it calls itself
    args = parser.parse_args()
    if args.engine_only:
        serve_engine(args)
        return 0
    report(args)
    return 0


# ------------------------------------------------------------------------------------------------------ engine


def prompts(args: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    lengths = RandomLengths(input_len=args.input_len, output_len=args.output_len)
    return [list(sample.prompt) for sample in random_samples(count, lengths, VOCAB_SIZE, seed)]  # type: ignore[misc]


def serve_engine(args: argparse.Namespace) -> None:
    """Answers each line of stdin, a list of prompts, with the output tokens/s of LLM.generate()."""
    from jaxserve import LLM, SamplingParams

    llm = LLM(dtype=args.dtype)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        batch = json.loads(line)
        start_s = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        print(len(batch) * args.output_len / (time.perf_counter() - start_s), flush=True)


class Peer:
    """A process that answers prompts (a line of JSON) with tokens/s (a line). All of them stay up, so that each figure
    can be taken next to the others: the speed of a shared machine drifts over minutes."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def speed(self, batch: list[list[int]]) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            sys.exit("scripts/bench_cpu.py: a measured process ended: see above")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def engine_peer(args: argparse.Namespace) -> Peer:
    command = [sys.executable, __file__, "--engine-only", "--output-len", str(args.output_len), "--dtype", args.dtype]
    return Peer(command, {**os.environ, **ENV})


# ------------------------------------------------------------------------------------------------------ server


@contextlib.contextmanager
def server(cache: Path, options: list[str], env: dict[str, str] | None = None) -> Iterator[tuple[str, float]]:
    """A running server with its compile cache in `cache`; yields its URL and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), *options]
    env = {**os.environ, **(env or {}), "JAXSERVE_CACHE_DIR": str(cache)}
    start_s = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=sys.stderr)
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.perf_counter() - start_s > READY_TIMEOUT_S:
                sys.exit(f"{sys.argv[0]}: the server did not start (exit code {process.returncode})")
            time.sleep(0.05)
        yield url, time.perf_counter() - start_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    return False


def bench_serve(url: str, file: Path, *, nice: int = 0, **options: int) -> dict[str, Any]:
    """`jaxserve bench serve` with these options; its result, which is also in `file`."""
    command = [
        *(sys.executable, "-m", "jaxserve", "bench", "serve", "--base-url", url, "--ignore-eos", "--disable-tqdm"),
        *("--num-warmups", "1", "--metric-percentiles", "50,99"),
        *("--save-result", "--result-dir", str(file.parent), "--result-filename", file.name),
        *(word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.nice(nice))
    result = json.loads(file.read_text())
    if result["failed"]:
        sys.exit(f"{sys.argv[0]}: {result['failed']} requests failed at concurrency {options['max_concurrency']}")
    return result


def bench_demo(args: argparse.Namespace, url: str, concurrency: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return bench_serve(
            url,
            Path(folder) / "result.json",
            nice=CLIENT_NICE,
            seed=seed,
            vocab_size=VOCAB_SIZE,
            random_input_len=args.input_len,
            random_output_len=args.output_len,
            num_prompts=concurrency,
            max_concurrency=concurrency,
        )


# ------------------------------------------------------------------------------------------------ Transformers

TRANSFORMERS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[3])).eval()
n = int(sys.argv[2])
for line in sys.stdin:
    ids = torch.tensor(json.loads(line))
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=n,
                             max_new_tokens=n, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + n
    print(len(ids) * n / (time.perf_counter() - begin), flush=True)
"""


def export_demo_model(folder: Path) -> None:
    """Writes the demo model's dequantised weights as a Transformers checkpoint."""
    import numpy as np
    from safetensors.numpy import save_file

    checkpoint = Checkpoint.open(EngineConfig())
    tensors = {name: np.ascontiguousarray(read(), dtype=np.float32) for name, read in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "model_type": "llama", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def transformers_versions(args: argparse.Namespace) -> str:
    script = "import torch, transformers; print(f'transformers {transformers.__version__}, torch {torch.__version__}')"
    command = [args.transformers_python, "-c", script]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def transformers_peer(args: argparse.Namespace, folder: Path) -> Peer:
    export_demo_model(folder)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # it is another environment
    return Peer([args.transformers_python, "-c", TRANSFORMERS, str(folder), str(args.output_len), args.dtype], env)


# ------------------------------------------------------------------------------------------------------ report


def side_by_side(args: argparse.Namespace, url: str, engine: Peer, peer: Peer | None) -> dict[int, dict[str, list]]:
    """Every figure `repeats` times, taken in turn; the first round is not counted."""
    found: dict[int, dict[str, list]] = {}
    for n in args.concurrency:
        columns: dict[str, list] = {"engine": [], "server": [], "peer": []}
        for repeat in range(args.repeats + 1):
            seed = 1000 * n + repeat
            columns["engine"].append(engine.speed(prompts(args, n, seed)))
            columns["server"].append(bench_demo(args, url, n, seed))
            if peer and n in (1, STATIC_BATCH):
                columns["peer"].append(peer.speed(prompts(args, n, seed)))
        found[n] = {name: runs[1:] for name, runs in columns.items()}
    return found


def report(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="jaxserve-cache-") as folder:
        models = cache_dir() / "models"
        models.mkdir(parents=True, exist_ok=True)
        (Path(folder) / "models").symlink_to(models)
        with server(Path(folder), ["--dtype", args.dtype], ENV) as (_, cold_s):
            pass
        with (
            server(Path(folder), ["--dtype", args.dtype], ENV) as (url, warm_s),
            tempfile.TemporaryDirectory(prefix="jaxserve-export-") as export,
        ):
            peer = transformers_peer(args, Path(export)) if args.transformers_python else None
            engine = engine_peer(args)
            found = side_by_side(args, url, engine, peer)
            for process in (engine, peer):
                if process:
                    process.close()
    versions = transformers_versions(args) if args.transformers_python else "not measured"
    facts = dict(line.split(": ", 1) for line in environment_lines(with_devices=False) if ": " in line)
    shown = [arg if arg != args.transformers_python else "PYTHON" for arg in sys.argv[1:]]
    memory = facts["memory"].split(",")[0]
    print(f"Command: `python scripts/bench_cpu.py {' '.join(shown)}`, {datetime.date.today()}  ")
    print(f"Machine: {facts['cpu']}, {memory}; jax {facts['jax']}, Python {facts['python'].split()[0]}  ")
    print(f"Transformers: {versions}.  ")
    print(f"Prompts of {args.input_len} tokens, answers of {args.output_len}, {args.dtype}, greedy.\n")
    print("| streams | engine, output tok/s | server, output tok/s | server / engine | Transformers, output tok/s |")
    print("|---|---|---|---|---|")
    for n, columns in found.items():
        alone = statistics.median(columns["engine"])
        served = statistics.median(run["output_throughput"] for run in columns["server"])
        other = f"{statistics.median(columns['peer']):.1f}" if columns["peer"] else ""
        other += f" ({'one at a time' if n == 1 else f'static batch of {n}'})" if other else ""
        print(f"| {n} | {alone:.1f} | {served:.1f} | {served / alone:.0%} | {other} |")
    print("\n| streams | TTFT p50 / p99 ms | TPOT p50 / p99 ms | ITL p50 / p99 ms | wasted KV slots, mean |")
    print("|---|---|---|---|---|")
    for n, columns in found.items():
        row = sorted(columns["server"], key=lambda run: run["output_throughput"])[len(columns["server"]) // 2]
        cells = [f"{row[f'p50_{m}_ms']:.1f} / {row[f'p99_{m}_ms']:.1f}" for m in ("ttft", "tpot", "itl")]
        waste = row.get("mean_kv_cache_wasted_slots_ratio")
        print(f"| {n} | {' | '.join(cells)} | {'' if waste is None else f'{waste:.1%}'} |")
    print("\n| start | seconds to ready |")
    print("|---|---|")
    print(f"| cold (no compiled steps) | {cold_s:.1f} |")
    print(f"| warm | {warm_s:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
