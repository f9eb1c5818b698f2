"""Kept responses: whose they are, how many and how long; those that run in the background, and their streams."""

import asyncio
import os
import signal

import aiohttp
import openai
import pytest

import jaxserve.http.response_store as response_store
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.frontend import Frontend
from jaxserve.http.app import serve
from tests.http.response_streams import PATH, events_of, kinds, say

BACKGROUND = {"input": "hi", "background": True}
LONG = {**BACKGROUND, "ignore_eos": True}


async def get(api, response_id: str, query: str = "", status: int = 200, **kwargs) -> dict:
    got, answer = await api.call(f"{PATH}/{response_id}{query}", method="GET", **kwargs)
    assert got == status, answer
    return answer


async def until(api, response_id: str, *statuses: str) -> dict:
    async with asyncio.timeout(5):
        while (answer := await get(api, response_id))["status"] not in statuses:
            await asyncio.sleep(0.002)
    return answer


# ---------------------------------------------------------------------------------------------------- size and time


async def test_only_so_many_are_kept(start):
    async with start(response_store_size=2) as api:
        say(api, "fox")
        ids = [(await api.ok(PATH, {"input": str(i)}))["id"] for i in range(3)]
        error = await api.error(f"{PATH}/{ids[0]}", None, 404, method="GET")
        assert "at most 2 are kept" in error["message"]
        for each in ids[1:]:
            await get(api, each)


async def test_only_for_so_long(start):
    async with start(response_store_ttl=0.05) as api:
        say(api, "fox")
        response_id = (await api.ok(PATH, {"input": "hi"}))["id"]
        await get(api, response_id)
        await asyncio.sleep(0.08)
        await api.error(f"{PATH}/{response_id}", None, 404, method="GET")


async def test_nothing_is_kept_that_need_not_be(api, start):
    say(api, "fox")
    answer = await api.ok(PATH, {"input": "hi", "store": False})
    assert answer["store"] is False
    await api.error(f"{PATH}/{answer['id']}", None, 404, method="GET")
    async with start(response_store_size=0) as other:
        say(other, "fox")
        answer = await other.ok(PATH, {"input": "hi"})
        assert answer["store"] is False
        await other.ok(PATH, {"input": "hi", "store": False})
        await other.error(f"{PATH}/{answer['id']}", None, 404, method="GET")
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_x"}):
            error = await other.error(PATH, {"input": "hi", **fields})
            assert error["param"] == next(iter(fields)) and "--response-store-size" in error["message"]


def test_options():
    for options in ({"response_store_size": -1}, {"response_store_ttl": 0}):
        with pytest.raises(ConfigError):
            ServeConfig(**options)


async def test_deleted_ones_are_gone(api):
    say(api, "fox")
    response_id = (await api.ok(PATH, {"input": "hi"}))["id"]
    deleted = await api.call(f"{PATH}/{response_id}", method="DELETE")
    assert deleted == (200, {"id": response_id, "object": "response", "deleted": True})
    await api.error(f"{PATH}/{response_id}", None, 404, method="DELETE")
    await api.error(PATH, {"input": "hi", "previous_response_id": response_id}, 404)


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"background": True}])
async def test_a_key_sees_its_own_responses_only(start, mode):
    async with start(api_key=["one", "two"]) as api:
        say(api, "fox")
        mine, theirs = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
        async with api.session.post(api.url + PATH, json={"input": "hi", **mode}, **mine) as response:
            if mode.get("stream"):
                response_id = (await events_of(response))[0]["response"]["id"]
            else:
                response_id = (await response.json())["id"]
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            error = await api.error(f"{PATH}/{response_id}{path}", None, 404, method=method, **theirs)
            unknown = await api.error(f"{PATH}/resp_zz{path}", None, 404, method=method, **theirs)
            assert error["message"].replace(response_id, "resp_zz") == unknown["message"]
        body = {"input": "hi", "previous_response_id": response_id}
        await api.error(PATH, body, 404, **theirs)
        await api.error(PATH + "/input_tokens", body, 404, **theirs)
        await get(api, response_id, **mine)
        await api.error(f"{PATH}/{response_id}", None, 401, method="GET")


# ------------------------------------------------------------------------------------------------------- background


async def test_a_background_response_is_got_by_its_id(api):
    say(api, "brown fox")
    api.engine.gate.clear()
    answer = await api.ok(PATH, BACKGROUND)
    assert answer["status"] == "queued" and answer["background"] is True and answer["output"] == []
    assert (await get(api, answer["id"]))["status"] == "queued"
    error = await api.error(PATH, {"input": "hi", "previous_response_id": answer["id"]})
    assert error["param"] == "previous_response_id" and "queued" in error["message"]
    api.engine.pause_at = 2
    api.engine.gate.set()
    await until(api, answer["id"], "in_progress")
    api.engine.pause_at = None
    api.engine.gate.set()
    done = await until(api, answer["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "brown fox" and done["usage"]["output_tokens"] > 0
    await api.ok(PATH, {"input": "hi", "previous_response_id": answer["id"]})


async def test_with_the_client(api):
    say(api, "brown fox")
    async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="none", max_retries=0) as client:
        api.engine.gate.clear()
        first = await client.responses.create(model="m", input="hi", background=True)
        cancelled = await client.responses.cancel(first.id)
        assert cancelled.status == "cancelled" and not api.engine.open
        api.engine.gate.set()
        stream = await client.responses.create(model="m", input="hi", background=True, stream=True)
        events = [event async for event in stream]
        again = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=2)
        assert [event async for event in again] == events[3:]
        async with client.responses.stream(response_id=events[0].response.id) as stream:
            assert (await stream.get_final_response()).output_text == "brown fox"


async def test_the_events_of_a_background_stream(api):
    say(api, "brown fox")
    async with api.session.post(api.url + PATH, json={**BACKGROUND, "stream": True}) as response:
        events = await events_of(response)
    assert kinds(events)[:3] == ["created", "queued", "in_progress"] and kinds(events)[-1] == "completed"
    assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]
    response_id = events[0]["response"]["id"]
    for after in (None, 0, 4, len(events) - 1, len(events) + 5):
        query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
        async with api.session.get(f"{api.url}{PATH}/{response_id}{query}") as response:
            assert await events_of(response) == events[0 if after is None else after + 1 :]


async def test_a_background_stream_goes_on_without_its_client(api):
    say(api, "brown fox")
    api.engine.pause_at = 3
    response = await api.session.post(api.url + PATH, json={**BACKGROUND, "stream": True})
    first = await response.content.readuntil(b"\n\n")
    response.close()
    response_id = first.split(b'"id":"')[1].split(b'"')[0].decode()
    while api.engine.gate.is_set():
        await asyncio.sleep(0.002)
    follower = asyncio.create_task(_follow(api, response_id))
    await asyncio.sleep(0.02)
    api.engine.pause_at = None
    api.engine.gate.set()
    events = await follower
    assert events[-1]["response"]["status"] == "completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "brown fox"


async def _follow(api, response_id: str) -> list[dict]:
    async with api.session.get(f"{api.url}{PATH}/{response_id}?stream=true") as response:
        return await events_of(response)


async def test_events_are_kept_for_a_while(api, monkeypatch):
    monkeypatch.setattr(response_store, "EVENTS_TTL_S", 0.03)
    say(api, "fox")
    async with api.session.post(api.url + PATH, json={**BACKGROUND, "stream": True}) as response:
        response_id = (await events_of(response))[0]["response"]["id"]
    await asyncio.sleep(0.06)
    assert (await api.error(f"{PATH}/{response_id}?stream=true", None, method="GET"))["param"] == "stream"
    assert (await get(api, response_id))["status"] == "completed"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        ("include_obfuscation=true", "include_obfuscation"),
        ("include=message.output_text.logprobs", "include"),
    ],
)
async def test_bad_queries(api, query, param):
    say(api, "fox")
    response_id = (await api.ok(PATH, {"input": "hi"}))["id"]
    assert (await api.error(f"{PATH}/{response_id}?{query}", None, method="GET"))["param"] == param


async def test_bad_starting_after(api):
    say(api, "fox")
    async with api.session.post(api.url + PATH, json={**BACKGROUND, "stream": True}) as response:
        response_id = (await events_of(response))[0]["response"]["id"]
    for value in ("-1", "x", "1.5", "9" * 30):
        error = await api.error(f"{PATH}/{response_id}?stream=true&starting_after={value}", None, method="GET")
        assert error["param"] == "starting_after"


async def test_cancel(api):
    api.engine.pause_at = 20
    stream = asyncio.create_task(api.session.post(api.url + PATH, json={**LONG, "stream": True}))
    while api.engine.gate.is_set():
        await asyncio.sleep(0.002)
    response = await stream
    response_id = api.engine.requests[0].request_id
    running = await get(api, response_id)
    assert running["status"] == "in_progress" and running["output"] == []
    status, answer = await api.call(f"{PATH}/{response_id}/cancel")
    assert status == 200 and answer["status"] == "cancelled" and answer["incomplete_details"] is None
    text = answer["output"][0]["content"][0]["text"]
    assert text and answer["output"][0]["status"] == "incomplete"
    assert 0 < answer["usage"]["output_tokens"] <= 20
    events = await events_of(response)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == answer
    assert "".join(e["delta"] for e in events if "delta" in e) == text
    await api.settled()
    assert (await api.call(f"{PATH}/{response_id}/cancel"))[1] == answer, "a second time changes nothing"


async def test_a_finished_one_stays_as_it_is_when_cancelled(api):
    say(api, "fox")
    done = await until(api, (await api.ok(PATH, BACKGROUND))["id"], "completed")
    assert await api.call(f"{PATH}/{done['id']}/cancel") == (200, done)


async def test_only_background_responses_can_be_cancelled(api):
    say(api, "fox")
    response_id = (await api.ok(PATH, {"input": "hi"}))["id"]
    assert "background" in (await api.error(f"{PATH}/{response_id}/cancel", None))["message"]


async def test_deleting_a_running_one_cancels_it(api):
    api.engine.gate.clear()
    response_id = (await api.ok(PATH, BACKGROUND))["id"]
    await api.call(f"{PATH}/{response_id}", method="DELETE")
    await api.settled()
    await api.error(f"{PATH}/{response_id}", None, 404, method="GET")


async def test_an_error_of_the_engine(api, engine_error):
    api.engine.broken_at = (2, engine_error)
    failed = await until(api, (await api.ok(PATH, BACKGROUND))["id"], "failed")
    assert failed["error"] == {"code": "server_error", "message": "page 7 is on fire"}
    assert failed["output"][0]["status"] == "incomplete"


async def test_running_ones_are_not_pushed_out(start):
    async with start(response_store_size=2) as api:
        api.engine.gate.clear()
        running = [(await api.ok(PATH, BACKGROUND))["id"] for _ in range(2)]
        error = await api.error(PATH, BACKGROUND, 429)
        assert "already run in the background" in error["message"]
        assert len(api.engine.open) == 2
        api.engine.gate.set()
        say(api, "fox")
        finished = [(await api.ok(PATH, {"input": "hi"}))["id"] for _ in range(2)]
        for each in running:
            await until(api, each, "completed", "incomplete")
        await get(api, finished[-1])


async def test_a_client_that_leaves_before_the_answer_leaves_nothing(api, monkeypatch):
    submit = api.engine.submit

    async def slow_submit(request):
        stream = await submit(request)
        await asyncio.sleep(60)
        return stream

    api.engine.gate.clear()
    monkeypatch.setattr(api.engine, "submit", slow_submit)
    call = asyncio.ensure_future(api.session.post(api.url + PATH, json=BACKGROUND))
    while not api.engine.open:
        await asyncio.sleep(0.002)
    response_id = api.engine.requests[0].request_id
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await api.settled()
    await api.error(f"{PATH}/{response_id}", None, 404, method="GET")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_stops_ends_them(make_engine, number):
    engine = make_engine()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    frontend = Frontend(engine.tokenizer, engine.info)
    task = asyncio.create_task(
        serve(frontend, engine, ServeConfig(port=0, model="m"), on_ready=url.set_result, grace_s=0.1)
    )
    engine.pause_at = 5
    async with aiohttp.ClientSession() as session:
        async with session.post(await url + PATH, json={**LONG, "stream": True}) as response:
            while engine.gate.is_set():
                await asyncio.sleep(0.002)
            os.kill(os.getpid(), number)
            events = await events_of(response)
    assert events[-1]["response"]["status"] == "cancelled"
    await asyncio.wait_for(task, 5)
    assert not engine.open


async def test_a_cancelled_server_leaves_none(make_engine):
    engine = make_engine()
    engine.gate.clear()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    frontend = Frontend(engine.tokenizer, engine.info)
    task = asyncio.create_task(serve(frontend, engine, ServeConfig(port=0, model="m"), on_ready=url.set_result))
    async with aiohttp.ClientSession() as session, session.post(await url + PATH, json=BACKGROUND) as response:
        assert response.status == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(5):
        while engine.open:
            await asyncio.sleep(0.002)
