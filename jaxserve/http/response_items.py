"""Items of a conversation, as /v1/responses takes and keeps them -> the messages of a chat."""

import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import short

ROLES = ("user", "assistant", "system", "developer")
PART_TYPES = ("input_text", "output_text")
STATUSES = ("in_progress", "completed", "incomplete")

Item = dict[str, Any]
Schema = dict[str, Any]


def check_input(raw: str | list, before: Iterable[Item] = (), *, ignore_unknown: bool = False) -> list[Item]:
    """The items of `input`, in one form: with type, id and status, content as parts.

    before: items that the conversation has already. Raises RequestError naming the place, as in `input.2.content`.
    """
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    if not raw:
        raise RequestError("input may not be empty", param="input")
    items = [_check_item(item, f"input.{i}", ignore_unknown) for i, item in enumerate(raw)]
    calls = {item["call_id"] for item in before if item["type"] == "function_call"}
    for i, item in enumerate(items):
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            place = f"input.{i}.call_id"
            raise RequestError(f"{place}: no function_call before it has the call_id {item['call_id']!r}", param=place)
    return items


def _check_item(item: Any, place: str, ignore_unknown: bool) -> Item:
    if not isinstance(item, dict):
        raise RequestError(f"{place} must be an object, got {short(item)}", param=place)
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.pop("type", "message" if "role" in given else None)
    if not isinstance(kind, str) or kind not in _ITEMS:
        where = f"{place}.type"
        message = f"{where} must be one of {', '.join(_ITEMS)}; items of type {short(kind)} are not supported"
        raise RequestError(message, param=where)
    check, names, prefix = _ITEMS[kind]
    if not ignore_unknown and (unknown := [name for name in given if name not in (*names, "id", "status")]):
        raise RequestError(f"{place} of type {kind} has an unknown field {short(unknown[0])}", param=place)
    head = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed"}
    for name in ("id", "status"):
        if name in given:
            head[name] = _text(given, name, place)
    if head["status"] not in STATUSES:
        where = f"{place}.status"
        raise RequestError(f"{where} must be one of {', '.join(STATUSES)}, got {short(head['status'])}", param=where)
    return {**head, **check(given, place, ignore_unknown)}


def _text(item: Item, name: str, place: str) -> str:
    if not isinstance(item.get(name), str):
        where = f"{place}.{name}"
        raise RequestError(f"{where} must be a string, got {short(item.get(name))}", param=where)
    return item[name]


def _check_message(item: Item, place: str, ignore_unknown: bool) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {short(role)}", param=f"{place}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list) and content:
        texts = [_check_part(part, f"{place}.content.{i}", ignore_unknown) for i, part in enumerate(content)]
    else:
        where = f"{place}.content"
        raise RequestError(f"{where} must be a string or a list of text parts, got {short(content)}", param=where)
    return {"role": role, "content": [_part(kind, text) for text in texts]}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def _check_part(part: Any, place: str, ignore_unknown: bool) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{place} must be an object with a type, got {short(part)}", param=place)
    if part.get("type") not in PART_TYPES:
        where, kind = f"{place}.type", short(part.get("type"))
        message = f"{where} must be {' or '.join(PART_TYPES)}; content of type {kind} is not supported yet"
        raise RequestError(message, param=where)
    known = ("type", "text", "annotations", "logprobs")  # the last two come back from answers
    if not ignore_unknown and (unknown := [n for n, v in part.items() if v is not None and n not in known]):
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)
    return _text(part, "text", place)


def _check_call(item: Item, place: str, ignore_unknown: bool) -> Item:
    call = {name: _text(item, name, place) for name in ("call_id", "name", "arguments")}
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"{place}.arguments"
        raise RequestError(f"{where} must be the JSON text of an object, got {short(call['arguments'])}", param=where)
    return call


def _check_output(item: Item, place: str, ignore_unknown: bool) -> Item:
    output = item.get("output")
    if isinstance(output, list) and output:
        texts = [_check_part(part, f"{place}.output.{i}", ignore_unknown) for i, part in enumerate(output)]
        output = [_part("input_text", text) for text in texts]
    elif not isinstance(output, str):
        where = f"{place}.output"
        raise RequestError(f"{where} must be a string or a list of text parts, got {short(output)}", param=where)
    return {"call_id": _text(item, "call_id", place), "output": output}


def _check_reasoning(item: Item, place: str, ignore_unknown: bool) -> Item:
    """What a model thought. A summary is not that: it comes back, and nothing else is done with it."""
    content, summary = (
        [_typed_text(part, f"{place}.{name}.{i}", kind) for i, part in enumerate(_list(item, name, place))]
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    )
    if summary and not content:
        where = f"{place}.summary"
        raise RequestError(f"{where} does not stand for the reasoning: send its content", param=where)
    return {"summary": summary, "content": content}


def _list(item: Item, name: str, place: str) -> list:
    if not isinstance(given := item.get(name, []), list):
        raise RequestError(f"{place}.{name} must be a list, got {short(given)}", param=f"{place}.{name}")
    return given


def _typed_text(part: Any, place: str, kind: str) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") != kind:
        raise RequestError(f"{place} must be an object of type {kind}, got {short(part)}", param=place)
    return {"type": kind, "text": _text(part, "text", place)}


_ITEMS: dict[str, tuple[Callable[[Item, str, bool], Item], tuple[str, ...], str]] = {  # check, fields, prefix of ids
    "message": (_check_message, ("role", "content"), "msg"),
    "function_call": (_check_call, ("call_id", "name", "arguments"), "fc"),
    "function_call_output": (_check_output, ("call_id", "output"), "fco"),
    "reasoning": (_check_reasoning, ("content", "summary"), "rs"),
}


def input_schema(ignore_unknown: bool) -> Schema:
    """JSON Schema of what check_input takes. That outputs belong to calls, and arguments are JSON, is not said."""
    text, items = {"type": "string"}, {"type": "array", "minItems": 1}
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(PART_TYPES)}, "text": text, "annotations": {}, "logprobs": {}},
        "required": ["type", "text"],
        **_closed(ignore_unknown),
    }
    content = {"anyOf": [text, {**items, "items": part}]}
    fields: dict[str, dict[str, Schema]] = {
        "message": {"role": {"enum": list(ROLES)}, "content": content},
        "function_call": {"call_id": text, "name": text, "arguments": {**text, "contentMediaType": "application/json"}},
        "function_call_output": {"call_id": text, "output": content},
        "reasoning": {"content": _typed_schema("reasoning_text"), "summary": _typed_schema("summary_text")},
    }
    assert {kind: tuple(names) for kind, names in fields.items()} == {
        kind: names for kind, (_, names, _) in _ITEMS.items()
    }
    schemas = [_item_schema(kind, names, ignore_unknown) for kind, names in fields.items()]
    return {"anyOf": [text, {**items, "items": {"anyOf": schemas}}]}


def _item_schema(kind: str, fields: dict[str, Schema], ignore_unknown: bool) -> Schema:
    named = {"enum": [kind, None]} if kind == "message" else {"const": kind}
    common = {"id": {"type": ["string", "null"]}, "status": {"enum": [*STATUSES, None]}}
    schema = {"type": "object", "properties": {"type": named, **fields, **common}, **_closed(ignore_unknown)}
    if kind == "reasoning":  # a summary is nothing without content
        thought = {"properties": {"content": {"type": "array", "minItems": 1}}, "required": ["content"]}
        return {**schema, "required": ["type"], "anyOf": [thought, {"properties": {"summary": {"enum": [None, []]}}}]}
    return {**schema, "required": [*fields, *(() if kind == "message" else ("type",))]}


def _typed_schema(kind: str) -> Schema:
    part = {"type": "object", "properties": {"type": {"const": kind}, "text": {"type": "string"}}}
    return {"type": ["array", "null"], "items": {**part, "required": ["type", "text"]}}


def _closed(ignore_unknown: bool) -> Schema:
    return {} if ignore_unknown else {"additionalProperties": {"type": "null"}}


# ----------------------------------------------------------------------------------------------------- as messages


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A chat: the reasoning, text and calls of one turn of the model are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    for item in items:
        _ADD[item["type"]](messages, item)
    for message in messages:
        message.setdefault("content", None if "tool_calls" in message else "")
    if not instructions:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):  # templates take one system message
        return [{**messages[0], "content": f"{instructions}\n\n{_joined(messages[0]['content'])}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _assistant(messages: list[dict[str, Any]], *, without: tuple[str, ...]) -> dict[str, Any]:
    """The last message, if it is the model's and has nothing of `without`; else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_message(messages: list[dict[str, Any]], item: Item) -> None:
    texts = [{"type": "text", "text": part["text"]} for part in item["content"]]
    content = texts[0]["text"] if len(texts) == 1 else texts
    if item["role"] == "assistant":
        _assistant(messages, without=("content", "tool_calls"))["content"] = content
    else:
        messages.append({"role": item["role"], "content": content})


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _assistant(messages, without=()).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], item: Item) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})


def _add_reasoning(messages: list[dict[str, Any]], item: Item) -> None:
    message = _assistant(messages, without=("content", "tool_calls"))
    message["reasoning"] = message.get("reasoning", "") + "".join(part["text"] for part in item["content"])


_ADD = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
