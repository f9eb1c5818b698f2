"""The assistant's message as it grows: what parsers write, and what a client is sent."""

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.parsers.tools import Tool

SPACE = " \t\r\n"


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one tool call. The pieces of a call join to exactly its arguments."""

    index: int  # of the call in the message
    id: str | None = None  # only in a call's first delta
    name: str | None = None  # only in a call's first delta, complete
    arguments: str = ""  # a piece of the JSON text


@dataclass(slots=True)
class MessageDelta:
    """What one piece of text adds to the message; false if nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def short_call_id() -> str:
    """Nine letters and digits: the templates of Mistral's models refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Message:
    """What parsers write to.

    White space around reasoning belongs to the format and is dropped; around calls, too, unless it parts two texts.

    tools       what may be called, by name
    max_calls   further calls are dropped; None: all are sent
    closing     a mark of the format: no content where it ends the message. "": there is none
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        max_calls: int | None = None,
        make_id: Callable[[], str] = call_id,
    ):
        self.tools = tools
        self.reasoning_spans: list[tuple[int, float]] = []  # begin and end, in characters of the output
        self.complete_calls = 0
        self.cut = False  # the last call has no end
        self.closing = ""
        self._closing_held = ""  # content that may turn out to be that
        self._max_calls = max_calls
        self._make_id = make_id
        self._delta = MessageDelta()
        self._calls = 0
        self._call: ToolCallDelta | None = None  # what the open call has for the next delta
        self._arguments: list[str] = []  # its arguments: joined once, there may be many pieces
        self._space = ""  # white space that is content, unless a call comes next
        self._fresh = False  # nothing but white space since a call, or since the reasoning
        self._gap = ""  # white space before a call, which parts the text before it from one after it
        self._has_content = False
        self._reasoning_space: str | None = None  # the same of reasoning; None before its first word

    def take(self, *, finished: bool) -> MessageDelta:
        """What was written since the last time."""
        if finished:
            self._delta.content += "" if self._fresh else self._space
            self._space = ""
        self._close_delta()
        delta, self._delta = self._delta, MessageDelta()
        if self.closing:
            delta.content = self._without_closing(delta.content, finished)
        return delta

    def _without_closing(self, text: str, finished: bool) -> str:
        text, mark = self._closing_held + text, self.closing
        body = text.rstrip(SPACE)
        if body.endswith(mark):
            end = len(body) - len(mark)
        elif finished:
            return text
        else:
            maybe = range(max(len(text) - len(mark) + 1, 0), len(text))
            end = next((i for i in maybe if mark.startswith(text[i:])), len(text))
        end = len(text[:end].rstrip(SPACE))
        self._closing_held = text[end:]
        return text[:end]

    def _close_delta(self) -> None:
        if self._call is not None:
            self._call.arguments = "".join(self._arguments)
        self._call, self._arguments = None, []

    def content(self, text: str) -> None:
        if not self.tools and not self._fresh:
            self._delta.content += text
            return
        text = self._space + text
        body = text.strip(SPACE) if self._fresh else text.rstrip(SPACE)
        if not body:
            self._space = text
            return
        end = len(text.rstrip(SPACE))
        before = text[: end - len(body)]
        self._delta.content += (self._gap or before if self._has_content else "") + body
        self._fresh, self._gap, self._has_content = False, "", True
        self._space = text[end:]

    def begin_reasoning(self, at: int) -> None:
        self.reasoning_spans.append((at, float("inf")))
        self._reasoning_space = None

    def reasoning(self, text: str) -> None:
        text = text.lstrip(SPACE) if self._reasoning_space is None else self._reasoning_space + text
        if not text:
            return
        body = text.rstrip(SPACE)
        self._delta.reasoning += body
        self._reasoning_space = text[len(body) :]

    def end_reasoning(self, at: int) -> None:
        begin, _ = self.reasoning_spans.pop()
        self.reasoning_spans.append((begin, at))
        self._space, self._fresh = "", True

    def begin_call(self, name: str) -> None:
        if not self._fresh:
            self._gap = self._space
        self._space, self._fresh = "", True
        self._close_delta()
        self._calls += 1
        self.cut = not self._dropped
        if not self._dropped:
            self._call = ToolCallDelta(self._calls - 1, self._make_id(), name)
            self._delta.tool_calls.append(self._call)

    def arguments(self, text: str) -> None:
        """A piece of the JSON text of the open call's arguments."""
        if self._dropped or not text:
            return
        if self._call is None:
            self._call = ToolCallDelta(self._calls - 1)
            self._delta.tool_calls.append(self._call)
        self._arguments.append(text)

    def end_call(self) -> None:
        """The open call is complete."""
        if not self._dropped:
            self.cut = False
            self.complete_calls += 1
        self._close_delta()

    @property
    def _dropped(self) -> bool:
        return self._max_calls is not None and self._calls > self._max_calls
