"""How the engine's process is started (what it does there: test_serve.py)."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from jaxserve import engine_process
from jaxserve.config import EngineConfig
from jaxserve.control import Command, Pause, Resume
from jaxserve.engine import Engine
from jaxserve.engine_process import EngineProcess, EngineServer, SocketClient, Submit
from jaxserve.errors import EngineError, RequestError
from jaxserve.request import EngineInfo, EngineStats, Request, SamplingParams, SequenceDelta
from jaxserve.tokenizer import Vocabulary

LLAMA = Path(__file__).parent / "goldens" / "llama"


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=1"])
async def test_the_engine_gets_huge_pages_unless_the_user_set_glibc_up(monkeypatch, given):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    engine = await EngineProcess.start(EngineConfig(model="nowhere"))
    try:
        with open(f"/proc/{engine._process.pid}/environ") as file:
            environment = dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)
    finally:
        await engine.stop(grace_s=0)
    assert environment["GLIBC_TUNABLES"] == (given or "glibc.malloc.hugetlb=1")
    assert environment["PATH"] == os.environ["PATH"]


async def test_it_is_started_without_a_fork_of_this_process_whose_threads_may_hold_locks(recwarn):
    released = threading.Event()
    threading.Thread(target=released.wait).start()
    engine = await EngineProcess.start(EngineConfig(model="nowhere"))
    try:
        assert os.getpgid(engine._process.pid) == engine._process.pid, "Ctrl-C in a terminal is not for it"
        assert not [str(w.message) for w in recwarn if "fork" in str(w.message)]
    finally:
        released.set()
        await engine.stop(grace_s=0)


class StandInEngine:
    """Gives each request one token. `hangs` while set: a step, or an idle round, then takes as long as that; `holds`
    while set: requests wait.
    """

    busy = False

    def __init__(self, compiles_later: bool = False):
        self.info = EngineInfo("m", 100, 64, 4, 16, 8, "cpu", "float32", compiles_later=compiles_later)
        self.waiting: list[Request] = []
        self.hangs, self.holds, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.cancelled: list[str] = []
        self.paused = False

    def has_work(self) -> bool:
        if self.ended.is_set():
            raise SystemExit
        while self.hangs.is_set():
            time.sleep(0.01)
        return bool(self.waiting) and not self.holds.is_set()

    def knows(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self.waiting)

    def submit(self, request: Request) -> bool:
        if self.knows(request.request_id):
            raise RequestError("in use")
        self.waiting.append(request)
        return True

    def cancel(self, request_id: str, index: int | None) -> None:
        self.cancelled.append(request_id)

    def control(self, command: Command) -> None:
        self.paused = isinstance(command, Pause)

    def stats(self) -> EngineStats:
        return EngineStats(paused=self.paused)

    def step(self) -> list[SequenceDelta]:
        done, self.waiting = self.waiting, []
        return [SequenceDelta(r.request_id, 0, token_ids=[5], finish_reason="length") for r in done]


class StoppableEngine(Engine):
    """The real one, which `connected` can end."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.hangs, self.ended = threading.Event(), threading.Event()

    def has_work(self) -> bool:
        if self.ended.is_set():
            raise SystemExit
        return super().has_work()


@asynccontextmanager
async def connected(folder: Path, engine: StandInEngine | StoppableEngine) -> AsyncIterator[SocketClient]:
    """A client of an engine that is served in a thread."""
    address = f"ipc://{folder}/engine.sock"
    server = EngineServer(address)

    def serve() -> None:
        try:
            server._serve(engine)
        except SystemExit:
            server._socket.close()

    thread = threading.Thread(target=serve)
    thread.start()
    client = SocketClient(address)
    try:
        await client.connect()
        yield client
    finally:
        engine.hangs.clear()
        engine.ended.set()
        await client.close()
        thread.join()


@asynccontextmanager
async def another(folder: Path) -> AsyncIterator[SocketClient]:
    """One more client of a stand-in engine."""
    client = SocketClient(f"ipc://{folder}/engine.sock")
    await client.connect()
    yield client
    await client.close()


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[5], params=SamplingParams(), max_tokens=1)


async def test_a_message_that_cannot_be_read_is_refused_and_others_go_on(tmp_path, caplog):
    async with connected(tmp_path, StandInEngine()) as client:
        bad = msgspec.to_builtins(Submit(request("bad")))
        for field, value in (("prompt_token_ids", "x"), ("stop_ids", ["x"]), ("max_tokens", 1.5), ("params", None)):
            broken = msgspec.msgpack.encode(bad | {"request": bad["request"] | {field: value}})
            client._encode = lambda message, broken=broken: broken if isinstance(message, Submit) else b""
            with pytest.raises(EngineError, match="cannot read this request"):
                await asyncio.wait_for(client.submit(request("bad")), 5)
        client._encode = msgspec.msgpack.Encoder().encode
        for junk in (b"", b"\xc1", b"junk", msgspec.msgpack.encode({"type": "Submit"}), msgspec.msgpack.encode([1])):
            await client._socket.send(junk)
        deltas = [delta async for delta in await asyncio.wait_for(client.submit(request("good")), 5)]
        assert deltas[-1].token_ids == [5] and client.healthy()
        assert caplog.text.count("cannot be read") >= 9


async def test_a_vocabulary_that_is_of_no_use_fails_requests_with_a_grammar_alone(tmp_path, caplog):
    config = EngineConfig(
        model=str(LLAMA), enforce_eager=True, max_num_seqs=2, max_num_batched_tokens=48, max_model_len=64,
        kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    async with connected(tmp_path, StoppableEngine(config)) as client:
        await client.use_vocabulary(Vocabulary("no tokenizer.json", [0]))
        for name in "ab":
            with pytest.raises(EngineError, match="no grammar can be compiled for the model's tokenizer: .*line 1"):
                bad = replace(request(name), grammar="start: /[0-9]+/")
                await asyncio.wait_for(client.submit(bad), 60)
        deltas = [delta async for delta in await asyncio.wait_for(client.submit(request("good")), 60)]
        assert deltas[-1].finish_reason == "length" and client.healthy()
    assert caplog.text.count("requests with a grammar will fail") == 1


@pytest.mark.parametrize("compiles_later", [False, True])
async def test_an_engine_that_hangs_is_not_healthy_until_it_speaks_again(tmp_path, compiles_later, monkeypatch, caplog):
    monkeypatch.setattr(engine_process, "STATS_PERIOD_S", 0.02)
    monkeypatch.setattr(engine_process, "IDLE_POLL_MS", 10)
    monkeypatch.setattr(engine_process, "WATCH_PERIOD_S", 0.05)
    monkeypatch.setattr(engine_process, "MAX_SILENCE_S", 0.4)
    caplog.set_level(logging.WARNING)
    engine = StandInEngine(compiles_later)
    async with connected(tmp_path, engine) as client:
        await asyncio.sleep(0.8)
        assert client.healthy(), "it says so also when idle"
        engine.hangs.set()
        await asyncio.sleep(0.8)
        assert client.healthy() == compiles_later, "one that compiles may be silent"
        engine.hangs.clear()
        async with asyncio.timeout(5):
            while not client.healthy():
                await asyncio.sleep(0.01)
    said = ["has said nothing for", "answers again"]
    assert [word for word in said if word in caplog.text] == ([] if compiles_later else said)


async def test_a_reader_that_has_fallen_behind_gets_what_waits_at_once():
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(n=2), max_tokens=9)
    stream = engine_process._Stream(SocketClient.__new__(SocketClient), request)
    for delta in (
        SequenceDelta("r", 0, [1], queue_s=0.5),
        SequenceDelta("r", 0, [2]),
        SequenceDelta("r", 1, [3]),  # another sequence
        SequenceDelta("r", 0, [4]),
        SequenceDelta("r", 0, [5], finish_reason="stop", stop_reason=5),
        SequenceDelta("r", 1, [6]),
        SequenceDelta("r", 1, finish_reason="abort"),  # no token
    ):
        stream.put(delta)
    got = [await anext(stream) for _ in range(5)]
    assert [(d.index, d.token_ids, d.finish_reason, d.stop_reason) for d in got] == [
        (0, [1, 2], None, None), (1, [3], None, None), (0, [4, 5], "stop", 5), (1, [6], None, None),
        (1, [], "abort", None),
    ]  # fmt: skip
    assert got[0].queue_s == 0.5


async def test_front_ends_do_not_touch_each_others_requests(tmp_path):
    engine = StandInEngine()
    engine.holds.set()
    async with connected(tmp_path, engine) as first, another(tmp_path) as second:
        async with asyncio.timeout(10):
            mine = await first.submit(request("same"))
            with pytest.raises(RequestError, match="in use"):
                await second.submit(request("same"))
            theirs = await second.submit(request("theirs"))
            await second.cancel("same")
            await second.control(Pause())  # by when the engine has seen what came before
            assert not engine.cancelled
            await first.cancel("same")
            await first.control(Resume())
            assert engine.cancelled == ["same"]
            engine.holds.clear()
            assert [delta.token_ids async for delta in mine] == [[5]] == [delta.token_ids async for delta in theirs]


async def test_all_front_ends_know_at_once_what_one_has_commanded(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "STATS_PERIOD_S", 60)
    async with connected(tmp_path, StandInEngine()) as first, another(tmp_path) as second:
        for command, paused in ((Pause(), True), (Resume(), False)):
            assert (await first.control(command)).paused == paused
            async with asyncio.timeout(0.5):
                while second.stats.paused != paused:
                    await asyncio.sleep(0.001)
