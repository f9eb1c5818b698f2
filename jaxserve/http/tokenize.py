"""POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from aiohttp import web

from jaxserve import chat
from jaxserve.detokenize import token_text
from jaxserve.frontend import Frontend
from jaxserve.http.generate import off_loop
from jaxserve.http.operation import operation
from jaxserve.http.replies import Text, Tokens
from jaxserve.http.schema import DetokenizeBody, TokenizeBody, TokenizeChatBody
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.parsers import Tool, check_tools


@operation(TokenizeBody, TokenizeChatBody, reply=Tokens)
async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of a conversation as the chat template writes it."""
    server = request.app[SERVER]
    raw = await read_object(request)
    tokens = await off_loop(request[BODY_BYTES], _tokenize, server, raw)
    return web.Response(body=msgspec.json.encode(tokens), content_type="application/json")


def _tokenize(server: Server, raw: dict[str, Any]) -> Tokens:
    frontend = server.frontend
    if raw.get("messages") is not None:
        body, _ = server.parse(TokenizeChatBody, raw)
        messages = chat.check_messages(body.messages, ignore_unknown=server.config.ignore_unknown_fields)
        text = chat.render(
            frontend.tokenizer,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            tools=None if body.tools is None else [tool.for_template() for tool in _tools(server, body.tools)],
        )
    else:
        body, _ = server.parse(TokenizeBody, raw)
        text = body.prompt
    frontend.check_chars(text, "prompt" if isinstance(body, TokenizeBody) else "messages")
    ids = frontend.encode(text, add_special_tokens=body.add_special_tokens)
    strings = [token_text(frontend.tokenizer.token_bytes(i)) for i in ids] if body.return_token_strs else None
    return Tokens(len(ids), frontend.info.max_model_len, ids, strings)


def _tools(server: Server, raw: list) -> list[Tool]:
    return check_tools(raw, ignore_unknown=server.config.ignore_unknown_fields)


@operation(DetokenizeBody, reply=Text)
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    server = request.app[SERVER]
    body, _ = server.parse(DetokenizeBody, await read_object(request))
    text = await off_loop(len(body.tokens), _detokenize, server.frontend, body.tokens)
    return web.Response(body=msgspec.json.encode(Text(text)), content_type="application/json")


def _detokenize(frontend: Frontend, ids: list[int]) -> str:
    if ids:
        frontend.check_ids(ids, "tokens")
    return frontend.tokenizer.decode(ids, skip_special_tokens=False)
