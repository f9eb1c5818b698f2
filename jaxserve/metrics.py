"""Counters and histograms for Prometheus, and the periodic log line. Never imports jax.

Names and meanings are vLLM's, with the prefix `jaxserve:` and the label model_name. The engine's own numbers are read
from EngineStats when they are asked for; what only the front end can see (latencies, ends of requests) is counted here.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from jaxserve.request import EngineStats

log = logging.getLogger(__name__)

PREFIX = "jaxserve:"
LOG_PERIOD_S = 10.0
TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float | None]]] = {
    "num_requests_running": ("sequences being computed", lambda s: s.running),
    "num_requests_waiting": ("sequences waiting for a slot or for pages", lambda s: s.waiting),
    "kv_cache_usage_perc": ("share of KV pages in use, 0 to 1", lambda s: s.pages_used / max(s.pages_total, 1)),
    "kv_cache_wasted_slots_ratio": (
        "share of token slots in pages of running sequences that hold no token, 0 to 1",
        lambda s: (s.allocated_token_slots - s.used_token_slots) / max(s.allocated_token_slots, 1),
    ),
    "engine_paused": ("1 while POST /pause holds new requests", lambda s: s.paused),
    "engine_sleep_level": ("0: awake; 1: weights in host memory; 2: weights dropped", lambda s: s.sleep_level),
    "peak_device_memory_bytes": (
        "the most bytes of one device's memory that were in use so far; absent where the device does not say (a CPU)",
        lambda s: s.peak_device_memory_bytes,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("prompt tokens looked up in the prefix cache", lambda s: s.prefix_cache_query_tokens),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda s: s.prefix_cache_hit_tokens),
    "num_preemptions": ("sequences preempted for want of pages", lambda s: s.preemptions),
    "prompt_tokens": ("prompt tokens taken in", lambda s: s.prompt_tokens),
    "generation_tokens": ("tokens generated", lambda s: s.generation_tokens),
    "engine_steps": ("steps launched", lambda s: s.steps),
    "compiles_after_warmup": ("steps compiled after warm-up; more than 0 is a bug", lambda s: s.compiles_after_warmup),
}


class EngineCollector(Collector):
    """The engine's numbers as they are when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str):
        self._stats = stats
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for table, family_type in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (doc, read) in table.items():
                if (value := read(stats)) is not None:
                    family = family_type(PREFIX + name, doc, labels=["model_name"])
                    family.add_metric(self._labels, float(value))
                    yield family


class Sum(Collector):
    """What a collector counts in this process, and what others of the same server say of it in Prometheus' format."""

    def __init__(self, own: Collector, others: Sequence[str]):
        self._own = own
        self._texts = others

    def collect(self) -> Iterator[Metric]:
        theirs: dict[tuple[str, frozenset], list[float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    theirs.setdefault(_key(sample), []).append(sample.value)
        for family in self._own.collect():
            family.samples = [_added(sample, theirs.get(_key(sample), [])) for sample in family.samples]
            yield family


def _key(sample: Sample) -> tuple[str, frozenset]:
    return sample.name, frozenset(sample.labels.items())


def _added(sample: Sample, others: Sequence[float]) -> Sample:
    """The sum; of times at which something began, the earliest."""
    combine = min if sample.name.endswith(("_created", "_start_time_seconds")) else sum
    return sample._replace(value=combine([sample.value, *others]))


class Histogram(Collector):
    """Latencies by size: prometheus_client's takes 3 us for each, and there is one for each token."""

    def __init__(self, name: str, doc: str, model_name: str, bounds_s: tuple[float, ...]):
        self._name, self._doc, self._model_name = name, doc, model_name
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Counts so many of a size."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._doc, labels=["model_name"])
        names = [*map(floatToGoString, self._bounds_s), "+Inf"]
        counts = accumulate(self._counts)
        family.add_metric([self._model_name], list(zip(names, counts, strict=True)), self._sum_s)
        yield family


class Metrics:
    """All metrics of one server."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str):
        self.stats = stats
        self._engine = EngineCollector(stats, model_name)
        self.registry = CollectorRegistry()  # of what is counted in this process
        ProcessCollector(registry=self.registry)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(PREFIX + name, doc, model_name, buckets)
            self.registry.register(family)
            return family

        self.time_to_first_token_s = histogram(
            "time_to_first_token_seconds", "from the call's arrival to the first token of the prompt", TTFT_BUCKETS_S
        )
        self.inter_token_latency_s = histogram(
            "inter_token_latency_seconds", "between two deliveries of tokens of a sequence, per token", ITL_BUCKETS_S
        )
        self.e2e_latency_s = histogram(
            "e2e_request_latency_seconds", "from the call's arrival to the last token of a sequence", LATENCY_BUCKETS_S
        )
        self.queue_time_s = histogram(
            "request_queue_time_seconds", "spent waiting before the first step", LATENCY_BUCKETS_S
        )
        self._finished = Counter(
            PREFIX + "request_success",
            "sequences ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)  # a rate needs the zero before the first event

    def count_finished(self, reason: str, count: int = 1) -> None:
        self._finished.labels(self._model_name, reason).inc(count)

    def text(self, others: Sequence[str] = ()) -> bytes:
        """The body of GET /metrics. others: that of the server's other HTTP processes."""
        whole = CollectorRegistry()
        whole.register(self._engine)
        whole.register(Sum(self.registry, others))
        return generate_latest(whole)


class TrafficLog:
    """One log line per period in which there was something to do."""

    def __init__(self, stats: Callable[[], EngineStats]):
        self._stats = stats
        self._last = replace(stats())
        self._last_s = time.monotonic()

    def line(self) -> str | None:
        """What happened since the last call; None if nothing did."""
        old, new = self._last, replace(self._stats())
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._last_s, 1e-6)
        self._last, self._last_s = new, now_s
        prompt, output = new.prompt_tokens - old.prompt_tokens, new.generation_tokens - old.generation_tokens
        if not (prompt or output or new.running or new.waiting):
            return None
        queries = new.prefix_cache_query_tokens - old.prefix_cache_query_tokens
        hits = new.prefix_cache_hit_tokens - old.prefix_cache_hit_tokens
        return (
            f"prompt {prompt / elapsed_s:.1f} tokens/s, generation {output / elapsed_s:.1f} tokens/s,"
            f" running {new.running}, waiting {new.waiting},"
            f" KV cache usage {100 * new.pages_used / max(new.pages_total, 1):.1f}%,"
            f" prefix cache hit rate {100 * hits / max(queries, 1):.1f}%"
        )
