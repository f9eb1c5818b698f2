"""Reasoning before the answer: where it begins and ends, in the output and in the prompt."""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of an answer's reasoning, its marks aside; after that its end must follow. 0: no reasoning.

    ends: ids that end an output, which none may do amid its reasoning
    """

    tokens: int
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """Reasoning between two marks, before everything else.

    always: a model that always reasons, also where the begin mark is missing
    around: marks that may stand around the answer after it
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    always: bool = False
    around: tuple[str, str] | None = None

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
        if not (yield from reader.until(*self.end, emit=message.reasoning)):
            return
        message.end_reasoning(reader.position)
        if self.around:
            yield from reader.space()
            if (yield from reader.skip(self.around[0])):
                message.closing = self.around[1]

    def prefix(self, lark: Lark, begun: Begun, budget: ThinkingBudget | None = None) -> str:
        """The part of a grammar that lets the reasoning pass, `budget` tokens of it at most."""
        if begun is Begun.CLOSED:
            return ""
        if budget is not None:
            begins, thought = self._limited(lark, budget)
            if begun is Begun.OPEN:
                return f"{thought} GAP"
            if self.always:
                return f"<[{begins}]>? {thought} GAP"
            lark.forbid_text(self.begin)
            return f"(<[{begins}]> {thought} GAP)?"
        ends = " | ".join(lark.until(mark) for mark in self.end)
        if begun is Begun.OPEN or self.always:
            return f"({ends}) GAP"
        begins = " | ".join(lark.marker(mark) for mark in self.begin)
        return f"(({begins}) ({ends}) GAP)?"

    def beginning(self, lark: Lark, begun: Begun, budget: ThinkingBudget) -> str:
        """The grammar of the reasoning alone, or of a first token that does not begin one."""
        begins, thought = self._limited(lark, budget)
        if begun is Begun.OPEN:
            return thought
        if self.always:
            return f"<[{begins}]>? {thought}"
        return f"<[{begins}]> {thought} | <[^{begins}]>"

    def _limited(self, lark: Lark, budget: ThinkingBudget) -> tuple[str, str]:
        """Ids of the marks that begin it; the rest of it. Tokens are counted, so it may break off amid a character."""
        begin, end = lark.token_ids(self.begin), lark.token_ids(self.end)
        assert begin is not None and end is not None, "check_budget() refused it otherwise"
        last = f"<[{_listed(end)}]>"
        thought = f"<[^{_listed([*end, *budget.ends])}]>{{0,{budget.tokens}}} {last}" if budget.tokens else last
        return _listed(begin), thought


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, dict.fromkeys(ids)))
