"""`LLM`: the engine in this process, for batch jobs and notebooks. Names and shapes are those of vLLM's class."""

import contextlib
import itertools
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tqdm import tqdm

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.frontend import Frontend, OutputBuilder
from jaxserve.parsers import check_tools
from jaxserve.request import EngineStats, RequestOutput, SamplingParams, SequenceDelta
from jaxserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model loaded for offline use.

        llm = LLM("Qwen/Qwen2.5-1.5B-Instruct")
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

    Keywords are the fields of EngineConfig (those of `jaxserve serve --help`). Raises ConfigError for a bad one.
    """

    def __init__(self, model: str = EngineConfig.model, **options: Any):
        known = EngineConfig.__dataclass_fields__
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"LLM() has no option {unknown[0]!r}; it knows {', '.join(known)}")
        config = EngineConfig(model=model, **{"max_queue_len": 2**31, **options})  # offline, the list is the queue
        checkpoint = Checkpoint.open(config)
        tokenizer, defaults = checkpoint.load_tokenizer(config), checkpoint.sampling_defaults(config)
        self._engine = Engine(config, checkpoint)
        self._frontend = Frontend(tokenizer, self._engine.info, defaults)
        self._engine.use_vocabulary(self._frontend.vocabulary())
        self._ids = itertools.count()

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
        return self._run([(_prompt(p), True) for p in _as_list(prompts)], sampling_params, use_tqdm, priority)

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
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [
            self._frontend.render_chat(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=[tool.for_template() for tool in check_tools(tools)] if tools is not None else None,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run([(text, False) for text in texts], sampling_params, use_tqdm, None)

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

    def _run(
        self,
        prompts: list[tuple[str | list[int], bool]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        builders: dict[str, OutputBuilder] = {}
        for (prompt, special), p, order in zip(prompts, params, priorities, strict=True):
            request = self._frontend.make_request(
                str(next(self._ids)), prompt, p, priority=order, add_special_tokens=special
            )
            text = prompt if isinstance(prompt, str) else None
            builders[request.request_id] = self._frontend.output_builder(request, text)
        try:
            for builder in builders.values():
                self._engine.submit(builder.request)
            self._drain(builders, use_tqdm)
        except BaseException:
            for request_id in builders:
                self._engine.cancel(request_id)
            while self._engine.has_work():
                self._engine.step()
            raise
        return [builder.output for builder in builders.values()]

    def _drain(self, builders: dict[str, OutputBuilder], use_tqdm: bool) -> None:
        tokens_in = tokens_out = 0
        with tqdm(total=len(builders), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            while self._engine.has_work():
                with _interrupts_held():
                    deltas = self._engine.step()
                for delta in deltas:
                    builder = builders[delta.request_id]
                    was_finished = builder.output.finished
                    if delta.error and delta.index < 0:  # a grammar that could not be compiled
                        raise delta.error.exception()
                    if delta.error:
                        _end_with_error(builder.output, delta)
                    elif builder.push(delta).stopped:
                        self._engine.cancel(delta.request_id, delta.index)
                    tokens_out += len(delta.token_ids)
                    if builder.output.finished and not was_finished:
                        tokens_in += len(builder.request.prompt_token_ids)
                        elapsed = max(bar.format_dict["elapsed"], 1e-6)
                        bar.set_postfix_str(
                            f"est. speed input: {tokens_in / elapsed:.2f} toks/s, "
                            f"output: {tokens_out / elapsed:.2f} toks/s",
                            refresh=False,
                        )
                        bar.update()


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


def _end_with_error(output: RequestOutput, delta: SequenceDelta) -> None:
    """A timeout or a failure of one sequence: it says so, and the rest of the list goes on."""
    log.warning(
        "prompt %s ends with %s: %s", output.request_id, delta.finish_reason, delta.error and delta.error.message
    )
    output.outputs[delta.index].finish_reason = delta.finish_reason
    output.finished = all(one.finished() for one in output.outputs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        known = [k for k in ("prompt_token_ids", "prompt") if k in prompt]
        if len(prompt) != 1 or not known:
            raise RequestError(
                f"a prompt dict holds exactly one of prompt, prompt_token_ids; got {sorted(prompt)}", param="prompt"
            )
        prompt = prompt[known[0]]
    return prompt if isinstance(prompt, str) else cast("list[int]", list(prompt))


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for every prompt, or one value per prompt."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} must have one entry per prompt ({count}), got {len(value)}", param=name)
    return list(value)
