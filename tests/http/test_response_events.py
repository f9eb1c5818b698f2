"""The events of any message, in any pieces: valid, in order, and together the message; the client's own state agrees."""

import dataclasses
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response as ClientResponse

from jaxserve.detokenize import TextDelta
from jaxserve.errors import ErrorInfo
from jaxserve.http.logprobs import LogprobShapes
from jaxserve.http.response_events import ResponseWriter, encode
from jaxserve.http.response_replies import Response
from jaxserve.parsers import MessageDelta, ToolCallDelta
from jaxserve.request import Request, SamplingParams, TokenLogprobs
from tests.http.response_streams import EVENT

ONE_END = ("response.completed", "response.incomplete", "response.failed")


class Script:
    """A parser that has one message delta per piece of text, whatever the text."""

    has_reasoned = False

    def __init__(self, deltas: list[MessageDelta]):
        self._deltas = iter(deltas)

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        return next(self._deltas, MessageDelta())

    def finish_reason(self, reason: str | None) -> str | None:
        return reason

    def is_reasoning(self, at: int) -> bool:
        return False


@dataclasses.dataclass
class Counts:
    """What a writer asks of the text of a request."""

    request: Request
    num_tokens: int = 0
    cached_tokens: int = 1


def writer_of(deltas: list[MessageDelta], *, background: bool = False, shapes: LogprobShapes | None = None):
    response = Response(
        id="resp_1", created_at=1, background=background, instructions=None, max_output_tokens=None, metadata={},
        model="m", parallel_tool_calls=True, previous_response_id=None, prompt_cache_key=None, reasoning={},
        safety_identifier=None, store=False, temperature=1.0, text={"format": {"type": "text"}}, tool_choice="auto",
        tools=[], top_logprobs=0, top_p=1.0, truncation="disabled", user=None,
    )  # fmt: skip
    text = Counts(Request(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=9))
    return ResponseWriter(response, text, Script(deltas), shapes)  # pyright: ignore[reportArgumentType]


def decoded(events: list) -> list[dict]:
    return [json.loads(block.split(b"data: ")[1]) for block in encode(events)]


def run(writer: ResponseWriter, deltas: list[MessageDelta], end: str) -> list[dict]:
    """All events of a response that gets these deltas, then ends."""
    events = decoded(writer.begin())
    for _ in deltas:
        events += decoded(writer.push(TextDelta(0, text="x", token_ids=[7])))
    if end == "cancel":
        return events + decoded(writer.cancel())
    if end == "fail":
        return events + decoded(writer.fail(ErrorInfo("it burns", "InternalServerError", None, 500)))
    return events + decoded(writer.push(TextDelta(0, token_ids=[1], finish_reason=end)))


texts = st.text(max_size=3)
calls = st.builds(
    lambda index, text, first: ToolCallDelta(index, f"call_{index}" if first else None, "f" if first else None, text),
    st.integers(0, 2), texts, st.booleans(),
)  # fmt: skip
scripts = st.lists(
    st.builds(MessageDelta, texts, texts, st.lists(calls, max_size=2)) | st.builds(MessageDelta, texts), max_size=6
)


def in_order(deltas: list[MessageDelta]) -> list[MessageDelta]:
    """The deltas with calls as parsers have them: one after the other, each begun with id and name, until text comes."""
    seen, going_on = -1, None
    for delta in deltas:
        fitting = []
        for call in delta.tool_calls:
            if call.id is None and going_on is not None:
                fitting.append(ToolCallDelta(going_on, arguments=call.arguments))
            else:
                going_on = seen = seen + 1
                fitting.append(ToolCallDelta(seen, f"call_{seen}", "f", call.arguments))
        delta.tool_calls = fitting
        if (delta.content or delta.reasoning) and all(call.id is None for call in fitting):
            going_on = None  # the text came after the call's last piece
    return deltas


@given(scripts, st.sampled_from(["stop", "length", "abort", "cancel", "fail"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_message(deltas, end, background):
    deltas = in_order(deltas)
    writer = writer_of(deltas, background=background)
    events = run(writer, deltas, end)
    client = ResponseStreamState(input_tools=omit, text_format=omit)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        client.handle_event(EVENT.validate_python(event))
    assert [event["type"] in ONE_END for event in events] == [False] * (len(events) - 1) + [True]
    final = events[-1]["response"]
    ClientResponse.model_validate(final)
    output = final["output"]
    check_places(events, output)
    joined = {
        "message": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "function_call": "".join(call.arguments for delta in deltas for call in delta.tool_calls),
    }
    for kind, text in joined.items():
        assert text == "".join(
            item["arguments"] if kind == "function_call" else "".join(part["text"] for part in item["content"])
            for item in output
            if item["type"] == kind
        )
    count = len({call.index for delta in deltas for call in delta.tool_calls})
    whole = end == "stop"
    assert [item["status"] for item in output[:-1]] == ["completed"] * len(output[:-1])
    assert all(item["status"] == ("completed" if whole else "incomplete") for item in output[-1:])
    call_ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    assert call_ids == [f"call_{i}" for i in range(count)]


def check_places(events: list[dict], output: list[dict]) -> None:
    """Each item is added, written and done where it ends up, one after the other; pieces join to what is done."""
    open_at, pieces, done = None, "", []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert open_at is None and event["output_index"] == len(done)
                open_at, pieces = event["output_index"], ""
                item_id = event["item"]["id"]
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert (event["output_index"], event["item_id"]) == (open_at, item_id) and event["delta"]
                pieces += event["delta"]
            case "output_text.done" | "reasoning_text.done" | "function_call_arguments.done":
                assert event["item_id"] == item_id and event.get("text", event.get("arguments")) == pieces
            case "output_item.done":
                assert event["output_index"] == open_at and event["item"]["id"] == item_id
                done.append(event["item"])
                open_at = None
    assert done == output and open_at is None


def test_the_order_of_a_whole_answer():
    deltas = [
        MessageDelta(reasoning="hm"),
        MessageDelta(content="I"),
        MessageDelta(content=" look", tool_calls=[ToolCallDelta(0, "call_a", "f", "{")]),
        MessageDelta(tool_calls=[ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "call_b", "g")]),
        MessageDelta(tool_calls=[ToolCallDelta(1, arguments="[]")]),
    ]
    events = run(writer_of(deltas), deltas, "stop")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]] == [
        ("call_a", "f", "{}"),
        ("call_b", "g", "[]"),
    ]


def test_logprobs_go_with_the_text_that_was_held_back(tokenizer):
    deltas = [MessageDelta(), MessageDelta(content="ab"), MessageDelta(reasoning="c"), MessageDelta(content="d")]
    writer = writer_of(deltas, shapes=LogprobShapes(tokenizer, 0))
    events = decoded(writer.begin())
    for token_id in (40, 41, 42, 43):
        entry = TokenLogprobs(token_id, -0.5, 1, [], [])
        events += decoded(writer.push(TextDelta(0, text="x", token_ids=[token_id], logprobs=[entry], offsets=[0])))
    end = TextDelta(0, token_ids=[1], logprobs=[TokenLogprobs(1, -0.5, 1, [], [])], offsets=[4], finish_reason="stop")
    events += decoded(writer.push(end))
    names = [tokenizer.token_bytes(i).decode() for i in (40, 41, 43, 1)]
    deltas_seen = [
        [e["token"] for e in event["logprobs"]]
        for event in events
        if event["type"].endswith("text.delta") and "logprobs" in event
    ]
    assert deltas_seen == [names[:2], names[2:3]]
    parts = [item["content"][0] for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [[e["token"] for e in part["logprobs"]] for part in parts] == [names[:2], names[2:]]


@pytest.mark.parametrize("end", ["stop", "cancel", "fail"])
def test_an_end_is_the_end(end):
    writer = writer_of([])
    run(writer, [], end)
    before = msgspec.json.encode(writer.response)
    assert writer.ended and writer.cancel() == [] and writer.fail(ErrorInfo("x", "y", None, 500)) == []
    assert msgspec.json.encode(writer.response) == before


def test_a_full_queue_is_a_rate_limit():
    writer = writer_of([])
    writer.begin()
    writer.fail(ErrorInfo("full", "RateLimitError", None, 429))
    assert writer.response.error is not None and writer.response.error.code == "rate_limit_exceeded"
