"""`LLM`: the engine in this process, for batch jobs and notebooks. Names and shapes are those of vLLM's class."""

import contextlib
import itertools
import logging
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

from tqdm import tqdm

from jaxserve.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, offline_config
from jaxserve.control import Sleep, WakeUp
from jaxserve.engine import Engine
from jaxserve.errors import EngineError, RequestError
from jaxserve.frontend import Frontend, OutputBuilder, Prompt, as_prompt
from jaxserve.parsers import check_tools, thinking_limiter
from jaxserve.request import (
    EmbeddingRequestOutput,
    EngineInfo,
    EngineStats,
    RequestOutput,
    SamplingParams,
    check_limits,
)
from jaxserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class LLM:
    """A model loaded for offline use.

        llm = LLM("Qwen/Qwen2.5-1.5B-Instruct")
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

    Keywords are the fields of EngineConfig (those of `jaxserve serve --help`). Raises ConfigError for a bad one.
    """

    def __init__(self, model: str = EngineConfig.model, **options: Any):
        config = offline_config("LLM", model, options)
        checkpoint = Checkpoint.open(config)
        tokenizer, defaults = checkpoint.load_tokenizer(config), checkpoint.sampling_defaults(config)
        self._engine = Engine(config, checkpoint)
        self._frontend = Frontend(
            tokenizer, self._engine.info, defaults, thinking_limiter(tokenizer, config.reasoning_parser)
        )
        self._engine.use_vocabulary(self._frontend.vocabulary)
        self._ids = itertools.count()
        self._open: dict[str, OutputBuilder] = {}  # by request id: those that the engine has not finished
        self._enqueued: list[OutputBuilder] = []  # those that wait_for_completion() will return

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.

        Results come in the order of the prompts. Raises RequestError, and then computes nothing, if any is bad.
        """
        return self._finish(self._submit(_texts(prompts), sampling_params, use_tqdm, priority), use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Submits prompts as generate() does, and returns their request ids: wait_for_completion() has the results."""
        return self._enqueue(self._submit(_texts(prompts), sampling_params, use_tqdm, priority))

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Runs until all that was enqueued is finished; its results, in the order of submission, each once."""
        builders, self._enqueued = self._enqueued, []
        return self._finish(builders, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them. `tools`, as OpenAI writes them, go to the template."""
        texts = self._conversations(
            messages, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        )
        return self._finish(self._submit(texts, sampling_params, use_tqdm, None), use_tqdm)

    def enqueue_chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[str]:
        """Submits conversations as chat() does; see enqueue()."""
        texts = self._conversations(
            messages, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        )
        return self._enqueue(self._submit(texts, sampling_params, use_tqdm, None))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt, best first: see beam_search.py.

        concurrency_limit: prompts searched at the same time, at most; None: all. Results come in the order of the
        prompts. Raises RequestError, and then computes nothing, if any is bad.
        """
        check_limits("concurrency_limit", concurrency_limit, int | None, {"ge": 1})
        searches = [self._beam_search(prompt, params) for prompt in _as_list(prompts)]
        waiting, active = deque(searches), []
        with tqdm(total=len(searches), desc="Beam search", unit="prompt", disable=not use_tqdm) as bar:
            while waiting or active:
                while waiting and len(active) < (concurrency_limit or len(searches)):
                    active.append(waiting.popleft())
                self._extend(active)
                bar.update(sum(search.finished for search in active))
                active = [search for search in active if not search.finished]
        return [self._searched(search) for search in searches]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, of length 1: the hidden state of its last token, or the mean of all tokens'.

        Results come in the order of the prompts. Raises RequestError, and then computes nothing, if any is bad.
        """
        builders = []
        for prompt in map(as_prompt, _as_list(prompts)):
            request = self._frontend.make_embedding_request(str(next(self._ids)), prompt, pooling, dimensions)
            builders.append(self._frontend.output_builder(request, prompt if isinstance(prompt, str) else None))
        self._finish(self._hand_over(builders), use_tqdm)
        return [builder.embedding_output(dimensions) for builder in builders]

    @property
    def info(self) -> EngineInfo:
        """What was started: the model's vocabulary, the longest sequence, KV pages, the device."""
        return self._engine.info

    def get_tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults (its generation_config.json)."""
        return self._frontend.default_params()

    def get_metrics(self) -> EngineStats:
        """The engine's counters since start."""
        return replace(self._engine.stats())

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages: the next prompts are computed anew."""
        self._engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: Literal["abort", "wait"] = "abort") -> None:
        """Frees the device's memory until wake_up(). Weights go to host memory (1), or are dropped (2).

        mode: what is enqueued ends with finish_reason "abort", or is finished first; wait_for_completion() has it.
        """
        self._engine.control(Sleep(level=level, mode=mode))
        while self._engine.busy:
            self._step()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the device's memory again: of both "weights" and "kv_cache", or of one. Level 2: loads the weights."""
        self._engine.control(WakeUp() if tags is None else WakeUp(tuple(tags)))  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------- requests in and out

    def _conversations(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None,
    ) -> list[tuple[str | list[int], bool]]:
        """The prompt of each conversation."""
        offered = None if tools is None else [tool.for_template() for tool in check_tools(tools)]
        conversations = _listed(messages)
        if not isinstance(conversations, list) or conversations and not isinstance(_listed(conversations[0]), list):
            conversations = [conversations]
        return [
            (
                self._frontend.render_chat(
                    _listed(conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    tools=offered,
                    **(chat_template_kwargs or {}),
                ),
                False,
            )
            for conversation in conversations
        ]

    def _submit(
        self,
        prompts: list[tuple[str | list[int], bool]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[OutputBuilder]:
        """Hands prompts to the engine: all of them, or none if one is bad. With each: whether to add special tokens."""
        params = _one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        builders = []
        with tqdm(total=len(prompts), desc="Adding requests", unit="prompt", disable=not use_tqdm) as bar:
            for (prompt, special), p, order in zip(prompts, params, priorities, strict=True):
                request = self._frontend.make_request(
                    str(next(self._ids)), prompt, p, priority=order, add_special_tokens=special
                )
                builders.append(self._frontend.output_builder(request, prompt if isinstance(prompt, str) else None))
                bar.update()
        return self._hand_over(builders)

    def _hand_over(self, builders: list[OutputBuilder]) -> list[OutputBuilder]:
        """Submits requests: all of them, or none."""
        try:
            for builder in builders:
                self._engine.submit(builder.request)
                self._open[builder.request.request_id] = builder
        except BaseException:
            self._drop(builders)
            raise
        return builders

    def _enqueue(self, builders: list[OutputBuilder]) -> list[str]:
        self._enqueued += builders
        return [builder.request.request_id for builder in builders]

    def _finish(self, builders: list[OutputBuilder], use_tqdm: bool) -> list[RequestOutput]:
        """Runs until these requests are finished; others go on meanwhile. If that fails, these are dropped."""
        try:
            self._run_until_finished(builders, use_tqdm)
        except BaseException:
            self._drop(builders)
            raise
        return [builder.output for builder in builders]

    def _run_until_finished(self, builders: list[OutputBuilder], use_tqdm: bool) -> None:
        awaited = {builder.request.request_id for builder in builders if not builder.output.finished}
        tokens_in = tokens_out = 0
        with tqdm(total=len(awaited), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            # With nothing else open the last step is taken in too, so that the engine rests.
            while self._engine.has_work() and (awaited or not self._open):
                for builder in self._step():
                    if builder.request.request_id not in awaited:
                        continue
                    awaited.remove(builder.request.request_id)
                    tokens_in += len(builder.request.prompt_token_ids)
                    tokens_out += builder.num_tokens
                    elapsed = max(bar.format_dict["elapsed"], 1e-6)
                    bar.set_postfix_str(
                        f"est. speed input: {tokens_in / elapsed:.2f} toks/s, "
                        f"output: {tokens_out / elapsed:.2f} toks/s",
                        refresh=False,
                    )
                    bar.update()

    def _step(self) -> list[OutputBuilder]:
        """One step of the engine, wherever its tokens belong; returns the requests that finished with it."""
        finished = []
        with _interrupts_held():
            for delta in self._engine.step():
                builder = self._open.get(delta.request_id)
                if builder is None:  # dropped, or ended by a stop string, and now the engine says so too
                    continue
                if delta.error:
                    log.warning(
                        "prompt %s ends with %s: %s", delta.request_id, delta.finish_reason, delta.error.message
                    )
                    builder.fail(delta)  # the rest of the list goes on
                elif builder.push(delta).stopped:
                    self._engine.cancel(delta.request_id, delta.index)
                if builder.output.finished:
                    finished.append(self._open.pop(delta.request_id))
        return finished

    def _drop(self, builders: list[OutputBuilder]) -> None:
        """Cancels what is left of these requests."""
        for builder in builders:
            self._open.pop(builder.request.request_id, None)
            self._engine.cancel(builder.request.request_id)
        while not self._open and self._engine.has_work():
            self._step()

    # ------------------------------------------------------------------------------------------------ beam search

    def _beam_search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearch:
        whole = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        request = self._frontend.make_request("", as_prompt(prompt), whole)  # only to be checked and resolved
        return BeamSearch(request.prompt_token_ids, params, request.stop_ids)

    def _extend(self, searches: list[BeamSearch]) -> None:
        """Takes every beam of these searches one token further."""
        beams = [(beam.tokens, search.step_params()) for search in searches for beam in search.beams]
        builders = self._submit([(tokens, False) for tokens, _ in beams], [p for _, p in beams], False, None)
        outputs = iter(self._finish(builders, use_tqdm=False))
        for search in searches:
            steps = [next(outputs).outputs[0] for _ in search.beams]
            if bad := next((step.finish_reason for step in steps if not step.logprobs), None):
                raise EngineError(f"the beam search cannot go on: a step ended with finish_reason {bad}")
            search.advance([step.logprobs[0] for step in steps if step.logprobs])

    def _searched(self, search: BeamSearch) -> BeamSearchOutput:
        for sequence in search.ended:
            sequence.text = self.get_tokenizer().decode(sequence.tokens, skip_special_tokens=False)
        return BeamSearchOutput(search.ended)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect after the body: a step that is cut in two would leave the device in an unknown state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed  # numpy's integers too


def _listed(value: Any) -> Any:
    """A sequence as a list; anything else, a text too, as it is, to be refused where its place has a name."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _texts(prompts: Prompt | Sequence[Prompt]) -> list[tuple[str | list[int], bool]]:
    """Each prompt, to which special tokens are to be added."""
    return [(as_prompt(prompt), True) for prompt in _as_list(prompts)]


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for every prompt, or one value per prompt."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} must have one entry per prompt ({count}), got {len(value)}", param=name)
    return list(value)
