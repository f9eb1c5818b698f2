"""Routes that speak of the engine as a whole: abort, load, prefix cache, pause, sleep."""

import asyncio

import pytest

from jaxserve.control import Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.errors import EngineAsleep
from jaxserve.http.sse import EventStream

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}


async def begun(api, calls: int) -> None:
    """Waits until so many calls are at the engine."""
    async with asyncio.timeout(5):
        while (await api.call("/load", method="GET"))[1] != {"server_load": calls}:
            await asyncio.sleep(0.002)


def reasons(answer) -> set[str]:
    return {choice["finish_reason"] for choice in answer["choices"]}


async def test_abort_by_the_ids_that_clients_know(api):
    api.engine.gate.clear()

    async def ask(path: str, body: dict, header: str) -> dict:
        async with api.session.post(api.url + path, json=body, headers={"X-Request-Id": header}) as response:
            return await response.json()

    calls = [asyncio.create_task(ask(p, b, f"mine-{i}")) for i, (p, b) in enumerate([(TEXT, LONG), (CHAT, TALK)] * 2)]
    await begun(api, 4)
    abort = "/abort_requests"
    assert await api.ok(abort, {"request_ids": ["nobody", "cmpl-"]}) == {"status": "aborted", "aborted": 0}
    assert await api.ok(abort, {"request_ids": ["mine-0", "mine-1", "nobody"]}) == {"status": "aborted", "aborted": 2}
    assert [reasons(await call) for call in calls[:2]] == [{"abort"}, {"abort"}]
    (chat,) = [
        r.request_id for r in api.engine.requests if r.request_id in api.engine.open and r.request_id[:4] == "chat"
    ]
    assert (await api.ok(abort, {"request_ids": [chat]}))["aborted"] == 1
    assert (await calls[3])["id"] == chat and not calls[2].done()
    (text,) = {request_id.rpartition("-")[0] for request_id in api.engine.open}
    assert (await api.ok(abort, {"request_ids": [text]}))["aborted"] == 1
    assert (await calls[2])["id"] == text and reasons(await calls[2]) == {"abort"}
    assert await api.call("/load", method="GET") == (200, {"server_load": 0})


@pytest.mark.parametrize("body", [None, {}, {"request_ids": []}, {"request_ids": None}])
async def test_abort_all(api, body):
    api.engine.gate.clear()
    calls = [asyncio.create_task(api.ok(TEXT, LONG)), asyncio.create_task(api.ok(CHAT, TALK))]
    await begun(api, 2)
    assert await api.call("/abort_requests", body) == (200, {"status": "aborted", "aborted": 2})
    assert [reasons(await call) for call in calls] == [{"abort"}] * 2
    await api.settled()


async def test_abort_ends_a_stream(api):
    api.engine.pause_at = 20
    stream = asyncio.create_task(api.events(CHAT, TALK))
    while len(api.engine.open) != 1 or api.engine.gate.is_set():
        await asyncio.sleep(0.002)
    await api.ok("/abort_requests", {})
    assert (await stream)[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.fixture
def slow_cancel(api, monkeypatch) -> asyncio.Event:
    """While it is not set, no cancel of the engine comes back."""
    cancel, go_on = api.engine.cancel, asyncio.Event()

    async def held(*args) -> None:
        await go_on.wait()
        await cancel(*args)

    monkeypatch.setattr(api.engine, "cancel", held)
    return go_on


async def test_two_aborts_at_once_count_a_call_once(api, slow_cancel):
    api.engine.gate.clear()
    calls = [asyncio.create_task(api.ok(TEXT, LONG)) for _ in range(2)]
    await begun(api, 2)
    aborts = [asyncio.create_task(api.ok("/abort_requests", {})) for _ in range(3)]
    await asyncio.sleep(0.05)
    slow_cancel.set()
    assert sum([(await abort)["aborted"] for abort in aborts]) == 2
    assert [reasons(await call) for call in calls] == [{"abort"}] * 2


async def test_an_abort_does_not_count_a_call_whose_client_has_gone(api, slow_cancel):
    api.engine.gate.clear()
    call = asyncio.create_task(api.ok(TEXT, LONG))
    await begun(api, 1)
    call.cancel()
    await asyncio.sleep(0.05)
    abort = asyncio.create_task(api.ok("/abort_requests", {}))
    await asyncio.sleep(0.05)
    assert (await api.call("/load", method="GET"))[1] == {"server_load": 1}, "it is still ending"
    slow_cancel.set()
    assert (await abort)["aborted"] == 0
    await api.settled()


async def test_an_abort_does_not_count_a_call_that_only_has_to_send_its_end(api, monkeypatch):
    sending, go_on, send = asyncio.Event(), asyncio.Event(), EventStream.send

    async def held(self: EventStream, data: bytes) -> None:
        if b'"finish_reason":"length"' in data:
            sending.set()
            await go_on.wait()
        await send(self, data)

    monkeypatch.setattr(EventStream, "send", held)
    call = asyncio.create_task(api.events(CHAT, TALK | {"max_tokens": 3}))
    await sending.wait()
    assert (await api.ok("/abort_requests", {}))["aborted"] == 0
    go_on.set()
    assert (await call)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [{"request_ids": "x"}, {"request_ids": [1]}, {"request_id": ["x"]}, {"ids": []}])
async def test_bad_aborts(api, body):
    assert (await api.error("/abort_requests", body))["param"] in ("request_ids", "request_ids[0]", *body)


@pytest.mark.parametrize(
    ("path", "answer", "command"),
    [
        ("/reset_prefix_cache", {"success": True}, ResetPrefixCache()),
        ("/pause", {"status": "paused"}, Pause("abort", True)),
        ("/pause?mode=wait&clear_cache=false", {"status": "paused"}, Pause("wait", False)),
        ("/pause?mode=keep&clear_cache=True", {"status": "paused"}, Pause("keep", True)),
        ("/resume", {"status": "resumed"}, Resume()),
        ("/sleep", {"is_sleeping": True}, Sleep(1, "abort")),
        ("/sleep?level=2&mode=wait", {"is_sleeping": True}, Sleep(2, "wait")),
        ("/wake_up", {"is_sleeping": False}, WakeUp(("weights", "kv_cache"))),
        ("/wake_up?tags=weights&tags=kv_cache", {"is_sleeping": False}, WakeUp(("weights", "kv_cache"))),
        ("/wake_up?tags=kv_cache,weights", {"is_sleeping": False}, WakeUp(("kv_cache", "weights"))),
    ],
)
async def test_commands_reach_the_engine(api, path, answer, command):
    assert await api.call(path) == (200, answer)
    assert api.engine.commands == [command]


async def test_the_state_is_told_and_health_stays(api):
    async def state() -> tuple:
        paused, asleep = [(await api.call(p, method="GET"))[1] for p in ("/is_paused", "/is_sleeping")]
        assert await api.call("/health", method="GET") == (200, "")
        return paused["is_paused"], asleep["is_sleeping"]

    assert await state() == (False, False)
    await api.call("/pause")
    assert await state() == (True, False)
    await api.call("/sleep?level=2")
    assert await state() == (True, True)
    _, metrics = await api.call("/metrics", method="GET")
    assert 'engine_paused{model_name="m"} 1.0' in metrics and 'engine_sleep_level{model_name="m"} 2.0' in metrics
    assert (await api.call("/wake_up?tags=weights"))[1] == {"is_sleeping": True}
    await api.call("/wake_up")
    await api.call("/resume")
    assert await state() == (False, False)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=stop", "mode"),
        ("/pause?mode=", "mode"),
        ("/pause?mode=wait&mode=keep", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/pause?cache=true", "cache"),
        ("/sleep?level=0", "level"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=scheduling", "tags"),
        ("/wake_up?tags=weights,", "tags"),
        ("/resume?now=1", "now"),
        ("/reset_prefix_cache?reset_external=true", "reset_external"),
    ],
)
async def test_bad_options(api, path, param):
    assert (await api.error(path, None))["param"] == param
    assert api.engine.commands == []


async def test_options_in_a_body_are_not_ignored(api):
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"):
        assert "in the URL" in (await api.error(path, {"level": 2}))["message"]
        assert (await api.call(path, {}))[0] == 200, "an empty object asks for nothing"


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_while_asleep(api, caplog, stream):
    api.engine.refusal = EngineAsleep("the engine is asleep: POST /wake_up")
    async with api.session.post(api.url + CHAT, json={**TALK, "stream": stream}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (503, "EngineAsleepError", 503)
        assert int(response.headers["Retry-After"]) > 0
    assert not caplog.records, "no failure of the server"
