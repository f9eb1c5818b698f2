"""`jaxserve bench serve`: load on an OpenAI-compatible server. Flags and JSON keys are those of vLLM's command."""

import argparse
import asyncio
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.api_client import ApiClient
from jaxserve.bench import report
from jaxserve.bench.datasets import Sample, add_dataset_arguments, as_text, load_codec, load_samples
from jaxserve.bench.load import BACKENDS, arrival_times_s, run_load, send, wait_until_ready
from jaxserve.bench.server_metrics import ServerMetrics
from jaxserve.config import client_api_key
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.request import short

SAMPLING = {  # flag -> field of the request, type
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser.add_argument_group("server"))
    add_dataset_arguments(parser)
    _add_load_arguments(parser.add_argument_group("load"))
    sampling = parser.add_argument_group("request")
    for name, kind in SAMPLING.items():
        default = "0" if name == "temperature" else "the server's"
        sampling.add_argument(f"--{name.replace('_', '-')}", metavar="X", type=kind, help=f"(default: {default})")
    sampling.add_argument("--ignore-eos", action="store_true", help="answers go on to their full length")
    sampling.add_argument("--extra-body", metavar="JSON", help="fields to add to each request")
    _add_result_arguments(parser.add_argument_group("results"))


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=tuple(BACKENDS), default="openai", help="API (default: %(default)s)")
    group.add_argument("--base-url", metavar="URL", help="server, without /v1 (default: http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", metavar="N", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: /v1/completions, or /v1/chat/completions)")
    group.add_argument("--api-key", metavar="KEY", help="(default: JAXSERVE_API_KEY or OPENAI_API_KEY)")
    group.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="repo id, directory or GGUF of the tokenizer (default: as --model)"
    )
    group.add_argument("--vocab-size", metavar="N", type=int, help="draw random ids below this, without a tokenizer")
    group.add_argument(
        "--ready-check-timeout-sec",
        metavar="S",
        type=float,
        default=600,
        help="wait so long for the server to answer (default: %(default)s)",
    )


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", metavar="N", type=int, default=1000, help="(default: %(default)s)")
    group.add_argument(
        "--request-rate", metavar="X", type=float, default=float("inf"), help="requests per second (default: inf)"
    )
    group.add_argument(
        "--burstiness",
        metavar="X",
        type=float,
        default=1.0,
        help="1: Poisson arrivals; less: burstier; more: steadier (default: %(default)s)",
    )
    group.add_argument("--max-concurrency", metavar="N", type=int, help="requests in flight at most")
    group.add_argument("--num-warmups", metavar="N", type=int, default=0, help="requests before (default: %(default)s)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts, arrivals (default: %(default)s)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        metavar="LIST",
        default="ttft,tpot,itl",
        help="of ttft,tpot,itl,e2el: the ones to report (default: %(default)s)",
    )
    group.add_argument("--metric-percentiles", metavar="LIST", default="99", help="e.g. 50,99 (default: %(default)s)")
    group.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", default=[], help="limits of a good request, e.g. ttft:200 tpot:30"
    )
    group.add_argument("--label", help="name of this run in the result file")
    group.add_argument("--save-result", action="store_true", help="write the figures to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with lengths, times and texts of each request")
    group.add_argument("--result-dir", metavar="DIR", type=Path, default=Path(), help="(default: this directory)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: from backend, rate, model and time)")


@dataclass(frozen=True)
class Options:
    """What is checked before the first request."""

    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float]
    fields: dict[str, Any]  # of every request


def run_serve(args: argparse.Namespace) -> int:
    options = _options(args)
    return asyncio.run(_bench(args, options))


def _options(args: argparse.Namespace) -> Options:
    for flag, value, holds in (
        ("request-rate", args.request_rate, args.request_rate > 0),
        ("burstiness", args.burstiness, args.burstiness > 0),
        ("max-concurrency", args.max_concurrency, args.max_concurrency is None or args.max_concurrency > 0),
        ("vocab-size", args.vocab_size, args.vocab_size is None or args.vocab_size > 0),
        ("num-warmups", args.num_warmups, args.num_warmups >= 0),
        ("seed", args.seed, args.seed >= 0),
    ):
        if not holds:
            raise ConfigError(f"--{flag} must be positive, got {value}")
    fields: dict[str, Any] = {"temperature": 0.0}
    fields |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if endless := [name for name, value in fields.items() if not math.isfinite(value)]:
        name = endless[0]
        raise ConfigError(f"--{name.replace('_', '-')} must be finite, got {fields[name]}")
    if args.ignore_eos:
        fields["ignore_eos"] = True
    return Options(
        report.parse_metric_names(args.percentile_metrics),
        report.parse_percentiles(args.metric_percentiles),
        report.parse_goodput(args.goodput),
        fields | _extra_body(args.extra_body),
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        extra = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {short(text)}")
    return extra


async def _bench(args: argparse.Namespace, options: Options) -> int:
    backend = BACKENDS[args.backend]
    path = args.endpoint or backend.path
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    async with ApiClient(base_url, args.api_key or client_api_key()) as client:
        served = await wait_until_ready(client, args.ready_check_timeout_sec)
        model = args.model or served["id"]
        samples = _samples(args, model, served)
        common = {"model": model, "stream": True, "stream_options": {"include_usage": True}} | options.fields

        async def one(sample: Sample) -> report.RequestTiming:
            return await send(client, backend, path, sample, common | backend.body(sample))

        warmups, samples = samples[: args.num_warmups], samples[args.num_warmups :]
        progress = not args.disable_tqdm
        if warmups:
            await _warm_up(args, warmups, one, progress)
        starts_s = arrival_times_s(len(samples), args.request_rate, args.burstiness, args.seed)
        server = ServerMetrics(client)
        await server.start()
        timings, duration_s = await run_load(
            samples, starts_s, args.max_concurrency, one, label="Requests", show_progress=progress
        )
        await server.stop()
    numbers = report.run_numbers(
        timings, duration_s, metrics=options.metrics, percentiles=options.percentiles, goodput=options.goodput
    )
    numbers |= server.numbers()
    if args.save_result or args.save_detailed:
        _save(args, model, base_url, numbers, timings)
    failures = _failures(timings)
    if failures and not numbers["completed"]:
        raise JaxserveError(failures)  # instead of a table of zeros
    print(report.table(_rows(args, numbers), numbers, options.metrics))
    if failures:
        print(failures)
    return 0


def _failures(timings: Sequence[report.RequestTiming]) -> str:
    """How many requests failed, and of what most of them; empty if none did."""
    errors = Counter(t.error for t in timings if t.error)
    if not errors:
        return ""
    (error, _), *others = errors.most_common()
    more = f" (and {len(others)} other error{'s' * (len(others) > 1)})" if others else ""
    return f"{errors.total()} of {len(timings)} requests failed: {error}{more}"


def _samples(args: argparse.Namespace, model: str, served: dict[str, Any]) -> list[Sample]:
    """Warm-up samples first, then the measured ones."""
    codec = None
    needs_text = args.backend == "openai-chat" and args.dataset_name == "random"
    if args.tokenizer or needs_text or (args.dataset_name != "custom" and args.vocab_size is None):
        codec = load_codec(served.get("root") or model, args.tokenizer)
    vocab_size = args.vocab_size or (codec.vocab_size if codec else None)
    samples = load_samples(args, args.num_prompts + args.num_warmups, codec, vocab_size)
    return [as_text(sample, codec) for sample in samples] if needs_text and codec else samples


async def _warm_up(args: argparse.Namespace, warmups: Sequence[Sample], one: Any, progress: bool) -> None:
    timings, _ = await run_load(
        warmups, [0.0] * len(warmups), args.max_concurrency, one, label="Warm-up", show_progress=progress
    )
    if bad := next((t.error for t in timings if t.error), None):
        raise JaxserveError(f"a warm-up request failed: {bad}")


def _rows(args: argparse.Namespace, numbers: dict[str, Any]) -> list[tuple[str, Any]]:
    """Label and value of the report's first part; rows of None are left out."""
    rate = None if args.request_rate == float("inf") else args.request_rate

    def counted(name: str) -> int | None:
        return int(numbers[name]) if name in numbers else None

    def percent(name: str) -> float | None:
        return numbers[name] * 100 if name in numbers else None

    return [
        ("Successful requests:", numbers["completed"]),
        ("Failed requests:", numbers["failed"]),
        ("Maximum request concurrency:", args.max_concurrency),
        ("Request rate configured (RPS):", rate),
        ("Benchmark duration (s):", numbers["duration"]),
        ("Total input tokens:", numbers["total_input_tokens"]),
        ("Total generated tokens:", numbers["total_output_tokens"]),
        ("Request throughput (req/s):", numbers["request_throughput"]),
        ("Request goodput (req/s):", numbers["request_goodput"]),
        ("Output token throughput (tok/s):", numbers["output_throughput"]),
        ("Peak output token throughput (tok/s):", numbers["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", numbers["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", numbers["total_token_throughput"]),
        ("Prefix cache hits (tokens):", counted("prefix_cache_hits")),
        ("Preemptions:", counted("num_preemptions")),
        ("Compiles after warm-up:", counted("compiles_after_warmup")),
        ("Peak KV cache usage (%):", percent("max_kv_cache_usage")),
        ("Mean wasted KV slots (%):", percent("mean_kv_cache_wasted_slots_ratio")),
        ("Peak wasted KV slots (%):", percent("max_kv_cache_wasted_slots_ratio")),
    ]


def _save(
    args: argparse.Namespace,
    model: str,
    base_url: str,
    numbers: dict[str, Any],
    timings: Sequence[report.RequestTiming],
) -> None:
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    now = report.timestamp()
    data = {
        "date": now,
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or model,
        "base_url": base_url,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **numbers,
    }
    if args.save_detailed:
        data |= report.details(timings)
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    short_model = re.sub(r"[^\w.-]", "_", model.split("/")[-1])
    name = args.result_filename or f"{args.label or args.backend}-{rate}qps{concurrency}-{short_model}-{now}.json"
    report.write_json(args.result_dir / name, data)
    print(f"Results are in {args.result_dir / name}")
