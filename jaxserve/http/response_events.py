"""The stream of one response: text deltas in, numbered events and output items out.

    created  (queued)  in_progress
      output_item.added  content_part.added  output_text.delta ...  output_text.done
                         content_part.done  output_item.done
      output_item.added  function_call_arguments.delta ...  function_call_arguments.done  output_item.done
      ...
    completed | incomplete | failed

A call that does not stream goes the same way, and leaves the events unwritten.
"""

import time
import uuid
from collections.abc import Iterator

import msgspec

from jaxserve.detokenize import TextDelta
from jaxserve.errors import ErrorInfo, QueueFull
from jaxserve.frontend import RequestText
from jaxserve.http.conversation import MessageText
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.replies import TokenLogprob
from jaxserve.http.response_replies import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Event,
    Failed,
    FunctionCallItem,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    TextDeltaEvent,
    TextDone,
)
from jaxserve.parsers import MessageDelta, MessageParser, ToolCallDelta

_STATUS = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "abort": "cancelled",
}  # by finish_reason


class ResponseWriter:
    """Writes one response. Its methods return the events that a stream sends; `response` is what came of it so far."""

    def __init__(self, response: Response, text: RequestText, parser: MessageParser, shapes: LogprobShapes | None):
        """shapes: of the logprobs to send with the output text, if any."""
        self.response = response
        self._text, self._parser, self._shapes = text, parser, shapes
        self._message = MessageText(parser)
        self._output = OutputWriter(response.output)
        self._next_number = 0

    def begin(self) -> list[Event]:
        """The engine has accepted the request."""
        if self.response.background:
            self.response.status = "queued"
            return self._numbered([Created(response=self._seen()), Queued(response=self._seen())])
        return self._numbered([Created(response=self._seen()), InProgress(response=self._seen())])

    def push(self, delta: TextDelta) -> list[Event]:
        events: list[Event] = []
        if self.response.status == "queued":
            self.response.status = "in_progress"
            events.append(InProgress(response=self._seen()))
        return self._numbered([*events, *self._push(delta)])

    def cancel(self) -> list[Event]:
        """Ends the response where it is, if it has not ended."""
        if self.ended:
            return []
        return self._numbered(self._push(TextDelta(0, finish_reason="abort")))

    def fail(self, error: ErrorInfo) -> list[Event]:
        """Ends the response with an error, if it has not ended."""
        if self.ended:
            return []
        code = "rate_limit_exceeded" if error.code == QueueFull.status else "server_error"
        self.response.error = ResponseError(code, error.message)
        return self._numbered(list(self._end("failed", [])))

    @property
    def ended(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

    def _push(self, delta: TextDelta) -> list[Event]:
        piece = self._message.push(delta)
        logprobs = self._logprobs(piece.tokens)
        events = self._output.push(piece.message, logprobs)
        if reason := piece.tokens.finish_reason:
            events += self._end(_STATUS[reason], [] if piece.message.content else logprobs)
        return events

    def _end(self, status: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield from self._output.close(status, logprobs)
        self.response.status = status
        self.response.usage = self._usage()
        if status == "completed":
            self.response.completed_at = int(time.time())
            yield Completed(response=self.response)
        elif status == "failed":
            yield Failed(response=self.response)
        else:  # OpenAI has no event of its own for a cancelled one: its status says it
            if status == "incomplete":
                self.response.incomplete_details = IncompleteDetails("max_output_tokens")
            yield Incomplete(response=self.response)

    def _logprobs(self, tokens: TextDelta) -> list[TokenLogprob]:
        """Those of the text; reasoning has none."""
        if not self._shapes:
            return []
        kept = [e for e, at in zip(tokens.logprobs, tokens.offsets, strict=True) if not self._parser.is_reasoning(at)]
        return self._shapes.chat(TextDelta(0, logprobs=kept)).content

    def _usage(self) -> ResponseUsage:
        prompt, output = len(self._text.request.prompt_token_ids), self._text.num_tokens
        return ResponseUsage(
            prompt,
            InputTokensDetails(self._text.cached_tokens),
            output,
            OutputTokensDetails(self._message.reasoning_tokens),
            prompt + output,
        )

    def _seen(self) -> Response:
        """The response as it is now: it changes before its events are written."""
        return msgspec.structs.replace(self.response, output=list(self.response.output))

    def _numbered(self, events: list[Event]) -> list[Event]:
        for number, event in enumerate(events, self._next_number):
            event.sequence_number = number
        self._next_number += len(events)
        return events


def encode(events: list[Event]) -> list[bytes]:
    """Each event with its name, as server-sent events have it."""
    return [b"event: %s\ndata: %s\n\n" % (event.type.encode(), msgspec.json.encode(event)) for event in events]


class OutputWriter:
    """Message deltas in, output items and their events out. One item is open at a time; `items` are those done."""

    def __init__(self, items: list[OutputItem]):
        self.items = items
        self._open: _Text | _Call | None = None

    def push(self, delta: MessageDelta, logprobs: list[TokenLogprob]) -> list[Event]:
        events: list[Event] = []
        begun = self._open.call_index if isinstance(self._open, _Call) else None
        for call in delta.tool_calls:
            if call.index == begun:  # the rest of a call comes before any text
                events += self._call(call)
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning, [])
        if delta.content:
            events += self._text("message", delta.content, logprobs)
        for call in delta.tool_calls:
            if call.index != begun:
                events += self._call(call)
        return events

    def close(self, status: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """Ends the last item; an answer without any has one empty message. `logprobs`: of tokens without a text."""
        if not self.items and self._open is None and status in ("completed", "incomplete"):
            yield from self._begin(_Text("message", len(self.items)))
        if isinstance(self._open, _Text):
            self._open.logprobs += logprobs
        yield from self._end("completed" if status == "completed" else "incomplete")

    def _text(self, kind: str, piece: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        if not (isinstance(self._open, _Text) and self._open.kind == kind):
            yield from self._begin(_Text(kind, len(self.items) + (self._open is not None)))
        assert isinstance(self._open, _Text)
        yield self._open.push(piece, logprobs)

    def _call(self, delta: ToolCallDelta) -> Iterator[Event]:
        if not (isinstance(self._open, _Call) and self._open.call_index == delta.index):
            yield from self._begin(_Call(delta, len(self.items) + (self._open is not None)))
        assert isinstance(self._open, _Call)
        yield from self._open.push(delta.arguments)

    def _begin(self, item: "_Text | _Call") -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.end(status)
        self.items.append(self._open.item)
        self._open = None


class _Text:
    """A message or a reasoning item that is being written."""

    def __init__(self, kind: str, index: int):
        self.kind = kind
        self._index = index
        self._parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.item: MessageItem | ReasoningItem
        if kind == "message":
            self.item = MessageItem(id=f"msg_{uuid.uuid4().hex}")
        else:
            self.item = ReasoningItem(id=f"rs_{uuid.uuid4().hex}")
        self._place = {"output_index": index, "item_id": self.item.id}

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(output_index=self._index, item=msgspec.structs.replace(self.item))
        yield PartAdded(**self._place, part=OutputText() if self.kind == "message" else ReasoningText())

    def push(self, piece: str, logprobs: list[TokenLogprob]) -> Event:
        self._parts.append(piece)
        self.logprobs += logprobs
        if self.kind == "message":
            return TextDeltaEvent(**self._place, delta=piece, logprobs=logprobs)
        return ReasoningDelta(**self._place, delta=piece)

    def end(self, status: str) -> Iterator[Event]:
        text = "".join(self._parts)
        if isinstance(self.item, MessageItem):
            part = OutputText(text, logprobs=self.logprobs)
            self.item.content = [part]
            yield TextDone(**self._place, text=text, logprobs=self.logprobs)
        else:
            part = ReasoningText(text)
            self.item.content = [part]
            yield ReasoningDone(**self._place, text=text)
        yield PartDone(**self._place, part=part)
        self.item.status = status
        yield ItemDone(output_index=self._index, item=self.item)


class _Call:
    """A function call that is being written."""

    def __init__(self, first: ToolCallDelta, index: int):
        self.call_index = first.index
        self._index = index
        self._parts: list[str] = []
        assert first.id is not None and first.name is not None, "a call begins with them"
        self.item = FunctionCallItem(id=f"fc_{uuid.uuid4().hex}", call_id=first.id, name=first.name)

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(output_index=self._index, item=msgspec.structs.replace(self.item))

    def push(self, piece: str) -> Iterator[Event]:
        if piece:
            self._parts.append(piece)
            yield ArgumentsDelta(output_index=self._index, item_id=self.item.id, delta=piece)

    def end(self, status: str) -> Iterator[Event]:
        self.item.arguments, self.item.status = "".join(self._parts), status
        yield ArgumentsDone(
            output_index=self._index, item_id=self.item.id, name=self.item.name, arguments=self.item.arguments
        )
        yield ItemDone(output_index=self._index, item=self.item)
