"""Python literals read from text that arrives in pieces, and turned into JSON as they come."""

import ast
import json
import re

from jaxserve.parsers.json_text import whole_characters
from jaxserve.parsers.reader import Emit, Reader, Steps

MAX_DEPTH = 100
_SCALAR = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"[+-]?\.?\d[\da-fA-FxXoObB_.]*([eE][+-]\d[\d_]*)?", re.ASCII)  # one sign: no depth
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSE = {"[": "]", "(": ")", "{": "}"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = frozenset("abfnrtvxuUN01234567\n")  # another character keeps its backslash


def copy_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Reads a Python literal and emits it as JSON. False if it was cut, is none, or is nested too deeply."""
    first = yield from reader.peek()
    if first in ('"', "'"):
        return (yield from _copy_string(reader, emit))
    if first in _CLOSE:
        return depth < MAX_DEPTH and (yield from _copy_items(reader, emit, depth + 1))
    word = yield from reader.span(_SCALAR)
    if not word or not (yield from reader.peek()):
        return False
    json_text = _WORDS.get(word) or _number(word)
    emit(json_text or "")
    return json_text is not None


def copy_quoted_literal(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a Python string and emits its value as it comes: of JSON within Python, the inner text."""

    def decode(piece: str) -> None:
        if piece != '"':  # those around it come on their own
            emit(json.loads(f'"{piece}"'))

    return (yield from _copy_string(reader, decode))


def read_quoted_literal(reader: Reader) -> Steps[str | None]:
    """Reads a Python string and returns its value; None if it is cut or broken."""
    parts: list[str] = []
    return "".join(parts) if (yield from copy_quoted_literal(reader, parts.append)) else None


def _number(word: str) -> str | None:
    if not _NUMBER.fullmatch(word):
        return None
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (ValueError, SyntaxError, MemoryError):
        return None


def _copy_items(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
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
        if not (yield from copy_literal(reader, emit, depth)):
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
    if kind in "\"'/\\":
        return kind
    try:
        return ast.literal_eval(f'"{escape}"') if kind in _ESCAPES else escape
    except (ValueError, SyntaxError):
        return None


def _inner(text: str) -> str:
    """As it stands between the quotes of JSON."""
    return json.dumps(whole_characters(text), ensure_ascii=False)[1:-1]
