"""Calls written as Python: [f(x=1, y="a"), g()]. Values are turned into JSON as they come."""

import json
import re
from collections.abc import Sequence

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.message import Message, call_id
from jaxserve.parsers.python_text import copy_literal
from jaxserve.parsers.reader import Reader, Steps
from jaxserve.parsers.tool_formats import TEXT_FIRST, repeated
from jaxserve.parsers.tools import Tool

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=,()]*")


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
