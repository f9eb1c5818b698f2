"""The table of docs/benchmarks.md on one GPU: random weights, 512 tokens in, 256 out, greedy. Prints Markdown.

    python scripts/bench_gpu.py llama-8b|qwen-1.5b [--parts server offline structured decode] [--out DIR]

Parts; each takes minutes, and what an earlier call has left in DIR is printed along:
    server      `jaxserve serve` to the first 200 of /health, with an empty compile cache if it is the first part, and
                again; streaming completions by `jaxserve bench serve` on the same machine, at concurrency 1, 64, 256.
                All with one seed, as vLLM's figures: a quarter of the prompts at 256 have been sent before. And once
                more with prompts that are all new
    offline     `jaxserve bench throughput`, 256 and 1,024 requests
    structured  64 rows with a JSON schema beside rows without, by scripts/bench_structured.py
    decode      ms per decode step at batch 1, 8 and 64, 128 tokens in and 240 out, by scripts/profile_step.py
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_cpu import bench_serve, server
from made_tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("llama-8b", "qwen-1.5b")
REQUESTS = {1: 8, 64: 256, 256: 1024}  # concurrency -> requests
OFFLINE = (256, 1024)
# vLLM 0.26.0 on the same kind of card with the same workloads; decode: 128 in, 256 out, the decode steps alone.
VLLM = {
    "llama-8b": {
        "start, cold s": 111, "start, warm s": 48, "offline 256, tok/s": 9918, "offline 1024, tok/s": 10018,
        "decode batch 1, ms": 5.09, "decode batch 8, ms": 5.30, "decode batch 64, ms": 6.11,
        "server 1, tok/s": 203, "server 1, TTFT p50 ms": 18.6, "server 1, TPOT p50 ms": 4.86,
        "server 64, tok/s": 6525, "server 64, TTFT p50 ms": 565, "server 64, TPOT p50 ms": 7.74,
        "server 256, tok/s": 10732, "server 256, TTFT p50 ms": 1132, "server 256, TPOT p50 ms": 19.7,
        "server 256, ITL p99 ms": 191,
    },
    "qwen-1.5b": {
        "start, cold s": 137, "offline 256, tok/s": 25718, "offline 1024, tok/s": 17093,
        "decode batch 1, ms": 2.04, "decode batch 8, ms": 2.14, "decode batch 64, ms": 4.07,
        "server 1, tok/s": 352, "server 1, TTFT p50 ms": 25.4, "server 1, TPOT p50 ms": 2.71,
        "server 64, tok/s": 11627, "server 64, TTFT p50 ms": 213, "server 64, TPOT p50 ms": 4.57,
        "server 256, tok/s": 13662, "server 256, TTFT p50 ms": 586, "server 256, TPOT p50 ms": 15.7,
        "server 256, ITL p99 ms": 50,
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--api-server-count", default="1", metavar="N", help="HTTP processes (default: %(default)s)")
    out = Path(tempfile.gettempdir()) / "jaxserve-bench"
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="for results (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.engine = engine_options(args)
    file = args.out / f"{args.shape}.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="jaxserve-cache-") as cache:
        os.environ["JAXSERVE_CACHE_DIR"] = cache  # empty: the first part compiles
        for part in args.parts:
            figures |= PARTS[part](args)
            file.write_text(json.dumps(figures) + "\n")
            print(table(args.shape, figures), flush=True)
    return 0


def engine_options(args: argparse.Namespace) -> list[str]:
    shape = ROOT / "scripts" / "shapes" / args.shape
    tokenizer = make_tokenizer(shape / "config.json", args.out / "tokenizer")
    return ["--model", str(shape), "--tokenizer", str(tokenizer), "--load-format", "dummy", "--max-model-len", "4096"]


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def serve(args: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    cache = Path(os.environ["JAXSERVE_CACHE_DIR"])
    empty = not any(cache.iterdir())
    options = [*args.engine, "--api-server-count", args.api_server_count]
    with server(cache, options) as (url, seconds):
        if empty:
            figures["start, cold s"] = seconds
        for concurrency in REQUESTS:
            figures |= load(args, url, concurrency)
        figures |= load(args, url, 256, seed=1, what=", new prompts")
    with server(cache, options) as (_, figures["start, warm s"]):
        pass
    return figures


def load(args: argparse.Namespace, url: str, concurrency: int, seed: int = 0, what: str = "") -> dict[str, float]:
    result = bench_serve(
        url,
        args.out / f"serve-{args.shape}-{concurrency}-{seed}.json",
        seed=seed,
        vocab_size=100_000,
        random_input_len=512,
        random_output_len=256,
        num_prompts=REQUESTS[concurrency],
        max_concurrency=concurrency,
    )
    names = {"tok/s": "output_throughput", "TTFT p50 ms": "p50_ttft_ms", "TTFT p99 ms": "p99_ttft_ms"}
    names |= {"TPOT p50 ms": "p50_tpot_ms", "ITL p99 ms": "p99_itl_ms"}
    return {f"server {concurrency}{what}, {name}": result[key] for name, key in names.items()}


def offline(args: argparse.Namespace) -> dict[str, float]:
    figures = {}
    for requests in OFFLINE:
        file = args.out / f"throughput-{args.shape}-{requests}.json"
        run(
            *("-m", "jaxserve", "bench", "throughput", *args.engine, "--input-len", "512"),
            *("--output-len", "256", "--num-prompts", str(requests), "--num-warmups", "64", "--temperature", "0"),
            *("--disable-detokenize", "--disable-tqdm", "--output-json", str(file)),
        )
        result: dict[str, Any] = json.loads(file.read_text())
        figures[f"offline {requests}, tok/s"] = result["output_tokens_per_second"]
        figures[f"offline {requests}, wasted slots %"] = 100 * result["mean_kv_cache_wasted_slots_ratio"]
    return figures


def structured(args: argparse.Namespace) -> dict[str, float]:
    out = run("scripts/bench_structured.py", *args.engine)
    found = re.findall(r"\| (.+) \| ([\d,]+) \| [\d.]+% \|", out)
    return {f"64 rows, {name}, tok/s": float(speed.replace(",", "")) for name, speed in found}


def decode(args: argparse.Namespace) -> dict[str, float]:
    out = run(
        *("scripts/profile_step.py", *args.engine, "--batch", "1", "8", "64", "--context", "128"),
        "--enforce-eager",
    )
    (args.out / f"profile-{args.shape}.md").write_text(out)
    found = re.findall(r"### decode, batch (\d+), .*?: ([\d.]+) ms/step", out)
    return {f"decode batch {batch}, ms": float(ms) for batch, ms in found}


PARTS = {"server": serve, "offline": offline, "structured": structured, "decode": decode}


def table(shape: str, figures: dict[str, float]) -> str:
    lines = [f"{shape}, `scripts/bench_gpu.py {' '.join(sys.argv[1:])}`, {datetime.date.today()}", ""]
    lines += ["| figure | jaxserve | vLLM 0.26.0 |", "|---|---|---|"]
    for name, value in figures.items():
        other = VLLM[shape].get(name)
        lines.append(f"| {name} | {value:,.4g} | {'' if other is None else f'{other:,}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
