"""Between clients and the engine: prompts and params become Requests, token deltas become text. Never imports jax.

Frontend         text or token ids + SamplingParams -> Request, with everything checked and resolved
RequestText      the deltas of one request -> text deltas, one per engine delta
OutputBuilder    the same, and a RequestOutput that grows with them (the offline API)
"""

import logging
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from jaxserve import chat, structured
from jaxserve.detokenize import SequenceText, StopMatcher, TextDelta, prompt_text, token_text
from jaxserve.errors import ConfigError, DeadlineExceeded, EngineError, RequestAborted, RequestError
from jaxserve.fill_in_middle import FillInMiddle
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_EOS_IDS,
    MAX_STOP_IDS,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineInfo,
    Logprob,
    Request,
    RequestOutput,
    RequestOutputKind,
    RequestStats,
    SamplingParams,
    SequenceDelta,
    TokenLogprobs,
    check_limits,
    short,
)
from jaxserve.settings import token_ids, whole
from jaxserve.tokenizer import Tokenizer, Vocabulary

log = logging.getLogger(__name__)

DEFAULTS_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
MIN_LOGPROB = -9999.0  # what is sent for minus infinity, which JSON cannot say

Prompt = str | Sequence[int] | Mapping[str, Any]  # as the offline API takes one
# End of a prompt, tokens of reasoning, ids that end an output, what the answer must match -> a grammar of it all, and
# whether that is the grammar of the reasoning only.
LimitThinking = Callable[[str, int, Sequence[int], str | None], tuple[str | None, bool]]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts a prompt to its last (`side` "left") or first tokens; `tokens` -1: as many as leave room for the output.

    Of a text, the BOS token at its beginning stays.
    """

    tokens: int
    side: Literal["left", "right"] = "left"

    def cut(self, ids: list[int], most: int, bos: int | None) -> list[int]:
        """`most`: tokens that the context takes beside the output."""
        keep = most if self.tokens == -1 else self.tokens
        if len(ids) <= keep:
            return ids
        if self.side == "right":
            return ids[:keep]
        head = ids[:1] if keep > 1 and ids[0] == bos else []
        return head + ids[len(ids) - keep + len(head) :]


class Frontend:
    """Turns what clients ask for into Requests. One per process; holds no state of requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        defaults: Mapping[str, Any] | None = None,
        limit_thinking: LimitThinking | None = None,
    ):
        """`defaults`: the model's generation_config.json, or {} to do without. Raises ConfigError if it is bad.

        limit_thinking: what SamplingParams.thinking_token_budget needs; chats over HTTP bring a grammar of their own.
        """
        self._limit_thinking = limit_thinking
        self.tokenizer = tokenizer
        self.info = info
        defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
        self._defaults = {name: defaults[name] for name in DEFAULTS_FROM_MODEL if name in defaults}
        file = "the model's generation_config.json"
        # Of chats that name none.
        self.default_max_tokens = whole(defaults, "max_new_tokens", file=file) if "max_new_tokens" in defaults else None
        eos = token_ids(defaults, "eos_token_id", file=file)
        self.eos_ids = list(dict.fromkeys([*tokenizer.eos_token_ids, *eos]))
        if told := {**self._defaults, **({"max_new_tokens": limit} if (limit := self.default_max_tokens) else {})}:
            shown = ", ".join(f"{name}={value}" for name, value in told.items())
            log.info("defaults from the model's generation_config.json: %s (--generation-config none: without)", shown)
        try:
            self.default_params()
        except RequestError as error:
            raise ConfigError(
                f"the model's generation_config.json is bad: {error.info().message}", param=error.param
            ) from None
        if (count := len(self.eos_ids)) > MAX_EOS_IDS:
            raise ConfigError(f"the model has {count} end-of-sequence tokens; at most {MAX_EOS_IDS} are supported")

    def vocabulary(self) -> Vocabulary:
        """What the engine compiles grammars for."""
        return Vocabulary(self.tokenizer.to_json(), self.eos_ids)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling defaults of the model."""
        return self._defaults

    def default_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults."""
        return self.params()

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams of what a client gave, over the model's defaults, over the built-in ones."""
        return SamplingParams(**{**self._defaults, **given})

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation; make_request takes it with add_special_tokens=False. Raises RequestError."""
        return chat.render(
            self.tokenizer,
            chat.check_messages(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
            tools=tools,
        )

    def make_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
        arrival_s: float | None = None,
        prompt_field: str = "prompt",
        max_tokens_field: str | None = "max_tokens",
        grammar: str | None = None,
        free_after_grammar: bool = False,
        structured_field: str = "structured_outputs",
        truncation: Truncation | None = None,
        suffix: str | None = None,
    ) -> Request:
        """Tokenises, checks and resolves. Raises RequestError naming field, limit and value.

        grammar: of llguidance, known to be good (structured.check_grammar); params.structured_outputs makes one, too.

        free_after_grammar: the grammar is that of the output's beginning, and the rest may be anything.

        suffix: the text after the output, for models that fill in the middle.

        max_tokens_field: what the client called it; None if max_tokens is a default, which yields where room is short.

        arrival_s: time.monotonic() when the client's call came in; the deadline is `timeout_s` seconds later.
        """
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        vocab_size = self.info.vocab_size
        if priority and self.info.scheduling_policy != "priority":
            raise RequestError(
                f"priority needs a server with --scheduling-policy priority, got {priority}", param="priority"
            )
        params.check_vocab(vocab_size)
        if params.structured_outputs:
            if grammar is not None:
                raise RequestError("structured outputs and a forced tool call exclude each other", param="tool_choice")
            grammar = structured.compile_grammar(params.structured_outputs, structured_field)
        bad_words_ids = [ids for word in params.bad_words or () for ids in self._bad_word_ids(word)]
        ends: list[int] = []
        if suffix:
            prompt = self._fill_in_middle.prompt_ids(prompt, suffix, add_special_tokens=add_special_tokens)
            ends = self._fill_in_middle.stop_ids
        elif truncation and prompt:
            room = max(self.info.max_model_len - (params.max_tokens or 1), 1)
            ids = self.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
            prompt = truncation.cut(ids, room, self.tokenizer.bos_token_id if isinstance(prompt, str) else None)
        stop_ids = self._stop_ids(params, ends)
        self._check_something_remains(params, stop_ids, bad_words_ids)
        ids = self.prompt_ids(prompt, add_special_tokens=add_special_tokens, field=prompt_field)
        if (budget := params.thinking_token_budget) is not None:
            if self._limit_thinking is None:
                message = "thinking_token_budget needs a conversation, or a prompt given to LLM or AsyncLLM"
                raise RequestError(message, param="thinking_token_budget")
            end = self.tokenizer.decode(ids[-50:], skip_special_tokens=False)
            grammar, free_after_grammar = self._limit_thinking(
                end, min(budget, self.info.max_model_len), self.eos_ids, grammar
            )
        return Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            max_tokens=self._max_tokens(len(ids), params, max_tokens_field),
            stop_ids=stop_ids,
            bad_words_ids=bad_words_ids,
            seed=params.seed,
            grammar=grammar,
            free_after_grammar=free_after_grammar,
            priority=priority,
            arrival_s=arrival_s,
            deadline_s=arrival_s + timeout_s if timeout_s else None,
        )

    def make_embedding_request(
        self, request_id: str, prompt: str | list[int], pooling: str, dimensions: int | None = None, **options: Any
    ) -> Request:
        """A request for the prompt's pooled hidden states ("last" token's, or the "mean" of all), and for no tokens.

        `options`: those of make_request. Raises RequestError.
        """
        if pooling not in ("last", "mean"):
            raise RequestError(f"pooling must be last or mean, got {short(pooling)}", param="pooling")
        check_limits("dimensions", dimensions, int | None, {"ge": 1, "le": self.info.hidden_size})
        if dimensions not in (None, self.info.hidden_size) and not self.info.matryoshka:
            raise RequestError(
                f"dimensions needs a model that was trained for it (its config says so with is_matryoshka); this one"
                f" gives {self.info.hidden_size} numbers, got {dimensions}",
                param="dimensions",
            )
        request = self.make_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=1), **options)
        request.pooling = pooling
        return request

    def text(self, request: Request, *, shown_ids: frozenset[int] = frozenset()) -> "RequestText":
        """What turns the request's deltas into text. `shown_ids`: special tokens that are text whatever is skipped."""
        return RequestText(self.tokenizer, request, shown_ids)

    def output_builder(self, request: Request, prompt: str | None = None) -> "OutputBuilder":
        return OutputBuilder(self.tokenizer, request, prompt)

    def prompt_ids(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """The prompt as token ids, known to leave room for at least one token of output."""
        if not prompt:
            raise RequestError(f"{field} may not be empty", param=field)
        if isinstance(prompt, str):
            self.check_chars(prompt, field)
            ids = self.encode(prompt, add_special_tokens=add_special_tokens)
            if not ids:
                raise RequestError(f"{field} has no tokens: {short(prompt)}", param=field)
        else:
            ids = prompt
        limit = self.info.max_model_len
        if len(ids) >= limit:
            raise RequestError(
                f"{field} has {len(ids)} tokens; the model's context of {limit} tokens takes a prompt of at most"
                f" {limit - 1}, and at least one token of output",
                param=field,
            )
        if ids is prompt:
            self.check_ids(ids, field)
        return ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a text that begins with the BOS token does not get a second one."""
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self.tokenizer.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises RequestError if a token id is outside the vocabulary."""
        limit = self.info.vocab_size - 1
        if min(ids) < 0 or max(ids) > limit:
            bad = next(i for i in ids if not 0 <= i <= limit)
            raise RequestError(f"{field}: token id {short(bad)} is outside the vocabulary (0 to {limit})", param=field)

    @cached_property
    def _max_token_bytes(self) -> int:
        """The most bytes of text that one token can stand for."""
        return max(len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size))

    def check_chars(self, text: str, field: str) -> None:
        """Refuses text that cannot fit whatever its tokens, without the work of tokenising it."""
        limit = self.info.max_model_len
        if len(text) > 16 * limit and len(text) > limit * self._max_token_bytes:
            raise RequestError(
                f"{field} has {len(text)} characters, which is too long for the model's context of {limit} tokens"
                f" (at most {limit * self._max_token_bytes} characters)",
                param=field,
            )

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams, field: str | None) -> int:
        room = self.info.max_model_len - prompt_tokens
        if field is None and params.max_tokens is not None:
            return min(params.max_tokens, room)
        if params.max_tokens is None:
            if params.min_tokens > room:
                raise RequestError(
                    f"min_tokens must be at most {room} after a prompt of {prompt_tokens} tokens (context"
                    f" {self.info.max_model_len}), got {short(params.min_tokens)}",
                    param="min_tokens",
                )
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"{field} must be at most {room}: the model's context is {self.info.max_model_len} tokens and the"
                f" prompt has {prompt_tokens}; got {short(params.max_tokens)}",
                param=field,
            )
        return params.max_tokens

    @cached_property
    def _fill_in_middle(self) -> FillInMiddle:
        return FillInMiddle(self.tokenizer)

    def _stop_ids(self, params: SamplingParams, ends: list[int]) -> list[int]:
        """`ends`: further tokens that end the output as EOS does."""
        own = () if params.ignore_eos else (*self.eos_ids, *ends)
        ids = list(dict.fromkeys([*own, *(params.stop_token_ids or ())]))
        if len(ids) > MAX_STOP_IDS:
            room = MAX_STOP_IDS - len(ids) + len(params.stop_token_ids or ())
            raise RequestError(
                f"stop_token_ids takes at most {room} entries with this model, which has {len(own)} ids of its own that"
                f" end the output, got {len(params.stop_token_ids or ())}",
                param="stop_token_ids",
            )
        return ids

    @staticmethod
    def _check_something_remains(params: SamplingParams, stop_ids: list[int], bad_words_ids: list[list[int]]) -> None:
        """Raises RequestError if no token could ever be drawn."""
        if params.allowed_token_ids is None:
            return
        forbidden = {ids[0] for ids in bad_words_ids if len(ids) == 1}
        if params.min_tokens:
            forbidden |= set(stop_ids)
        if forbidden.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids leaves nothing: each of them is a bad word, or ends the output before min_tokens"
                f" ({params.min_tokens}); got {short(params.allowed_token_ids)}",
                param="allowed_token_ids",
            )

    def _bad_word_ids(self, word: str) -> list[list[int]]:
        """The word's tokens at the beginning of a text and after a space."""
        bare = word.lstrip() or word
        variants: list[list[int]] = []
        for text in (bare, " " + bare):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: {short(word)} has {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are supported",
                    param="bad_words",
                )
            if ids and ids not in variants:
                variants.append(ids)
        if not variants:
            raise RequestError(f"bad_words: {short(word)} has no tokens", param="bad_words")
        return variants


class RequestText:
    """The text of one request's n sequences as their tokens come."""

    def __init__(self, tokenizer: Tokenizer, request: Request, shown_ids: frozenset[int] = frozenset()):
        self.request = request
        self.tokenizer = tokenizer
        params = request.params
        stops = StopMatcher(params.stop) if params.stop else None
        self.sequences = [
            SequenceText(i, tokenizer, params, stops, request.prompt_token_ids, request.stop_ids, shown_ids)
            for i in range(params.n)
        ]
        self._unfinished = params.n
        self.cached_tokens = 0
        self.queue_s = 0.0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._embedding = b""

    @property
    def finished(self) -> bool:
        return not self._unfinished

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, in all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    def push(self, delta: SequenceDelta) -> TextDelta:
        """What may be shown now, false if nothing. If `stopped`, cancel that sequence at the engine.

        Raises the request's error: EngineError, DeadlineExceeded, or what the engine refused it with.
        """
        if delta.error:
            raise delta.error.exception()
        if delta.finish_reason == "timeout":
            raise DeadlineExceeded("the request did not finish within the server's time limit (--request-timeout)")
        if delta.finish_reason == "error":
            raise EngineError("the engine could not finish this request")
        if delta.cached_tokens or delta.queue_s:  # which come with the first token
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
            self.queue_s = max(self.queue_s, delta.queue_s)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.embedding is not None:
            self._embedding = delta.embedding
        if delta.index < 0:
            return TextDelta(delta.index)
        shown = self.sequences[delta.index].push(delta)
        self._unfinished -= shown.finish_reason is not None
        return shown

    def embedding(self, dimensions: int | None = None) -> np.ndarray:
        """The embedding f32[dimensions], of length 1, once the request is finished. All dimensions: None.

        Raises RequestAborted if the request was.
        """
        if not self._embedding:
            raise RequestAborted("the request was aborted before it had an embedding")
        vector = np.frombuffer(self._embedding, "<f4")[:dimensions]
        return vector / np.maximum(np.linalg.norm(vector), 1e-12)

    def prompt_text(self) -> tuple[str, list[int]]:
        """The prompt as text and where each token begins in it, without a half character at the end."""
        skip = self.request.params.skip_special_tokens
        return prompt_text(self.tokenizer, self.request.prompt_token_ids, skip_special_tokens=skip)


class OutputBuilder(RequestText):
    """Deltas of one request -> its RequestOutput, which grows with them."""

    def __init__(self, tokenizer: Tokenizer, request: Request, prompt: str | None = None):
        super().__init__(tokenizer, request)
        with_logprobs = request.params.logprobs is not None
        self._stats = RequestStats(request.arrival_s)
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    i, logprobs=[] if with_logprobs else None, cumulative_logprob=0.0 if with_logprobs else None
                )
                for i in range(request.params.n)
            ],
            metrics=self._stats,
        )

    def push(self, delta: SequenceDelta) -> TextDelta:
        shown = super().push(delta)
        self.output.num_cached_tokens = self.cached_tokens
        self._stats.queue_s = self.queue_s
        if delta.token_ids and self._stats.first_token_s is None:
            self._stats.first_token_s = time.monotonic()
        params = self.request.params
        if delta.prompt_logprobs is not None and params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                entry and logprob_dict(self.tokenizer, entry, params.prompt_logprobs) for entry in delta.prompt_logprobs
            ]
        if shown:
            self._add(shown)
        return shown

    def _add(self, shown: TextDelta) -> None:
        output = self.output.outputs[shown.index]
        output.text += shown.text
        output.token_ids += shown.token_ids
        if output.logprobs is not None:
            count = self.request.params.logprobs or 0
            output.logprobs += [logprob_dict(self.tokenizer, entry, count) for entry in shown.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e.logprob for e in shown.logprobs)
        self._end(output, shown.finish_reason, shown.stop_reason)

    def embedding_output(self, dimensions: int | None = None) -> EmbeddingRequestOutput:
        """The output of an embedding request; see embedding()."""
        vector = EmbeddingOutput(self.embedding(dimensions).tolist())
        output = self.output
        return EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens)

    def fail(self, delta: SequenceDelta) -> None:
        """Ends one sequence, or all of a refused request, with the delta's error; the rest of a list goes on."""
        for output in self.output.outputs if delta.index < 0 else [self.output.outputs[delta.index]]:
            self._end(output, delta.finish_reason, None)

    def _end(self, output: CompletionOutput, finish_reason: str | None, stop_reason: int | str | None) -> None:
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        self.output.finished = all(one.finished() for one in self.output.outputs)
        if self.output.finished:
            self._stats.finished_s = time.monotonic()

    def news(self, shown: TextDelta) -> RequestOutput | None:
        """What a stream yields after push() returned `shown`, by output_kind; None: nothing. It will not change."""
        kind = self.request.params.output_kind
        if not shown or kind is RequestOutputKind.FINAL_ONLY and not self.output.finished:
            return None
        if kind is RequestOutputKind.DELTA:
            one = self.output.outputs[shown.index]
            outputs = [replace(_since(one, len(one.token_ids) - len(shown.token_ids)), text=shown.text)]
        else:
            outputs = [_since(one, 0) for one in self.output.outputs]
        return replace(self.output, outputs=outputs, metrics=replace(self._stats))


def _since(one: CompletionOutput, start: int) -> CompletionOutput:
    """A copy with the tokens from number `start` on: the original grows."""
    logprobs = None if one.logprobs is None else one.logprobs[start:]
    return replace(one, token_ids=one.token_ids[start:], logprobs=logprobs)


def as_prompt(prompt: Prompt) -> str | list[int]:
    """A text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. Raises RequestError."""
    if isinstance(prompt, Mapping):
        known = [k for k in ("prompt_token_ids", "prompt") if k in prompt]
        if len(prompt) != 1 or not known:
            raise RequestError(
                f"a prompt dict holds exactly one of prompt, prompt_token_ids; got {sorted(prompt)}", param="prompt"
            )
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, bytes | bytearray):  # which are integers to Python
            raise TypeError
        return [operator.index(token_id) for token_id in cast("Sequence[Any]", prompt)]  # numpy's integers too
    except TypeError:
        raise RequestError(f"a prompt must be a text or token ids, got {short(prompt)}", param="prompt") from None


def logprob_dict(tokenizer: Tokenizer, entry: TokenLogprobs, count: int) -> dict[int, Logprob]:
    """Token id -> Logprob: the token itself first, then the `count` likeliest."""
    chosen = {entry.token_id: Logprob(entry.logprob, entry.rank, token_text(tokenizer.token_bytes(entry.token_id)))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids[:count], entry.top_logprobs, strict=False), 1):
        if token_id not in chosen:
            chosen[token_id] = Logprob(logprob, rank, token_text(tokenizer.token_bytes(token_id)))
    return chosen


def finite(logprob: float) -> float:
    """A logprob as JSON can say it."""
    return max(logprob, MIN_LOGPROB) if not math.isnan(logprob) else MIN_LOGPROB
