"""One HTTP call's requests at the engine: submitted together, merged into one stream, cancelled when the call ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import ClientConnectionError, web
from msgspec import UNSET

from jaxserve.detokenize import TextDelta
from jaxserve.errors import EngineError
from jaxserve.frontend import RequestText
from jaxserve.http.errors import describe
from jaxserve.http.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from jaxserve.http.sse import EventStream
from jaxserve.http.state import Call, Server
from jaxserve.request import SequenceDelta

LONG_TEXT_CHARS = 20_000  # text from this size on is tokenised in a thread, so that other streams go on


class Shown(NamedTuple):
    """A text delta of one of the call's prompts."""

    prompt_index: int
    delta: TextDelta


class Generation:
    """The requests of one call, as an async context: entering submits them all, leaving cancels what is unfinished.

    Entering raises the engine's refusal (QueueFull, ...), with nothing left behind: no header has been sent then.
    """

    def __init__(self, server: Server, texts: Sequence[RequestText], names: Iterable[str] = ()):
        """`names`: further ids by which the client knows the call (request_id.call_names)."""
        self.texts = texts
        ids = [text.request.request_id for text in texts]
        self._call = Call(frozenset((*names, *ids)), ids)
        self._server = server
        self._client = server.client
        self._metrics = server.metrics
        self._streams: list[AsyncIterator[SequenceDelta] | None] = [None] * len(texts)
        self._pumps: list[asyncio.Task] = []
        self._last_s: dict[tuple[int, int], float] = {}  # (prompt, sequence) -> when its last tokens came
        self._submitted = False

    async def __aenter__(self) -> Self:
        self._server.calls.add(self._call)
        try:
            results = await asyncio.gather(*map(self._submit, range(len(self.texts))), return_exceptions=True)
            if refusal := next((result for result in results if isinstance(result, BaseException)), None):
                raise refusal
        except BaseException:
            await self._close_surely("abort")
            raise
        self._submitted = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gone = isinstance(error, asyncio.CancelledError | ClientConnectionError)
        await self._close_surely("error" if error and not gone else "abort")

    async def _submit(self, i: int) -> None:
        self._streams[i] = await self._client.submit(self.texts[i].request)

    async def _close_surely(self, reason: str) -> None:
        """Closes in a task of its own: a failed write and the cancel of a lost connection may come one after the other,
        and the second must not interrupt what the first began.
        """
        self._call.ending = True
        task = asyncio.create_task(self._close(reason))
        self._server.closing.add(task)
        task.add_done_callback(self._server.closing.discard)
        await asyncio.shield(task)

    async def _close(self, reason: str) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for text, stream in zip(self.texts, self._streams, strict=True):
            if stream is not None and (close := getattr(stream, "aclose", None)):
                await close()
            if not text.finished:
                await self._client.cancel(text.request.request_id)
                if self._submitted:
                    self._metrics.count_finished(reason, sum(not sequence.finished for sequence in text.sequences))
        self._server.calls.discard(self._call)

    async def batches(self) -> AsyncIterator[list[Shown]]:
        """What may be shown, as it comes; several at once if they came together. Ends when all are finished."""
        unfinished = len(self.texts)
        async for arrived in self._arrivals():
            batch = []
            for i, delta in arrived:
                text = self.texts[i]
                if text.finished:
                    continue
                if delta is None:
                    raise EngineError("the engine ended this request without a result")
                late = delta.index < 0 or text.sequences[delta.index].finished  # told already, or at its end
                shown = text.push(delta)
                if shown.stopped:
                    await self._client.cancel(text.request.request_id, shown.index)
                if not late:
                    self._observe(i, delta, shown)
                if shown:
                    batch.append(Shown(i, shown))
                unfinished -= text.finished
            self._call.ending |= not unfinished
            if batch:
                yield batch
            if not unfinished:
                return

    async def _arrivals(self) -> AsyncIterator[list[tuple[int, SequenceDelta | None]]]:
        """Engine deltas of all requests, None at the end of each: a lone stream as it is, several through a queue."""
        if len(self._streams) == 1:
            assert (stream := self._streams[0]) is not None, "submitted"
            async for delta in stream:
                yield [(0, delta)]
            yield [(0, None)]
            return
        queue: asyncio.Queue[tuple[int, SequenceDelta | None] | Exception] = asyncio.Queue()

        async def pump(i: int) -> None:
            try:
                async for delta in self._deltas(i):
                    queue.put_nowait((i, delta))
            except Exception as error:
                queue.put_nowait(error)

        self._pumps = [asyncio.create_task(pump(i)) for i in range(len(self._streams))]
        while True:
            arrived = []
            while not arrived or not queue.empty():
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                arrived.append(item)
            yield arrived

    async def _deltas(self, i: int) -> AsyncIterator[SequenceDelta | None]:
        stream = self._streams[i]
        assert stream is not None, "submitted"
        async for delta in stream:
            yield delta
        yield None

    def _observe(self, i: int, delta: SequenceDelta, shown: TextDelta) -> None:
        now_s = time.monotonic()
        request = self.texts[i].request
        if delta.token_ids:
            last_s = self._last_s.get((i, delta.index))
            if last_s is not None:
                count = len(delta.token_ids)
                self._metrics.inter_token_latency_s.observe((now_s - last_s) / count, count)
            elif not any(prompt == i for prompt, _ in self._last_s):
                self._metrics.time_to_first_token_s.observe(now_s - request.arrival_s)
                self._metrics.queue_time_s.observe(delta.queue_s)
            self._last_s[i, delta.index] = now_s
        if shown.finish_reason:
            self._metrics.e2e_latency_s.observe(now_s - request.arrival_s)
            self._metrics.count_finished(shown.finish_reason)


async def off_loop[T](size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`function(*args)`, in a thread if what it works on is large: characters, or bytes of a body."""
    if size < LONG_TEXT_CHARS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def usage(texts: Sequence[RequestText], *, hidden_tokens: bool = False, reasoning_tokens: int | None = None) -> Usage:
    """Tokens so far of all prompts and outputs. `hidden_tokens`: what was generated is not part of the answer."""
    prompt_tokens = sum(len(text.request.prompt_token_ids) for text in texts)
    output_tokens = 0 if hidden_tokens else sum(text.num_tokens for text in texts)
    cached_tokens = sum(text.cached_tokens for text in texts)
    details = UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    cached = PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, cached, details)


async def stream_answer(
    request: web.Request,
    generation: Generation,
    encode: Callable[[Shown], bytes],
    last: Callable[[], bytes],
) -> web.StreamResponse:
    """Streams the generation as server-sent events: `encode` writes one text delta, `last` what comes at the end.

    An error before the first event is raised, and so becomes an HTTP error; a later one becomes the last event.
    """
    stream = EventStream(request)
    try:
        async with generation:
            async for batch in generation.batches():
                await stream.send(b"".join(map(encode, batch)))
        return await stream.end(last())
    except ClientConnectionError:
        return stream.response  # nobody is left to answer
    except Exception as error:
        if not stream.opened:
            raise
        await stream.fail(describe(error))
        return stream.response


async def drain(generation: Generation) -> None:
    """Runs the generation to its end; the texts then hold the answer."""
    async with generation:
        async for _ in generation.batches():
            pass
