"""`AsyncLLM`: the engine in a process of its own, for asyncio. Names are those of vLLM's classes. Never imports jax."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, offline_config
from jaxserve.control import Command, Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.detokenize import TextDelta
from jaxserve.engine_process import EngineProcess, SocketClient, start_engine
from jaxserve.errors import EngineDead, RequestError
from jaxserve.frontend import Frontend, OutputBuilder, Prompt, as_prompt
from jaxserve.parsers import check_tools
from jaxserve.request import EmbeddingRequestOutput, EngineStats, Request, RequestOutput, SamplingParams, short
from jaxserve.tokenizer import Tokenizer


class AsyncLLM:
    """A model loaded for asyncio.

        async with AsyncLLM("Qwen/Qwen2.5-1.5B-Instruct") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Keywords are those of LLM. The engine starts on entering, or else with the first call that needs it, which raises
    ConfigError or EngineDead if it cannot. It belongs to the event loop that it was started in.
    """

    def __init__(self, model: str = EngineConfig.model, **options: Any):
        self._set_up(offline_config("AsyncLLM", model, options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An AsyncLLM with this config as it is: its max_queue_len refuses with QueueFull what is too much."""
        llm = cls.__new__(cls)
        llm._set_up(config)
        return llm

    def _set_up(self, config: EngineConfig) -> None:
        self._config = config
        self._starting: asyncio.Task[tuple[EngineProcess, Frontend]] | None = None
        self._watch: asyncio.Task[int] | None = None
        self._serial = itertools.count()
        self._live: dict[str, str] = {}  # request id -> its name at the engine, which is never used twice
        self._shut_down = False

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Completes one prompt; yields what there is of it as it grows, as sampling_params.output_kind says.

        Closing the iterator early cancels the request; so does leaving a loop over it by `break`. request_id: for
        abort(); no two live requests may have the same. Raises RequestError, and later what ends the request.
        """
        _, frontend = await self._started()
        params = sampling_params or frontend.default_params()
        make = partial(frontend.make_request, params=params, priority=priority)
        async with contextlib.aclosing(self._run(as_prompt(prompt), request_id, make)) as steps:
            async for builder, shown in steps:
                if output := builder.news(shown):
                    yield output

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answers one conversation, which LLM.chat() would take, as generate() completes a prompt."""
        _, frontend = await self._started()
        prompt = await asyncio.to_thread(
            frontend.render_chat,
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=None if tools is None else [tool.for_template() for tool in check_tools(tools)],
            **(chat_template_kwargs or {}),
        )
        params = sampling_params or frontend.default_params()
        make = partial(frontend.make_request, params=params, priority=priority, add_special_tokens=False)
        async with contextlib.aclosing(self._run(prompt, request_id, make)) as steps:
            async for builder, shown in steps:
                if output := builder.news(shown):
                    yield output

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt: see LLM.embed(). Raises RequestAborted if abort() ends it."""
        _, frontend = await self._started()
        make = partial(frontend.make_embedding_request, pooling=pooling, dimensions=dimensions, priority=priority)
        async with contextlib.aclosing(self._run(as_prompt(prompt), request_id, make)) as steps:
            builder = [builder async for builder, _ in steps][-1]
        return builder.embedding_output(dimensions)

    async def _run(
        self, prompt: str | list[int], request_id: str | None, make: Callable[..., Request]
    ) -> AsyncGenerator[tuple[OutputBuilder, TextDelta]]:
        """Runs make(its name at the engine, prompt) to its end; yields what each delta adds."""
        name = uuid.uuid4().hex if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise RequestError(f"request_id must be text, and not empty; got {short(name)}", param="request_id")
        client, frontend = await self._started()
        engine_id = f"{name}-{next(self._serial)}"
        # In a thread: a long text must not hold up the other streams.
        request = await asyncio.to_thread(make, engine_id, prompt)
        builder = frontend.output_builder(request, prompt if isinstance(prompt, str) else None)
        builder.output.request_id = name
        if name in self._live:
            raise RequestError(f"request_id {short(name)} is in use by a request that goes on", param="request_id")
        self._live[name] = engine_id
        try:
            async with contextlib.aclosing(await client.submit(request)) as deltas:
                async for delta in deltas:
                    shown = builder.push(delta)
                    if shown.stopped:
                        await client.cancel(engine_id, shown.index)
                    yield builder, shown
                    if builder.finished:
                        return
        finally:
            del self._live[name]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends live requests: the last output of each says finish_reason "abort". Unknown ids are over already."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if engine_id := self._live.get(name):
                client, _ = await self._started()
                await client.cancel(engine_id)

    # ----------------------------------------------------------------------------------------------------- engine

    async def check_health(self) -> None:
        """Raises EngineDead if the engine cannot serve any more."""
        client, _ = await self._started()
        if not client.healthy():
            raise EngineDead("the engine process has ended")

    async def pause_generation(
        self, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> None:
        """Starts no new request until resume_generation(); returns when none runs any more that `mode` lets finish.

        mode: of those accepted before: "abort" ends them, "wait" lets them finish, "keep" freezes them as they are.
        """
        await self._control(Pause(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Ends a pause: what waited goes on."""
        await self._control(Resume())

    async def is_paused(self) -> bool:
        client, _ = await self._started()
        return client.stats.paused

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait"] = "abort") -> None:
        """Frees the device's memory until wake_up(). Weights go to host memory (1), or are dropped (2).

        mode: requests end with finish_reason "abort", or are finished first. New ones are refused with EngineAsleep.
        """
        await self._control(Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the device's memory again: of both "weights" and "kv_cache", or of one. Level 2: loads the weights."""
        await self._control(WakeUp() if tags is None else WakeUp(tuple(tags)))  # type: ignore[arg-type]

    async def is_sleeping(self) -> bool:
        """Whether the engine is asleep, or not all of it is back."""
        client, _ = await self._started()
        return client.stats.sleep_level > 0

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached pages: the next prompts are computed anew."""
        await self._control(ResetPrefixCache())

    async def _control(self, command: Command) -> EngineStats:
        client, _ = await self._started()
        return await client.control(command)

    async def get_tokenizer(self) -> Tokenizer:
        _, frontend = await self._started()
        return frontend.tokenizer

    async def shutdown(self) -> None:
        """Ends the engine; open iterators end with EngineDead. Nothing can be asked after that."""
        self._shut_down = True
        if self._starting is None:
            return
        self._starting.cancel()  # if it is still starting: no engine is left then
        await asyncio.wait([self._starting])
        if self._starting.cancelled() or self._starting.exception():
            return
        engine, _ = self._starting.result()
        if self._watch:
            self._watch.cancel()
        await engine.stop()

    async def _started(self) -> tuple[SocketClient, Frontend]:
        """The running engine, started by whoever needs it first."""
        if self._shut_down:
            raise EngineDead("this AsyncLLM is shut down")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM was started in another event loop, which it belongs to")
        try:
            engine, frontend = await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():  # it, and not who waits for it
                raise EngineDead("this AsyncLLM is shut down") from None
            raise
        return engine.client, frontend

    async def _start(self) -> tuple[EngineProcess, Frontend]:
        checkpoint = await asyncio.to_thread(Checkpoint.open, self._config)  # before the engine: only one downloads
        engine, frontend = await start_engine(self._config, checkpoint)
        self._watch = asyncio.create_task(engine.wait())  # its end ends the open streams
        return engine, frontend
