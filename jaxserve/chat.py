"""Conversations: messages as a client sends them -> the text of the prompt. Never imports jax."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import short
from jaxserve.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")
# Fields of messages that ask for what jaxserve does not do yet. Clients that send back the messages they were given
# have them as null or empty.
UNSUPPORTED_FIELDS = (
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "annotations",
    "reasoning",
    "reasoning_content",
)
# Arguments of the template that have fields of their own, or that are not for clients.
RESERVED_KWARGS = frozenset((
    "self", "messages", "conversation", "chat_template", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip


def check_messages(raw: Any, *, ignore_unknown: bool = False) -> list[dict[str, Any]]:
    """Messages with a known role and text content. Raises RequestError naming the place, as in `messages.2.content`."""
    if not isinstance(raw, list):
        raise RequestError(f"messages must be a list, got {short(raw)}", param="messages")
    if not raw:
        raise RequestError("messages may not be empty", param="messages")
    return [_check_message(message, f"messages.{i}", ignore_unknown) for i, message in enumerate(raw)]


def _check_message(message: Any, place: str, ignore_unknown: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content, got {short(message)}", param=place)
    given = {name: value for name, value in message.items() if value is not None}
    for name in UNSUPPORTED_FIELDS:
        if given.pop(name, None):
            raise RequestError(f"{place}.{name} is not supported yet", param=f"{place}.{name}")
    if not ignore_unknown and (unknown := [name for name in given if name not in MESSAGE_FIELDS]):
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)
    role = given.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {short(role)}", param=f"{place}.role")
    for name in ("name", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise RequestError(f"{place}.{name} must be str, got {short(given[name])}", param=f"{place}.{name}")
    given["content"] = _check_content(given.get("content"), f"{place}.content", ignore_unknown)
    return {name: given[name] for name in MESSAGE_FIELDS if name in given}


def _check_content(content: Any, place: str, ignore_unknown: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{place} must be a string or a list of text parts, got {short(content)}", param=place)
    return [_check_part(part, f"{place}.{i}", ignore_unknown) for i, part in enumerate(content)]


def _check_part(part: Any, place: str, ignore_unknown: bool) -> dict[str, str]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{place} must be an object with a type, got {short(part)}", param=place)
    if part["type"] != "text":
        raise RequestError(
            f"{place}: content of type {short(part['type'])} is not supported yet; text is", param=f"{place}.type"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{place}.text must be str, got {short(part.get('text'))}", param=f"{place}.text")
    if not ignore_unknown and (unknown := [name for name in part if name not in ("type", "text")]):
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)
    return {"type": "text", "text": part["text"]}


def message_schema(ignore_unknown: bool) -> dict[str, Any]:
    """JSON Schema of one message that check_messages takes."""
    closed = {} if ignore_unknown else {"additionalProperties": False}
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        **closed,
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]}
    optional = {"type": ["string", "null"]}
    given = {"role": {"enum": list(ROLES)}, "content": content, "name": optional, "tool_call_id": optional}
    empty = {"enum": [None, "", [], {}, False, 0]}
    return {
        "type": "object",
        "properties": {name: given[name] for name in MESSAGE_FIELDS} | dict.fromkeys(UNSUPPORTED_FIELDS, empty),
        "required": ["role", "content"],
        **closed,
    }


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation, special tokens included: tokenise it without adding more.

    Raises RequestError for a clash of options, or if the template refuses the messages.
    """
    kwargs = dict(template_kwargs or {})
    if taken := RESERVED_KWARGS.intersection(kwargs):
        raise RequestError(f"chat_template_kwargs may not contain {min(taken)!r}", param="chat_template_kwargs")
    template = chat_template or tokenizer.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="chat_template",
        )
    return tokenizer.apply_chat_template(
        _fit(messages, template, tokenizer.template_wants_parts(template)),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=template,
        **kwargs,
    )


def _fit(messages: list[dict[str, Any]], template: str, wants_parts: bool) -> list[dict[str, Any]]:
    """The messages in the form that the template reads."""
    fitted = []
    for message in messages:
        content, role = message["content"], message["role"]
        if wants_parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not wants_parts and not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        if role == "developer" and "developer" not in template:
            role = "system"  # the same thing under its older name
        fitted.append({**message, "role": role, "content": content})
    return fitted
