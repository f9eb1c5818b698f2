"""Reasoning before the answer: where it begins and ends, in the output and in the prompt."""

from dataclasses import dataclass
from enum import Enum

from jaxserve.parsers.grammar import Lark
from jaxserve.parsers.message import SPACE, Message
from jaxserve.parsers.reader import Reader, Steps


class Begun(Enum):
    """What the prompt has done."""

    NO = "nothing: the output may begin with reasoning"
    OPEN = "begun the reasoning: the output goes on with it"
    CLOSED = "ended the reasoning: the output is the answer"


@dataclass(frozen=True)
class Thinking:
    """Reasoning between two marks, before everything else.

    always: a model that always reasons, also where the begin mark is missing
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin + self.end

    def begun(self, prompt: str) -> Begun:
        """By what the prompt ends with, white space aside; `prompt` may be just its last part."""
        tail = prompt.rstrip(SPACE)
        if tail.endswith(self.end):
            return Begun.CLOSED
        return Begun.OPEN if tail.endswith(self.begin) else Begun.NO

    def begun_in(self, text: str) -> Begun:
        """By the text of a message that the output continues."""
        ended = max(text.rfind(mark) for mark in self.end)
        begun = max(text.rfind(mark) for mark in self.begin)
        return Begun.OPEN if begun > ended else Begun.CLOSED

    def read(self, reader: Reader, message: Message, begun: Begun) -> Steps[None]:
        """Reads the reasoning, if there is any, up to the answer."""
        if begun is Begun.CLOSED:
            return
        reader.keep()
        yield from reader.space()
        marked = yield from reader.skip_any(self.begin)
        if begun is Begun.NO and not self.always and not marked:
            message.content(reader.kept())
            return
        reader.kept()
        message.begin_reasoning(0)
        if (yield from reader.until(*self.end, emit=message.reasoning)):
            message.end_reasoning(reader.position)

    def prefix(self, lark: Lark, begun: Begun) -> str:
        """The part of a grammar that lets the reasoning pass."""
        if begun is Begun.CLOSED:
            return ""
        ends = " | ".join(lark.until(mark) for mark in self.end)
        if begun is Begun.OPEN or self.always:
            return f"({ends}) GAP"
        begins = " | ".join(lark.marker(mark) for mark in self.begin)
        return f"(({begins}) ({ends}) GAP)?"
