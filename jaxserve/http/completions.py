"""POST /v1/completions."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from jaxserve.detokenize import TextDelta
from jaxserve.errors import RequestError
from jaxserve.frontend import RequestText
from jaxserve.http.generate import LONG_TEXT_CHARS, Generation, Shown, drain, off_loop, stream_answer, usage
from jaxserve.http.health import FINGERPRINT
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.operation import operation
from jaxserve.http.replies import Completion, CompletionChoice, LegacyLogprobs
from jaxserve.http.request_id import CALL_ID, call_names
from jaxserve.http.schema import COMPLETION_MAX_TOKENS, MAX_PROMPTS, CompletionBody
from jaxserve.http.sse import event
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.request import Request, SamplingParams


@operation(CompletionBody, reply=Completion, event=Completion)
async def completions(request: web.Request) -> web.StreamResponse:
    """What comes after a text, or after several."""
    server, arrival_s = request.app[SERVER], time.monotonic()
    body, sampling = server.parse(CompletionBody, await read_object(request))
    score_only = body.max_tokens == 0
    params = make_params(server, body, sampling, score_only)
    prompts = body.prompts()
    if len(prompts) * params.n > MAX_PROMPTS:
        got = f"{len(prompts)} prompts x {params.n}"
        raise RequestError(f"prompt and n: at most {MAX_PROMPTS} answers in one call, got {got}", param="n")
    call_id = request[CALL_ID] = f"cmpl-{uuid.uuid4().hex}"
    field = "max_tokens" if body.max_tokens is not None else None
    size = LONG_TEXT_CHARS if params.structured_outputs else request[BODY_BYTES]  # a grammar takes time to check
    requests = await off_loop(size, _make_requests, server, call_id, body, params, prompts, field, arrival_s)
    texts = [server.frontend.text(each) for each in requests]
    echoed = prompts if body.truncate_prompt_tokens is None else [each.prompt_token_ids for each in requests]
    answer = CompletionAnswer(server, call_id, body, texts, echoed, score_only, sampling)
    generation = Generation(server, texts, call_names(request))
    if body.stream:
        return await stream_answer(request, generation, answer.chunk, answer.last)
    await drain(generation)
    return web.Response(body=msgspec.json.encode(answer.whole()), content_type="application/json")


def make_params(
    server: Server, body: CompletionBody, sampling: dict[str, Any], score_only: bool = False
) -> SamplingParams:
    """The sampling params of the call. `score_only` (echo without output) generates one token that is not shown."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = {**sampling, "max_tokens": 1 if score_only else max_tokens}
    n = sampling.get("n", 1)
    if body.best_of is not None and body.best_of != n:
        sampling |= _more_candidates(server, body.best_of, n, sampling, score_only)
    params = server.frontend.params(**sampling)
    if body.echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
    return params


def _more_candidates(
    server: Server, best_of: int, n: int, sampling: dict[str, Any], score_only: bool
) -> dict[str, Any]:
    """Sampling fields with which `best_of` sequences are generated, and can be ranked."""
    if best_of < n:
        raise RequestError(f"best_of must be at least n ({n}), got {best_of}", param="best_of")
    temperature = {name: sampling[name] for name in ("temperature",) if name in sampling}
    if score_only or server.frontend.params(**temperature).greedy:
        why = "max_tokens=0" if score_only else "greedy sampling (temperature 0)"
        raise RequestError(f"best_of must be n with {why}, got {best_of}", param="best_of")
    return {"n": best_of, "logprobs": sampling.get("logprobs", 0)}


def _make_requests(
    server: Server,
    call_id: str,
    body: CompletionBody,
    params: SamplingParams,
    prompts: list[str | list[int]],
    max_tokens_field: str | None,
    arrival_s: float,
) -> list[Request]:
    return [
        server.frontend.make_request(
            f"{call_id}-{i}",
            prompt,
            params,
            priority=body.priority,
            add_special_tokens=body.add_special_tokens,
            timeout_s=server.config.request_timeout,
            arrival_s=arrival_s,
            prompt_field="prompt" if len(prompts) == 1 else f"prompt.{i}",
            max_tokens_field=max_tokens_field,
            structured_field=body.structured_field,
            truncation=body.truncation(server.frontend.info.max_model_len),
            suffix=body.suffix,
        )
        for i, prompt in enumerate(prompts)
    ]


class CompletionAnswer:
    """Writes the answer of one call, whole or in chunks."""

    def __init__(
        self,
        server: Server,
        call_id: str,
        body: CompletionBody,
        texts: list[RequestText],
        prompts: Sequence[str | list[int]],
        score_only: bool,
        asked: dict[str, Any],
    ):
        """`asked`: the sampling fields that the client gave."""
        params = texts[0].request.params
        self._body, self._texts, self._prompts = body, texts, prompts
        self._score_only, self._usage_so_far = score_only, body.continuous_usage
        self._n = asked.get("n", 1)
        tokenizer, as_ids = server.frontend.tokenizer, body.return_tokens_as_token_ids
        self._shapes = LogprobShapes(tokenizer, params.logprobs or 0, as_ids=as_ids)
        self._with_logprobs = "logprobs" in asked
        self._prompt_shapes = None
        if "prompt_logprobs" in asked:
            self._prompt_shapes = LogprobShapes(tokenizer, params.prompt_logprobs or 0)
        self._id, self._model = call_id, server.model_name(body.model)
        self._created = int(time.time())
        self._echoes: dict[int, tuple[str, list[int]]] = {}  # prompt -> its text and token offsets
        self._echoed_logprobs: dict[int, LegacyLogprobs] = {}
        self._begun: set[tuple[int, int]] = set()

    def whole(self) -> Completion:
        choices = [
            self._choice(i, delta, first=True) for i, text in enumerate(self._texts) for delta in self._best(text)
        ]
        if self._prompt_shapes:
            of_prompts = [self._prompt_shapes.prompt(text.prompt_logprobs or []) for text in self._texts]
            for choice in choices:
                choice.prompt_logprobs = of_prompts[choice.index // self._n]
        return self._completion(choices, with_usage=True, with_fingerprint=True)

    def _best(self, text: RequestText) -> list[TextDelta]:
        """The n sequences to send, all there are or the likeliest, numbered in this order."""
        deltas = [sequence.whole for sequence in text.sequences]
        if len(deltas) == self._n:
            return deltas
        deltas.sort(key=_mean_logprob, reverse=True)
        return [replace(delta, index=rank) for rank, delta in enumerate(deltas[: self._n])]

    def chunk(self, shown: Shown) -> bytes:
        key = (shown.prompt_index, shown.delta.index)
        choice = self._choice(shown.prompt_index, shown.delta, first=key not in self._begun)
        self._begun.add(key)
        return event(self._completion([choice], with_usage=self._usage_so_far))

    def last(self) -> bytes:
        if not self._body.include_usage:
            return b""
        return event(self._completion([], with_usage=True, with_fingerprint=True))

    def _completion(
        self, choices: list[CompletionChoice], *, with_usage: bool, with_fingerprint: bool = False
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage(self._texts, hidden_tokens=self._score_only) if with_usage else UNSET,
            system_fingerprint=FINGERPRINT if with_fingerprint else UNSET,
        )

    def _choice(self, prompt_index: int, delta: TextDelta, *, first: bool) -> CompletionChoice:
        """One choice, or a chunk of one; `first`: the echo of the prompt comes before it."""
        if self._score_only:
            delta = TextDelta(delta.index, finish_reason="length" if delta.finish_reason != "abort" else "abort")
        echo = self._echo(prompt_index) if self._body.echo else ("", [])
        choice = CompletionChoice(
            index=prompt_index * self._n + delta.index,
            text=echo[0] + delta.text if first else delta.text,
            logprobs=self._logprobs(prompt_index, delta, echo, first) if self._with_logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = self._texts[prompt_index].request.prompt_token_ids
        return choice

    def _logprobs(
        self, prompt_index: int, delta: TextDelta, echo: tuple[str, list[int]], first: bool
    ) -> LegacyLogprobs:
        text, offsets = echo
        logprobs = self._shapes.legacy(delta, base=len(text))
        if not (first and self._body.echo):
            return logprobs
        if prompt_index not in self._echoed_logprobs:
            source = self._texts[prompt_index]
            ids = source.request.prompt_token_ids
            entries = source.prompt_logprobs or [None] * len(ids)  # none of a request that ended before it ran
            self._echoed_logprobs[prompt_index] = self._shapes.legacy_prompt(ids, entries, offsets)
        return self._echoed_logprobs[prompt_index].before(logprobs)

    def _echo(self, prompt_index: int) -> tuple[str, list[int]]:
        """The prompt as it is echoed, and where its tokens begin: a text as it was sent, token ids as they read."""
        if prompt_index not in self._echoes:
            text, offsets = self._texts[prompt_index].prompt_text()
            sent = self._prompts[prompt_index]
            if isinstance(sent, str):
                extra = len(text) - len(sent) if text.endswith(sent) else 0  # a space that the tokenizer put before it
                text, offsets = sent, [min(max(offset - extra, 0), len(sent)) for offset in offsets]
            self._echoes[prompt_index] = text, offsets
        return self._echoes[prompt_index]


def _mean_logprob(delta: TextDelta) -> float:
    """The logprob per token; of no tokens: the worst there is."""
    values = [entry.logprob for entry in delta.logprobs]
    return sum(values) / len(values) if values else -math.inf
