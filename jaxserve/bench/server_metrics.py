"""What the server says of itself in /metrics while a benchmark runs. Only jaxserve's names are read."""

import asyncio
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api_client import ApiClient
from jaxserve.errors import JaxserveError

PREFIX = "jaxserve:"
PERIOD_S = 0.5


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of the jaxserve families by name without the prefix, summed over labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith(PREFIX) else ():
            name = sample.name.removeprefix(PREFIX)
            values[name] = values.get(name, 0.0) + sample.value
    return values


@dataclass
class ServerMetrics:
    """Polls /metrics between `start` and `stop`; a server that has no such route, or other names, gives no numbers."""

    client: ApiClient
    samples: list[dict[str, float]] = field(default_factory=list)
    _task: asyncio.Task | None = None

    async def start(self) -> None:
        if await self._poll():
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._poll()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._poll()

    async def _poll(self) -> bool:
        try:
            values = parse_metrics(await self.client.get_text(f"{self.client.base_url}/metrics"))
        except (JaxserveError, ValueError):
            return False
        if values:
            self.samples.append(values)
        return bool(values)

    def numbers(self) -> dict[str, float]:
        """Result keys: waste while anything ran, what the counters gained over the run, and the device's peak."""
        if len(self.samples) < 2:
            return {}
        first, last = self.samples[0], self.samples[-1]
        busy = [s for s in self.samples if s.get("num_requests_running")]
        waste = [s["kv_cache_wasted_slots_ratio"] for s in busy if "kv_cache_wasted_slots_ratio" in s]
        numbers: dict[str, float] = {}
        if waste:
            numbers["mean_kv_cache_wasted_slots_ratio"] = sum(waste) / len(waste)
            numbers["max_kv_cache_wasted_slots_ratio"] = max(waste)
        if usage := [s["kv_cache_usage_perc"] for s in busy if "kv_cache_usage_perc" in s]:
            numbers["max_kv_cache_usage"] = max(usage)
        for name in ("prefix_cache_hits", "num_preemptions", "compiles_after_warmup"):
            if (total := f"{name}_total") in last:
                numbers[name] = last[total] - first.get(total, 0.0)
        if (name := "peak_device_memory_bytes") in last:
            numbers[name] = last[name]
        return numbers
