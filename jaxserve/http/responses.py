"""/v1/responses: OpenAI's Responses API. A response is generated as a chat is, and kept for later calls."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import ClientConnectionError, web

from jaxserve.errors import DeadlineExceeded, EngineDead, QueueFull, RequestError
from jaxserve.http.auth import OWNER
from jaxserve.http.conversation import Conversation, prepare
from jaxserve.http.errors import describe
from jaxserve.http.generate import LONG_TEXT_CHARS, Generation, off_loop
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.operation import operation
from jaxserve.http.request_id import CALL_ID
from jaxserve.http.response_events import ResponseWriter, encode
from jaxserve.http.response_items import Item, check_input, messages_of
from jaxserve.http.response_replies import AnyEvent, DeletedResponse, Event, InputItems, InputTokens, Response
from jaxserve.http.response_store import EVENTS_TTL_S, EventLog, StoredResponse
from jaxserve.http.responses_schema import InputTokensBody, ResponseBody, renamed
from jaxserve.http.sse import EventStream
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.request import Request, SamplingParams, short
from jaxserve.structured import compile_grammar, from_request

NOBODY = b""  # owner of what is made without an API key
MAX_PAGE, DEFAULT_PAGE = 100, 20  # items of one page of input_items
MAX_EVENT = 2**31
EVENTS_QUERY = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": MAX_EVENT},
    "include_obfuscation": {"enum": [False]},
}
PAGE_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}


# ------------------------------------------------------------------------------------------------------------ create


@operation(ResponseBody, reply=Response, event=AnyEvent, errors=(QueueFull, EngineDead, DeadlineExceeded))
async def create_response(request: web.Request) -> web.StreamResponse:
    """What the model says to a text, or to the items of a conversation; kept for later calls."""
    server, arrival_s = request.app[SERVER], time.monotonic()
    body, sampling = server.parse(ResponseBody, await read_object(request))
    keep = _check_store(server, body)
    if (number := server.peers.keeper(request, body.previous_response_id)) is not None:
        return await server.peers.pass_on(request, number)
    params = make_params(server, body, sampling)
    before = _previous(server, body, request.get(OWNER, NOBODY))
    response_id = request[CALL_ID] = server.peers.new_response_id()
    size_chars = (before.size_chars if before else 0) + request[BODY_BYTES]
    work = max(size_chars, LONG_TEXT_CHARS if body.may_have_grammar else 0)  # checking a grammar takes time
    made = await off_loop(work, _prepare, server, response_id, body, params, before, arrival_s)
    response = _response(server, response_id, body, params, keep)
    call = ResponseCall(server, body, response, made)
    stored = StoredResponse(response, request.get(OWNER, NOBODY), made.items, size_chars)
    if body.background:
        return await _run_in_background(request, call, stored, stream=body.stream)
    if body.stream:
        return await _stream(request, call, stored)
    async with call.generation as generation:
        async for batch in generation.batches():
            for shown in batch:
                call.writer.push(shown.delta)
    if keep:
        server.responses.add_finished(stored)
    return _json(response)


class Made(NamedTuple):
    """What a response is generated from."""

    items: list[Item]
    conversation: Conversation
    request: Request


class ResponseCall:
    """What generates and what writes one response."""

    def __init__(self, server: Server, body: ResponseBody, response: Response, made: Made):
        text = server.frontend.text(made.request, shown_ids=made.conversation.shown_ids)
        shapes = LogprobShapes(server.frontend.tokenizer, body.top_logprobs) if body.with_logprobs else None
        self.server = server
        self.generation = Generation(server, [text], [response.id])
        self.writer = ResponseWriter(response, text, made.conversation.parser(), shapes)


def _check_store(server: Server, body: ResponseBody) -> bool:
    """Whether the response is to be kept. Raises RequestError for what needs that and cannot have it."""
    if not server.responses.size:
        for name in ("store", "background", "previous_response_id"):
            if value := getattr(body, name):
                raise RequestError(
                    f"{name} needs a server that keeps responses (--response-store-size), got {short(value)}",
                    param=name,
                )
        return False
    return body.store is not False


def make_params(server: Server, body: ResponseBody, sampling: Mapping[str, Any]) -> SamplingParams:
    """The sampling params of the call: no max_output_tokens means the model's default, or what the context takes."""
    max_tokens = body.max_output_tokens or server.frontend.default_max_tokens
    logprobs = body.top_logprobs if body.with_logprobs else None
    try:
        return server.frontend.params(**sampling, max_tokens=max_tokens, logprobs=logprobs)
    except RequestError as error:
        raise renamed(error) from None


def _previous(server: Server, body: InputTokensBody, owner: bytes) -> StoredResponse | None:
    """What the conversation goes on from. Raises NotFound; RequestError if it is not there yet."""
    if body.previous_response_id is None:
        return None
    stored = server.responses.get(body.previous_response_id, owner, param="previous_response_id")
    if stored.running:
        raise RequestError(
            f"previous_response_id: {short(body.previous_response_id)} is still {stored.response.status}",
            param="previous_response_id",
        )
    return stored


def _prepare(
    server: Server,
    response_id: str,
    body: ResponseBody,
    params: SamplingParams,
    before: StoredResponse | None,
    arrival_s: float,
) -> Made:
    items = _items(server, body, before)
    try:
        conversation, token_ids = _converse(server, body, items, body.structured_outputs, body.max_output_tokens or 1)
        request = server.frontend.make_request(
            response_id,
            token_ids or conversation.prompt,
            params,
            priority=body.priority,
            add_special_tokens=False,
            timeout_s=server.config.request_timeout,
            arrival_s=arrival_s,
            prompt_field="input",
            max_tokens_field="max_output_tokens" if body.max_output_tokens else None,
            grammar=conversation.grammar,
        )
    except RequestError as error:
        raise renamed(error) from None
    return Made(items, conversation, request)


def _items(server: Server, body: InputTokensBody, before: StoredResponse | None) -> list[Item]:
    """All that the response is generated from: what came before, and the input."""
    earlier = [*before.items, *msgspec.to_builtins(before.response.output)] if before else []
    return [*earlier, *check_input(body.input, earlier, ignore_unknown=server.config.ignore_unknown_fields)]


# ------------------------------------------------------------------------------------------------------------ prompt


def _converse(
    server: Server,
    body: InputTokensBody,
    items: Sequence[Item],
    structured_outputs: dict[str, Any] | None,
    room_tokens: int,
) -> tuple[Conversation, list[int] | None]:
    """The conversation made ready; with truncation as much of its end as leaves room for the output, and its tokens."""
    messages = messages_of(body.instructions, items)
    grammar = _answer_grammar(body, structured_outputs)
    if body.truncation == "disabled":
        return _ready(server, body, messages, grammar), None
    limit = server.frontend.info.max_model_len - room_tokens

    def cut_at(turn: int) -> tuple[Conversation, list[int]]:
        conversation = _ready(server, body, messages[:head] + messages[turn:], grammar)
        return conversation, server.frontend.prompt_ids(conversation.prompt, add_special_tokens=False, field="input")

    def fits(turn: int) -> bool:
        try:
            return len(cut_at(turn)[1]) <= limit
        except RequestError:  # too long by far
            return False

    head = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    turns = [head, *(i for i, message in enumerate(messages) if message["role"] == "user" and i > head)]
    return cut_at(turns[min(bisect_left(turns, True, key=fits), len(turns) - 1)])


def _answer_grammar(body: InputTokensBody, structured_outputs: dict[str, Any] | None) -> str | None:
    """Of what the text must be, if anything."""
    wanted = from_request(body.response_format, structured_outputs)
    field = "structured_outputs" if body.text_format["type"] == "text" else "text.format"
    return compile_grammar(wanted, field) if wanted else None


def _ready(
    server: Server, body: InputTokensBody, messages: list[dict[str, Any]], answer_grammar: str | None
) -> Conversation:
    return prepare(
        server,
        messages,
        tools=body.chat_tools,
        tool_choice=body.chat_tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.effort,
        template_kwargs=body.chat_template_kwargs,
        answer_grammar=answer_grammar,
    )


@operation(InputTokensBody, reply=InputTokens)
async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """The tokens of the prompt that a response with these fields would have."""
    server = request.app[SERVER]
    body, _ = server.parse(InputTokensBody, await read_object(request))
    if (number := server.peers.keeper(request, body.previous_response_id)) is not None:
        return await server.peers.pass_on(request, number)
    before = _previous(server, body, request.get(OWNER, NOBODY))
    size_chars = (before.size_chars if before else 0) + request[BODY_BYTES]
    return _json(InputTokens(await off_loop(size_chars, _count, server, body, before)))


def _count(server: Server, body: InputTokensBody, before: StoredResponse | None) -> int:
    try:
        conversation, token_ids = _converse(server, body, _items(server, body, before), None, 1)
    except RequestError as error:
        raise renamed(error) from None
    return len(token_ids or server.frontend.encode(conversation.prompt, add_special_tokens=False))


# ------------------------------------------------------------------------------------------------------------ answer


def _response(server: Server, response_id: str, body: ResponseBody, params: SamplingParams, keep: bool) -> Response:
    """The response before anything of it is generated."""
    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=server.model_name(body.model),
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.effort, "summary": None},
        safety_identifier=body.safety_identifier,
        store=keep,
        temperature=params.temperature,
        text={"format": body.text_format, "verbosity": "medium"},
        tool_choice=body.tool_choice,
        tools=body.tools,
        top_logprobs=body.top_logprobs,
        top_p=params.top_p,
        truncation=body.truncation,
        user=body.user,
    )


async def _stream(request: web.Request, call: ResponseCall, stored: StoredResponse) -> web.StreamResponse:
    """Streams the response. An error before the engine's word is raised, a later one is told by the last event."""
    stream, writer, last = EventStream(request, done=b""), call.writer, []
    try:
        try:
            async with call.generation as generation:
                await stream.send(b"".join(encode(writer.begin())))
                async for batch in generation.batches():
                    last = [event for shown in batch for event in writer.push(shown.delta)]
                    if not writer.ended:
                        await stream.send(b"".join(encode(last)))
        except ClientConnectionError:
            raise
        except Exception as error:
            if not stream.opened:
                raise
            last = writer.fail(describe(error))
        if stored.response.store:
            call.server.responses.add_finished(stored)
        return await stream.end(b"".join(encode(last)))
    except ClientConnectionError:
        return stream.response  # nobody is left to answer


async def _run_in_background(
    request: web.Request, call: ResponseCall, stored: StoredResponse, *, stream: bool
) -> web.StreamResponse:
    """Answers once the engine has accepted: from then on nothing depends on this connection."""
    store = call.server.responses
    log = stored.events = EventLog() if stream else None
    accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stored.task = asyncio.create_task(_generate(call, stored, accepted))
    try:
        store.add_running(stored)
        await accepted
    except BaseException:
        store.remove(stored)
        raise
    return await _follow(request, log, 0) if log else _json(stored.response)


async def _generate(call: ResponseCall, stored: StoredResponse, accepted: asyncio.Future[None]) -> None:
    """Generates a response, whoever listens. A refusal of the engine goes to `accepted`."""
    writer, log = call.writer, stored.events

    def publish(events: list[Event]) -> None:
        if log:
            log.extend(encode(events))

    try:
        async with call.generation as generation:
            publish(writer.begin())
            if not accepted.done():
                accepted.set_result(None)
            async for batch in generation.batches():
                for shown in batch:
                    publish(writer.push(shown.delta))
    except asyncio.CancelledError:
        accepted.cancel()
        publish(writer.cancel())
    except Exception as error:
        if accepted.done():
            publish(writer.fail(describe(error)))
        else:
            accepted.set_exception(error)
    finally:
        if log:
            log.close()
        call.server.responses.finish(stored)


async def _follow(request: web.Request, log: EventLog, start: int) -> web.StreamResponse:
    """Streams the events of a background response from number `start` on."""
    stream = EventStream(request, done=b"")
    try:
        async for events in log.read(start):
            await stream.send(events)
        return await stream.end()
    except ClientConnectionError:
        return stream.response


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


# ------------------------------------------------------------------------------------------------- kept responses


@operation(reply=Response, event=AnyEvent, query=EVENTS_QUERY)
async def get_response(request: web.Request) -> web.StreamResponse:
    """A response as it is now; with stream=true the events of one that runs, or ran, in the background."""
    query = _query(request, EVENTS_QUERY)
    stored = _stored(request)
    if _flag(query, "include_obfuscation"):
        raise RequestError("include_obfuscation is not supported yet", param="include_obfuscation")
    if not _flag(query, "stream"):
        if "starting_after" in query:
            raise RequestError("starting_after may only be given with stream=true", param="starting_after")
        return _json(stored.response)
    if stored.events is None:
        raise RequestError(
            "stream: events are kept of responses made with background=true and stream=true, until"
            f" {EVENTS_TTL_S:g} s after their end",
            param="stream",
        )
    return await _follow(request, stored.events, _number(query, "starting_after", -1, 0, MAX_EVENT) + 1)


@operation(reply=DeletedResponse)
async def delete_response(request: web.Request) -> web.Response:
    """Forgets a response, and ends it if it runs."""
    stored = _stored(request)
    request.app[SERVER].responses.remove(stored)
    return _json(DeletedResponse(stored.response.id))


@operation(reply=Response)
async def cancel_response(request: web.Request) -> web.Response:
    """Ends a background response where it is; one that has ended stays as it is."""
    stored = _stored(request)
    if stored.task is None:
        raise RequestError(
            f"{stored.response.id} does not run in the background: closing its connection cancels it",
            param="response_id",
        )
    stored.task.cancel()
    await asyncio.wait([stored.task])
    return _json(stored.response)


@operation(reply=InputItems, query=PAGE_QUERY)
async def list_input_items(request: web.Request) -> web.Response:
    """What a response was generated from, in pages."""
    query = _query(request, PAGE_QUERY)
    limit = _number(query, "limit", DEFAULT_PAGE, 1, MAX_PAGE)
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {short(order)}", param="order")
    items = _stored(request).items
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise RequestError(f"after: the response has no input item {short(after)}", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page] or [""]
    return _json(InputItems(data=page, first_id=ids[0], last_id=ids[-1], has_more=len(items) > limit))


def _stored(request: web.Request) -> StoredResponse:
    return request.app[SERVER].responses.get(request.match_info["response_id"], request.get(OWNER, NOBODY))


def _query(request: web.Request, known: Collection[str]) -> Mapping[str, str]:
    """The query's parameters, all known. Raises RequestError."""
    for name in request.query:
        if name not in known:
            names = ", ".join(known)
            raise RequestError(f"unknown query parameter {short(name)}; known are {names}", param=name[:64])
    return request.query


def _flag(query: Mapping[str, str], name: str) -> bool:
    if (text := query.get(name, "false")) not in ("true", "false"):
        raise RequestError(f"{name} must be true or false, got {short(text)}", param=name)
    return text == "true"


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    if (text := query.get(name)) is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise RequestError(f"{name} must be a whole number from {least} to {most}, got {short(text)}", param=name)
    return int(text)
