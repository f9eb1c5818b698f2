"""/v1/responses with the official client: its own types judge every answer and every event."""

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from jaxserve.errors import QueueFull
from tests.http.response_streams import PATH, events_of, kinds, prompt_of, say

LOGPROBS = "message.output_text.logprobs"
ITEM = TypeAdapter(ResponseItem)
DELTAS = "response.output_text.delta"


async def stream_of(api, body: dict) -> list[dict]:
    async with api.session.post(api.url + PATH, json={**body, "stream": True}) as response:
        return await events_of(response)


# ------------------------------------------------------------------------------------------------------------ answers


async def test_shape(api):
    ids = say(api, "brown fox")
    answer = await api.ok(PATH, {"model": "m", "input": "quick", "metadata": {"a": "b"}, "user": "u"})
    Response.model_validate(answer)
    assert answer.pop("id").startswith("resp_") and answer["created_at"] > 10**9
    assert answer.pop("completed_at") >= answer.pop("created_at")
    item = answer.pop("output")[0]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "brown fox", "annotations": [], "logprobs": []}],
    }
    prompt_tokens = len(api.engine.requests[0].prompt_token_ids)
    assert answer == {
        "object": "response", "status": "completed", "model": "m", "background": False, "error": None,
        "incomplete_details": None, "instructions": None, "max_output_tokens": None, "max_tool_calls": None,
        "metadata": {"a": "b"}, "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
        "store": True, "temperature": 1.0, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": "u",
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": len(ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + len(ids),
        },
    }  # fmt: skip


async def test_the_prompt_is_that_of_the_chat(api):
    await api.ok(PATH, {"input": "hi", "instructions": "be brief"})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    await api.ok("/v1/chat/completions", {"messages": messages})
    ours, theirs = api.engine.requests
    assert ours.prompt_token_ids == theirs.prompt_token_ids and ours.max_tokens == theirs.max_tokens
    assert ours.stop_ids == theirs.stop_ids


@pytest.mark.parametrize("text", ["brown fox", "naïve 日本語 😀👍🏽 done.", "", "\n\n"])
async def test_a_stream_says_what_the_whole_answer_says(api, text):
    say(api, text)
    body = {"input": "hi", "include": [LOGPROBS], "top_logprobs": 2}
    whole = await api.ok(PATH, body)
    events = await stream_of(api, body)
    text_events = ["output_text.delta"] if text else []
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", *text_events,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"] == DELTAS) == text
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["text"] == text
    last = events[-1]["response"]
    for each in (whole, last):
        for name in ("id", "created_at", "completed_at"):
            each.pop(name)
        each["output"][0].pop("id")
    assert last == whole
    part = whole["output"][0]["content"][0]
    assert part["text"] == text and part["logprobs"] == done["logprobs"]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    joined = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert joined == (text + "</s>").encode()
    streamed = [entry for event in events if event["type"] == DELTAS for entry in event["logprobs"]]
    assert streamed == part["logprobs"][: len(streamed)] and len(part["logprobs"]) - len(streamed) <= 1
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


async def test_states_of_the_response_in_its_events(api):
    say(api, "fox")
    events = await stream_of(api, {"input": "hi"})
    states = [event["response"] for event in events if "response" in event]
    assert [state["status"] for state in states] == ["in_progress", "in_progress", "completed"]
    assert [len(state["output"]) for state in states] == [0, 0, 1]
    assert [state["usage"] is None for state in states] == [True, True, False]
    assert len({state["id"] for state in states}) == 1
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["status"] == "in_progress" and added["item"]["content"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_limit_makes_it_incomplete(api, stream):
    body = {"input": "hi", "max_output_tokens": 5, "ignore_eos": True}
    answer = (await stream_of(api, body))[-1]["response"] if stream else await api.ok(PATH, body)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    assert answer["usage"]["output_tokens"] == answer["max_output_tokens"] == 5
    assert api.engine.requests[0].max_tokens == 5


async def test_sampling_fields_reach_the_engine(api):
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 9, "stop": ["#"], "min_tokens": 2,
        "presence_penalty": 0.5, "frequency_penalty": 1.5, "repetition_penalty": 1.25, "logit_bias": {"5": 2.5},
        "bad_words": ["x"], "stop_token_ids": [7], "allowed_token_ids": [5, 6, 7], "ignore_eos": True,
    }  # fmt: skip
    answer = await api.ok(PATH, {"input": "hi", "priority": 3, "max_output_tokens": 4, **fields})
    request = api.engine.requests[0]
    for name, value in fields.items():
        assert getattr(request.params, name) == ({5: 2.5} if name == "logit_bias" else value)
    assert request.priority == 3 and request.params.n == 1
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.25)


async def test_defaults_of_the_model(start):
    async with start(defaults={"temperature": 0.25, "max_new_tokens": 7}) as api:
        answer = await api.ok(PATH, {"input": "hi"})
        assert answer["temperature"] == 0.25 and api.engine.requests[0].max_tokens == 7


# ------------------------------------------------------------------------------------------------------------ client


async def test_the_client(api, client):
    say(api, "brown fox")
    whole = await client.responses.create(model="m", input="hi", instructions="x")
    assert whole.output_text == "brown fox" and whole.status == "completed"
    stream = await client.responses.create(model="m", input="hi", stream=True)
    events = [event async for event in stream]
    assert events[-1].response.output_text == "brown fox"
    again = await client.responses.retrieve(whole.id)
    assert again == whole
    page = await client.responses.input_items.list(whole.id)
    assert [item.content[0].text async for item in page] == ["hi"]
    count = await client.responses.input_tokens.count(model="m", input="hi", instructions="x")
    assert count.input_tokens == whole.usage.input_tokens
    await client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(whole.id)


async def test_the_stream_helper(api, client):
    say(api, "brown fox")
    async with client.responses.stream(model="m", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == DELTAS]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "brown fox"


async def test_the_sync_client(api):
    say(api, "brown fox")

    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=api.url + "/v1", api_key="none") as client:
            whole = client.responses.create(model="m", input=[{"role": "user", "content": "hi"}])
            with client.responses.stream(model="m", input="hi", previous_response_id=whole.id) as stream:
                return whole.output_text, stream.get_final_response().output_text

    assert await asyncio.to_thread(talk) == ("brown fox", "brown fox")


async def test_output_sent_back_as_input(api, client):
    say(api, "brown fox")
    first = await client.responses.create(model="m", input="hi")
    conversation = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    await client.responses.create(model="m", input=[*conversation, {"role": "user", "content": "more"}])
    await client.responses.create(model="m", input="more", previous_response_id=first.id)
    assert prompt_of(api, -1) == prompt_of(api, -2)
    assert "assistant\nbrown fox<|im_end|>" in prompt_of(api)


# -------------------------------------------------------------------------------------------------- conversations


def message(role: str, *texts: str, kind: str = "input_text") -> dict:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


async def test_items_become_messages(api):
    items = [
        {"role": "developer", "content": "rules"},
        message("user", "a", "b"),
        message("assistant", "c", kind="output_text"),
        {"role": "user", "content": "d"},
    ]
    await api.ok(PATH, {"input": items, "instructions": "be brief"})
    turns = [("system", "be brief\n\nrules"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    body = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt_of(api) == f"<s>{body}<|im_start|>assistant\n"


async def test_a_conversation_goes_on_by_id(api):
    say(api, "one")
    first = await api.ok(PATH, {"input": "a", "instructions": "only for the first"})
    say(api, "two")
    second = await api.ok(PATH, {"input": "b", "previous_response_id": first["id"], "instructions": "now this"})
    third = await api.ok(PATH, {"input": "c", "previous_response_id": second["id"]})
    assert third["previous_response_id"] == second["id"]
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "c")]
    body = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt_of(api, 2) == f"<s>{body}<|im_start|>assistant\n"
    assert "system\nnow this<|im_end|>" in prompt_of(api, 1) and "only for the first" not in prompt_of(api, 1)
    branch = await api.ok(PATH, {"input": "d", "previous_response_id": first["id"]})
    assert branch["status"] == "completed" and "two" not in prompt_of(api)
    await api.call(f"{PATH}/{first['id']}", method="DELETE")
    await api.ok(PATH, {"input": "e", "previous_response_id": second["id"]})
    assert "one" in prompt_of(api), "what a response was made from stays with it"


async def test_truncation_leaves_out_the_oldest_turns(api):
    long = " fox" * 150  # the context has 512 tokens
    items = [{"role": "system", "content": "rules"}]
    for name in ("one", "two", "three"):
        items += [{"role": "user", "content": name + long}, {"role": "assistant", "content": f"answer {name}"}]
    body = {"input": [*items, {"role": "user", "content": "last"}], "max_output_tokens": 50}
    error = await api.error(PATH, body)
    assert error["param"] == "input" and "512" in error["message"]
    answer = await api.ok(PATH, {**body, "truncation": "auto"})
    assert answer["truncation"] == "auto" and len(api.engine.requests[0].prompt_token_ids) <= 512 - 50
    prompt = prompt_of(api)
    assert "rules" in prompt and "last" in prompt and "answer three" in prompt and "one" not in prompt
    assert prompt.index("<|im_start|>user") < prompt.index("<|im_start|>assistant"), "a turn goes as a whole"
    count = await api.ok(PATH + "/input_tokens", {"input": body["input"], "truncation": "auto"})
    assert count["input_tokens"] <= 511
    alone = {"input": "x" + 10 * long, "truncation": "auto"}
    assert (await api.error(PATH, alone))["param"] == "input"
    short = await api.ok(PATH, {"input": "hi", "truncation": "auto"})
    assert short["usage"]["input_tokens"] == (await api.ok(PATH + "/input_tokens", {"input": "hi"}))["input_tokens"]


async def test_input_tokens(api):
    say(api, "one")
    first = await api.ok(PATH, {"input": "a"})
    body = {"input": "b", "instructions": "x", "previous_response_id": first["id"]}
    answer = await api.ok(PATH + "/input_tokens", body)
    whole = await api.ok(PATH, body)
    assert answer == {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}
    long = await api.ok(PATH + "/input_tokens", {"input": "fox " * 600})
    assert long["input_tokens"] > 512, "what is too long can be counted"
    assert (await api.error(PATH + "/input_tokens", {"input": "b", "temperature": 1}))["param"] == "temperature"


async def test_input_items_in_pages(api):
    say(api, "answer")
    first = await api.ok(
        PATH, {"input": [message("user", "a"), {"role": "assistant", "content": "b"}, message("user", "c")]}
    )
    second = await api.ok(PATH, {"input": "d", "previous_response_id": first["id"]})
    url = f"{PATH}/{second['id']}/input_items"
    _, page = await api.call(f"{url}?order=asc&limit=100", method="GET")
    for item in page["data"]:
        ITEM.validate_python(item)
    assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b", "c", "answer", "d"]
    assert len({item["id"] for item in page["data"]}) == 5 and not page["has_more"]
    ids = [item["id"] for item in page["data"]]
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[0], ids[-1])
    _, newest = await api.call(f"{url}?limit=2", method="GET")
    assert [item["id"] for item in newest["data"]] == [ids[4], ids[3]] and newest["has_more"]
    _, rest = await api.call(f"{url}?limit=3&after={ids[3]}", method="GET")
    assert [item["id"] for item in rest["data"]] == [ids[2], ids[1], ids[0]] and not rest["has_more"]
    _, none = await api.call(f"{url}?after={ids[0]}", method="GET")
    assert none["data"] == [] and not none["has_more"]
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=zz", "after"),
        ("nonsense=1", "nonsense"),
    ):
        assert (await api.error(f"{url}?{query}", None, method="GET"))["param"] == param


# -------------------------------------------------------------------------------------------------------- bad calls

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["hi"]}, "input.0"),
    ({"input": [{"content": "hi"}]}, "input.0.type"),
    ({"input": [{"type": ["message"]}]}, "input.0.type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"role": "robot", "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": ["user"], "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "tool", "content": "hi"}]}, "input.0.role"),
    ({"input": [USER, {"role": "user"}]}, "input.1.content"),
    ({"input": [{"role": "user", "content": []}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": ["hi"]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": "hi", "mood": "good"}]}, "input.0"),
    ({"input": [{**USER, "status": "done"}]}, "input.0.status"),
    ({"input": [{**USER, "id": 5}]}, "input.0.id"),
    ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
    ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id"),
    ({"input": [{**CALL, "namespace": "x"}]}, "input.0"),
    ({"input": [{"type": "function_call_output", "call_id": "zz", "output": "1"}]}, "input.0.call_id"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input.1.output"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [5]}]}, "input.1.output.0"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]}, "input.0.content.0"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]}, "input.0.summary"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.0"),
    ({"instructions": ["a"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_tool_calls": 5}, "max_tool_calls"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 2}, "n"),
    ({"logprobs": 2}, "logprobs"),
    ({"prompt_logprobs": 2}, "prompt_logprobs"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"include": LOGPROBS}, "include"),
    ({"include": [5]}, "include"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"x" * 65: "a"}}, "metadata"),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
    ({"user": "x" * 513}, "user"),
    ({"truncation": "middle"}, "truncation"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"form": {}}}, "text.form"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"background": True, "store": False}, "store"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER]}, "messages"),
    ({"nonsense": 1}, "nonsense"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
async def test_bad_calls(api, fields, param):
    for stream in (False, True) if "stream_options" not in fields else (fields.get("stream", False),):
        error = await api.error(PATH, {"model": "m", "input": "hi", "stream": stream, **fields})
        assert error["param"] == param and error["type"] == "BadRequestError"
        assert param.split(".")[0] in error["message"] and "None" not in error["message"]
    assert not api.engine.requests, "a bad call reached the engine"


async def test_unknown_names_are_404(api):
    assert (await api.error(PATH, {"model": "zz", "input": "hi"}, 404))["param"] == "model"
    for path in (PATH, PATH + "/input_tokens"):
        error = await api.error(path, {"input": "hi", "previous_response_id": "resp_zz"}, 404)
        assert error["param"] == "previous_response_id" and "resp_zz" in error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await api.error(f"{PATH}/resp_zz{path}", None, 404, method=method))["param"] == "response_id"


async def test_unknown_fields_may_be_dropped(start):
    async with start(ignore_unknown_fields=True) as api:
        part = {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
        await api.ok(PATH, {"input": [{"role": "user", "content": [part], "phase": "commentary"}], "nonsense": 1})


# ------------------------------------------------------------------------------------------------------- failures


async def test_an_error_of_the_engine(api, engine_error):
    api.engine.broken_at = (2, engine_error)
    error = await api.error(PATH, {"input": "hi"}, 500)
    assert "page 7" in error["message"]
    events = await stream_of(api, {"input": "hi"})
    assert [event["type"] for event in events].count("response.failed") == 1
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "page 7 is on fire"}
    assert kinds(events)[-3:] == ["content_part.done", "output_item.done", "failed"]
    assert last["response"]["output"][0]["status"] == "incomplete"
    stored = (await api.call(f"{PATH}/{last['response']['id']}", method="GET"))[1]
    assert stored == last["response"]
    await api.settled()


async def test_a_refusal_of_the_engine_is_an_http_error(api):
    api.engine.refusal = QueueFull("the queue is full")
    for extra in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
        await api.error(PATH, {"input": "hi", **extra}, 429)
    assert not api.engine.open


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels(api, stream):
    api.engine.pause_at = 20
    call = asyncio.ensure_future(
        api.session.post(api.url + PATH, json={"input": "hi", "ignore_eos": True, "stream": stream})
    )
    while api.engine.pause_at is not None and api.engine.gate.is_set():
        await asyncio.sleep(0.002)
    if stream:
        (await call).close()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await api.settled()
