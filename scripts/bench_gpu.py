"""The table of docs/benchmarks.md on one GPU: random weights, 512 tokens in, 256 out, greedy. Prints Markdown.

    python scripts/bench_gpu.py [llama-8b] [qwen-1.5b] [--parts server offline structured decode] [--out DIR]

Parts; each takes minutes, and what an earlier call has left in DIR is printed along (`--parts` alone prints just that):
    server      `jaxserve serve` to the first 200 of /health, with an empty compile cache if it is the first part, and
                again; streaming completions by `jaxserve bench serve` on the same machine, at concurrency 1, 64, 256.
                All with one seed, as vLLM's figures: a quarter of the prompts at 256 have been sent before. And once
                more with prompts that are all new
    offline     `jaxserve bench throughput`, 256 and 1,024 requests
    structured  64 rows with a JSON schema beside rows without, by scripts/bench_structured.py
    decode      ms per decode step at batch 1, 8 and 64, 128 tokens in and 240 out, by scripts/profile_step.py

Columns: "goal" is what a figure has to be at least (tok/s) or at most (s, ms); "floor" is the best that the card could
give by scripts/floors.py, prompts that are in the prefix cache left out; "peak memory" is the most that JAX had in use
on the device so far in the process that the figure comes from, which takes for KV pages what its share leaves.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from bench_cpu import bench_serve, server
from floors import Card, add_card_arguments, card_of, decode_s, least_s, output_tokens_per_s, weights_of
from made_tokenizer import make_tokenizer
from need_gpu import find_gpu

from jaxserve.bench.server_metrics import parse_metrics
from jaxserve.collect_env import lines as environment_lines
from jaxserve.models.base import decoder_config
from jaxserve.paging.kv_cache import GiB

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "scripts" / "shapes"
INPUT_LEN, OUTPUT_LEN = 512, 256
REQUESTS = {1: 8, 64: 256, 256: 1024}  # concurrency -> requests
OFFLINE = (256, 1024)
DECODE_ROWS, DECODE_CONTEXT = (1, 8, 64), (128, 248)  # where decoding begins, and what a row holds on average
# Figure -> that of vLLM 0.26.0 on the same kind of card with the same workload, and the goal. Decode of vLLM: 128 in,
# 256 out, the decode steps alone.
KNOWN: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "llama-8b": {
        "start, cold s": (111, 75), "start, warm s": (48, 20),
        "offline 256, tok/s": (9918, 10_900), "offline 1024, tok/s": (10018, 11_000),
        "decode batch 1, ms": (5.09, 4.3), "decode batch 8, ms": (5.30, 4.6), "decode batch 64, ms": (6.11, 5.6),
        "server 1, tok/s": (203, None), "server 1, TTFT p50 ms": (18.6, 18), "server 1, TPOT p50 ms": (4.86, 4.4),
        "server 64, tok/s": (6525, 7200), "server 64, TTFT p50 ms": (565, None),
        "server 64, TPOT p50 ms": (7.74, None),
        "server 256, tok/s": (10732, 11_500), "server 256, TTFT p50 ms": (1132, 1000),
        "server 256, TPOT p50 ms": (19.7, None), "server 256, ITL p99 ms": (191, 100),
    },
    "qwen-1.5b": {
        "start, cold s": (137, None), "offline 256, tok/s": (25718, 32_000), "offline 1024, tok/s": (17093, 34_000),
        "decode batch 1, ms": (2.04, 1.4), "decode batch 8, ms": (2.14, 1.5), "decode batch 64, ms": (4.07, 2.0),
        "server 1, tok/s": (352, None), "server 1, TTFT p50 ms": (25.4, None), "server 1, TPOT p50 ms": (2.71, None),
        "server 64, tok/s": (11627, 16_000), "server 64, TTFT p50 ms": (213, None),
        "server 64, TPOT p50 ms": (4.57, None),
        "server 256, tok/s": (13662, 24_000), "server 256, TTFT p50 ms": (586, None),
        "server 256, TPOT p50 ms": (15.7, None), "server 256, ITL p99 ms": (50, None),
    },
}  # fmt: skip
SERVED = {"llama-8b": 0.95, "qwen-1.5b": 0.8}  # goal: what the server makes of offline's tokens per second


class Figure(NamedTuple):
    value: float
    peak_bytes: float | None  # of the device, in the process that it comes from


Figures = dict[str, Figure]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{' or '.join(KNOWN)} (default: both)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--api-server-count", default="1", metavar="N", help="HTTP processes (default: %(default)s)")
    out = Path(tempfile.gettempdir()) / "jaxserve-bench"
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="for results (default: %(default)s)")
    add_card_arguments(parser)
    args = parser.parse_args()
    if unknown := [shape for shape in args.shapes if shape not in KNOWN]:
        parser.error(f"unknown shape {unknown[0]!r}: known are {', '.join(KNOWN)}")
    device, card = find_gpu() if args.parts else "What earlier calls have left", card_of(args)
    args.out.mkdir(parents=True, exist_ok=True)
    tables = [table(shape, measure(args, shape), floors(shape, card)) for shape in args.shapes or KNOWN]
    print(heading(device, card), *tables, sep="\n\n")
    return 0


def measure(args: argparse.Namespace, shape: str) -> Figures:
    """Runs the parts; returns their figures and what earlier calls have left."""
    args.shape, args.engine = shape, engine_options(args.out, shape)
    file = args.out / f"figures-{shape}.json"
    figures = {name: Figure(*pair) for name, pair in json.loads(file.read_text()).items()} if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="jaxserve-cache-") as cache:
        os.environ["JAXSERVE_CACHE_DIR"] = cache  # empty: the first part compiles
        for part in args.parts:
            figures |= PARTS[part](args)
            file.write_text(json.dumps(figures) + "\n")
            print(table(shape, figures, floors(shape, card_of(args))), file=sys.stderr, flush=True)
    return figures


def engine_options(out: Path, shape: str) -> list[str]:
    tokenizer = make_tokenizer(SHAPES / shape / "config.json", out / "tokenizer")
    options = ["--tokenizer", str(tokenizer), "--load-format", "dummy", "--max-model-len", "4096"]
    return ["--model", str(SHAPES / shape), *options]


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


# ------------------------------------------------------------------------------------------------------- parts


def serve(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    cache = Path(os.environ["JAXSERVE_CACHE_DIR"])
    empty = not any(cache.iterdir())
    options = [*args.engine, "--api-server-count", args.api_server_count]
    with server(cache, options) as (url, seconds):
        if empty:
            figures["start, cold s"] = Figure(seconds, peak_of(url))
        for concurrency in REQUESTS:
            figures |= load(args, url, concurrency)
        figures |= load(args, url, 256, seed=1, what=", new prompts")
    with server(cache, options) as (url, seconds):
        figures["start, warm s"] = Figure(seconds, peak_of(url))
    return figures


def peak_of(url: str) -> float | None:
    """The most bytes of the device that this server had in use so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode()).get("peak_device_memory_bytes")


def load(args: argparse.Namespace, url: str, concurrency: int, seed: int = 0, what: str = "") -> Figures:
    result = bench_serve(
        url,
        args.out / f"serve-{args.shape}-{concurrency}-{seed}.json",
        seed=seed,
        vocab_size=100_000,
        random_input_len=INPUT_LEN,
        random_output_len=OUTPUT_LEN,
        num_prompts=REQUESTS[concurrency],
        max_concurrency=concurrency,
    )
    names = {"tok/s": "output_throughput", "TTFT p50 ms": "p50_ttft_ms", "TTFT p99 ms": "p99_ttft_ms"}
    names |= {"TPOT p50 ms": "p50_tpot_ms", "ITL p99 ms": "p99_itl_ms"}
    peak = result.get("peak_device_memory_bytes")
    return {f"server {concurrency}{what}, {name}": Figure(result[key], peak) for name, key in names.items()}


def offline(args: argparse.Namespace) -> Figures:
    figures = {}
    for requests in OFFLINE:
        file = args.out / f"throughput-{args.shape}-{requests}.json"
        run(
            *("-m", "jaxserve", "bench", "throughput", *args.engine, "--input-len", str(INPUT_LEN)),
            *("--output-len", str(OUTPUT_LEN), "--num-prompts", str(requests), "--num-warmups", "64"),
            *("--temperature", "0", "--disable-detokenize", "--disable-tqdm", "--output-json", str(file)),
        )
        result: dict[str, Any] = json.loads(file.read_text())
        peak, waste = result["peak_device_memory_bytes"], 100 * result["mean_kv_cache_wasted_slots_ratio"]
        figures[f"offline {requests}, tok/s"] = Figure(result["output_tokens_per_second"], peak)
        figures[f"offline {requests}, wasted slots %"] = Figure(waste, peak)
    return figures


def structured(args: argparse.Namespace) -> Figures:
    out = run("scripts/bench_structured.py", *args.engine)
    found = re.findall(r"\| (.+) \| ([\d,]+) \| [\d.]+% \|", out)
    return {f"64 rows, {name}, tok/s": Figure(float(speed.replace(",", "")), peak_in(out)) for name, speed in found}


def decode(args: argparse.Namespace) -> Figures:
    batches, (context, _) = map(str, DECODE_ROWS), DECODE_CONTEXT
    options = ["--batch", *batches, "--context", str(context), "--enforce-eager"]
    out = run("scripts/profile_step.py", *args.engine, *options)
    (args.out / f"profile-{args.shape}.md").write_text(out)
    found = re.findall(r"### decode, batch (\d+), .*?: ([\d.]+) ms/step", out)
    return {f"decode batch {batch}, ms": Figure(float(ms), peak_in(out)) for batch, ms in found}


def peak_in(out: str) -> float | None:
    """Of a script's output, in bytes."""
    found = re.search(r"^Peak device memory: ([\d.]+) GiB$", out, re.MULTILINE)
    return float(found[1]) * GiB if found else None


PARTS = {"server": serve, "offline": offline, "structured": structured, "decode": decode}


# ------------------------------------------------------------------------------------------------------- table


def heading(device: str, card: Card) -> str:
    """What ran where, with which versions."""
    told = (line.strip().partition(" (")[0] for line in environment_lines(with_devices=False))
    found = [line.replace(": ", " ") for line in told if re.match(r"python|jax(?!serve|typing)|nvidia-|\d+, ", line)]
    return (
        f"# {device}\n\n`{shlex.join(['python', 'scripts/bench_gpu.py', *sys.argv[1:]])}`, {datetime.date.today()}  \n"
        f"{', '.join(found)}  \nFloor: memory at {card.read_tb_s:g} TB/s, products at {card.matrix_tflops:g} TFLOP/s"
    )


def floors(shape: str, card: Card) -> dict[str, float]:
    """The best that the card could give, by figure."""
    hf = json.loads((SHAPES / shape / "config.json").read_text())
    weights = weights_of(decoder_config(hf, sliding_windows=None))

    def speed(rows: int, cached: float = 0) -> float:
        return output_tokens_per_s(card, weights, rows, INPUT_LEN, OUTPUT_LEN, cached=cached)

    best = {f"offline {rows}, tok/s": speed(rows) for rows in OFFLINE}
    for before, rows in zip((0, *REQUESTS), REQUESTS):  # one seed: the prompts of the load before come again
        best[f"server {rows}, tok/s"] = speed(rows, cached=REQUESTS.get(before, 0) / REQUESTS[rows])
    best["server 256, new prompts, tok/s"] = speed(256)
    best["server 1, TTFT p50 ms"] = 1e3 * least_s(card, weights, tokens=INPUT_LEN, drawn=1)
    best["server 1, TPOT p50 ms"] = 1e3 * decode_s(card, weights, 1, INPUT_LEN + OUTPUT_LEN // 2)
    _, context = DECODE_CONTEXT
    return best | {f"decode batch {rows}, ms": 1e3 * decode_s(card, weights, rows, context) for rows in DECODE_ROWS}


def table(shape: str, figures: Figures, best: dict[str, float]) -> str:
    lines = [f"## {shape}", ""]
    lines += ["| figure | jaxserve | vLLM 0.26.0 | goal | floor | of the floor | peak memory, GiB |", "|---" * 7 + "|"]
    for name, (value, peak_bytes) in figures.items():
        vllm, goal = KNOWN[shape].get(name, (None, None))
        floor, share = best.get(name), None
        if floor:
            share = value / floor if name.endswith("tok/s") else floor / value
        peak = peak_bytes and peak_bytes / GiB
        texts = (
            number(value),
            shown(vllm, ","),
            shown(goal, ","),
            number(floor),
            shown(share, ".0%"),
            shown(peak, ".1f"),
        )
        lines.append(f"| {name} | {' | '.join(texts)} |")
    served, offline = (figures.get(name) for name in ("server 256, new prompts, tok/s", "offline 256, tok/s"))
    if served and offline:
        share = served.value / offline.value
        lines.append(f"| server 256, new prompts, of offline 256 | {share:.0%} |  | {SERVED[shape]:.0%} |  |  |  |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """With three digits at least."""
    return shown(value, ",.0f" if value and value >= 100 else "#.3g")


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
