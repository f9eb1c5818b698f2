"""Conversations: messages as a client sends them -> the text of the prompt. Never imports jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import RequestError
from jaxserve.request import short
from jaxserve.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning")
# Fields of messages that ask for what jaxserve does not do yet. Clients that send back the messages they were given
# have them as null or empty.
UNSUPPORTED_FIELDS = ("function_call", "refusal", "audio", "annotations")
# Names under which templates read the reasoning of earlier answers.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
# Variables of templates that turn reasoning on and off.
REASONING_SWITCHES = ("enable_thinking", "thinking")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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
    reasoning = given.pop("reasoning_content", None)
    if reasoning is not None and given.get("reasoning") in (None, ""):
        given["reasoning"] = reasoning
    if not ignore_unknown and (unknown := [name for name in given if name not in MESSAGE_FIELDS]):
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)
    role = given.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {short(role)}", param=f"{place}.role")
    for name in ("name", "tool_call_id", "reasoning"):
        if not isinstance(given.get(name, ""), str):
            raise RequestError(f"{place}.{name} must be a string, got {short(given[name])}", param=f"{place}.{name}")
    if role != "assistant" and (wrong := [n for n in ("tool_calls", "reasoning") if given.get(n)]):
        raise RequestError(f"{place}.{wrong[0]} is only for assistants, not for {role}", param=f"{place}.{wrong[0]}")
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = _check_calls(calls, f"{place}.tool_calls", ignore_unknown)
    if not given.get("content") and (calls or given.get("reasoning")):
        given["content"] = None
    else:
        given["content"] = _check_content(given.get("content"), f"{place}.content", ignore_unknown)
    return {name: given[name] for name in MESSAGE_FIELDS if name in given}


class Arguments(dict):
    """The arguments of a call: an object to templates that want one, and the client's own text where it is printed."""

    def __init__(self, text: str, value: dict[str, Any]):
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Any) -> str:
        return self._text + other

    def __radd__(self, other: Any) -> str:
        return other + self._text


def _check_calls(raw: Any, place: str, ignore_unknown: bool) -> list[dict[str, Any]]:
    if not isinstance(raw, list):
        raise RequestError(f"{place} must be a list, got {short(raw)}", param=place)
    return [_check_call(call, f"{place}.{i}", ignore_unknown) for i, call in enumerate(raw)]


def _check_call(raw: Any, place: str, ignore_unknown: bool) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}}, and an id if there is one."""
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise RequestError(f"{place} must be an object of type function with a function, got {short(raw)}", param=place)
    unknown = [name for name in raw if name not in ("id", "type", "function", "index")]
    unknown += [f"function.{name}" for name in function if name not in ("name", "arguments")]
    if unknown and not ignore_unknown:
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)
    call_id, name, given = raw.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str | None):
        raise RequestError(f"{place}.id must be a string, got {short(call_id)}", param=f"{place}.id")
    if not isinstance(name, str) or not name:
        message = f"{place}.function.name must be the name of a function, got {short(name)}"
        raise RequestError(message, param=f"{place}.function.name")
    arguments = _check_arguments(given, f"{place}.function.arguments")
    ids = {} if call_id is None else {"id": call_id}
    return {**ids, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_arguments(given: Any, place: str) -> Arguments:
    """JSON text of an object (nothing: no arguments); templates' own examples have the object itself."""
    try:
        value = given if isinstance(given, dict) else json.loads(given or "{}")
    except (ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{place} must be the JSON text of an object, got {short(given)}", param=place)
    return Arguments(given if isinstance(given, str) and given else json.dumps(value, ensure_ascii=False), value)


def _check_content(content: Any, place: str, ignore_unknown: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content == []:
        raise RequestError(f'{place} may not be an empty list; an empty text is ""', param=place)
    if not isinstance(content, list):
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
        raise RequestError(f"{place}.text must be a string, got {short(part.get('text'))}", param=f"{place}.text")
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
    empty = {"enum": [None, "", [], {}, False, 0]}
    calls = {"type": "array", "minItems": 1, "items": _call_schema(closed)}
    given = {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [content, empty]},
        "name": optional,
        "tool_call_id": optional,
        "tool_calls": {"anyOf": [calls, empty]},
        "reasoning": optional,
        "reasoning_content": optional,
    }
    others = {
        "properties": {
            "role": {"enum": [role for role in ROLES if role != "assistant"]},
            "content": content,
            "tool_calls": empty,
            "reasoning": {"enum": [None, ""]},
            "reasoning_content": {"enum": [None, ""]},
        },
        "required": ["content"],
    }
    assistant = {"role": {"const": "assistant"}}
    # One of these is there, and of a chat's answer may be all that is.
    spoken = {"properties": {**assistant, "content": content}, "required": ["content"]}
    called = {"properties": {**assistant, "tool_calls": calls}, "required": ["tool_calls"]}
    thought = [
        {"properties": {**assistant, name: {"type": "string", "minLength": 1}}, "required": [name]}
        for name in ("reasoning", "reasoning_content")
    ]
    return {
        "type": "object",
        "properties": {**given, **dict.fromkeys(UNSUPPORTED_FIELDS, empty)},
        "required": ["role"],
        "anyOf": [others, spoken, called, *thought],
        **closed,
    }


def _call_schema(closed: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, as it was answered. That a text is that of an object is not said."""
    function = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "arguments": {
                "anyOf": [{"type": "string", "contentMediaType": "application/json"}, {"type": ["object", "null"]}]
            },
        },
        "required": ["name"],
        **closed,
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": ["string", "null"]},
            "type": {"const": "function"},
            "function": function,
            "index": {},
        },
        "required": ["function"],
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
    tools: Sequence[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt of a conversation, special tokens included: tokenise it without adding more.

    Raises RequestError for a clash of options, or if the template refuses the messages.
    """
    kwargs = dict(template_kwargs or {})
    if taken := RESERVED_KWARGS.intersection(kwargs):
        raise RequestError(f"chat_template_kwargs may not contain {min(taken)!r}", param="chat_template_kwargs")
    template = chat_template or tokenizer.template_for(tools)
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="chat_template",
        )
    compiled = tokenizer.template(template)
    if tools:
        check_takes_tools(compiled)
    if reasoning_effort is not None:
        kwargs = _effort(reasoning_effort, compiled.names) | kwargs
    return tokenizer.apply_chat_template(
        _fit(messages, compiled),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=template,
        tools=list(tools) if tools else None,
        **kwargs,
    )


def check_takes_tools(template: ChatTemplate) -> None:
    """Raises RequestError if the template does not tell the model of tools."""
    if "tools" not in template.names:
        raise RequestError(
            "the model's chat template takes no tools: use a model that was trained to call them, or start the server"
            " with a template that does (--chat-template FILE)",
            param="tools",
        )


def _effort(effort: str, names: frozenset[str]) -> dict[str, Any]:
    """The variables that say it to the template. Raises RequestError if it has none."""
    if effort not in EFFORTS:
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {short(effort)}"
        raise RequestError(message, param="reasoning_effort")
    switches = {name: effort != "none" for name in REASONING_SWITCHES if name in names}
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort, **switches}
    if not switches and effort != "none":
        raise RequestError("the model's chat template takes no reasoning_effort", param="reasoning_effort")
    return switches


def _fit(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages in the form that the template reads."""
    fitted = []
    wants_parts = template.wants_parts
    reasoning_name = next((name for name in REASONING_NAMES if name in template.fields), None)
    for i, given in enumerate(messages):
        message = dict(given)
        content, role = message["content"], message["role"]
        reasoning = message.pop("reasoning", None)
        # gpt-oss, where it is "thinking", takes either that or a text beside calls.
        if reasoning and reasoning_name and not (reasoning_name == "thinking" and content and "tool_calls" in message):
            message[reasoning_name] = reasoning
        if "tool_calls" in message and "tool_calls" not in template.fields:
            place = f"messages.{i}.tool_calls"
            raise RequestError(f"{place}: the model's chat template takes no tool calls", param=place)
        if content is None:
            content = None if template.tests_content else []
        if wants_parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not wants_parts and isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if role == "developer" and not template.mentions("developer"):
            role = "system"  # the same thing under its older name
        fitted.append({**message, "role": role, "content": content})
    return fitted
