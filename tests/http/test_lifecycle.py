"""Clients that go away, servers that stop, many at once: nothing stays in the engine."""

import asyncio
import json
import logging
import os
import signal
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import jaxserve.http.app as http_app
from jaxserve import engine_process
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.frontend import Frontend
from jaxserve.http.app import serve

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


async def leave(api, body: dict, *, when: str) -> None:
    """Sends a call and drops the connection: at once, or after the first event."""
    async with aiohttp.ClientSession() as session:
        call = asyncio.ensure_future(session.post(api.url + TEXT, json=body))
        async with asyncio.timeout(5):
            while not api.engine.open:
                await asyncio.sleep(0.002)
            if when == "streaming":
                response = await call
                await response.content.readuntil(b"\n\n")
                response.close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one", "three"])
@pytest.mark.parametrize(("stream", "when"), [(False, "waiting"), (True, "waiting"), (True, "streaming")])
async def test_a_client_that_goes_away_cancels_its_requests(api, stream, when, prompt):
    if when == "waiting":
        api.engine.gate.clear()
    api.engine.pause_at = 20
    await leave(api, {**LONG, "prompt": prompt, "n": 2, "stream": stream}, when=when)
    await api.settled()
    assert {request.request_id for request in api.engine.requests} <= {name for name, _ in api.engine.cancelled}
    assert (api.engine.stats.running, api.engine.stats.waiting) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_the_queue(start, make_engine, stream):
    engine = make_engine(max_num_seqs=1)
    engine.gate.clear()
    async with start(engine) as api:
        first = asyncio.create_task(api.ok(TEXT, {"prompt": "first"}))
        while not engine.stats.running:
            await asyncio.sleep(0.002)
        async with aiohttp.ClientSession() as session:
            queued = asyncio.create_task(session.post(api.url + TEXT, json={**LONG, "stream": stream}))
            while not engine.stats.waiting:
                await asyncio.sleep(0.002)
            queued.cancel()
        while engine.stats.waiting:
            await asyncio.sleep(0.002)
        assert engine.stats.running == 1, "the other one goes on"
        engine.gate.set()
        await first


async def test_a_half_closed_client_counts_as_gone(api):
    """Its FIN is that of one that closed: an answer whose reader may be gone is not generated to its end."""
    host, port = api.url.removeprefix("http://").split(":")
    api.engine.gate.clear()
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(LONG).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(5):
        while not api.engine.open:
            await asyncio.sleep(0.002)
        writer.write_eof()
        assert await reader.read() == b""
    await api.settled()
    assert api.engine.cancelled
    writer.close()


async def test_a_client_that_goes_away_while_it_submits(api, monkeypatch):
    submit = api.engine.submit

    async def slow_submit(request):
        stream = await submit(request)
        await asyncio.sleep(60)
        return stream

    api.engine.gate.clear()
    monkeypatch.setattr(api.engine, "submit", slow_submit)
    await leave(api, {**LONG, "prompt": ["a", "b"]}, when="waiting")
    await api.settled()


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one", "three"])
async def test_a_lost_connection_does_not_interrupt_the_cleanup_after_a_failed_write(api, monkeypatch, prompt):
    cancel, cancelling, lost = api.engine.cancel, asyncio.Event(), asyncio.Event()

    async def slow_cancel(request_id, index=None):
        cancelling.set()
        await lost.wait()
        await cancel(request_id, index)

    async def failing_write(self, data):
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(api.engine, "cancel", slow_cancel)
    api.engine.pause_at = 20
    monkeypatch.setattr(web.StreamResponse, "write", failing_write)
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(api.url + TEXT, json={**LONG, "prompt": prompt, "stream": True}))
        await cancelling.wait()  # the write has failed
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0.05)  # now the connection is lost, and the handler is cancelled
    lost.set()
    await api.settled()


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
async def test_a_client_that_goes_away_while_it_sends(api, caplog, framing):
    host, port = api.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
            writer.write(head.encode() + b'5\r\n{"pro')
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
            await asyncio.sleep(0.02)
        await api.ok(TEXT, {"prompt": "still there"})
    assert not caplog.records


async def test_many_clients_and_some_that_leave(start, make_engine, caplog):
    engine = make_engine(max_num_seqs=8)
    async with start(engine) as api:
        expected = await api.ok(TEXT, {"prompt": "x", "max_tokens": 50})

        async def stay() -> None:
            events = await api.events(TEXT, {"prompt": "x", "max_tokens": 50})
            assert "".join(e["choices"][0]["text"] for e in events) == expected["choices"][0]["text"]

        async def go(i: int) -> None:
            async with aiohttp.ClientSession() as session:
                body = {**LONG, "stream": i % 2 == 0}
                call = asyncio.ensure_future(session.post(api.url + TEXT, json=body))
                await asyncio.sleep(0.01 * (i % 5))
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(stay() if i % 3 else go(i) for i in range(48)))
            await api.settled()
        assert not caplog.records
        assert (engine.stats.running, engine.stats.waiting) == (0, 0)
        _, metrics = await api.call("/metrics", method="GET")
        assert 'jaxserve:num_requests_running{model_name="m"} 0.0' in metrics


async def test_a_reader_that_is_slow_gets_everything(api):
    api.engine.tokens_per_delta = 4
    async with api.session.post(api.url + TEXT, json={**LONG, "stream": True, "logprobs": 20}) as response:
        await asyncio.sleep(0.2)
        events = [json.loads(line[6:]) for line in (await response.text()).split("\n\n") if line[6:7] == "{"]
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == 400


# ---------------------------------------------------------------------------------------------------- start and stop

HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)
HALF_A_CHUNKED_BODY = HALF_A_BODY.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")[:-1] + b"1\r\n{\r\n"


class Running:
    """serve() as a task, to be stopped by a real signal."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        frontend = Frontend(engine.tokenizer, engine.info)
        config = ServeConfig(port=0, model="m")
        self.task = asyncio.create_task(serve(frontend, engine, config, on_ready=self.url.set_result, **options))

    async def wait_for_requests(self) -> None:
        async with asyncio.timeout(5):
            while not self.engine.open:
                await asyncio.sleep(0.002)


async def test_sigterm_lets_running_calls_finish(make_engine):
    engine = make_engine()
    running = Running(engine)
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        url = await running.url
        call = asyncio.create_task(session.post(url + TEXT, json={"prompt": "a", "stream": True}))
        await running.wait_for_requests()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as other:
                await other.get(url + "/health")
        engine.gate.set()
        response = await call
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await asyncio.wait_for(running.task, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("signals", "grace_s"),
    [([signal.SIGTERM], 0.1), ([signal.SIGTERM] * 2, 60), ([signal.SIGINT], 60)],
    ids=["grace period over", "second signal", "Ctrl-C"],
)
async def test_calls_that_do_not_finish_in_time_end_with_abort(make_engine, stream, signals, grace_s, caplog):
    caplog.set_level(logging.INFO)
    engine = make_engine()
    running = Running(engine, grace_s=grace_s)
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(await running.url + TEXT, json={"prompt": "a", "stream": stream}))
        await running.wait_for_requests()
        for number in signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
        body = await (await call).text()
    await asyncio.wait_for(running.task, 5)
    assert '"finish_reason":"abort"' in body
    assert body.endswith("data: [DONE]\n\n") == stream
    assert not engine.open
    finishing = f"finishing 1 running request, for at most {grace_s:g} s; Ctrl-C ends this now"
    assert (finishing in caplog.messages) == (signals != [signal.SIGINT])
    assert "cancelling 1 running request" in caplog.messages


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HALF_A_BODY, HALF_A_CHUNKED_BODY])
async def test_a_request_that_is_not_all_here_does_not_hold_up_the_end(make_engine, sent):
    """Also while a call that is gets its time to finish."""
    engine = make_engine()
    running = Running(engine, grace_s=5)
    engine.gate.clear()
    url = await running.url
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(sent)
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(url + TEXT, json={"prompt": "a"}))
        await running.wait_for_requests()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(reader.read(), 2) == b""
        engine.gate.set()
        assert (await call).status == 200
    await asyncio.wait_for(running.task, 2)
    writer.close()


def test_all_waits_of_the_end_fit_into_what_docker_gives():
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    assert f"On SIGTERM running calls get {http_app.GRACE_S:g} s to finish" in readme
    assert http_app.GRACE_S + 2 * http_app.ABORT_S + engine_process.STOP_S <= 9.5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a b c", [5, 6, 7], [5]])
@pytest.mark.parametrize("more", [{"logprobs": 1}, {"logprobs": 0, "max_tokens": 0}, {}, {"return_token_ids": True}])
async def test_an_echo_whose_request_never_ran_ends_with_abort(make_engine, stream, prompt, more):
    engine = make_engine()
    running = Running(engine, grace_s=0.05)
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        body = {"prompt": prompt, "echo": True, "stream": stream, **more}
        call = asyncio.create_task(session.post(await running.url + TEXT, json=body))
        await running.wait_for_requests()
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await call
        text = await answer.text()
    await asyncio.wait_for(running.task, 5)
    assert answer.status == 200 and '"finish_reason":"abort"' in text and "error" not in text
    if "logprobs" in more:
        assert '"token_logprobs":[null' in text


async def test_a_cancelled_server_closes(make_engine):
    running = Running(make_engine())
    url = await running.url
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url + "/health")


async def test_the_ready_line_names_the_bound_port(make_engine, capsys):
    engine = make_engine()
    task = asyncio.create_task(serve(Frontend(engine.tokenizer, engine.info), engine, ServeConfig(port=0, model="m")))
    while not (printed := capsys.readouterr().out):
        await asyncio.sleep(0.005)
    url = printed.split()[-1]
    async with aiohttp.ClientSession() as session, session.get(url + "/models") as response:
        assert response.status == 200 and not url.endswith(":0/v1")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_port_in_use_is_a_clear_error(make_engine):
    engine = make_engine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1], model="m")
        with pytest.raises(ConfigError, match="in use; choose another with --port"):
            await serve(Frontend(engine.tokenizer, engine.info), engine, config)
    with pytest.raises(ConfigError, match="cannot listen on 203.0.113.1:0"):
        await serve(Frontend(engine.tokenizer, engine.info), engine, ServeConfig(host="203.0.113.1", port=0, model="m"))
