"""Whatever is sent as input is refused in one way, or becomes items that OpenAI's types and the chat take."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from jaxserve import chat
from jaxserve.errors import RequestError
from jaxserve.http.response_items import check_input, messages_of

ITEM = TypeAdapter(ResponseItem)

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("{}")
words = st.sampled_from([
    "message", "function_call", "function_call_output", "reasoning", "user", "assistant", "system", "developer",
    "input_text", "output_text", "reasoning_text", "summary_text", "completed", "c1", "c2",
])  # fmt: skip
names = st.sampled_from(["type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "text"])
anything = st.recursive(
    leaves | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
texts = st.text(max_size=5)
parts = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": texts})
contents = texts | st.lists(parts, min_size=1, max_size=2)
ids = st.sampled_from(["c1", "c2"])
good_items = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": contents}),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": ids, "name": st.just("f"), "arguments": st.just('{"a": 1}')}
    ),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": ids, "output": contents}),
    st.builds(
        lambda text, summary: {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": each} for each in summary],
            "content": [{"type": "reasoning_text", "text": text}],
        },
        texts,
        st.lists(texts, max_size=1),
    ),
)


@given(st.lists(anything, max_size=3) | st.lists(good_items | anything, max_size=4) | texts)
@settings(max_examples=300, deadline=None)
def test_any_input(raw):
    try:
        items = check_input(raw)
    except RequestError as error:
        assert error.status == 400 and error.param and error.param.startswith("input") and len(error.message) < 500
        assert error.param in error.message
        return
    check_items(items)


@given(st.lists(good_items, min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_good_input(raw):
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in ("c1", "c2")]
    items = check_input([*calls, *raw])
    check_items(items)
    assert check_input(items) == items, "what is kept can be sent again"
    assert check_input(raw, check_input(calls))[0].keys() == items[2].keys()


def check_items(items: list[dict]) -> None:
    for item in items:
        ITEM.validate_python(item)
    messages = messages_of("be brief", items)
    assert chat.check_messages(messages), "as the chat route takes them"
    said = [m["content"] for m in messages if m["role"] == "tool"]
    assert len(said) == sum(item["type"] == "function_call_output" for item in items)
    assert messages[0]["role"] in ("system", "developer")
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [item["call_id"] for item in items if item["type"] == "function_call"]


REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"role": "assistant", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([REASONING, SAID, CALL], [("reasoning", "content", "tool_calls")]),
        ([REASONING, CALL, CALL], [("reasoning", "content", "tool_calls")]),
        ([SAID, SAID], [("content",), ("content",)]),
        ([CALL, SAID], [("content", "tool_calls"), ("content",)]),
        ([REASONING, CALL, RESULT, REASONING, SAID], [("reasoning", "content", "tool_calls"), ("tool",), ("reasoning", "content")]),
        ([SAID, REASONING, CALL], [("content",), ("reasoning", "content", "tool_calls")]),
        ([REASONING, REASONING, SAID], [("reasoning", "content")]),
    ],
)  # fmt: skip
def test_what_belongs_to_one_turn(items, turns):
    messages = messages_of(None, check_input(items))
    assert [
        ("tool",) if m["role"] == "tool" else tuple(n for n in ("reasoning", "content", "tool_calls") if n in m)
        for m in messages
    ] == turns


def test_instructions_join_a_system_message():
    items = check_input([{"role": "developer", "content": [{"type": "input_text", "text": t} for t in "ab"]}, SAID])
    assert messages_of("be brief", items)[0] == {"role": "developer", "content": "be brief\n\na\nb"}
    assert [m["role"] for m in messages_of("be brief", check_input([SAID]))] == ["system", "assistant"]
    assert messages_of(None, items)[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
