"""Tools, reasoning and formats of /v1/responses: what the model writes becomes items, and items what it reads."""

import json

import pydantic
import pytest
from openai.types.responses import Response

from tests.http.response_streams import PATH, events_of, kinds, prompt_of, say
from tests.parsers.chat_templates import QWEN3

LOGPROBS = "message.output_text.logprobs"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "tells the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@pytest.fixture
async def api(start, make_engine):
    engine = make_engine(max_model_len=4096)
    engine.tokenizer = engine.tokenizer.with_chat_template(QWEN3)
    async with start(engine) as running:
        yield running


async def answers(api, body: dict) -> list[dict]:
    """The same call whole and streamed: the same but for ids and times."""
    whole = await api.ok(PATH, body)
    async with api.session.post(api.url + PATH, json={**body, "stream": True}) as response:
        streamed = (await events_of(response))[-1]["response"]
    found = []
    for answer in (whole, streamed):
        Response.model_validate(answer)
        plain = {name: value for name, value in answer.items() if name not in ("id", "created_at", "completed_at")}
        plain["output"] = [
            {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in answer["output"]
        ]
        found.append(plain)
    assert found[0] == found[1]
    return whole["output"]


async def test_a_call(api):
    say(api, "I look." + CALL)
    body = {"input": "weather?", "tools": [WEATHER, TIME]}
    message, call = await answers(api, body)
    assert message["content"][0]["text"] == "I look." and message["status"] == "completed"
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Köln 😀"} and call["call_id"].startswith("call_")
    assert '"weather"' in prompt_of(api) and '"time"' in prompt_of(api)
    assert (await api.ok(PATH, body))["tools"] == [WEATHER, TIME], "they come back as they were sent"


async def test_the_events_of_a_call(api):
    say(api, CALL)
    body = {"input": "weather?", "tools": [WEATHER], "stream": True}
    async with api.session.post(api.url + PATH, json=body) as response:
        events = await events_of(response)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    arguments = "".join(event["delta"] for event in events if "delta" in event)
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert arguments == done["arguments"] == events[-1]["response"]["output"][0]["arguments"]
    assert done["name"] == "weather" and sum("delta" in event for event in events) > 3


async def test_reasoning(api):
    ids = say(api, THOUGHT + "It rains.")
    reasoning, message = await answers(api, {"input": "hi", "include": [LOGPROBS]})
    assert reasoning["type"] == "reasoning" and reasoning["status"] == "completed" and reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    part = message["content"][0]
    assert part["text"] == "It rains."
    tokens = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert tokens.decode().strip() == "It rains.</s>", "no logprobs of the reasoning"
    usage = (await api.ok(PATH, {"input": "hi"}))["usage"]
    thought = usage["output_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < usage["output_tokens"] == len(ids)
    marked = len(api.frontend.tokenizer.encode(THOUGHT.strip(), add_special_tokens=False))
    assert abs(thought - marked) <= 1


async def test_the_limit_inside_the_reasoning_and_inside_a_call(api):
    say(api, THOUGHT)
    (reasoning,) = await answers(api, {"input": "hi", "max_output_tokens": 15})
    assert reasoning["type"] == "reasoning" and reasoning["status"] == "incomplete"
    ids = say(api, CALL)
    (call,) = await answers(api, {"input": "hi", "tools": [WEATHER], "max_output_tokens": len(ids) - 14})
    assert call["type"] == "function_call" and call["status"] == "incomplete"
    assert '{"city": "Köln 😀"}'.startswith(call["arguments"]) and call["arguments"]


async def test_effort_goes_to_the_template(api):
    say(api, "Fine.")
    answer = await api.ok(PATH, {"input": "hi", "reasoning": {"effort": "none"}})
    assert prompt_of(api).endswith("<think>\n\n</think>\n\n") and answer["reasoning"]["effort"] == "none"
    await api.ok(PATH, {"input": "hi", "reasoning": {"effort": "high"}})
    assert not prompt_of(api).endswith("</think>\n\n")
    await api.ok(PATH, {"input": "hi", "chat_template_kwargs": {"enable_thinking": False}})
    assert prompt_of(api).endswith("<think>\n\n</think>\n\n")


async def test_the_turns_of_a_tool(api, client):
    """By id, and by sending everything again, the model reads the same."""
    say(api, THOUGHT + "I look.\n" + CALL)
    question = {"role": "user", "content": "weather?"}
    tools: list = [WEATHER]
    first = await client.responses.create(model="m", input=[question], tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    say(api, "It rains.")
    await client.responses.create(model="m", input=[result], tools=tools, previous_response_id=first.id)
    sent = [question, *(item.model_dump() for item in first.output), result]
    last = await client.responses.create(model="m", input=sent, tools=tools)
    assert prompt_of(api, -1) == prompt_of(api, -2)
    assert last.output_text == "It rains."
    assistant = prompt_of(api).split("<|im_start|>assistant\n")[1]
    assert "Let me see." in assistant and "I look." in assistant and '"city": "Köln 😀"' in assistant
    assert "<tool_response>\nrain\n</tool_response>" in prompt_of(api)
    page = await client.responses.input_items.list(last.id, order="asc")
    assert [item.type for item in page.data] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip


async def test_two_calls_of_one_turn_are_one_message(api):
    say(api, "Done.")
    calls = [{"type": "function_call", "call_id": f"call_{i}", "name": "time", "arguments": "{}"} for i in range(2)]
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{i}", "output": [{"type": "input_text", "text": str(i)}]}
        for i in range(2)
    ]
    items = [{"role": "user", "content": "hi"}, *calls, *outputs]
    await api.ok(PATH, {"input": items, "tools": [TIME]})
    assert prompt_of(api).count("<|im_start|>assistant") == 2, "the calls, and what is to come"
    assert prompt_of(api).split("<|im_start|>assistant")[1].count('{"name": "time"') == 2


async def test_parallel_calls_can_be_forbidden(api):
    say(api, CALL + "\n" + CALL)
    body = {"input": "hi", "tools": [WEATHER]}
    assert len(await answers(api, body)) == 2
    assert len(await answers(api, {**body, "parallel_tool_calls": False})) == 1


async def test_a_forced_call_has_a_grammar(api):
    say(api, CALL)
    body = {"input": "hi", "tools": [WEATHER, TIME]}
    await api.ok(PATH, body)
    assert api.engine.requests[-1].grammar is None
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = await api.ok(PATH, {**body, "tool_choice": choice})
        assert api.engine.requests[-1].grammar and answer["tool_choice"] == choice
        assert answer["output"][0]["type"] == "function_call" and answer["status"] == "completed"
    await api.ok(PATH, {**body, "tool_choice": "none"})
    assert api.engine.requests[-1].grammar is None


async def test_formats(api, client):
    class City(pydantic.BaseModel):
        name: str
        people: int

    say(api, '{"name": "Köln", "people": 1}')
    parsed = await client.responses.parse(model="m", input="a city", text_format=City)
    assert parsed.output_parsed == City(name="Köln", people=1)
    strict = api.engine.requests[-1].grammar
    assert strict and "people" in strict
    sent = {"type": "json_schema", "name": "city", "schema": City.model_json_schema()}
    answer = await api.ok(PATH, {"input": "a city", "text": {"format": sent}})
    assert answer["text"]["format"] == sent
    Response.model_validate(answer)
    await api.ok(PATH, {"input": "a city", "text": {"format": {"type": "json_object"}}})
    assert api.engine.requests[-1].grammar
    await api.ok(PATH, {"input": "a city", "text": {"format": {"type": "text"}}})
    assert api.engine.requests[-1].grammar is None
    await api.ok(PATH, {"input": "a city", "structured_outputs": {"regex": "[a-z]+"}})
    assert "[a-z]+" in api.engine.requests[-1].grammar


SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [WEATHER, {**WEATHER, "name": "a b"}]}, "tools.1.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{**WEATHER, "parameters": "x"}]}, "tools.0.parameters"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools.0.parameters.type"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "zz"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"text": {"format": {**SCHEMA, "mood": 1}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "name": "x"}}}, "text.format"),
        ({"text": {"format": SCHEMA}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs.json"),
    ],
    ids=lambda value: json.dumps(value)[:70],
)
async def test_bad_calls(api, fields, param):
    for stream in (False, True):
        error = await api.error(PATH, {"input": "hi", "stream": stream, **fields})
        assert error["param"] == param
        assert not any(name in error["message"] for name in (".function", "response_format"))
    assert not api.engine.requests


async def test_what_the_model_cannot_do_is_refused(start, make_engine):
    """The plain template knows neither tools, nor calls, nor effort."""
    async with start() as plain:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        for fields, param in (
            ({"tools": [WEATHER]}, "tools"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
            ({"input": [{"role": "user", "content": "hi"}, call]}, "input"),
        ):
            error = await plain.error(PATH, {"input": "hi", **fields})
            assert error["param"] == param and "messages" not in error["message"]
