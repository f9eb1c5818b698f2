"""A small byte-level tokenizer, a deterministic engine behind the EngineClient seam, and the production server."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxserve.config import ServeConfig
from jaxserve.control import Command, Pause, Resume, Sleep, WakeUp
from jaxserve.errors import EngineError, JaxserveError, QueueFull
from jaxserve.frontend import Frontend
from jaxserve.http.app import listening, serve
from jaxserve.request import EngineInfo, EngineStats, Request, SequenceDelta, TokenLogprobs
from jaxserve.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = "The quick brown fox, 3.14 and ## then ### some: naïve café 日本語 😀👍🏽 done.\n\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """The event loop of production; where timing matters also the plain one: they report lost connections differently."""
    loops = {"uvloop": uvloop.new_event_loop}
    return loops | {"asyncio": asyncio.new_event_loop} if item.path.name == "test_lifecycle.py" else loops


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT.split("naïve")[0]] * 3, trainer)  # characters past ASCII stay several tokens
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


@pytest.fixture(scope="session")
def tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        backend, bos_token_id=0, eos_token_ids=[1], special_tokens={"bos_token": "<s>"}, chat_template=TEMPLATE
    )


@dataclass
class Sequences:
    """A request inside the fake engine."""

    request: Request
    deltas: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancelled: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    task: asyncio.Task | None = None


class Stream:
    """What submit() returns: closing it early cancels, also before the first delta was asked for."""

    def __init__(self, engine: "FakeEngine", sequences: Sequences):
        self._engine, self._sequences = engine, sequences

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> SequenceDelta:
        sequences = self._sequences
        if sequences.deltas.empty() and len(sequences.finished) == sequences.request.params.n:
            raise StopAsyncIteration
        item = await sequences.deltas.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        if len(self._sequences.finished) < self._sequences.request.params.n:
            await self._engine.cancel(self._sequences.request.request_id)


class FakeEngine:
    """Answers with a text that depends on prompt, seed and sequence index only. `script` replaces it.

    gate        while cleared, running sequences stay where they are
    pause_at    the output token before which the gate closes by itself
    refusal     raised by submit()
    broken_at   the output token before which a request ends with an error
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_model_len: int = 512, max_num_seqs: int = 64, max_queue: int = 2000
    ):
        self.tokenizer = tokenizer
        self.info = EngineInfo(
            model="fake", vocab_size=tokenizer.vocab_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            page_size=16, num_pages=64, device="cpu", dtype="float32",
            scheduling_policy="priority", hidden_size=4,
        )  # fmt: skip
        self.stats = EngineStats(pages_total=64)
        self.gate = asyncio.Event()
        self.gate.set()
        self.pause_at: int | None = None
        self.refusal: JaxserveError | None = None
        self.broken_at: tuple[int, SequenceDelta | Exception | None] | None = None
        self.script: Callable[[Request, int], list[int]] = self._text
        self.tokens_per_delta = 1
        self.alive = True
        self.requests: list[Request] = []
        self.open: dict[str, Sequences] = {}
        self.cancelled: list[tuple[str, int | None]] = []
        self.commands: list[Command] = []
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._max_queue = max_queue

    def _text(self, request: Request, index: int) -> list[int]:
        ids = self.tokenizer.encode(TEXT, add_special_tokens=False)
        start = (sum(request.prompt_token_ids) + 7 * (request.seed or 0) + 11 * index) % len(ids)
        return list(itertools.islice(itertools.cycle(ids[start:] + ids[:start]), request.max_tokens))

    def healthy(self) -> bool:
        return self.alive

    async def submit(self, request: Request) -> Stream:
        await asyncio.sleep(0)
        if self.refusal:
            raise self.refusal
        if len(self.open) >= self._max_queue:
            raise QueueFull(f"the queue is full: {self._max_queue} requests wait (--max-queue-len)")
        self.requests.append(request)
        sequences = self.open[request.request_id] = Sequences(request)
        sequences.task = asyncio.create_task(self._run(sequences))
        return Stream(self, sequences)

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        self.cancelled.append((request_id, index))
        if sequences := self.open.get(request_id):
            sequences.cancelled.update(range(sequences.request.params.n) if index is None else [index])
            if index is None and sequences.task:
                sequences.task.cancel()

    async def control(self, command: Command) -> EngineStats:
        await asyncio.sleep(0)
        if self.refusal:
            raise self.refusal
        self.commands.append(command)
        match command:
            case Pause() | Resume():
                self.stats.paused = isinstance(command, Pause)
            case Sleep():
                self.stats.sleep_level = command.level
            case WakeUp() if len(command.tags) == 2:
                self.stats.sleep_level = 0
        return self.stats

    async def _run(self, sequences: Sequences) -> None:
        request = sequences.request
        put = sequences.deltas.put_nowait
        try:
            self.stats.waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self.stats.waiting -= 1
            self.stats.running += 1
            try:
                await self._generate(sequences)
            finally:
                self._slots.release()
                self.stats.running -= 1
        except asyncio.CancelledError:
            for i in set(range(request.params.n)) - sequences.finished:
                sequences.finished.add(i)
                put(SequenceDelta(request.request_id, i, finish_reason="abort"))
        except Exception as error:
            put(error)
        finally:
            del self.open[request.request_id]

    async def _generate(self, sequences: Sequences) -> None:
        request = sequences.request
        scripts = [self.script(request, i) for i in range(request.params.n)]
        first = True
        for at in range(0, request.max_tokens + 1, self.tokens_per_delta):
            await asyncio.sleep(0)
            if at == self.pause_at:
                self.gate.clear()
            await self.gate.wait()
            if self.broken_at and at >= self.broken_at[0]:
                if isinstance(error := self.broken_at[1], Exception):
                    raise error
                sequences.deltas.put_nowait(error)
                return
            for i in sorted(set(range(request.params.n)) - sequences.finished):
                delta = self._delta(request, i, scripts[i], at)
                if i in sequences.cancelled:
                    delta = SequenceDelta(request.request_id, i, finish_reason="abort")
                if first:
                    first = False
                    delta.prompt_logprobs = self._prompt_logprobs(request)
                    delta.cached_tokens = 3
                    self.stats.prompt_tokens += len(request.prompt_token_ids)
                self.stats.generation_tokens += len(delta.token_ids)
                if delta.finish_reason:
                    sequences.finished.add(i)
                sequences.deltas.put_nowait(delta)
            if len(sequences.finished) == request.params.n:
                return

    def _delta(self, request: Request, index: int, script: list[int], at: int) -> SequenceDelta:
        delta = SequenceDelta(request.request_id, index)
        for token_id in script[at : at + self.tokens_per_delta]:
            delta.token_ids.append(token_id)
            count = at + len(delta.token_ids)
            if token_id in request.stop_ids and count > request.params.min_tokens:
                delta.finish_reason = "stop"
                delta.stop_reason = token_id if token_id in (request.params.stop_token_ids or ()) else None
            elif count >= request.max_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason:
                break
        if request.pooling is not None:
            ids = np.array(request.prompt_token_ids, "<f4")
            pooled = ids[-1] if request.pooling == "last" else ids.mean()
            delta.token_ids, delta.finish_reason = [], "length"
            delta.embedding = np.array([pooled, 1, 0, 2], "<f4").tobytes()
        if request.params.logprobs is not None:
            delta.logprobs = [self.logprobs(t, request.params.logprobs) for t in delta.token_ids]
        return delta

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        if (count := request.params.prompt_logprobs) is None:
            return None
        return [None, *(self.logprobs(t, count) for t in request.prompt_token_ids[1:])]

    def logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        """Every third token is not among the likeliest; the last candidate is impossible."""
        first = token_id if token_id % 3 else token_id + 1
        ids = [(first + i) % self.info.vocab_size for i in range(count)]
        values = [-0.5 * (i + 1) for i in range(count)]
        if count > 1:
            values[-1] = float("-inf")
        rank = 1 if token_id % 3 else count + 1
        return TokenLogprobs(token_id, -0.5 if rank == 1 else -20.0, rank, ids, values)


class Api:
    """The running server as a client sees it."""

    def __init__(self, url: str, engine: FakeEngine, frontend: Frontend, session: aiohttp.ClientSession):
        self.url, self.engine, self.frontend, self.session = url, engine, frontend, session

    async def call(self, path: str, body: Any = None, *, method: str = "POST", **kwargs: Any) -> tuple[int, Any]:
        """Status and decoded JSON (or text) of the answer."""
        if body is not None:
            kwargs["json"] = body
        async with self.session.request(method, self.url + path, **kwargs) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self.call(path, body)
        assert status == 200, answer
        return answer

    async def error(self, path: str, body: Any, status: int = 400, **kwargs: Any) -> dict[str, Any]:
        """The error of a call that must fail so, checked for its shape."""
        got, answer = await self.call(path, body, **kwargs)
        assert got == status, answer
        return self.checked(answer, status)

    def checked(self, answer: dict[str, Any], status: int) -> dict[str, Any]:
        """The error of an answer with that status, checked for its shape."""
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["code"] == status
        assert len(answer["error"]["message"]) < 500
        return answer["error"]

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a streamed answer; it must end with [DONE]."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) for line in lines[:-1]]

    async def settled(self) -> None:
        """Waits until the engine has nothing left; fails if something stays."""
        async with asyncio.timeout(5):
            while self.engine.open:
                await asyncio.sleep(0.005)


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., Any]:
    """start(engine=None, defaults={}, grace_s=..., **config) -> async context of an Api, on the production serve()."""

    @asynccontextmanager
    async def run(
        engine: FakeEngine | None = None, *, defaults: dict[str, Any] | None = None, grace_s: float = 5.0, **config: Any
    ) -> AsyncIterator[Api]:
        engine = engine or FakeEngine(tokenizer)
        frontend = Frontend(engine.tokenizer, engine.info, defaults or {})
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(
                frontend,
                engine,
                ServeConfig(port=0, **{"model": "m", **config}),
                on_ready=ready.set_result,
                grace_s=grace_s,
            )
        )
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        try:
            async with aiohttp.ClientSession() as session:
                yield Api(await ready, engine, frontend, session)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return run


@pytest.fixture(scope="module")
def in_thread(tokenizer: Tokenizer) -> Callable[..., Any]:
    """in_thread(max_model_len=..., using=tokenizer, **config) -> context of the URL of a server in a thread, for blocking clients."""

    @contextmanager
    def run(*, max_model_len: int = 512, using: Tokenizer = tokenizer, **config: Any) -> Iterator[str]:
        engine = FakeEngine(using, max_model_len=max_model_len)
        engine.tokens_per_delta = max_model_len
        url: Future[str] = Future()

        async def main() -> None:
            frontend = Frontend(engine.tokenizer, engine.info, {})
            async with listening(frontend, engine, ServeConfig(port=0, **{"model": "m", **config}), grace_s=0) as at:
                loop, stop = asyncio.get_running_loop(), asyncio.Event()
                url.set_result(at)
                stopping.set_result(lambda: loop.call_soon_threadsafe(stop.set))
                await stop.wait()

        stopping: Future[Callable[[], Any]] = Future()
        thread = threading.Thread(target=uvloop.run, args=(main(),), daemon=True)
        thread.start()
        try:
            yield url.result(10)
        finally:
            stopping.result(10)()
            thread.join(10)

    return run


@pytest.fixture
async def api(start: Callable[..., Any]) -> AsyncIterator[Api]:
    async with start() as running:
        yield running


@pytest.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of `api`."""
    async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def make_engine(tokenizer: Tokenizer) -> Callable[..., FakeEngine]:
    def make(**kwargs: Any) -> FakeEngine:
        return FakeEngine(tokenizer, **kwargs)

    return make


@pytest.fixture
def make_api() -> type[Api]:
    return Api


@pytest.fixture
def engine_error() -> EngineError:
    return EngineError("page 7 is on fire")
