"""The message format of gpt-oss: channels of reasoning, text and calls, between special tokens.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{"x": 1}<|call|>
"""

import re
from collections.abc import Sequence

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.json_text import copy_value
from jaxserve.parsers.message import Message, call_id
from jaxserve.parsers.reader import Reader, Steps
from jaxserve.parsers.tools import Tool

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


class Harmony:
    """Reads reasoning, text and calls alike. The prompt has begun the message: <|start|>assistant."""

    begin = None
    between = None
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS[:3])
    make_id = staticmethod(call_id)

    def read(self, reader: Reader, message: Message) -> Steps[None]:
        if (yield from reader.peek()) not in ("<", " "):  # plain text: the prompt went further than usual
            yield from self._read_body(reader, message, "")
        while True:
            begin, pieces = reader.position, []
            found = yield from reader.until(_MESSAGE, *_ENDS[:3], emit=pieces.append)
            header = "".join(pieces)
            if found is None:
                message.content("" if begin or _CHANNEL in header else header)
                return
            if found == _MESSAGE:
                yield from self._read_body(reader, message, header, begin)

    def _read_body(self, reader: Reader, message: Message, header: str, begin: int = 0) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(_CHANNEL)[2].strip()
        if recipient and message.tools:
            yield from self._read_call(reader, message, recipient[1].removeprefix("functions."))
        elif channel.startswith("analysis"):
            message.begin_reasoning(begin)
            if (yield from reader.until(*_ENDS, emit=message.reasoning)):
                message.end_reasoning(reader.position)
        else:
            yield from reader.until(*_ENDS, emit=message.content)

    def _read_call(self, reader: Reader, message: Message, name: str) -> Steps[None]:
        message.begin_call(name)
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            whole = yield from copy_value(reader, message.arguments)
        else:
            rest: list[str] = []
            whole = (yield from reader.until(*_ENDS, emit=rest.append, leave=_ENDS)) is not None
            message.arguments("".join(rest).strip() or ("{}" if whole else ""))
        if whole:
            message.end_call()
        yield from reader.until(*_ENDS, emit=lambda text: None)

    def call_grammar(self, lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        """One call, with the reasoning and the texts before it: the model stops after a call whatever it is asked."""
        bodies = [
            f"{lark.text(f'commentary to=functions.{tool.name} ')} {lark.marker(_CONSTRAIN)} {self._body(lark, tool)}"
            for tool in tools
        ]
        return f"{self._before(lark)} {lark.marker(_CHANNEL)} {lark.either(bodies)}"

    def answer_grammar(self, lark: Lark, answer: str) -> str:
        final = f'{lark.marker(_CHANNEL)} "final" {lark.marker(_MESSAGE)}'
        return f"{self._before(lark)} {final} {answer}"

    def _body(self, lark: Lark, tool: Tool) -> str:
        return f'"json" {lark.marker(_MESSAGE)} {lark.arguments(tool)}'

    def _before(self, lark: Lark) -> str:
        channels = '("analysis" | "commentary")'
        again = f'{lark.marker(_START)} "assistant"'
        part = f"{lark.marker(_CHANNEL)} {channels} {lark.marker(_MESSAGE)} {lark.until('<|end|>')} {again}"
        return f"{lark.rule(part)}*"


HARMONY = Harmony()
