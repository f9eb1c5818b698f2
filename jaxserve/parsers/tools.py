"""Tools and tool_choice, from what a client sent to what was checked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import KINDS, short

MAX_TOOLS = 512
MAX_DEPTH = 100  # of a schema
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may, or must, be called."""

    mode: str = "none"  # none, auto, required, named
    tools: tuple[Tool, ...] = ()  # that may be called; of a named choice the one
    offered: tuple[Tool, ...] = ()  # that the model is told of: all, where any may be called


def check_tools(raw: Any, *, ignore_unknown: bool = False) -> list[Tool]:
    """Raises RequestError naming the place, as in `tools.2.function.name`."""
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise RequestError(f"tools must be a list, got {short(raw)}", param="tools")
    if not raw:
        raise RequestError("tools may not be empty: leave it out where there are none", param="tools")
    if len(raw) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} tools, got {len(raw)}", param="tools")
    tools: dict[str, Tool] = {}
    for i, each in enumerate(raw):
        tool = _check_tool(each, f"tools.{i}", ignore_unknown)
        if tool.name in tools:
            place = f"tools.{i}.function.name"
            raise RequestError(f"{place}: two tools are named {short(tool.name)}", param=place)
        tools[tool.name] = tool
    return list(tools.values())


def _check_tool(raw: Any, place: str, ignore_unknown: bool) -> Tool:
    if not isinstance(raw, dict):
        raise RequestError(f"{place} must be an object, got {short(raw)}", param=place)
    if raw.get("type") != "function":
        raise RequestError(f"{place}.type must be 'function', got {short(raw.get('type'))}", param=f"{place}.type")
    _check_names(raw, ("type", "function"), place, ignore_unknown)
    place = f"{place}.function"
    function = raw.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place} must be an object with a name, got {short(function)}", param=place)
    _check_names(function, _FIELDS, place, ignore_unknown)
    given = {name: value for name, value in function.items() if value is not None and name in _FIELDS}
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{place}.name must be 1 to 64 letters, digits, _ or -, got {short(name)}"
        raise RequestError(message, param=f"{place}.name")
    for field, kind in (("description", str), ("strict", bool), ("parameters", dict)):
        if field in given and not isinstance(given[field], kind):
            message = f"{place}.{field} must be {KINDS[kind]}, got {short(given[field])}"
            raise RequestError(message, param=f"{place}.{field}")
    given["parameters"] = _check_parameters(given.get("parameters", {}), f"{place}.parameters")
    return Tool(**given)


def _check_names(raw: dict, known: tuple[str, ...], place: str, ignore_unknown: bool) -> None:
    if not ignore_unknown and (unknown := [name for name in raw if name not in known]):
        raise RequestError(f"{place} has an unknown field {short(unknown[0])}", param=place)


def _check_parameters(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema, with type and properties, which templates rely on."""
    if _deeper(schema, MAX_DEPTH):
        raise RequestError(f"{place} may be nested at most {MAX_DEPTH} deep", param=place)
    if schema.get("type", "object") != "object":
        message = f"{place}.type must be 'object', got {short(schema['type'])}"
        raise RequestError(message, param=f"{place}.type")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(
            f"{place}.properties must be an object, got {short(properties)}", param=f"{place}.properties"
        )
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            where = f"{place}.properties.{name[:64]}"
            raise RequestError(f"{where} must be a JSON schema, got {short(value)}", param=where)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(
            f"{place}.required must be a list of names, got {short(required)}", param=f"{place}.required"
        )
    return {"type": "object", "properties": {}, **schema}


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def check_tool_choice(raw: Any, tools: Sequence[Tool]) -> ToolChoice:
    """`raw`: none, auto, required, {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools",
    "allowed_tools": {"mode": auto or required, "tools": [functions by name]}}; None: auto if there are tools.
    """
    place = "tool_choice"
    if raw is None:
        return ToolChoice("auto", tuple(tools), tuple(tools)) if tools else ToolChoice()
    if raw == "none":
        return ToolChoice()
    if isinstance(raw, dict) and raw.get("type") == "allowed_tools":
        return _allowed(raw, tools)
    if isinstance(raw, dict):
        name = _chosen_name(raw)
        chosen = tuple(tool for tool in tools if tool.name == name)
        if not chosen:
            known = ", ".join(tool.name for tool in tools[:10]) or "none"
            place = f"{place}.function.name"
            raise RequestError(f"{place} {short(name)} is none of the tools: {known}", param=place)
        return ToolChoice("named", chosen, tuple(tools))
    if raw not in ("auto", "required"):
        message = f"{place} must be none, auto, required or a function by name, got {short(raw)}"
        raise RequestError(message, param=place)
    if not tools:
        raise RequestError(f"{place} {short(raw)} needs tools", param=place)
    return ToolChoice(raw, tuple(tools), tuple(tools))


def _allowed(raw: dict[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    """The model is told of all tools, so that the prompt's beginning stays the same; it may call only these."""
    place = "tool_choice.allowed_tools"
    given = raw.get("allowed_tools")
    if not isinstance(given, dict):
        raise RequestError(f"{place} must be an object with mode and tools, got {short(given)}", param=place)
    _check_names(raw, ("type", "allowed_tools"), "tool_choice", False)
    _check_names(given, ("mode", "tools"), place, False)
    mode, listed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{place}.mode must be auto or required, got {short(mode)}", param=f"{place}.mode")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        message = f"{place}.tools must be a list of 1 to {MAX_TOOLS} functions, got {short(listed)}"
        raise RequestError(message, param=f"{place}.tools")
    known, names = {tool.name for tool in tools}, set()
    for i, each in enumerate(listed):
        where = f"{place}.tools.{i}"
        function = each.get("function") if isinstance(each, dict) and each.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RequestError(f"{where} must be a function by name, got {short(each)}", param=where)
        if name not in known:
            shown = ", ".join(tool.name for tool in tools[:10]) or "none"
            raise RequestError(f"{where} {short(name)} is none of the tools: {shown}", param=where)
        names.add(name)
    return ToolChoice(mode, tuple(tool for tool in tools if tool.name in names), tuple(tools))


def _chosen_name(raw: dict[str, Any]) -> str:
    place = "tool_choice"
    if raw.get("type") != "function":
        message = f"{place}.type must be 'function', got {short(raw.get('type'))}"
        raise RequestError(message, param=f"{place}.type")
    function = raw.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function must be an object, got {short(function)}", param=f"{place}.function")
    if not isinstance(function.get("name"), str):
        message = f"{place}.function.name must be a string, got {short(function.get('name'))}"
        raise RequestError(message, param=f"{place}.function.name")
    return function["name"]


# ------------------------------------------------------------------------------------------------- as JSON Schema


def tools_schema(ignore_unknown: bool) -> dict[str, Any]:
    """What check_tools takes, and null; that names differ and schemas are good is not said."""
    tool = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function_schema(ignore_unknown)},
        "required": ["type", "function"],
        **({} if ignore_unknown else {"additionalProperties": False}),
    }
    return {"type": ["array", "null"], "minItems": 1, "maxItems": MAX_TOOLS, "items": tool}


def function_schema(ignore_unknown: bool) -> dict[str, Any]:
    """A function with name, description, parameters and strict."""
    parameters = {
        "type": ["object", "null"],
        "properties": {
            "type": {"const": "object"},
            "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
            "required": {"type": "array", "items": {"type": "string"}},
        },
    }
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
            "description": {"type": ["string", "null"]},
            "parameters": parameters,
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["name"],
        **({} if ignore_unknown else {"additionalProperties": False}),
    }


def tool_choice_schema() -> dict[str, Any]:
    """What check_tool_choice takes; that the tools are there is not said."""
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    function = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": named},
        "required": ["type", "function"],
    }
    return {
        "anyOf": [{"enum": ["none", "auto", "required", None]}, function, allowed_tools_schema(function, nested=True)]
    }


def allowed_tools_schema(function: dict[str, Any], *, nested: bool) -> dict[str, Any]:
    """A choice of type allowed_tools. `nested`: as chats have it, mode and tools in an object of their own."""
    parts = {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": function},
    }
    if nested:
        inner = {"type": "object", "properties": parts, "required": ["mode", "tools"], "additionalProperties": False}
        parts = {"allowed_tools": inner}
    return {
        "type": "object",
        "properties": {"type": {"const": "allowed_tools"}, **parts},
        "required": ["type", *parts],
        "additionalProperties": False,
    }
