"""Numbers of a benchmark: from timings to the keys of vLLM's result files, and to a table."""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError

METRICS = {  # name in flags and keys -> heading, short name
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH = 50


@dataclass(slots=True)
class RequestTiming:
    """What one request did. `start_s` is on the clock of the run; `itls_s` are the gaps between pieces of text."""

    start_s: float
    prompt_len: int = 0
    output_len: int = 0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token, which has no such thing."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None


def parse_percentiles(text: str) -> list[float]:
    """`50,90,99.9` -> numbers; raises ConfigError."""
    try:
        values = [float(p) for p in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= p <= 100 for p in values):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100 with commas between, got {text!r}")
    return values


def parse_metric_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if bad := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: unknown {bad[0]!r}; known are {', '.join(METRICS)}")
    return names


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:30` -> limits in milliseconds; raises ConfigError."""
    limits = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", limit):
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, got {pair!r}")
        limits[name] = float(limit)
    return limits


def percentile_key(p: float) -> str:
    return f"{int(p) if p == int(p) else p}"


def summary(values_ms: Sequence[float], name: str, percentiles: Iterable[float]) -> dict[str, float]:
    """mean_, median_, std_ and pXX_ of one metric; zeros when nothing was measured."""
    values = np.array(values_ms if len(values_ms) else [0.0])
    row = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    row |= {f"p{percentile_key(p)}": np.percentile(values, p) for p in percentiles}
    return {f"{key}_{name}_ms": float(value) for key, value in row.items()}


def run_numbers(
    timings: Sequence[RequestTiming],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """The result keys of `bench serve` that derive from the timings of all requests."""
    done = [t for t in timings if not t.error]
    total_input, total_output = sum(t.prompt_len for t in done), sum(t.output_len for t in done)
    values_ms = {
        "ttft": [t.ttft_s * 1e3 for t in done],
        "tpot": [t.tpot_s * 1e3 for t in done if t.tpot_s is not None],
        "itl": [gap * 1e3 for t in done for gap in t.itls_s],
        "e2el": [t.latency_s * 1e3 for t in done],
    }
    numbers: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(_is_good(t, goodput) for t in done) / duration_s if goodput else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(done),
    }
    for name in metrics:
        numbers |= summary(values_ms[name], name, percentiles)
    return numbers


def _is_good(timing: RequestTiming, limits_ms: dict[str, float]) -> bool:
    measured = {"ttft": timing.ttft_s, "tpot": timing.tpot_s or 0.0, "e2el": timing.latency_s}
    return all(measured[name] * 1e3 <= limit for name, limit in limits_ms.items())


def peak_tokens_per_s(done: Sequence[RequestTiming]) -> float:
    """Tokens in the best whole second of the run. A request's tokens are shared out over its pieces of text."""
    if not done:
        return 0.0
    begin = min(t.start_s for t in done)
    counts = np.zeros(int(max(t.start_s + t.latency_s for t in done) - begin) + 1)
    for t in done:
        times = np.cumsum([t.start_s - begin + t.ttft_s, *t.itls_s])
        np.add.at(counts, np.minimum(times.astype(int), len(counts) - 1), t.output_len / len(times))
    return float(counts.max())


def peak_concurrency(done: Sequence[RequestTiming]) -> int:
    """Most requests in flight at any moment."""
    edges = sorted([(t.start_s, 1) for t in done] + [(t.start_s + t.latency_s, -1) for t in done])
    return int(np.cumsum([step for _, step in edges]).max()) if edges else 0


def details(timings: Sequence[RequestTiming]) -> dict[str, Any]:
    """The per-request keys of a result file, in seconds, in the order of the prompts."""
    return {
        "input_lens": [t.prompt_len for t in timings],
        "output_lens": [t.output_len for t in timings],
        "ttfts": [t.ttft_s for t in timings],
        "itls": [t.itls_s for t in timings],
        "generated_texts": [t.text for t in timings],
        "errors": [t.error for t in timings],
    }


def table(rows: Sequence[tuple[str, Any]], numbers: dict[str, Any], metrics: Sequence[str]) -> str:
    """The report that is printed: `rows` first, then a section for each metric."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_row(label, value) for label, value in rows if value is not None]
    for name in metrics:
        heading, short_name = METRICS[name]
        lines.append(f"{heading:-^{WIDTH}}")
        for key in numbers:
            if match := re.fullmatch(rf"(mean|median|p[\d.]+)_{name}_ms", key):
                lines.append(_row(f"{match[1].capitalize()} {short_name} (ms):", numbers[key]))
    return "\n".join([*lines, "=" * WIDTH])


def _row(label: str, value: Any) -> str:
    return f"{label:<40} {value:<9.2f}".rstrip() if isinstance(value, float) else f"{label:<40} {value}"


def add_output_json_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-json", metavar="FILE", type=Path, help="also write the figures to this file")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a result file; raises ConfigError if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def timestamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
