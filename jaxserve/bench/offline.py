"""What `bench latency` and `bench throughput` share: the LLM under test and a watch on its page slots."""

import argparse
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxserve.bench.datasets import Sample
from jaxserve.config import EngineConfig, from_arguments, size_text
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.llm import LLM

WATCH_PERIOD_S = 0.05


def load_llm(args: argparse.Namespace) -> "LLM":
    """The LLM that the engine options in `args` ask for."""
    config = from_arguments(args, EngineConfig)
    from jaxserve.llm import LLM  # after the options are checked: this imports jax

    given = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default
    }
    return LLM(**given)  # not the defaults: LLM has its own for an offline list


def common_vocab_size(llm: "LLM") -> int:
    """Ids below this are known to both the model and its tokenizer: one can have more than the other."""
    return min(llm.get_tokenizer().vocab_size, llm.info.vocab_size)


def check_lengths(samples: Sequence[Sample], llm: "LLM") -> None:
    """Raises ConfigError if a random prompt with its answer is longer than what the engine takes."""
    limit = llm.info.max_model_len
    for sample in samples:
        if (sample.prompt_len or 0) + sample.output_len > limit:
            raise ConfigError(
                f"a prompt of {sample.prompt_len} tokens and an answer of {sample.output_len} do not fit the model's "
                f"context of {limit}: lower --input-len or --output-len"
            )


def peak_memory_line(peak_bytes: int | None) -> str:
    return f"Peak device memory: {'the device does not say' if peak_bytes is None else size_text(peak_bytes)}"


@dataclasses.dataclass
class SlotWatch:
    """Samples of wasted over allocated token slots, taken while sequences hold pages, and what the engine counts."""

    ratios: list[float] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    prefix_cache_hit_tokens: int = 0
    peak_device_memory_bytes: int | None = None

    def numbers(self) -> dict[str, Any]:
        """Result keys; without a sample (a run shorter than the period) no waste is claimed."""
        numbers: dict[str, Any] = {
            "prefix_cache_hits": self.prefix_cache_hit_tokens,
            "num_preemptions": self.preemptions,
            "peak_device_memory_bytes": self.peak_device_memory_bytes,
        }
        if self.ratios:
            numbers |= {
                "mean_kv_cache_wasted_slots_ratio": sum(self.ratios) / len(self.ratios),
                "max_kv_cache_wasted_slots_ratio": max(self.ratios),
            }
        return numbers

    def line(self) -> str:
        numbers = self.numbers()
        text = f"Prefix cache hits: {numbers['prefix_cache_hits']} tokens, preemptions: {numbers['num_preemptions']}"
        if "mean_kv_cache_wasted_slots_ratio" in numbers:
            mean, peak = numbers["mean_kv_cache_wasted_slots_ratio"], numbers["max_kv_cache_wasted_slots_ratio"]
            text += f", wasted KV slots: mean {mean:.2%}, peak {peak:.2%}"
        return f"{text}\n{peak_memory_line(self.peak_device_memory_bytes)}"


@contextmanager
def watched_slots(llm: "LLM") -> Iterator[SlotWatch]:
    """Samples the engine's counters from a thread while the body runs."""
    watch, done, before = SlotWatch(), threading.Event(), llm.get_metrics()
    first = (before.preemptions, before.prefix_cache_hit_tokens)

    def run() -> None:
        while not done.wait(WATCH_PERIOD_S):
            stats = llm.get_metrics()
            if allocated := stats.allocated_token_slots:
                watch.ratios.append((allocated - stats.used_token_slots) / allocated)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()
        after = llm.get_metrics()
        watch.preemptions = after.preemptions - first[0]
        watch.prefix_cache_hit_tokens = after.prefix_cache_hit_tokens - first[1]
        watch.peak_device_memory_bytes = after.peak_device_memory_bytes
