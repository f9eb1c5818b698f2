"""Calls written as Python: [f(x=1, y="a"), g()]. Values are turned into JSON as they come."""

import ast
import json
import re
from collections.abc import Sequence

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.json_text import whole_characters
from jaxserve.parsers.message import Message, call_id
from jaxserve.parsers.reader import Emit, Reader, Steps
from jaxserve.parsers.tool_formats import TEXT_FIRST, repeated
from jaxserve.parsers.tools import Tool

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=,()]*")
_SCALAR = re.compile(r"[\w.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSE = {"[": "]", "(": ")", "{": "}"}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class Pythonic:
    """The whole message is a list of calls of known functions; anything else is plain text."""

    begin = None
    between = None
    markers = ("<|python_start|>", "<|python_end|>")  # of Llama 4
    make_id = staticmethod(call_id)

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        reader.keep()
        yield from reader.space()
        if (yield from reader.skip(self.markers[0])):
            reader.keep()
        if (yield from reader.skip("[")):
            yield from self._read_list(reader, message)
        message.content(reader.kept())
        while (yield from reader.until(*self.markers, emit=message.content)):
            pass

    def _read_list(self, reader: Reader, message: Message) -> Steps[None]:
        while True:
            yield from reader.space()
            name = yield from reader.span(_NAME)
            if name not in message.tools or not (yield from reader.skip("(")):
                return
            reader.kept()
            message.begin_call(name)
            message.arguments("{")
            if not (yield from self._read_arguments(reader, message)):
                return
            message.arguments("}")
            message.end_call()
            reader.keep()
            yield from reader.space()
            if not (yield from reader.skip(",")):
                yield from reader.skip("]")
                reader.kept()
                return

    def _read_arguments(self, reader: Reader, message: Message) -> Steps[bool]:
        first = True
        while True:
            yield from reader.space()
            if (yield from reader.skip(")")):
                return True
            key = yield from reader.span(_KEY)
            yield from reader.space()
            if not key or not (yield from reader.skip("=")):
                return False
            yield from reader.space()
            message.arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            if not (yield from copy_literal(reader, message.arguments)):
                return False
            yield from reader.space()
            if not (yield from reader.skip(",")) and (yield from reader.peek()) != ")":
                return False

    def text_grammar(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """A text that does not begin as calls do."""
        return f"{TEXT_FIRST}?"

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        calls = [f'{lark.text(tool.name + "(")} {self._arguments(lark, tool)} ")"' for tool in tools]
        return f'"[" {repeated(lark.either(calls), ", ", many)} "]"'

    def _arguments(self, lark: Lark, tool: Tool) -> str:
        """Rules from the last argument to the first: `tail` follows another argument, `head` is the list from here."""
        head = tail = '""'
        required = tool.parameters.get("required", [])
        for key, schema in reversed(tool.parameters.get("properties", {}).items()):
            one = f"{lark.text(key + '=')} {lark.json(schema, tool.parameters)} {tail}"
            may_lack = key not in required
            head, tail = (
                lark.rule(one + (f" | {head}" if may_lack else "")),
                lark.rule(f'", " {one}' + (f" | {tail}" if may_lack else "")),
            )
        return head


def copy_literal(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a Python literal and emits it as JSON. False if it was cut or is none."""
    first = yield from reader.peek()
    if first in ('"', "'"):
        return (yield from _copy_string(reader, emit))
    if first in _CLOSE:
        return (yield from _copy_items(reader, emit))
    word = yield from reader.span(_SCALAR)
    if not word or not (yield from reader.peek()):
        return False
    json_text = _WORDS.get(word) or _number(word)
    emit(json_text or "")
    return json_text is not None


def _number(word: str) -> str | None:
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (ValueError, SyntaxError, MemoryError):
        return None


def _copy_items(reader: Reader, emit: Emit) -> Steps[bool]:
    """A list, a tuple (also sent as a list) or a dict."""
    opening = yield from reader.peek()
    reader.take(1)
    emit("{" if opening == "{" else "[")
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.skip(_CLOSE[opening])):
            emit("}" if opening == "{" else "]")
            return True
        if not first:
            emit(", ")
        first = False
        if opening == "{":
            if (yield from reader.peek()) not in ('"', "'") or not (yield from _copy_string(reader, emit)):
                return False
            yield from reader.space()
            if not (yield from reader.skip(":")):
                return False
            emit(": ")
            yield from reader.space()
        if not (yield from copy_literal(reader, emit)):
            return False
        yield from reader.space()
        if not (yield from reader.skip(",")) and (yield from reader.peek()) != _CLOSE[opening]:
            return False


def _copy_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """A string; its value is emitted as it comes, an escape as soon as it is whole."""
    quote = yield from reader.peek()
    reader.take(1)
    plain = re.compile(rf"[^\\{quote}]*")
    emit('"')
    while True:
        while text := reader.available(plain):
            emit(_inner(text))
        char = yield from reader.peek()
        if not char:
            return False
        if char == quote:
            reader.take(1)
            emit('"')
            return True
        if char == "\\":
            if (value := (yield from _read_escape(reader))) is None:
                return False
            emit(_inner(value))


def _read_escape(reader: Reader) -> Steps[str | None]:
    """The value of an escape; two of them that make one character (as JSON writes it) are read together."""
    escape = reader.take(1)
    kind = yield from reader.peek()
    if not kind:
        return None
    escape += reader.take(1)
    for _ in range(_DIGITS.get(kind, 0)):
        if (yield from reader.peek()) not in set("0123456789abcdefABCDEF"):
            return None
        escape += reader.take(1)
    if re.fullmatch(r"\\u[dD][89abAB]..", escape) and (yield from reader.skip("\\u")):
        second = ""
        while len(second) < 4 and (yield from reader.peek()) in set("0123456789abcdefABCDEF"):
            second += reader.take(1)
        pair = f"{escape}\\u{second}"
        return json.loads(f'"{pair}"') if len(second) == 4 else None
    try:
        return ast.literal_eval(f'"{escape}"') if kind not in "\"'/" else kind
    except (ValueError, SyntaxError):
        return None


def _inner(text: str) -> str:
    """As it stands between the quotes of JSON."""
    return json.dumps(whole_characters(text), ensure_ascii=False)[1:-1]
