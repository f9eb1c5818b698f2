"""How models write tool calls as JSON: each format is read by one class, which also knows its grammar."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.json_text import copy_quoted, copy_value, read_string
from jaxserve.parsers.message import Message, call_id, short_call_id
from jaxserve.parsers.python_text import copy_literal, copy_quoted_literal, read_quoted_literal
from jaxserve.parsers.reader import Emit, Reader, Steps
from jaxserve.parsers.tools import Tool

_WORD = re.compile(r"[\w.-]*")
_OPENING = re.compile(r"\{[ \t\r\n]*")
_KEYS = ("name", "arguments", "parameters", "type", "id")  # of a call that nothing else marks as one


# A text that does not begin as calls do that have no mark.
TEXT_FIRST = r"/[^\s\[{](.|\n)*/"


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model, and must be read nevertheless."""
        ...

    @property
    def begin(self) -> str | None:
        """The text that every group of calls begins with; None: calls are the whole message and have no mark."""
        ...

    @property
    def between(self) -> str | None:
        """What stands between one group and the next; None: there is only one."""
        ...

    @property
    def make_id(self) -> Callable[[], str]:
        """Makes ids that its chat template takes."""
        ...

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        """Reads the message, without its reasoning, to its end."""
        ...

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        """An expression: the calls of one group, without `begin`."""
        ...


class Read(Enum):
    """How reading a call went."""

    PLAIN = "not a call: nothing was written, and the reader has kept the text"
    BROKEN = "its beginning was written, then it was cut or no JSON any more"
    WHOLE = "complete"


def read_call(
    reader: Reader, message: Message, *, marked: bool = True, before_name: Sequence[str] = _KEYS
) -> Steps[Read]:
    """Reads {"name": ..., "arguments": {...}}, also as a Python dict, of which the arguments are turned into JSON.

    If it is not `marked` as a call, name and keys must be known ones, those before the name be in `before_name`, and a
    type be "function".
    """
    copy = copy_literal if (yield from reader.peek_after(_OPENING)) == "'" else copy_value
    if not (yield from reader.skip("{")):
        return Read.PLAIN
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    done = False  # with the arguments

    def write(text: str) -> None:
        early.append(text) if name is None else message.arguments(text)

    def failed() -> Read:
        if name is not None and done:
            message.end_call()
        return Read.PLAIN if name is None else Read.BROKEN

    while True:
        yield from reader.space()
        if (yield from reader.skip("}")):
            break
        key = yield from _read_text(reader)
        yield from reader.space()
        known = before_name if name is None else _KEYS
        if key is None or not marked and key not in known or not (yield from reader.skip(":")):
            return failed()
        yield from reader.space()
        if key == "name" and name is None:
            found = yield from _read_text(reader)
            if not found or not marked and found not in message.tools:
                return failed()
            name = found
            reader.kept()
            message.begin_call(name)
            message.arguments("".join(early))
        elif key in ("arguments", "parameters") and not done:
            if not (yield from _read_arguments(reader, write, copy)):
                return failed()
            done = True
        elif key == "type" and not marked:
            if (yield from _read_text(reader)) != "function":
                return failed()
        elif not (yield from copy(reader, lambda text: None)):
            return failed()
        yield from reader.space()
        yield from reader.skip(",")
    if name is None:
        return Read.PLAIN
    if not done:
        message.arguments("{}")
    message.end_call()
    return Read.WHOLE


def _read_text(reader: Reader) -> Steps[str | None]:
    if (yield from reader.peek()) == "'":
        return (yield from read_quoted_literal(reader))
    return (yield from read_string(reader))


def _read_arguments(
    reader: Reader, write: Callable[[str], None], copy: Callable[[Reader, Emit], Steps[bool]]
) -> Steps[bool]:
    """Some models write the object as a string, or null for no arguments; some write a Python dict into the JSON."""
    match (yield from reader.peek()):
        case '"':
            return (yield from copy_quoted(reader, write))
        case "'":
            return (yield from copy_quoted_literal(reader, write))
        case "n" | "N":
            null: list[str] = []
            whole = yield from copy(reader, null.append)
            write("{}" if whole else "")
            return whole
        case "{" if (yield from reader.peek_after(_OPENING)) == "'":
            copy = copy_literal
    return (yield from copy(reader, write))


def read_calls(reader: Reader, message: Message) -> Steps[Read]:
    """Reads one call, or a list of them."""
    if not (yield from reader.skip("[")):
        return (yield from read_call(reader, message))
    result = Read.PLAIN
    while True:
        yield from reader.space()
        if (yield from reader.skip("]")):
            return result
        each = yield from read_call(reader, message)
        if each is not Read.WHOLE:
            return each if result is Read.PLAIN else Read.BROKEN
        result = each
        yield from reader.space()
        yield from reader.skip(",")


def calls_in_json(lark: Lark, tools: Sequence[Tool], arguments: str = "arguments") -> str:
    """A rule: any of the tools, as {"name": ..., "arguments": ...}."""
    heads = [f'{{"name": "{tool.name}", "{arguments}": ' for tool in tools]
    return lark.either([f'{lark.text(head)} {lark.arguments(tool)} "}}"' for head, tool in zip(heads, tools)])


def list_in_json(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    return f'"[" {repeated(calls_in_json(lark, tools), ", ", many)} "]"'


def repeated(one: str, between: str, many: bool) -> str:
    """An expression: one, or many parted by a text."""
    return f"{one} ({json.dumps(between)} {one})*" if many else one


@dataclass(frozen=True, kw_only=True)
class MarkedJson:
    """Text, then a marker and one call or a list of calls.

    hermes             <tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>
    granite            <|tool_call|>[{"name": "f", "arguments": {}}, ...]; of version 4 as hermes
    phi4_mini_json     functools[{"name": "f", "arguments": {}}, ...]; by some templates
                       <|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>
    """

    begin: str
    other_begins: tuple[str, ...] = ()
    end: str | None = None  # of a group; None: a list has its own
    other_ends: tuple[str, ...] = ()  # that may follow a group nevertheless
    gap: str = "\n"  # between marks and calls, where there is an `end`
    markers: tuple[str, ...] = ()
    make_id: Callable[[], str] = call_id

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        begins = (self.begin, *self.other_begins)
        begin = yield from reader.until(*begins, emit=message.content)
        while begin:
            reader.keep("" if begin in self.markers else begin)
            yield from reader.space()
            while (yield from reader.skip_any(begins)):  # models write it twice
                yield from reader.space()
            result = yield from read_calls(reader, message)
            if result is Read.PLAIN:
                message.content(reader.kept())
            elif self.end is None:
                yield from reader.space()
                yield from reader.skip_any(self.other_ends)
            else:
                yield from self._more_calls(reader, message)
                rest: list[str] = []
                found = yield from reader.until(self.end, *begins, emit=rest.append)
                if found is None:
                    message.content("".join(rest))
                    return
                if found != self.end:
                    begin = found
                    continue
            begin = yield from reader.until(*begins, emit=message.content)

    def _more_calls(self, reader: Reader, message: Message) -> Steps[None]:
        """Further calls of a group that should have had one."""
        yield from reader.space()
        while (yield from reader.peek()) == "{" and (yield from read_call(reader, message)) is Read.WHOLE:
            yield from reader.space()

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        if self.end is None:
            return list_in_json(lark, tools, many)
        gap = lark.text(self.gap)
        return f"{gap} {calls_in_json(lark, tools)} {gap} {lark.marker(self.end)}"

    @property
    def between(self) -> str | None:
        return None if self.end is None else self.gap


class Llama3Json:
    """{"name": "f", "parameters": {}}: at the beginning, of the message or of a line, or after <|python_tag|>.

    Several are parted by semicolons, or are a list. Amid a text the name comes first, or "type": "function" before it.
    """

    TAG = "<|python_tag|>"
    LINE = "\n{"
    markers = (TAG,)
    begin = None
    between = None
    make_id = staticmethod(call_id)

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        found: str | None = ""
        while found is not None:
            reader.keep()
            yield from reader.space()
            if (yield from self._tag(reader)):
                found = self.TAG
            yield from self._read_calls(reader, message, found)
            found = yield from reader.until(self.TAG, self.LINE, emit=message.content, leave=(self.TAG, self.LINE))

    def _read_calls(self, reader: Reader, message: Message, after: str) -> Steps[None]:
        """Reads calls as far as they go, and writes what comes between them and text."""
        keys = ("name", "type") if after == self.LINE else _KEYS
        marked = after == self.TAG
        listed = after != self.LINE and (yield from reader.skip("["))
        while True:
            yield from reader.space()
            if (yield from read_call(reader, message, marked=marked, before_name=keys)) is not Read.WHOLE:
                break
            reader.keep()
            yield from reader.space()
            if listed and (yield from reader.skip("]")):
                reader.kept()
                return
            yield from reader.skip("," if listed else ";")
            yield from reader.space()
            marked = yield from self._tag(reader)
            if not marked and (yield from reader.peek()) != "{":
                break
        message.content(reader.kept())

    def _tag(self, reader: Reader) -> Steps[bool]:
        """Reads the tag, if it comes next; it is never content."""
        if not (yield from reader.skip(self.TAG)):
            return False
        reader.keep()
        yield from reader.space()
        return True

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        return repeated(calls_in_json(lark, tools, "parameters"), "; ", many)

    def text_grammar(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """A text in which no line begins as a call does, or with calls on lines of their own."""
        names, gap = "|".join(tool.name for tool in tools), r"[ \t\r\n]*"
        kind = rf"""["']type["']{gap}:{gap}["']function["']{gap},?{gap}"""
        head = rf"""\{{{gap}({kind})*["']name["']{gap}:{gap}["']({names})["']"""
        no_call = rf" & ~/(.|\n)*\n{head}(.|\n)*/"
        first, later = lark.terminal(TEXT_FIRST + no_call), lark.terminal("/(.|\\n)*/" + no_call)

        def call(before: str) -> str:
            heads = [(lark.text(f'\n{{"name": "{tool.name}", "parameters": '), tool) for tool in tools]
            return lark.either(
                [
                    f'{lark.rule(f"{before} {head}", options="[lazy]")} {lark.arguments(tool)} "}}"'
                    for head, tool in heads
                ]
            )

        return f"{first}? | {call(first)} {call(later)}* {later}"


@dataclass(frozen=True)
class Mistral:
    """[TOOL_CALLS] and a list of calls, or (tokenizers since version 11) [TOOL_CALLS]name[ARGS]{...} for each call."""

    by_name: bool  # the newer form
    begin: str = "[TOOL_CALLS]"
    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    make_id: Callable[[], str] = short_call_id

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        while (yield from reader.until(self.begin, emit=message.content)):
            reader.keep()
            yield from reader.space()
            if (yield from reader.peek()) in ("[", "{"):
                result = yield from read_calls(reader, message)
            else:
                result = yield from self._read_named(reader, message)
            if result is Read.PLAIN:
                message.content(reader.kept())

    def _read_named(self, reader: Reader, message: Message) -> Steps[Read]:
        name = yield from reader.span(_WORD)
        if (yield from reader.skip("[CALL_ID]")):
            yield from reader.span(_WORD)
        marked = yield from reader.skip("[ARGS]")
        yield from reader.space()
        opened = (yield from reader.peek()) == "{"
        if not name or not marked and not opened:
            return Read.PLAIN
        reader.kept()
        message.begin_call(name)
        if not opened or not (yield from copy_value(reader, message.arguments)):
            return Read.BROKEN
        message.end_call()
        return Read.WHOLE

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        if not self.by_name:
            return list_in_json(lark, tools, many)
        return lark.either([f"{lark.text(t.name)} {lark.marker('[ARGS]')} {lark.arguments(t)}" for t in tools])

    @property
    def between(self) -> str | None:
        return "" if self.by_name else None


@dataclass(frozen=True)
class DeepSeek:
    """One block of calls: V3 and R1 name the type and put the JSON into a code fence, V3.1 has name and JSON only."""

    fenced: bool  # V3
    begin: str = "<｜tool▁calls▁begin｜>"
    call: str = "<｜tool▁call▁begin｜>"
    sep: str = "<｜tool▁sep｜>"
    call_end: str = "<｜tool▁call▁end｜>"
    end: str = "<｜tool▁calls▁end｜>"
    make_id: Callable[[], str] = call_id
    between: None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.call, self.sep, self.call_end, self.end)

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        found = yield from reader.until(*self.markers, emit=message.content)
        while found:
            if found == self.call:
                yield from self._read_one(reader, message)
            found = yield from reader.until(*self.markers, emit=message.content)

    def _read_one(self, reader: Reader, message: Message) -> Steps[None]:
        header: list[str] = []
        reader.keep()
        if not (yield from reader.until(self.sep, emit=header.append)):
            message.content(reader.kept())
            return
        name = "".join(header).strip()
        fenced = name == "function" and (yield from reader.peek()) != "{"
        if fenced:
            line: list[str] = []
            whole = yield from reader.until("\n", emit=line.append)
            name = "".join(line).strip()
            if not whole or not name:
                message.content("".join(line))
                return
        reader.kept()
        message.begin_call(name)
        yield from reader.space()
        if fenced:
            yield from reader.skip("```json")
            yield from reader.space()
        if (yield from reader.peek()) != "{" or not (yield from copy_value(reader, message.arguments)):
            return
        message.end_call()
        yield from reader.space()
        if fenced:
            yield from reader.skip("```")

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        call, sep, end = lark.marker(self.call), lark.marker(self.sep), lark.marker(self.call_end)
        if self.fenced:
            bodies = [
                f'"function" {sep} {lark.text(tool.name + "\n```json\n")} {lark.arguments(tool)} "\\n```"'
                for tool in tools
            ]
        else:
            bodies = [f"{lark.text(tool.name)} {sep} {lark.arguments(tool)}" for tool in tools]
        one = lark.rule(f"{call} {lark.either(bodies)} {end}")
        calls = repeated(one, "\n" if self.fenced else "", many)
        return f"{calls} {lark.marker(self.end)}"


HERMES = MarkedJson(begin="<tool_call>", end="</tool_call>", markers=("</tool_call>",))
GRANITE = MarkedJson(
    begin="<|tool_call|>",
    other_begins=("<tool_call>",),
    other_ends=("</tool_call>",),
    markers=("<|tool_call|>", "<tool_call>"),
)
PHI4_MINI_MARKED = MarkedJson(
    begin="<|tool_call|>",
    other_begins=("functools",),
    end="<|/tool_call|>",
    gap="",
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
PHI4_MINI = MarkedJson(
    begin="functools",
    other_begins=("<|tool_call|>",),
    other_ends=("<|/tool_call|>",),
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
