"""JSON read from text that arrives in pieces: values as they are written, not as they are meant.

A client gets the model's own text of the arguments, byte for byte. That is why this is no JSON parser: partial parsers
of values (jiter, partial-json-parser) would have to be printed again, and the prints of two prefixes need not agree.
"""

import json
import re

from jaxserve.parsers.reader import Emit, Reader, Steps

_FLAT = re.compile(r'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)  # whole strings, and what is no bracket
_IN_STRING = re.compile(r'["\\]')
_SCALAR = re.compile(r"[\w.+-]*")
_WHOLE_ESCAPES = re.compile(r"(?:[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})*", re.DOTALL)
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # the second half is still to come


def whole_characters(text: str) -> str:
    """Escapes can name half a character, which no answer can hold: it becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def copy_value(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads one value and emits its text as it comes. True once it is complete; brackets are counted, not matched."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from copy_string(reader, emit))
    if first not in ("{", "["):
        scalar = yield from reader.span(_SCALAR)
        emit(scalar)
        return bool(scalar) and bool((yield from reader.peek()))
    depth = 0
    while True:
        emit(reader.available(_FLAT))
        match (yield from reader.peek()):
            case "":
                return False
            case '"':
                if not (yield from copy_string(reader, emit)):
                    return False
            case "{" | "[":
                emit(reader.take(1))
                depth += 1
            case "}" | "]":
                emit(reader.take(1))
                depth -= 1
                if not depth:
                    return True
            case _:
                pass  # more text has come


def copy_string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a string, emits its text with the quotes as it comes. True once it is complete."""
    emit(reader.take(1))
    while True:
        emit(reader.take(len(reader.find(_IN_STRING))))
        match (yield from reader.peek()):
            case "":
                return False
            case '"':
                emit(reader.take(1))
                return True
            case "\\":
                emit(reader.take(1))
                if not (yield from reader.peek()):
                    return False
                emit(reader.take(1))
            case _:
                pass


def read_string(reader: Reader) -> Steps[str | None]:
    """Reads a string and returns its value; None if what comes is none."""
    if (yield from reader.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from copy_string(reader, parts.append)):
        return None
    try:
        return whole_characters(json.loads("".join(parts), strict=False))
    except ValueError:
        return None


def copy_quoted(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a string and emits its value as it comes: of JSON within JSON, the inner text."""
    waiting = ""

    def decode(piece: str) -> None:
        nonlocal waiting
        waiting += piece
        whole = _WHOLE_ESCAPES.match(waiting)
        assert whole is not None, "it matches the empty text"
        text = waiting[: whole.end()]
        if half := _HALF_PAIR.search(text):
            text = text[: half.start()]
        waiting = waiting[len(text) :]
        try:
            emit(whole_characters(json.loads(f'"{text}"', strict=False)))
        except ValueError:  # an escape that JSON does not know: as it stands
            emit(text)

    first = True

    def without_quotes(piece: str) -> None:
        nonlocal first
        if first:  # copy_string emits the opening quote on its own
            first = False
        else:
            decode(piece)

    end: list[str] = []

    def hold_last(piece: str) -> None:
        """The closing quote, also on its own, is not part of the value."""
        if end:
            without_quotes(end.pop())
        if piece:
            end.append(piece)

    complete = yield from copy_string(reader, hold_last)
    if not complete and end:
        without_quotes(end.pop())
    return complete
