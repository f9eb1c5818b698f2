"""Figures on this machine's CPU with the demo model, side by side in one run. Prints Markdown for docs/benchmarks.md.

    .venv/bin/python scripts/bench_cpu.py --transformers-python /path/to/python/with/torch/and/transformers

Measures, with the same token-id prompts, greedy, in float32:
    engine        LLM.generate() in a process of its own, ids only: the step and its bookkeeping, no text, no HTTP
    server        streaming completions through `jaxserve serve`, by `jaxserve bench serve`
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
from jaxserve.config import EngineConfig, cache_dir

CONCURRENCY = (1, 8, 16, 32)
STATIC_BATCH = 8
VOCAB_SIZE = 49152  # of the demo model
READY_TIMEOUT_S = 600
ENV = {"JAX_PLATFORMS": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python", metavar="PATH", help="Python with torch and transformers")
    parser.add_argument("--input-len", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each figure (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, help="(default: 1 8 16 32)")
    parser.add_argument("--engine-only", action="store_true", help=argparse.SUPPRESS)  # how it calls itself
    args = parser.parse_args()
    if args.engine_only:
        print(json.dumps(measure_engine(args)))
        return 0
    report(args)
    return 0


# ------------------------------------------------------------------------------------------------------ engine


def prompts(args: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    lengths = RandomLengths(input_len=args.input_len, output_len=args.output_len)
    return [list(sample.prompt) for sample in random_samples(count, lengths, VOCAB_SIZE, seed)]  # type: ignore[misc]


def measure_engine(args: argparse.Namespace) -> dict[int, float]:
    """Output tokens/s of LLM.generate by batch size."""
    from jaxserve import LLM, SamplingParams

    llm = LLM(dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    speeds = {}
    for batch in args.concurrency:
        runs = []
        for repeat in range(args.repeats + 1):
            batch_prompts = prompts(args, batch, seed=1000 * batch + repeat)
            start_s = time.perf_counter()
            llm.generate(batch_prompts, params, use_tqdm=False)
            runs.append(batch * args.output_len / (time.perf_counter() - start_s))
        speeds[batch] = statistics.median(runs[1:])
    return speeds


def engine_speeds(args: argparse.Namespace) -> dict[int, float]:
    """The same in a process of its own, so that nothing of it is left when the server is measured."""
    command = [sys.executable, __file__, "--engine-only"]
    for name in ("input_len", "output_len", "repeats"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--concurrency", *map(str, args.concurrency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ENV})
    return {int(batch): speed for batch, speed in json.loads(done.stdout.splitlines()[-1]).items()}


# ------------------------------------------------------------------------------------------------------ server


@contextlib.contextmanager
def server(cache: Path) -> Iterator[tuple[str, float]]:
    """A running server; yields its URL and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), "--dtype", "float32"]
    env = {**os.environ, **ENV, "JAXSERVE_CACHE_DIR": str(cache)}
    start_s = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=sys.stderr)
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.perf_counter() - start_s > READY_TIMEOUT_S:
                sys.exit(f"scripts/bench_cpu.py: the server did not start (exit code {process.returncode})")
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


def server_speeds(args: argparse.Namespace, url: str) -> dict[int, dict[str, Any]]:
    """The median result of `jaxserve bench serve` by concurrency."""
    results = {}
    for concurrency in args.concurrency:
        runs = [bench_serve(args, url, concurrency, seed=1000 * concurrency + i) for i in range(args.repeats + 1)][1:]
        runs.sort(key=lambda run: run["output_throughput"])
        results[concurrency] = runs[len(runs) // 2]
    return results


def bench_serve(args: argparse.Namespace, url: str, concurrency: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "jaxserve", "bench", "serve", "--base-url", url, "--seed", str(seed)),
            *("--vocab-size", str(VOCAB_SIZE), "--random-input-len", str(args.input_len)),
            *("--random-output-len", str(args.output_len), "--num-prompts", str(concurrency), "--ignore-eos"),
            *("--max-concurrency", str(concurrency), "--disable-tqdm", "--metric-percentiles", "50,99"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["failed"]:
        sys.exit(f"scripts/bench_cpu.py: {result['failed']} requests failed at concurrency {concurrency}")
    return result


def starts_and_speeds(args: argparse.Namespace) -> tuple[float, float, dict[int, dict[str, Any]]]:
    """Seconds to ready cold and warm, and what the warm server does. The demo model is there already."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-cache-") as folder:
        (Path(folder) / "models").symlink_to(cache_dir() / "models")
        with server(Path(folder)) as (_, cold_s):
            pass
        with server(Path(folder)) as (url, warm_s):
            return cold_s, warm_s, server_speeds(args, url)


# ------------------------------------------------------------------------------------------------ Transformers

TRANSFORMERS = """
import json, statistics, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM

task = json.load(open(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()

def speed(prompts):
    ids = torch.tensor(prompts)
    n = task["output_len"]
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=n,
                             max_new_tokens=n, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + n
    return len(prompts) * n / (time.perf_counter() - begin)

result = {batch: statistics.median([speed(p) for p in runs][1:]) for batch, runs in task["runs"].items()}
print(json.dumps({"speeds": result, "versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}))
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


def transformers_speeds(args: argparse.Namespace) -> tuple[dict[int, float], str]:
    """Output tokens/s of Transformers' generate() by batch size, and the versions used."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-export-") as folder:
        export_demo_model(Path(folder))
        runs = {b: [prompts(args, b, 1000 * b + i) for i in range(args.repeats + 1)] for b in (1, STATIC_BATCH)}
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"model": folder, "output_len": args.output_len, "runs": runs}))
        command = [args.transformers_python, "-c", TRANSFORMERS, str(task)]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # it is another environment
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
        if done.returncode:
            sys.exit("scripts/bench_cpu.py: the Transformers part failed: see above")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {int(batch): speed for batch, speed in answer["speeds"].items()}, answer["versions"]


# ------------------------------------------------------------------------------------------------------ report


def report(args: argparse.Namespace) -> None:
    peer, versions = transformers_speeds(args) if args.transformers_python else ({}, "not measured")
    engine = engine_speeds(args)
    cold_s, warm_s, served = starts_and_speeds(args)
    facts = dict(line.split(": ", 1) for line in environment_lines(with_devices=False) if ": " in line)
    shown = [arg if arg != args.transformers_python else "PYTHON" for arg in sys.argv[1:]]
    memory = facts["memory"].split(",")[0]
    print(f"Command: `scripts/bench_cpu.py {' '.join(shown)}`, {datetime.date.today()}  ")
    print(f"Machine: {facts['cpu']}, {memory}; jax {facts['jax']}, Python {facts['python'].split()[0]}  ")
    print(f"Transformers: {versions}.  ")
    print(f"Prompts of {args.input_len} tokens, answers of {args.output_len}, float32, greedy.\n")
    print("| streams | engine, output tok/s | server, output tok/s | server / engine | Transformers, output tok/s |")
    print("|---|---|---|---|---|")
    for n in args.concurrency:
        speed = served[n]["output_throughput"]
        other = f"{peer[n]:.1f} ({'one at a time' if n == 1 else f'static batch of {n}'})" if n in peer else ""
        print(f"| {n} | {engine[n]:.1f} | {speed:.1f} | {speed / engine[n]:.0%} | {other} |")
    print("\n| streams | TTFT p50 / p99 ms | TPOT p50 / p99 ms | ITL p50 / p99 ms | wasted KV slots, mean |")
    print("|---|---|---|---|---|")
    for n in args.concurrency:
        row = served[n]
        cells = [f"{row[f'p50_{m}_ms']:.1f} / {row[f'p99_{m}_ms']:.1f}" for m in ("ttft", "tpot", "itl")]
        waste = row.get("mean_kv_cache_wasted_slots_ratio")
        print(f"| {n} | {' | '.join(cells)} | {'' if waste is None else f'{waste:.1%}'} |")
    print("\n| start | seconds to ready |")
    print("|---|---|")
    print(f"| cold (no compiled steps) | {cold_s:.1f} |")
    print(f"| warm | {warm_s:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
