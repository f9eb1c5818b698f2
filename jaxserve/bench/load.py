"""Puts load on a server: when each request starts, how many run at once, and what each one took."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from jaxserve.api_client import ApiClient
from jaxserve.bench.datasets import Sample
from jaxserve.bench.report import RequestTiming
from jaxserve.errors import JaxserveError

READY_POLL_S = 1.0


class Backend(Protocol):
    """One of the APIs that can be measured."""

    path: str

    def body(self, sample: Sample) -> dict[str, Any]: ...

    def text_of(self, choice: dict[str, Any]) -> str: ...


class Completions:
    """--backend openai: prompts as text or token ids."""

    path = "/v1/completions"

    def body(self, sample: Sample) -> dict[str, Any]:
        return {"prompt": sample.prompt, "max_tokens": sample.output_len}

    def text_of(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class ChatCompletions:
    """--backend openai-chat: the prompt is one user message."""

    path = "/v1/chat/completions"

    def body(self, sample: Sample) -> dict[str, Any]:
        messages = [{"role": "user", "content": sample.prompt}]
        return {"messages": messages, "max_completion_tokens": sample.output_len}

    def text_of(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")


BACKENDS: dict[str, Backend] = {"openai": Completions(), "openai-chat": ChatCompletions()}


def arrival_times_s(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """When each request starts, in seconds from the first one's clock. An infinite rate starts all at once.

    Gaps are gamma-distributed: burstiness 1 is a Poisson process, less is burstier. They are scaled so that the last
    request starts at count / rate, and the rate asked for is the rate applied.
    """
    if np.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return times * (count / rate / times[-1])


async def send(client: ApiClient, backend: Backend, path: str, sample: Sample, body: dict[str, Any]) -> RequestTiming:
    """One streamed request. A failure is an entry in the result, not an exception.

    A gap (ITL) lies between two pieces of text: pieces without text (a chat's first delta, the closing one) and
    usage are not tokens. Lengths are the server's own counts where it sends usage.
    """
    timing = RequestTiming(time.perf_counter(), sample.prompt_len or 0)
    pieces, usage, last_s, first_event_s = [], None, 0.0, 0.0
    try:
        async for event in client.stream(path, body):
            now_s = time.perf_counter()
            usage = event.get("usage") or usage
            choices = event.get("choices") or ()
            first_event_s = first_event_s or now_s
            text = "".join(backend.text_of(choice) for choice in choices)
            if not text:
                continue
            if pieces:
                timing.itls_s.append(now_s - last_s)
            else:
                timing.ttft_s = now_s - timing.start_s
            pieces.append(text)
            last_s = now_s
    except JaxserveError as error:
        timing.error = error.message
    timing.latency_s = (last_s or time.perf_counter()) - timing.start_s
    timing.ttft_s = timing.ttft_s or (first_event_s or time.perf_counter()) - timing.start_s
    timing.text = "".join(pieces)
    timing.output_len = (usage or {}).get("completion_tokens") or len(pieces)
    timing.prompt_len = (usage or {}).get("prompt_tokens") or timing.prompt_len
    return timing


async def run_load(
    samples: Sequence[Sample],
    starts_s: Sequence[float] | np.ndarray,
    max_concurrency: int | None,
    one: Callable[[Sample], Awaitable[RequestTiming]],
    *,
    label: str,
    show_progress: bool,
) -> tuple[list[RequestTiming], float]:
    """Runs `one` for each sample at its time. Returns timings in the order of the samples, and the seconds it took.

    A request that waits for --max-concurrency has not started: its clock begins when it is sent.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    with tqdm(total=len(samples), desc=label, unit="request", disable=not show_progress) as bar:

        async def gated(sample: Sample) -> RequestTiming:
            async with gate:
                timing = await one(sample)
            bar.update()
            return timing

        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for sample, start_s in zip(samples, starts_s, strict=True):
                if (wait_s := begin_s + start_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(group.create_task(gated(sample)))
        return [task.result() for task in tasks], time.perf_counter() - begin_s


async def wait_until_ready(client: ApiClient, timeout_s: float) -> dict[str, Any]:
    """Asks for the models until the server answers; returns the first. Says once on stderr what it waits for.

    Raises what the server refuses (4xx) at once, and the last error after `timeout_s`.
    """
    deadline_s, said = time.monotonic() + timeout_s, ""
    while True:
        try:
            return (await client.models("/v1/models"))[0]
        except JaxserveError as error:
            if 400 <= error.status < 500 or time.monotonic() + READY_POLL_S > deadline_s:
                raise
            if error.message != said:
                print(f"waiting for the server, at most {timeout_s:g} s: {error.message}", file=sys.stderr, flush=True)
                said = error.message
        await asyncio.sleep(READY_POLL_S)
