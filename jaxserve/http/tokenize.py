"""POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from aiohttp import web

from jaxserve import chat
from jaxserve.detokenize import token_text
from jaxserve.frontend import Frontend
from jaxserve.http.generate import off_loop
from jaxserve.http.replies import Tokens
from jaxserve.http.schema import DetokenizeBody, TokenizeBody, TokenizeChatBody
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.parsers import check_tools


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
            tools=[tool.for_template() for tool in check_tools(body.tools)] if body.tools is not None else None,
        )
    else:
        body, _ = server.parse(TokenizeBody, raw)
        text = body.prompt
    frontend.check_chars(text, "prompt" if isinstance(body, TokenizeBody) else "messages")
    ids = frontend.encode(text, add_special_tokens=body.add_special_tokens)
    strings = [token_text(frontend.tokenizer.token_bytes(i)) for i in ids] if body.return_token_strs else None
    return Tokens(len(ids), frontend.info.max_model_len, ids, strings)


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    server = request.app[SERVER]
    body, _ = server.parse(DetokenizeBody, await read_object(request))
    text = await off_loop(len(body.tokens), _detokenize, server.frontend, body.tokens)
    return web.json_response({"prompt": text})


def _detokenize(frontend: Frontend, ids: list[int]) -> str:
    if ids:
        frontend.check_ids(ids, "tokens")
    return frontend.tokenizer.decode(ids, skip_special_tokens=False)
