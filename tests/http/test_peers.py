"""Two HTTP processes of one server, here in one: whichever is asked, the answer is that of the server."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from jaxserve.config import ServeConfig
from jaxserve.frontend import Frontend
from jaxserve.http.app import listening
from jaxserve.http.peers import Peers

TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


class Pair:
    """Two front ends of one engine; each at a port of its own, so that a test can choose."""

    def __init__(self, directory: Path, engine, make_api, **config):
        self.engine, self.directory, self._make_api = engine, directory, make_api
        self.config = ServeConfig(**{"port": 0, "model": "m", **config})
        self.stops = [asyncio.Event(), asyncio.Event()]
        self.tasks: list[asyncio.Task] = []
        self.apis: list[Any] = []

    async def __aenter__(self) -> list[Any]:
        for number in (0, 1):
            url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.tasks.append(asyncio.create_task(self._serve(number, url)))
            frontend = Frontend(self.engine.tokenizer, self.engine.info)
            self.apis.append(self._make_api(await url, self.engine, frontend, aiohttp.ClientSession()))
        return self.apis

    async def _serve(self, number: int, url: asyncio.Future[str]) -> None:
        frontend = Frontend(self.engine.tokenizer, self.engine.info)
        peers = Peers(number, 2, self.directory)
        async with listening(frontend, self.engine, self.config, peers=peers, grace_s=5) as at:
            url.set_result(at)
            await self.stops[number].wait()

    async def __aexit__(self, *_) -> None:
        for api in self.apis:
            await api.session.close()
        for stop in self.stops:
            stop.set()
        await asyncio.gather(*self.tasks)


@pytest.fixture
def pair(tmp_path, make_engine, make_api):
    return lambda **config: Pair(tmp_path, make_engine(), make_api, **config)


@pytest.fixture
async def both(pair) -> AsyncIterator[list[Any]]:
    async with pair() as apis:
        yield apis


async def load(api) -> int:
    return (await api.call("/load", method="GET"))[1]["server_load"]


async def begun(api, calls: int) -> None:
    async with asyncio.timeout(5):
        while await load(api) != calls:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("asked", [0, 1])
async def test_load_and_aborts_are_those_of_the_server(both, asked):
    both[0].engine.gate.clear()

    async def ask(api, name: str) -> str:
        async with api.session.post(api.url + TEXT, json=LONG, headers={"X-Request-Id": name}) as response:
            return (await response.json())["choices"][0]["finish_reason"]

    names = ("here", "there", "here-2", "there-2")
    calls = {name: asyncio.create_task(ask(both[i % 2], name)) for i, name in enumerate(names)}
    await begun(both[asked], 4)
    assert await load(both[1 - asked]) == 4
    aborted = await both[asked].ok("/abort_requests", {"request_ids": ["there", "here", "nobody"]})
    assert aborted == {"status": "aborted", "aborted": 2}
    assert {await calls["here"], await calls["there"]} == {"abort"}
    assert not calls["here-2"].done() and not calls["there-2"].done()
    assert (await both[asked].ok("/abort_requests", {}))["aborted"] == 2
    assert {await call for call in calls.values()} == {"abort"}
    assert await load(both[asked]) == 0


async def test_a_head_call_and_bodies_that_mean_nothing_or_cannot_be_decoded(both):
    async with both[0].session.head(both[0].url + "/load") as response:
        assert response.status == 200 and int(response.headers["Content-Length"]) > 0
    kept = f"{RESPONSES}/resp_1_{'0' * 32}"
    for method, path, status in (
        ("GET", "/metrics", 200), ("GET", kept, 404), ("POST", "/abort_requests", 400), ("POST", f"{kept}/cancel", 400),
    ):  # fmt: skip
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, both[0].url + path, data=b"zz", headers=headers) as response,
        ):
            assert response.status == status
            assert status != 400 or "cannot be decoded" in (await response.json())["error"]["message"]


async def test_metrics_are_those_of_the_server(both):
    for i in (0, 0, 1):
        await both[i].ok(TEXT, {"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
    texts = [(await api.call("/metrics", method="GET"))[1] for api in both]
    for text in texts:
        found = {m[1] + (m[2] or ""): float(m[3]) for m in re.finditer(r"^([\w:]+)({.*?})? (\S+)$", text, re.MULTILINE)}
        assert found['jaxserve:request_success_total{finished_reason="length",model_name="m"}'] == 3
        assert found['jaxserve:time_to_first_token_seconds_count{model_name="m"}'] == 3
        assert found['jaxserve:inter_token_latency_seconds_count{model_name="m"}'] == 6
        assert found['jaxserve:inter_token_latency_seconds_bucket{le="+Inf",model_name="m"}'] == 6
        assert found['jaxserve:generation_tokens_total{model_name="m"}'] == 9, "the engine's own, counted once"
        assert 1.6e9 < found["process_start_time_seconds"] < 3e9
        assert 1.6e9 < found['jaxserve:request_success_created{finished_reason="length",model_name="m"}'] < 3e9
        assert text.count("# TYPE jaxserve:e2e_request_latency_seconds histogram") == 1


async def test_a_stored_response_is_found_by_all(both):
    here, there = both
    made = await here.ok(RESPONSES, {"input": "hi", "max_output_tokens": 8})
    path = f"{RESPONSES}/{made['id']}"
    assert await there.call(path, method="GET") == (200, made)
    _, items = await there.call(path + "/input_items?limit=5", method="GET")
    assert items["data"][0]["content"][0]["text"] == "hi"
    more = await there.ok(RESPONSES, {"input": "and?", "previous_response_id": made["id"], "max_output_tokens": 8})
    assert more["previous_response_id"] == made["id"]
    counts = [
        await api.ok(RESPONSES + "/input_tokens", {"input": "x", "previous_response_id": more["id"]}) for api in both
    ]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 10
    assert (await there.call(path, method="DELETE"))[1]["deleted"]
    for api in both:
        error = await api.error(path, None, 404, method="GET")
        assert made["id"] in error["message"]


async def test_what_streams_in_one_can_be_followed_and_cancelled_in_the_other(both):
    here, there = both
    here.engine.pause_at = 5
    body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 50}
    async with here.session.post(here.url + RESPONSES, json=body) as response:
        first = json.loads((await response.content.readuntil(b"\n\n")).partition(b"data: ")[2])
    path = f"{RESPONSES}/{first['response']['id']}"
    following = asyncio.create_task(there.call(path + "?stream=true&starting_after=0", method="GET"))
    await asyncio.sleep(0.05)
    assert (await there.call(path + "/cancel"))[1]["status"] == "cancelled"
    status, events = await following
    assert status == 200 and "response.created" not in events and '"status":"cancelled"' in events


async def test_a_client_that_leaves_a_passed_on_call_cancels_it(both):
    here, there = both
    made = await here.ok(RESPONSES, {"input": "hi", "max_output_tokens": 8})
    here.engine.gate.clear()
    body = {"input": "hi", "previous_response_id": made["id"], "max_output_tokens": 50, "stream": True}
    call = asyncio.create_task(there.call(RESPONSES, body))
    await begun(there, 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await here.settled()
    await begun(there, 0)


async def test_a_passed_on_call_is_finished_before_the_end(pair):
    two = pair()
    async with two as (here, there):
        made = await here.ok(RESPONSES, {"input": "hi", "max_output_tokens": 8})
        two.engine.gate.clear()
        body = {"input": "hi", "previous_response_id": made["id"], "max_output_tokens": 50}
        call = asyncio.create_task(there.ok(RESPONSES, body))
        await begun(there, 1)
        two.stops[0].set()
        two.stops[1].set()
        await asyncio.sleep(2.5)  # more than aiohttp waits by itself
        two.engine.gate.set()
        assert (await call)["status"] in ("completed", "incomplete")


@pytest.mark.parametrize("key", ["right", "wrong", ""])
async def test_keys_and_owners_hold_everywhere(pair, key):
    async with pair(api_key=["right", "other"]) as (here, there):
        headers = {"Authorization": f"Bearer {key}"}
        async with here.session.post(
            here.url + RESPONSES, json={"input": "hi"}, headers={"Authorization": "Bearer right"}
        ) as response:
            made = await response.json()
        status, _ = await there.call(f"{RESPONSES}/{made['id']}", method="GET", headers=headers)
        assert status == (200 if key == "right" else 401)
        others = {"Authorization": "Bearer other"}
        assert (await there.call(f"{RESPONSES}/{made['id']}", method="GET", headers=others))[0] == 404
        assert (await there.call("/load", method="GET", headers=headers))[0] == (200 if key == "right" else 401)


@pytest.mark.parametrize("response_id", ["resp_1_x", f"resp_2_{'a' * 32}", f"resp_999_{'0' * 32}", "resp_", "x"])
async def test_ids_of_nobody_are_not_found(both, response_id):
    assert response_id[:20] in (await both[0].error(f"{RESPONSES}/{response_id}", None, 404, method="GET"))["message"]


async def test_one_that_does_not_answer_is_told(pair):
    two = pair()
    async with two as (here, there):
        made = await there.ok(RESPONSES, {"input": "hi", "max_output_tokens": 8})
        two.stops[1].set()
        await two.tasks[1]
        for path in ("/load", "/metrics", f"{RESPONSES}/{made['id']}"):
            error = await here.error(path, None, 503, method="GET")
            assert error["message"].startswith("HTTP process 2 of 2")
        assert (await here.call("/health", method="GET"))[0] == 200


async def test_the_store_is_shared_out(pair):
    async with pair(response_store_size=3) as (here, _):
        made = [await here.ok(RESPONSES, {"input": "hi", "max_output_tokens": 2}) for _ in range(3)]
        found = [(await here.call(f"{RESPONSES}/{each['id']}", method="GET"))[0] for each in made]
        assert found == [404, 200, 200]
