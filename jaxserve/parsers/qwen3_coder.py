"""Qwen3-Coder's calls: arguments as text between tags, which become JSON by the types of the tool's schema."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.message import Message, call_id
from jaxserve.parsers.reader import Emit, Reader, Steps
from jaxserve.parsers.tools import Tool

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\n]*")
_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class Qwen3Coder:
    """<tool_call>\\n<function=f>\\n<parameter=x>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>

    Texts are sent as they come; other values once they are complete. A grammar holds texts to their `enum` only.
    """

    begin = "<tool_call>"
    end = "</tool_call>"
    between = "\n"
    markers = ()
    make_id = staticmethod(call_id)

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        while found := (yield from reader.until(self.begin, _FUNCTION, emit=message.content)):
            reader.keep(found)
            if found == self.begin:
                yield from reader.space()
            if found == self.begin and not (yield from reader.skip(_FUNCTION)):
                message.content(reader.kept())
                continue
            name = (yield from reader.span(_NAME)).strip()
            if not name or not (yield from reader.skip(">")):
                message.content(reader.kept())
                continue
            reader.kept()
            message.begin_call(name)
            if not (yield from self._read_arguments(reader, message, message.tools.get(name))):
                return
            message.end_call()
            yield from reader.space()
            yield from reader.skip(self.end)

    def _read_arguments(self, reader: Reader, message: Message, tool: Tool | None) -> Steps[bool]:
        schema = tool.parameters if tool else {}
        message.arguments("{")
        first = True
        while (found := (yield from reader.until(_PARAMETER, _FUNCTION_END, emit=lambda text: None))) == _PARAMETER:
            key = yield from reader.span(_NAME)
            if not (yield from reader.skip(">")):
                return False
            message.arguments(("" if first else ", ") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            first = False
            yield from reader.skip("\n")
            kinds = value_kinds(schema.get("properties", {}).get(key.strip(), {}), schema)
            if not (yield from _read_value(reader, message.arguments, kinds)):
                return False
        if found:
            message.arguments("}")
        return found is not None

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        bodies = [f"{lark.text(f'\n<function={tool.name}>\n')} {self._parameters(lark, tool)}" for tool in tools]
        return f"{lark.either(bodies)} {lark.text(_FUNCTION_END + '\n')} {lark.marker(self.end)}"

    def _parameters(self, lark: Lark, tool: Tool) -> str:
        end = "\n" + _PARAMETER_END + "\n"
        parts = []
        for key, schema in tool.parameters.get("properties", {}).items():
            kinds = value_kinds(schema, tool.parameters)
            texts = (
                [text for text in schema.get("enum", ()) if isinstance(text, str)] if isinstance(schema, dict) else []
            )
            if kinds == {"string"} and texts:
                value = f"({' | '.join(map(lark.text, texts))}) {lark.text(end)}"
            elif "string" in kinds:
                value = lark.until(end)
            else:
                value = f"{lark.json(schema, tool.parameters)} {lark.text(end)}"
            part = lark.rule(f"{lark.text(f'<parameter={key}>\n')} {value}")
            parts.append(part if key in tool.parameters.get("required", []) else f"{part}?")
        if not parts:
            free = lark.rule(f"{lark.text(_PARAMETER)} /[^>\\n]+/ {lark.text('>\n')} {lark.until(end)}")
            parts = [f"{free}*"] if tool.parameters == {"type": "object"} else ['""']
        return " ".join(parts)


def _read_value(reader: Reader, emit: Emit, kinds: set[str]) -> Steps[bool]:
    """A value up to its closing tag, or (models forget it) to the next tag on a line of its own."""
    pieces: list[str] = []
    ends = (f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
    is_text = kinds == {"string"}
    if is_text:
        emit('"')
    write = (lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1])) if is_text else pieces.append
    if (yield from reader.until(*ends, emit=write, leave=ends[2:])) is None:
        emit("" if is_text else "".join(pieces))
        return False
    emit('"' if is_text else value_text("".join(pieces), kinds))
    return True


def value_kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema admits; a schema that says nothing admits texts."""
    if not isinstance(schema, dict) or depth > 8:
        return {"string"}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return value_kinds(target, root, depth + 1)
    if "type" in schema:
        given = schema["type"]
        kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        return {kind for kind in kinds if isinstance(kind, str)} or {"string"}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return set().union(*(value_kinds(each, root, depth + 1) for each in schema[name]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {_KINDS.get(type(value), "null") for value in values} or {"string"}


def value_text(text: str, kinds: set[str]) -> str:
    """JSON of a value that may be no text: as it was written, if that is JSON of one of the kinds."""
    for read in (_read_json, ast.literal_eval):
        try:
            value = read(text.strip())
            kind = "null" if value is None else _KINDS.get(type(value), "")
            fits = kind in kinds or {"integer", "number"} >= {kind} and bool(kinds & {"integer", "number"})
            if fits and kind != "string":
                return text.strip() if read is _read_json else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _read_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)
