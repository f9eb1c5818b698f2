"""POST /v1/chat/completions."""

import time
import uuid
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from jaxserve import chat
from jaxserve.detokenize import TextDelta
from jaxserve.errors import RequestError
from jaxserve.frontend import RequestText
from jaxserve.http.generate import LONG_TEXT_CHARS, Generation, Shown, drain, off_loop, stream_answer, usage
from jaxserve.http.health import FINGERPRINT
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from jaxserve.http.request_id import CALL_ID
from jaxserve.http.schema import ChatBody
from jaxserve.http.sse import event
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.request import Request, SamplingParams


async def chat_completions(request: web.Request) -> web.StreamResponse:
    server, arrival_s = request.app[SERVER], time.monotonic()
    body, sampling = server.parse(ChatBody, await read_object(request))
    params = make_params(server, body, sampling)
    call_id = request[CALL_ID] = f"chatcmpl-{uuid.uuid4().hex}"
    size = LONG_TEXT_CHARS if params.structured_outputs else request[BODY_BYTES]
    field = _max_tokens_field(body, sampling)
    text = server.frontend.text(await off_loop(size, _make_request, server, call_id, body, params, field, arrival_s))
    answer = ChatAnswer(server, call_id, body, text, "prompt_logprobs" in sampling)
    generation = Generation(server, [text])
    if body.stream:
        return await stream_answer(request, generation, answer.chunks, answer.last)
    await drain(generation)
    return web.Response(body=msgspec.json.encode(answer.whole()), content_type="application/json")


def make_params(server: Server, body: ChatBody, sampling: dict[str, Any]) -> SamplingParams:
    """The sampling params of the call: no max_tokens means the model's default, or what the context takes."""
    if body.stream and "prompt_logprobs" in sampling:
        raise RequestError("prompt_logprobs may not be combined with stream=true", param="prompt_logprobs")
    if body.max_completion_tokens is not None:
        sampling = {**sampling, "max_tokens": body.max_completion_tokens}
    elif "max_tokens" not in sampling:
        sampling = {**sampling, "max_tokens": server.frontend.default_max_tokens}
    return server.frontend.params(**sampling, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _max_tokens_field(body: ChatBody, sampling: dict[str, Any]) -> str | None:
    if body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens" if sampling.get("max_tokens") is not None else None


def _make_request(
    server: Server, call_id: str, body: ChatBody, params: SamplingParams, max_tokens_field: str | None, arrival_s: float
) -> Request:
    messages = chat.check_messages(body.messages, ignore_unknown=server.config.ignore_unknown_fields)
    prompt = chat.render(
        server.frontend.tokenizer,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    return server.frontend.make_request(
        call_id,
        prompt,
        params,
        priority=body.priority,
        add_special_tokens=body.add_special_tokens,
        timeout_s=server.config.request_timeout,
        arrival_s=arrival_s,
        prompt_field="messages",
        max_tokens_field=max_tokens_field,
        structured_field=body.structured_field,
    )


class ChatAnswer:
    """Writes the answer of one call, whole or in chunks."""

    def __init__(self, server: Server, call_id: str, body: ChatBody, text: RequestText, with_prompt_logprobs: bool):
        self._body, self._text = body, text
        tokenizer, as_ids = server.frontend.tokenizer, body.return_tokens_as_token_ids
        self._shapes = LogprobShapes(tokenizer, body.top_logprobs or 0, as_ids=as_ids)
        self._prompt_shapes = None
        if with_prompt_logprobs:
            self._prompt_shapes = LogprobShapes(tokenizer, text.request.params.prompt_logprobs or 0)
        self._id, self._model = call_id, server.model_name(body.model)
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self) -> ChatCompletion:
        choices = []
        for sequence in self._text.sequences:
            delta = sequence.whole
            choice = ChatChoice(delta.index, ChatMessage(content=delta.text), self._logprobs(delta))
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = delta.token_ids
            choices.append(choice)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage([self._text]),
            system_fingerprint=FINGERPRINT,
            prompt_token_ids=self._text.request.prompt_token_ids if self._body.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_shapes.prompt(self._text.prompt_logprobs or [])
            if self._prompt_shapes
            else UNSET,
        )

    def chunks(self, shown: Shown) -> bytes:
        """The role (once per choice), then the text, then the reason of the end (each if there is one)."""
        delta, events = shown.delta, b""
        if delta.index not in self._begun:
            first = self._chunk([ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))])
            if self._body.return_token_ids and not self._begun:
                first.prompt_token_ids = self._text.request.prompt_token_ids
            self._begun.add(delta.index)
            events = event(first)
        if delta.text:
            content = ChatChunkChoice(delta.index, ChatDelta(content=delta.text))
            events += event(self._chunk([self._with_tokens(content, delta)]))
        if delta.finish_reason:
            end = ChatChunkChoice(delta.index, ChatDelta())
            if not delta.text:
                end = self._with_tokens(end, delta)
            end.finish_reason, end.stop_reason = delta.finish_reason, delta.stop_reason
            events += event(self._chunk([end]))
        return events

    def last(self) -> bytes:
        if not self._body.include_usage:
            return b""
        last = self._chunk([])
        last.usage, last.system_fingerprint = usage([self._text]), FINGERPRINT
        return event(last)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)
        if self._body.continuous_usage:
            chunk.usage = usage([self._text])
        return chunk

    def _with_tokens(self, choice: ChatChunkChoice, delta: TextDelta) -> ChatChunkChoice:
        choice.logprobs = self._logprobs(delta)
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        return self._shapes.chat(delta) if self._body.logprobs else None
