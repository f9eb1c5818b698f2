"""POST /v1/chat/completions."""

import time
import uuid
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from jaxserve.detokenize import TextDelta
from jaxserve.frontend import RequestText
from jaxserve.http.conversation import Conversation, MessageText, Piece, prepare
from jaxserve.http.generate import LONG_TEXT_CHARS, Generation, Shown, drain, off_loop, stream_answer, usage
from jaxserve.http.health import FINGERPRINT
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.operation import operation
from jaxserve.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    ToolCall,
    Usage,
)
from jaxserve.http.request_id import CALL_ID, call_names
from jaxserve.http.schema import ChatBody
from jaxserve.http.sse import event
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.parsers import MessageDelta, ToolCallDelta
from jaxserve.request import Request, SamplingParams
from jaxserve.structured import compile_grammar


@operation(ChatBody, reply=ChatCompletion, event=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """The next message of a conversation."""
    server, arrival_s = request.app[SERVER], time.monotonic()
    body, sampling = server.parse(ChatBody, await read_object(request))
    params = make_params(server, body, sampling)
    call_id = request[CALL_ID] = f"chatcmpl-{uuid.uuid4().hex}"
    makes_grammar = params.structured_outputs or body.tools  # which takes time to check
    size = LONG_TEXT_CHARS if makes_grammar else request[BODY_BYTES]
    field = _max_tokens_field(body)
    made = await off_loop(size, _make_request, server, call_id, body, params, field, arrival_s)
    text = server.frontend.text(made.request, shown_ids=made.conversation.shown_ids)
    answer = ChatAnswer(server, call_id, body, text, made.conversation, "prompt_logprobs" in sampling)
    generation = Generation(server, [text], call_names(request))
    if body.stream:
        return await stream_answer(request, generation, answer.chunks, answer.last)
    await drain(generation)
    return web.Response(body=msgspec.json.encode(answer.whole()), content_type="application/json")


def make_params(server: Server, body: ChatBody, sampling: dict[str, Any]) -> SamplingParams:
    """The sampling params of the call: no max_tokens means the model's default, or what the context takes."""
    max_tokens = body.max_completion_tokens or body.max_tokens or server.frontend.default_max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return server.frontend.params(**sampling, max_tokens=max_tokens, logprobs=logprobs)


def _max_tokens_field(body: ChatBody) -> str | None:
    given = (name for name in ("max_completion_tokens", "max_tokens") if getattr(body, name) is not None)
    return next(given, None)


class Made(NamedTuple):
    request: Request
    conversation: Conversation


def _make_request(
    server: Server, call_id: str, body: ChatBody, params: SamplingParams, max_tokens_field: str | None, arrival_s: float
) -> Made:
    wanted = params.structured_outputs
    conversation = prepare(
        server,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        answer_grammar=compile_grammar(wanted, body.structured_field) if wanted else None,
    )
    request = server.frontend.make_request(
        call_id,
        conversation.prompt,
        replace(params, structured_outputs=None) if wanted else params,  # it is part of the grammar now
        priority=body.priority,
        add_special_tokens=body.add_special_tokens,
        timeout_s=server.config.request_timeout,
        arrival_s=arrival_s,
        prompt_field="messages",
        max_tokens_field=max_tokens_field,
        grammar=conversation.grammar,
        free_after_grammar=conversation.free_after_grammar,
        truncation=body.truncation(server.frontend.info.max_model_len),
    )
    return Made(request, conversation)


class ChatAnswer:
    """Writes the answer of one call, whole or in chunks."""

    def __init__(
        self,
        server: Server,
        call_id: str,
        body: ChatBody,
        text: RequestText,
        conversation: Conversation,
        with_prompt_logprobs: bool,
    ):
        self._body, self._text = body, text
        self._messages = [
            MessageText(conversation.parser(), include_reasoning=body.include_reasoning) for _ in text.sequences
        ]
        self._reasons = server.formats.reasons
        self._usage_so_far = body.continuous_usage
        tokenizer, as_ids = server.frontend.tokenizer, body.return_tokens_as_token_ids
        self._shapes = LogprobShapes(tokenizer, body.top_logprobs or 0, as_ids=as_ids)
        self._prompt_shapes = None
        if with_prompt_logprobs:
            self._prompt_shapes = LogprobShapes(tokenizer, text.request.params.prompt_logprobs or 0)
        self._id, self._model = call_id, server.model_name(body.model)
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self) -> ChatCompletion:
        choices = [
            self._choice(message.push(sequence.whole))
            for message, sequence in zip(self._messages, self._text.sequences, strict=True)
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            system_fingerprint=FINGERPRINT,
            prompt_token_ids=self._text.request.prompt_token_ids if self._body.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_shapes.prompt(self._text.prompt_logprobs or [])
            if self._prompt_shapes
            else UNSET,
        )

    def _choice(self, piece: Piece) -> ChatChoice:
        said, tokens = piece.message, piece.tokens
        calls = [_tool_call(call) for call in said.tool_calls]
        message = ChatMessage(
            content=said.content or (None if calls or said.reasoning else ""),
            reasoning=said.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        choice = ChatChoice(tokens.index, message, self._logprobs(tokens), tokens.finish_reason, tokens.stop_reason)
        if self._body.return_token_ids:
            choice.token_ids = tokens.token_ids
        return choice

    def chunks(self, shown: Shown) -> bytes:
        """The role (once per choice), then what is said, then the reason of the end (each if there is one)."""
        piece, events = self._messages[shown.delta.index].push(shown.delta), b""
        tokens = piece.tokens
        if tokens.index not in self._begun:
            first = self._chunk([ChatChunkChoice(tokens.index, ChatDelta(role="assistant", content=""))])
            if self._body.return_token_ids and not self._begun:
                first.prompt_token_ids = self._text.request.prompt_token_ids
            self._begun.add(tokens.index)
            events = event(first)
        deltas = _deltas(piece.message)
        for i, delta in enumerate(deltas):
            choice = ChatChunkChoice(tokens.index, delta)
            events += event(self._chunk([self._with_tokens(choice, tokens) if i == 0 else choice]))
        if tokens.finish_reason:
            end = ChatChunkChoice(tokens.index, ChatDelta())
            if not deltas:
                end = self._with_tokens(end, tokens)
            end.finish_reason, end.stop_reason = tokens.finish_reason, tokens.stop_reason
            events += event(self._chunk([end]))
        return events

    def last(self) -> bytes:
        if not self._body.include_usage:
            return b""
        last = self._chunk([])
        last.usage, last.system_fingerprint = self._usage(), FINGERPRINT
        return event(last)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)
        if self._usage_so_far:
            chunk.usage = self._usage()
        return chunk

    def _usage(self) -> Usage:
        reasoning = sum(message.reasoning_tokens for message in self._messages) if self._reasons else None
        return usage([self._text], reasoning_tokens=reasoning)

    def _with_tokens(self, choice: ChatChunkChoice, tokens: TextDelta) -> ChatChunkChoice:
        choice.logprobs = self._logprobs(tokens)
        if self._body.return_token_ids:
            choice.token_ids = tokens.token_ids
        return choice

    def _logprobs(self, tokens: TextDelta) -> ChatLogprobs | None:
        return self._shapes.chat(tokens) if self._body.logprobs else None


def _deltas(said: MessageDelta) -> list[ChatDelta]:
    """One thing each: reasoning, text, or a piece of a call."""
    deltas = [ChatDelta(reasoning=said.reasoning)] if said.reasoning else []
    if said.content:
        deltas.append(ChatDelta(content=said.content))
    for call in said.tool_calls:
        deltas.append(ChatDelta(tool_calls=[_tool_call(call, index=call.index)]))
    return deltas


def _tool_call(call: ToolCallDelta, index: int | UnsetType = UNSET) -> ToolCall:
    function = FunctionCall(name=call.name or UNSET, arguments=call.arguments)
    return ToolCall(index=index, id=call.id or UNSET, type="function" if call.id else UNSET, function=function)
